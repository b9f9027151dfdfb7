"""Constraints: what a choice loses, what it costs, and which limit that breaks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from draftwell.components.prompts.prompt import Prompt
from draftwell.components.tune.constraints import ConstraintChecker
from draftwell.components.tune.evaluator import Measured, Quality
from draftwell.components.tune.settings import Constraints
from draftwell.components.tune.successive_halving import successive_halving
from draftwell.serving.runtime.strategies import PLAIN, StrategyChoice
from tests.support.loop.scripted_clock import Clock

PROMPTS = [Prompt(f"p{i}", None, [f"prompt {i}"]) for i in range(8)]
LOSSY = Constraints(
    lossless_only=False, max_quality_loss=0.1, max_rouge_l_loss=2.0, max_surprisal_shift=0.1
)
CSD = StrategyChoice("csd", {"num_speculative_tokens": 6})
VANILLA = [StrategyChoice("vanilla_sd", {"num_speculative_tokens": gamma}) for gamma in (1, 2, 3)]
SPEEDS = {"autoregressive": 1.0, "csd": 3.0, "vanilla_sd": 1.5}


def written(config: StrategyChoice, prompts: Sequence[Prompt]) -> Measured:
    [result] = Clock(SPEEDS)([config], prompts)
    return result


def by_prompt(shares: dict[str, float], rouge: dict[str, float] | None = None) -> ConstraintChecker:
    """A judge of csd whose outputs, which alone took 10 target calls, have these shares and points;
    others are perfect."""

    def quality(prompts: Sequence[Prompt], measured: Measured) -> Quality:
        lossy = measured.calls[0] == 10
        kept = [shares.get(prompt.id, 1.0) if lossy else 1.0 for prompt in prompts]
        points = [(rouge or {}).get(prompt.id, 30.0) if lossy else 30.0 for prompt in prompts]
        return Quality(float(np.mean(kept)), float(np.mean(points)) if rouge is not None else None)

    return ConstraintChecker(LOSSY, quality)


def objection(judge: ConstraintChecker, count: int) -> str | None:
    prompts = PROMPTS[:count]
    found = judge.metrics(CSD, prompts, written(CSD, prompts), written(PLAIN, prompts))["objection"]
    assert found is None or isinstance(found, str)
    return found


def test_one_bad_prompt_of_two_drops_nothing() -> None:
    """p0 loses .4, the other seven nothing: .2 of two prompts, .05 of all."""
    judge = by_prompt({"p0": 0.6})
    assert "loses 0.200 of the target's own tokens" in (objection(judge, 2) or "")
    assert objection(judge, 8) is None
    _, confirmation = successive_halving(Clock(SPEEDS), [CSD, *VANILLA], PROMPTS, judge)
    assert CSD in [figure.choice for figure in confirmation.figures]


def test_what_loses_too_much_of_all_prompts_is_not_fit_to_be_chosen() -> None:
    judge = by_prompt({f"p{i}": 0.5 for i in range(8)})
    _, confirmation = successive_halving(Clock(SPEEDS), [CSD, *VANILLA], PROMPTS, judge)
    objections = {figure.choice: figure.objection for figure in confirmation.figures}
    assert "target's own tokens" in (objections.pop(CSD) or "")
    assert objections == {PLAIN: None, VANILLA[0]: None}, "the second place is that of one that may"


def test_points_of_rouge_are_limited() -> None:
    assert "5.0 points of ROUGE-L" in (objection(by_prompt({}, {"p0": 20.0}), 2) or "")
    assert objection(by_prompt({}, {"p0": 20.0}), 8) is None


class Counted(Clock):
    """Vanilla SD calls the target 4 times on an easy prompt (even numbers) and 8 times on a hard
    one; csd half as often again."""

    def __call__(
        self, configs: Sequence[StrategyChoice], prompts: Sequence[Prompt], **more: Any
    ) -> list[Measured]:
        own = [8 if int(prompt.id[1:]) % 2 else 4 for prompt in prompts]
        return [
            replace(
                result, calls=[count * 3 // 2 if config.name == "csd" else count for count in own]
            )
            for config, result in zip(
                configs, super().__call__(configs, prompts, **more), strict=True
            )
        ]


def costs_of(clock: Counted, limits: Constraints) -> ConstraintChecker:
    return ConstraintChecker(
        limits,
        lambda prompts, measured: Quality(1.0),
        clock,
        VANILLA[1],
        {StrategyChoice("vanilla_sd"): 0.5, VANILLA[1]: 0.25},
    )


def test_a_cost_ratio_is_of_the_same_prompts() -> None:
    """Replay said .25 calls a token of other texts; beside vanilla SD on its own prompts csd costs
    1.5, on whichever it was measured."""
    clock = Counted(SPEEDS)
    judge = costs_of(clock, Constraints(lossless_only=False, max_cost_ratio=2.0))
    for prompts in (PROMPTS[:1], PROMPTS[1:2], PROMPTS):
        [plain, csd] = clock([PLAIN, CSD], prompts)
        assert judge.metrics(CSD, prompts, csd, plain)["cost_ratio"] == pytest.approx(1.5)
        assert judge.cost_ratio(StrategyChoice("vanilla_sd"), prompts, csd) == 2.0, "both replayed"
    beside = [asked for configs, asked, _ in clock.calls if configs == [VANILLA[1]]]
    assert beside == [["p0"], ["p1"], [prompt.id for prompt in PROMPTS]]


def test_cost_is_measured_only_where_it_is_limited() -> None:
    clock = Counted(SPEEDS)
    measured = Counted(SPEEDS)([CSD, PLAIN], PROMPTS)
    assert costs_of(clock, LOSSY).metrics(CSD, PROMPTS, *measured)["cost_ratio"] is None
    assert clock.calls == []


@pytest.mark.parametrize(("shift", "objects"), [(0.3, True), (-0.3, True), (0.05, False)])
def test_samples_may_be_neither_much_less_nor_much_more_likely_than_plain_decodings(
    shift: float, objects: bool
) -> None:
    """All of the same share of argmax: it says nothing here."""

    def quality(prompts: Sequence[Prompt], measured: Measured) -> Quality:
        return Quality(0.8, None, shift if measured.calls[0] == 10 else 0.02)

    found = objection(ConstraintChecker(LOSSY, quality), 8)
    assert ("nats a token" in (found or "")) == objects
