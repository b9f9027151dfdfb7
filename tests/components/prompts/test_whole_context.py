"""Whoever decodes a prompt asks the target all of it: the system message and the earlier turns
stand before the first turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from draftwell.components.bench.bench import run_bench
from draftwell.components.bench.device_parity import check_against
from draftwell.components.bench.runner import measure
from draftwell.components.bench.settings import BenchSettings
from draftwell.components.bench.throughput import batch_throughput
from draftwell.components.calibrate.correction_memory import MemorySettings, build_correction_memory
from draftwell.components.gate.baseline_counts import deterministic_report
from draftwell.components.prompts.prompt import Prompt, ids_of, prompts_digest
from draftwell.components.tune.evaluator import Evaluator, Measured, QualityReader
from draftwell.components.tune.resume import ResumableEvaluator
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import PLAIN, StrategyChoice, StrategyResources
from tests.support.loop.scripted_clock import Clock
from tests.support.models.tiny import table_pair

SYSTEM = {"role": "system", "content": "be brief"}
PROMPTS = [
    Prompt(f"p{i}", None, [text], messages=(SYSTEM,))
    for i, text in enumerate(["hello world", "abc", "so it goes"])
]
BARE = [Prompt(prompt.id, None, prompt.turns) for prompt in PROMPTS]
ORIGIN = Provenance(pair="tiny", fingerprint="f" * 64)
GAMMA = StrategyChoice("vanilla_sd", {"num_speculative_tokens": 2})
OUTPUTS = [[5, 6]] * len(PROMPTS)

USERS: dict[str, Callable[[LoadedPair], Any]] = {
    "measure": lambda pair: measure(
        pair, StrategyResources(), [PLAIN], PROMPTS, BenchSettings(max_tokens=4)
    ),
    "bench": lambda pair: run_bench(
        pair,
        [GAMMA, StrategyChoice("fuzzy_sd")],
        PROMPTS,
        StrategyResources(),
        BenchSettings(max_tokens=4),
    ),
    "contest": lambda pair: Evaluator(pair, StrategyResources(), max_tokens=4)([PLAIN], PROMPTS),
    "reader": lambda pair: QualityReader(pair)(
        PROMPTS, Measured([1.0] * len(PROMPTS), OUTPUTS, [1] * len(PROMPTS))
    ),
    "memory": lambda pair: build_correction_memory(
        pair, PROMPTS, ORIGIN, MemorySettings(max_tokens=4)
    ),
    "counting": lambda pair: deterministic_report(pair, [GAMMA], PROMPTS, 4),
    "batching": lambda pair: batch_throughput(
        pair, StrategyResources(), [PLAIN], PROMPTS, BenchSettings(concurrency=2, max_tokens=4)
    ),
    "crosscheck": lambda pair: check_against(
        pair,
        measure(pair, StrategyResources(), [GAMMA], PROMPTS, BenchSettings(max_tokens=4)),
        PROMPTS,
        max_tokens=4,
    ),
}


@pytest.mark.parametrize("name", USERS)
def test_nothing_asks_a_turn_without_what_stands_before_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asked = LoadedPair.encode_messages, list[list[dict[str, str]]]()

    def encode(
        self: LoadedPair, messages: Sequence[dict[str, str]], tools: Sequence[Any] = ()
    ) -> list[int]:
        asked.append(list(messages))
        return real(self, messages, tools)

    monkeypatch.setattr(LoadedPair, "encode_messages", encode)
    USERS[name](table_pair())
    assert asked
    assert all(messages[0] == SYSTEM and messages[-1]["role"] == "user" for messages in asked)


def test_what_stands_before_a_turn_is_part_of_every_digest_and_memory() -> None:
    assert len(ids_of(table_pair(), PROMPTS[0])) > len(ids_of(table_pair(), BARE[0]))
    assert prompts_digest(PROMPTS) != prompts_digest(BARE)
    assert prompts_digest(BARE) == prompts_digest(
        [Prompt(p.id, "qa", p.turns, "an answer") for p in BARE]
    )
    clock = Clock({})
    remembered = ResumableEvaluator(clock, None, {})
    for prompts in (PROMPTS, BARE, PROMPTS):
        remembered([PLAIN], prompts)
    assert len(clock.calls) == 2, "the same turns behind another system message are other prompts"
