"""What a server recorded has prompts, too: what is made from it is neither tuned nor judged on
them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftwell.components.drift.prompts import prompts_of_trace, spooled_prompts, write_prompts
from draftwell.components.drift.recorded_prompts import WITHOUT_TEXT, recorded_hashes
from draftwell.components.drift.spool import read_spool
from draftwell.components.gate.own_prompts import JudgingPrompts
from draftwell.components.prompts.overlap import hashes_of
from draftwell.components.prompts.prompt import Prompt, read_prompts
from draftwell.components.train.datastore import build_datastore
from draftwell.flows.context import StepContext, artifact_prompts, prompts_behind
from draftwell.flows.steps.train import made_from
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.server.feedback.record import Record
from draftwell.serving.server.feedback.spool import Spool
from tests.support.loop.drift_traffic import FINGERPRINT
from tests.support.server.feedback_server import PROMPTS, FeedbackServer
from tests.support.server.served_pair import tiny_pair

OTHERS = [Prompt(f"o{i}", None, [f"never asked {i}"]) for i in range(20)]


@pytest.fixture(scope="module")
def pair() -> Any:
    made = tiny_pair(4)
    made.fingerprint = FINGERPRINT
    return made


class WrittenAtOnce(Spool):
    """A spool without a thread."""

    def start(self) -> None:
        pass

    def offer(self, record: Record) -> bool:
        self.write([record])
        return True

    def close(self, timeout: float = 0.0) -> None:
        pass


def recorded(pair: Any, folder: Path, *, text: bool = True, bodies: bool = True) -> TraceSet:
    """A spool of `PROMPTS`, as a server writes it."""
    server = FeedbackServer(pair, folder, text=text, spool=WrittenAtOnce(folder, private=text))
    server.ask(PROMPTS, bodies=bodies)
    server.close()
    return TraceSet(folder)


@pytest.mark.parametrize("bodies", [True, False])
def test_a_datastore_of_served_traffic_is_not_judged_on_it(
    pair: Any, tmp_path: Path, bodies: bool
) -> None:
    """The scheduled flows take their prompts from the same spool: none of those may be left to
    judge on."""
    traces = recorded(pair, tmp_path / "spool", bodies=bodies)
    store, _ = build_datastore(traces, made_from(StepContext(SimpleNamespace(), pair), traces))  # type: ignore[arg-type]
    write_prompts(
        tmp_path / "served.jsonl",
        spooled_prompts(
            traces.folder,
            pair,
            read_spool(traces.folder, FINGERPRINT, window=200).rows,
            window=40,
            fewest=3,
        ),
    )
    served = read_prompts(tmp_path / "served.jsonl")
    used = artifact_prompts({"datastore": store})
    assert (len(served), used.unknown) == (len(set(PROMPTS)), ())
    assert (
        JudgingPrompts.choose([*served, *OTHERS], used, artifact_prompts({}), None).prompts
        == OTHERS
    )
    assert used.split(prompts_of_trace(traces))[0] == [], "nor on the same prompts as tokens"


def test_what_cannot_be_known_is_said(pair: Any, tmp_path: Path) -> None:
    numbers = recorded(pair, tmp_path / "numbers", text=False)
    assert prompts_behind(numbers, pair) == (None, ()), "neither texts nor tokens"
    tokens = recorded(pair, tmp_path / "tokens", bodies=False)
    hashes, unknown = recorded_hashes(tokens)  # no pair to decode with
    assert hashes == hashes_of(prompts_of_trace(tokens))
    assert unknown == (WITHOUT_TEXT,)


def test_shards_without_text_beside_some_with_it(pair: Any, tmp_path: Path) -> None:
    recorded(pair, tmp_path, text=False)
    hashes, unknown = recorded_hashes(recorded(pair, tmp_path), pair)
    assert set(hashes or ()) >= set(hashes_of(Prompt("", None, [text]) for text in PROMPTS))
    assert unknown == (WITHOUT_TEXT,)
