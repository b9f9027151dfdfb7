"""The server writes, monitoring reads: one format, and the same figures as a collection of the same
prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from draftwell.components.drift.prompts import prompts_of_trace, spooled_prompts
from draftwell.components.drift.schema import DRIFTED, STEADY
from draftwell.components.drift.spool import read_spool
from draftwell.components.drift.traffic import (
    HIDDEN,
    NEEDED,
    Traffic,
    prompts_of_the_other_sort,
    read_traffic,
    shared_kinds,
)
from draftwell.components.prompts.prompt import Prompt
from draftwell.serving.artifacts.verifier import Verifier
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.recording.trace_schema import LOSSY
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import STRATEGIES, build_strategy
from draftwell.serving.server.feedback.feedback import blind
from draftwell.serving.server.feedback.record import Record, RecordOrigin
from draftwell.serving.server.feedback.spool import Spool
from tests.support.collecting import collect_traces
from tests.support.errors import raises_code
from tests.support.loop.drift_traffic import FINGERPRINT, HEADER, compared, rows
from tests.support.models.resources import ORIGIN, table_resources
from tests.support.server.feedback_server import PROMPTS, TOKENS, FeedbackServer
from tests.support.server.served_pair import tiny_pair

LOSSLESS = [
    name
    for name, cls in STRATEGIES.items()
    if cls.lossless and "draft" in cls.roles and name != "adaedl"
]
WATCHED: dict[str, Any] = {"kinds": ("target",), "temperature": 0.0, "max_tokens": TOKENS}


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, TraceSet]:
    """The pair, and its collected trace of the prompts that are served below: both models read
    whole texts at once."""
    pair = tiny_pair(4)
    pair.fingerprint = FINGERPRINT
    folder = tmp_path_factory.mktemp("collected")
    return pair, collect_traces(
        pair,
        [Prompt(f"p{i}", None, [text]) for i, text in enumerate(PROMPTS)],
        folder,
        max_tokens=TOKENS,
        rollout=8,
    )


def traffic_of(folder: Path, kinds: tuple[str, ...] = ("target",)) -> Traffic:
    return read_traffic(
        read_spool(folder, FINGERPRINT, window=200).rows, **{**WATCHED, "kinds": kinds}
    )


def by_text(table: pa.Table) -> dict[tuple[int, ...], list[dict[str, Any]]]:
    """Rows of each text by its prompt."""
    texts: dict[str, list[dict[str, Any]]] = {}
    for row in table.to_pylist():
        texts.setdefault(row["prompt_id"], []).append(row)
    return {tuple(text[0]["prompt_tokens"]): text for text in texts.values()}


@pytest.mark.parametrize(
    "strategy", ["vanilla_sd", "svip", "spide", "pearl", "duo_decoding", "hf_dynamic"]
)
def test_a_served_text_has_the_figures_of_a_collected_one(
    tmp_path: Path, collected: tuple[Any, TraceSet], strategy: str
) -> None:
    """Every position, drafted or not, whatever drafted it: a server's spool and `draftwell step
    collect` are the same to monitoring."""
    assert strategy in LOSSLESS
    pair, traces = collected
    server = FeedbackServer(pair, tmp_path, text=True, strategy=strategy)
    server.ask(PROMPTS, stop_token_ids=pair.stop_tokens)
    server.close()
    then = by_text(traces.read())
    now = by_text(read_spool(tmp_path, FINGERPRINT, window=200).rows)
    assert now.keys() == then.keys()
    compared = (
        "token",
        "draft_token",
        "correction",
        "draft_q",
        "draft_p",
        "draft_raw_q",
        "ratio",
        "rank",
        "confidence",
        "entropy",
    )
    for prompt, text in now.items():
        assert 0 <= len(then[prompt]) - len(text) <= 3
        for mine, theirs in zip(text, then[prompt], strict=False):
            for name in compared:
                assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-4), (
                    name,
                    mine["position"],
                )


@pytest.mark.parametrize(
    ("strategy", "parameters"),
    [("lossy_sd", {}), ("csd", {"use_memory": False}), ("fuzzy_sd", {}), ("sprinter", {})],
)
def test_a_lossy_strategys_served_text_has_the_figures_of_one_that_is_collected_with_it(
    tmp_path: Path, collected: tuple[Any, TraceSet], strategy: str, parameters: dict[str, Any]
) -> None:
    """Text by both models, and beside each token what the target would have put there itself."""
    pair, traces = collected
    server = FeedbackServer(pair, tmp_path / "served", text=True)
    half_sure = Verifier(
        torch.randn(32, generator=torch.Generator().manual_seed(3)),
        0.0,
        ("before",),
        0.5,
        1.2,
        ORIGIN,
    )
    server.scheduler.strategy = build_strategy(
        strategy, parameters, table_resources(8, verifier=half_sure)
    )
    server.ask(PROMPTS, stop_token_ids=pair.stop_tokens)
    server.close()
    then = by_text(
        collect_traces(
            pair,
            prompts_of_trace(traces),
            tmp_path / "collected",
            max_tokens=TOKENS,
            rollout=1,
            prefix_kinds=(LOSSY,),
            strategy=server.scheduler.strategy,
        ).read()
    )
    now = by_text(read_spool(tmp_path / "served", FINGERPRINT, window=200).rows)
    assert now.keys() == then.keys()
    assert len(now) == len(PROMPTS)
    compared = (
        "kind",
        "token",
        "draft_token",
        "correction",
        "draft_q",
        "draft_p",
        "draft_raw_q",
        "ratio",
        "rank",
        "confidence",
        "entropy",
    )
    others = 0
    # the target was not asked about the end of a text that the verifier trusts
    unasked = 20 if strategy == "sprinter" else 3
    for prompt, text in now.items():
        assert 0 <= len(then[prompt]) - len(text) <= unasked
        for mine, theirs in zip(text, then[prompt], strict=False):
            others += mine["token"] != mine["correction"]
            for name in compared:
                assert mine[name] == (
                    theirs[name]
                    if name == "kind"
                    else pytest.approx(theirs[name], rel=1e-3, abs=1e-4)
                ), name
    assert others, "or the target's own texts would do"


def test_what_monitoring_needs_is_there_with_texts_and_without(
    tmp_path: Path, collected: tuple[Any, TraceSet]
) -> None:
    pair, _ = collected
    seen = []
    for text in (True, False):
        server = FeedbackServer(pair, tmp_path / str(text), text=text)
        server.ask(PROMPTS)
        server.close()
        found = read_spool(tmp_path / str(text), FINGERPRINT, window=200, hidden=True)
        assert set(NEEDED) | set(HIDDEN) <= set(found.rows.column_names)
        seen.append(read_traffic(found.rows, **WATCHED))
    for traffic in seen:
        assert (traffic.undrafted, traffic.others, len(traffic.names)) == (0, 0, len(PROMPTS))
    full, figures = seen
    for name in ("confidence", "kept", "judged", "ratio"):
        assert sorted(getattr(full, name)) == pytest.approx(
            sorted(getattr(figures, name)), rel=1e-5, abs=1e-5
        )
    assert (full.pattern >= 0).all()
    assert (figures.pattern == -1).all()
    assert figures.parts.keys() == {"scalars"}


def test_a_lossy_strategys_texts_are_not_compared_with_mixed_ones(
    tmp_path: Path, collected: tuple[Any, TraceSet]
) -> None:
    """Those a coin has written. With texts of their own kind they are."""
    pair, _ = collected
    server = FeedbackServer(pair, tmp_path, text=True, strategy="lossy_sd")
    server.ask(PROMPTS)
    server.close()
    assert len(traffic_of(tmp_path, ("mixed",))) == 0
    assert len(traffic_of(tmp_path, (LOSSY,)).names) == len(PROMPTS)
    served = read_spool(tmp_path, FINGERPRINT, window=200).rows
    every = collect_traces(
        pair,
        [Prompt("p", None, [PROMPTS[0]])],
        tmp_path / "every",
        max_tokens=8,
        rollout=2,
        prefix_kinds=("target", "mixed"),
    )
    assert shared_kinds(every.read(), served) == ("target",), "of which the feedback has none"
    assert shared_kinds(served, served) == (LOSSY,)
    assert (
        prompts_of_the_other_sort(served, ("target",)),
        prompts_of_the_other_sort(served, (LOSSY,)),
    ) == (len(PROMPTS), 0)


def served(folder: Path, table: pa.Table, *, text: bool) -> Path:
    """Made traffic as a server's spool, through the server's own writer."""
    texts: dict[str, list[dict[str, Any]]] = {}
    for row in table.to_pylist():
        texts.setdefault(row["prompt_id"], []).append(row)
    records = []
    origin, asked = (
        RecordOrigin(HEADER.pair, FINGERPRINT, HEADER.dtype),
        Sampling(stop_token_ids=frozenset(HEADER.stop_token_ids)),
    )
    for name, positions in texts.items():
        prompt = positions[0]["prompt_tokens"]
        shared = ("prompt_id", "prompt_tokens", "kind", "temperature", "turn")
        figures = [
            {k: v for k, v in row.items() if v is not None and k not in shared} for row in positions
        ]
        records.append(
            Record(
                name,
                origin,
                asked,
                "target",
                figures if text else [blind(p) for p in figures],
                prompt if text else None,
            )
        )
    Spool(folder).write(records)
    return folder


def test_drift_shows_without_texts(tmp_path: Path) -> None:
    """From confidences and acceptances; patterns of rejections are tokens, and the report says that
    they are missing."""
    for text in (True, False):
        verdicts = []
        for name, table in (
            ("same", rows(2, first=100)),
            ("others", rows(3, first=200, sure=-1.2, kept=0.7)),
        ):
            folder = served(tmp_path / f"{name}-{text}", table, text=text)
            found = compared(rows(1), read_spool(folder, FINGERPRINT, window=200).rows)
            verdicts.append(found.verdict)
            checked = {check.name for check in found.checks}
            assert {"confidence_psi", "acceptance", "table", "verifier"} <= checked
            assert ("novelty" in checked) == text
            assert any("--feedback-text" in note for note in found.notes) != text
        assert verdicts == [STEADY, DRIFTED]


def test_without_texts_there_is_nothing_to_calibrate_on_and_that_is_said(
    tmp_path: Path, collected: tuple[Any, TraceSet]
) -> None:
    pair, _ = collected
    server = FeedbackServer(pair, tmp_path)
    server.ask(PROMPTS)
    server.close()
    found = read_spool(tmp_path, FINGERPRINT, window=200)
    with raises_code("spool_without_text", "--feedback-text"):
        spooled_prompts(tmp_path, pair, found.rows, window=40, fewest=3)


@pytest.mark.parametrize("bodies", [True, False])
def test_with_texts_the_prompts_come_back(
    tmp_path: Path, collected: tuple[Any, TraceSet], bodies: bool
) -> None:
    """From request bodies, or where the server does not know them from the tokens of single
    messages."""
    pair, _ = collected
    server = FeedbackServer(pair, tmp_path, text=True)
    server.ask(PROMPTS, bodies=bodies)
    server.close()
    assert bool(list(tmp_path.glob("requests-*"))) == bodies
    found = spooled_prompts(
        tmp_path, pair, read_spool(tmp_path, FINGERPRINT, window=200).rows, window=40, fewest=3
    )
    assert {prompt.prompt for prompt in found} == set(PROMPTS)


def test_a_spool_that_loses_its_oldest_shards_meanwhile_is_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftwell.components.drift import spool

    for i in range(3):
        served(tmp_path, rows(i, 10, first=10 * i), text=True)
    oldest = TraceSet(tmp_path).shards[0]
    sha256 = spool.sha256_file

    def removing(path: Path) -> str:
        oldest.unlink(missing_ok=True)
        return sha256(path)

    monkeypatch.setattr(spool, "sha256_file", removing)
    found = read_spool(tmp_path, FINGERPRINT, window=100)
    assert len(np.unique(found.rows.column("prompt_id").to_pylist())) == 20
    assert found.notes == ()
