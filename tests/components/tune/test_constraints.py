"""Constraints on few prompts: what is out for sure, what may be chance, and what a cost ratio is
against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from draftwell.components.prompts.prompt import Prompt
from draftwell.components.report.intervals import lower_bound
from draftwell.components.tune.constraints import (
    ConstraintChecker,
    ConstraintViolation,
    VanillaBaseline,
)
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

    return ConstraintChecker(LOSSY, quality, None, {})


def fit(judge: ConstraintChecker, count: int) -> ConstraintViolation | None:
    return judge.violation(
        CSD, PROMPTS[:count], written(CSD, PROMPTS[:count]), written(PLAIN, PROMPTS[:count])
    )


def test_one_bad_prompt_of_two_is_doubt_and_not_proof() -> None:
    """p0 loses .4, the other seven nothing: .2 of two prompts, .05 of all."""
    judge = by_prompt({"p0": 0.6})
    objection = fit(judge, 2)
    assert objection is not None
    assert not objection.sure
    assert "loses 0.200 of the target's own tokens" in objection.why
    assert fit(judge, 8) is None
    halved = successive_halving(Clock(SPEEDS), [CSD, *VANILLA], PROMPTS, violates=judge.violation)
    assert CSD in [config for config, _ in halved.confirmed]


@pytest.mark.parametrize("count", [2, 4, 8])
def test_what_every_prompt_loses_is_proof(count: int) -> None:
    objection = fit(by_prompt({f"p{i}": 0.5 + 0.01 * (i % 2) for i in range(8)}), count)
    assert objection is not None
    assert objection.sure
    halved = successive_halving(
        Clock(SPEEDS),
        [CSD, *VANILLA],
        PROMPTS,
        violates=by_prompt({f"p{i}": 0.5 for i in range(8)}).violation,
    )
    assert [
        gone.strategy for gone in halved.rungs[0].dropped if "target's own tokens" in gone.why
    ] == ["csd"]


def test_rouge_is_judged_as_carefully() -> None:
    doubt, proof = (
        fit(by_prompt({}, {"p0": 20.0}), 2),
        fit(by_prompt({}, {f"p{i}": 20.0 + i for i in range(8)}), 4),
    )
    assert doubt is not None
    assert "5.0 points of ROUGE-L" in doubt.why
    assert proof is not None
    assert (doubt.sure, proof.sure) == (False, True)


def test_one_prompt_proves_nothing() -> None:
    objection = fit(by_prompt({"p0": 0.1}), 1)
    assert objection is not None
    assert not objection.sure


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


def test_a_cost_ratio_is_of_the_same_prompts() -> None:
    """Replay said .25 calls a token of other texts; beside vanilla SD on its own prompts csd costs
    1.5, on whichever it was measured."""
    clock = Counted(SPEEDS)
    limited = Constraints(lossless_only=False, max_cost_ratio=2.0)
    judge = ConstraintChecker(
        limited,
        lambda prompts, measured: Quality(1.0),
        0.25,
        {StrategyChoice("vanilla_sd"): 0.5},
        VanillaBaseline(clock, VANILLA[1]),
    )
    for prompts in (PROMPTS[:1], PROMPTS[1:2], PROMPTS):
        [plain, csd] = clock([PLAIN, CSD], prompts)
        assert judge.metrics(CSD, prompts, csd, plain)["cost_ratio"] == pytest.approx(1.5)
        assert (
            judge.metrics(StrategyChoice("vanilla_sd"), prompts, csd, plain)["cost_ratio"] == 2.0
        ), "both replayed"
    beside = [asked for configs, asked, _ in clock.calls if configs == [VANILLA[1]]]
    assert beside == [["p0"], ["p1"], ["p2", "p3", "p4", "p5", "p6", "p7"]], "each prompt once"


def test_cost_is_measured_only_where_it_is_limited() -> None:
    clock = Counted(SPEEDS)
    judge = ConstraintChecker(
        LOSSY, lambda prompts, measured: Quality(1.0), 0.25, {}, VanillaBaseline(clock, VANILLA[1])
    )
    assert (
        judge.metrics(CSD, PROMPTS, *Counted(SPEEDS)([CSD, PLAIN], PROMPTS))["cost_ratio"] is None
    )
    assert clock.calls == []


def test_a_cost_ratio_of_two_prompts_may_be_chance() -> None:
    """1.0 on the one, 2.0 on the other."""
    csd, vanilla = (
        Measured([1.0] * 2, [[0] * 16] * 2, [4, 16]),
        Measured([1.0] * 2, [[0] * 16] * 2, [4, 8]),
    )
    judge = ConstraintChecker(
        Constraints(lossless_only=False, max_cost_ratio=1.5),
        lambda prompts, measured: Quality(1.0),
        0.25,
        {},
        VanillaBaseline(lambda configs, prompts, **more: [vanilla], VANILLA[1]),
    )
    doubt = judge.violation(CSD, PROMPTS[:2], csd, vanilla)
    assert doubt == ConstraintViolation(
        "it costs 1.67 times the target calls of vanilla SD, and at most 1.5 times is allowed",
        sure=False,
    )
    proof = judge.violation(CSD, PROMPTS[:2], replace(csd, calls=[8, 16]), vanilla)
    assert proof is not None
    assert proof.sure


def test_a_lower_bound_holds_on_very_few_prompts() -> None:
    """A mean of normal prompts: the bound lies above the truth in 5 % of studies, whatever their
    number."""
    rng = np.random.default_rng(1)
    for prompts in (2, 4, 8):
        studies = rng.normal(1.0, 0.3, (2000, prompts))
        above = [
            lower_bound(lambda sums: sums[0] / sums[1], [study, [1.0] * prompts]) > 1.0
            for study in studies.tolist()
        ]
        assert 0.035 <= np.mean(above) <= 0.065, prompts


@pytest.mark.parametrize(
    ("shifts", "objects", "sure"),
    [
        ([0.3] * 8, True, True),
        ([-0.3] * 8, True, True),
        ([0.05] * 8, False, False),
        ([2.0, *[0.0] * 7], True, False),
    ],
)
def test_samples_may_be_neither_much_less_nor_much_more_likely_than_plain_decodings(
    shifts: list[float], objects: bool, sure: bool
) -> None:
    """All of the same share of argmax: it says nothing here."""

    def quality(prompts: Sequence[Prompt], measured: Measured) -> Quality:
        mine = [
            shifts[PROMPTS.index(prompt)] if measured.calls[0] == 10 else 0.02 for prompt in prompts
        ]
        return Quality(0.8, None, float(np.mean(mine)))

    found = ConstraintChecker(LOSSY, quality, None, {}).violation(
        CSD, PROMPTS, written(CSD, PROMPTS), written(PLAIN, PROMPTS)
    )
    assert (found is not None) == objects
    assert found is None or (found.sure == sure and "nats a token" in found.why)
