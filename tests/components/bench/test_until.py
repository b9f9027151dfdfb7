"""A comparison that takes more prompts while its interval is wide and there is time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

from draftwell.components.bench import until
from draftwell.components.bench.interleaved import REFERENCE
from draftwell.components.bench.runner import Generation, Measurement
from draftwell.components.bench.settings import BenchSettings
from draftwell.components.bench.until import Until
from draftwell.components.prompts.prompt import Prompt
from draftwell.serving.runtime.session.stats import Stats

PROMPTS = [Prompt(f"p{number}", None, ["x"]) for number in range(40)]


class Named:
    def __init__(self, label: str):
        self.label = label


def measured_on(prompts: Sequence[Prompt], spread: float) -> dict[str, Measurement]:
    """Plain decoding takes a second for each prompt; another one half of it, more or less."""
    found = {}
    for label, base in ((REFERENCE, 1.0), ("other", 0.5)):
        runs = []
        for prompt in prompts:
            odd = int(prompt.id[1:]) % 2
            seconds = base * (1 + spread * odd) if label == "other" else base
            stats = Stats()
            stats.wall_seconds = seconds
            runs.append([Generation([1] * 10, stats)])
        contender: Any = Named(label)
        found[label] = Measurement(contender, [prompt.id for prompt in prompts], runs)
    return found


def narrowed(until: Until, spread: float) -> tuple[dict[str, Measurement], list[int]]:
    """What is measured in the end, and the seeds of the later parts."""
    seeds = []

    def measure(prompts: Sequence[Prompt], settings: BenchSettings) -> dict[str, Measurement]:
        seeds.append(settings.seed)
        return measured_on(prompts, spread)

    first = measured_on(PROMPTS[:8], spread)
    labels = [REFERENCE, "other"]
    found = until.narrowed(first, labels, PROMPTS, measure, BenchSettings(seed=3))
    return found, seeds


def test_a_narrow_interval_takes_no_further_prompt() -> None:
    found, seeds = narrowed(Until(8, 0.12, time.monotonic() + 1e6), spread=0.1)
    assert (len(found["other"].prompt_ids), seeds) == (8, [])


def test_a_wide_one_takes_others_until_it_is_narrow_and_no_more() -> None:
    found, seeds = narrowed(Until(8, 0.2, time.monotonic() + 1e6), spread=1.0)
    ids = found["other"].prompt_ids
    assert ids == [prompt.id for prompt in PROMPTS[: len(ids)]]
    assert found[REFERENCE].prompt_ids == ids
    assert 8 < len(ids) < 40
    assert seeds[0] == 3 + 8, "each further prompt has the next seed"


def test_there_are_no_more_prompts_than_there_are() -> None:
    found, _ = narrowed(Until(8, 0.001, time.monotonic() + 1e6), spread=1.0)
    assert len(found["other"].prompt_ids) == 40


def test_time_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts take 1.75 s for both sides: there is time for five, and then for none."""
    now = [0.0]
    monkeypatch.setattr(until.time, "monotonic", lambda: now[0])

    def measure(prompts: Sequence[Prompt], _: BenchSettings) -> dict[str, Measurement]:
        now[0] += 1.75 * len(prompts)
        return measured_on(prompts, 1.0)

    found = Until(8, 0.001, deadline=9.0).narrowed(
        measured_on(PROMPTS[:8], 1.0), [REFERENCE, "other"], PROMPTS, measure, BenchSettings()
    )
    assert len(found["other"].prompt_ids) == 8 + 5
