"""A release whose artifacts are for other temperatures than its choices fails by name, also where a
person pinned them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from draftwell.components.bench.schema import BenchEntry, PromptRow
from draftwell.components.gate.temperatures import (
    greedy_on_trial,
    judge_artifacts,
    judge_sampled,
    passes_trial,
    sampled_temperature,
    untuned,
)
from draftwell.flows.steps.verdict import only_sampled
from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.decoding_config import DecodingConfig, SampledChoice
from draftwell.serving.bundle.verdict import (
    FAILED,
    PASSED,
    UNDECIDED,
    Check,
    GateVerdict,
    Thresholds,
)
from draftwell.serving.runtime.strategies import StrategyChoice
from tests.support.models.resources import ORIGIN

SPIDE = SampledChoice(0.7, "spide", {})


def table(temperature: float) -> dict[str, Any]:
    made = ORIGIN.model_copy(update={"parameters": {"temperature": temperature}})
    return {"acceptance_table": AcceptanceTable([5] * 20, [3] * 20, made)}


@pytest.mark.parametrize(
    ("config", "made", "passed"),
    [
        (DecodingConfig("spide", {}, {}, ORIGIN), 0.0, True),
        (DecodingConfig("spide", {}, {}, ORIGIN), 0.7, False),
        (DecodingConfig("svip", {}, {}, ORIGIN, SPIDE), 0.7, True),
        (DecodingConfig("svip", {}, {}, ORIGIN, SPIDE), 0.0, False),
        (DecodingConfig("svip", {}, {}, ORIGIN), 0.7, True),
    ],
)
def test_a_table_from_another_temperature_fails_by_name(
    config: DecodingConfig, made: float, passed: bool
) -> None:
    verdict = judge_artifacts(config, table(made))
    check = verdict.checks[-1]
    assert [check.name for check in verdict.checks] == ["temperature", "sampled temperature"][
        : 1 + (config.sampled is not None)
    ]
    assert all(check.passed for check in verdict.checks[:-1]), "the other choice is not to blame"
    assert only_sampled({"checks": [vars(check) for check in verdict.checks]}) == (
        not passed and config.sampled is not None
    )
    assert check.passed == passed
    assert passed or ("acceptance_table" in check.detail and f"{made:g}" in check.detail)
    assert verdict.notes == ()


def test_sampled_requests_are_judged_where_candidate_or_champion_has_a_choice_for_them() -> None:
    """Otherwise a candidate that drops the champion's fast sampled choice would never be compared
    with it."""
    plain, tuned = (
        DecodingConfig("csd", {}, {}, ORIGIN),
        DecodingConfig("csd", {}, {}, ORIGIN, SPIDE),
    )
    cooler = DecodingConfig("svip", {}, {}, ORIGIN, SampledChoice(0.3, "svip", {}))
    found = [
        sampled_temperature(*both)
        for both in ((plain, None), (plain, plain), (plain, tuned), (tuned, plain), (cooler, tuned))
    ]
    assert found == [None, None, 0.7, 0.7, 0.3]
    assert untuned(tuned, 0.7) == ()
    [alone], [beside] = untuned(plain, None), untuned(plain, 0.7)
    assert alone.startswith(
        "sampled requests are not judged: nothing was tuned for them, and autoregressive "
        "decodes them"
    )
    assert beside == (
        "nothing was tuned for sampled requests (`draftwell step choose --set temperature=…`): "
        "measured at temperature 0.7, "
        "autoregressive decodes them"
    )


def test_a_lossless_greedy_choice_is_on_trial_for_sampled_requests_where_none_was_tuned_for_them() -> (  # noqa: E501
    None
):
    configs = [
        DecodingConfig("svip", {"max_draft": 3}, {}, ORIGIN),
        DecodingConfig("svip", {}, {}, ORIGIN, SPIDE),
        DecodingConfig("csd", {}, {}, ORIGIN),
        DecodingConfig("autoregressive", {}, {}, ORIGIN),
    ]
    assert [greedy_on_trial(config) for config in configs] == [
        StrategyChoice("svip", {"max_draft": 3}),
        None,
        None,
        None,
    ]
    [note] = untuned(configs[0], 1.0, low=0.934)
    assert "autoregressive decodes them" in note
    assert "is at least 0.93 times as fast as plain decoding there" in note


@pytest.mark.parametrize(
    ("checks", "passes"),
    [
        ({"speedup": True}, True),
        ({"speedup": True, "regression": False}, True),
        ({"speedup": False}, False),
        ({"speedup": True, "time per token": False}, False),
        ({"time per token": True}, False),
    ],
)
def test_the_trial_asks_for_a_measured_bound_and_not_for_the_champion(
    checks: dict[str, bool], passes: bool
) -> None:
    verdict = GateVerdict(
        tuple(Check(name, 1.0, 1.0, passed, "") for name, passed in checks.items())
    )
    assert passes_trial(verdict) is passes


def samples(
    shift: float,
    *,
    lossless: bool = False,
    prompts: int = 40,
    noise: float = 0.2,
    seed: int = 0,
    read: bool = True,
) -> BenchEntry:
    """Outputs whose tokens the target finds `shift` nats less likely than its own, give or take."""
    drawn = random.Random(seed)
    nats = [20 * (shift + noise * drawn.gauss(0, 1)) for _ in range(prompts)]
    rows = tuple(
        PromptRow(prompt_id=f"p{i}", tokens=20, divergence=value if read else None)
        for i, value in enumerate(nats)
    )
    return BenchEntry(
        strategy="svip" if lossless else "lossy_sd", lossless=lossless, per_prompt=rows
    )


def judged(entry: BenchEntry, reference: BenchEntry) -> GateVerdict:
    measured = GateVerdict((Check("speedup", 1.2, 1.0, True, "fast"),), ("noted",))
    return judge_sampled(
        measured,
        entry,
        reference.model_copy(update={"strategy": "autoregressive", "lossless": True}),
        0.7,
        Thresholds(max_surprisal_shift=0.1),
    )


@pytest.mark.parametrize(
    ("shift", "noise", "result"),
    [
        (0.0, 0.05, PASSED),
        (0.3, 0.2, FAILED),
        (-0.3, 0.2, FAILED),
        (0.09, 0.2, UNDECIDED),
        (-0.11, 0.2, UNDECIDED),
        (0.0, 0.6, UNDECIDED),
    ],
)
def test_a_lossy_choices_likelihood_is_judged_by_its_interval(
    shift: float, noise: float, result: str
) -> None:
    """Too likely texts are as far from the target's as too unlikely ones."""
    verdict = judged(samples(shift, noise=noise), samples(0.0, noise=0.02, seed=1))
    checks = {check.name: check for check in verdict.checks}
    assert set(checks) == {"sampled speedup", "sampled likelihood"}
    found = checks["sampled likelihood"]
    assert found.result == result, found.detail
    assert (found.prompts_needed is None) is (result != UNDECIDED), found.detail
    assert found.prompts_needed is None or found.prompts_needed > 40
    assert verdict.notes == ("at temperature 0.7: noted",)


@pytest.mark.parametrize(("base", "shift", "result"), [(0.3, 0.3, PASSED), (0.3, 0.0, FAILED)])
def test_likelihood_is_compared_with_plain_decodings_in_the_same_run(
    base: float, shift: float, result: str
) -> None:
    """Against 0, which no finite set of samples shows, the first would be refused and the second
    passed."""
    [_, check] = judged(samples(shift, noise=0.05), samples(base, noise=0.05, seed=1)).checks
    assert check.result == result, check.detail


@pytest.mark.parametrize(
    ("shift", "noise", "passed"),
    [
        (0.0, 0.05, True),
        (0.12, 0.6, True),
        (-0.14, 0.6, True),
        (0.3, 0.2, False),
        (-0.4, 0.2, False),
    ],
)
def test_a_lossless_choices_likelihood_fails_beyond_doubt_only(
    shift: float, noise: float, passed: bool
) -> None:
    """It draws from the target's distribution, by proof: −.14 nats on some prompts is chance, and
    an interval that is wholly beyond the limit a fault of the sampler."""
    verdict = judged(samples(shift, noise=noise, lossless=True), samples(0.0, seed=1))
    [_, check] = verdict.checks
    assert (check.name, check.result) == ("sampled likelihood", PASSED if passed else FAILED)
    assert "not enough evidence" not in check.detail


def test_a_lossless_choices_likelihood_on_few_prompts_decides_nothing() -> None:
    few = [samples(shift, noise=0.01, lossless=True, prompts=4) for shift in (0.3, 0.0)]
    verdict = judged(*few)
    assert verdict.passed
    assert [one.name for one in verdict.skipped] == ["sampled likelihood"]
    assert "4 prompts" in verdict.skipped[0].why


def test_a_lossless_choices_likelihood_that_was_not_read_is_said() -> None:
    verdict = judged(samples(0.0, lossless=True, read=False), samples(0.0))
    assert verdict.passed
    assert [one.name for one in verdict.skipped] == ["sampled likelihood"]


def test_a_lossy_choice_whose_likelihood_was_not_read_fails() -> None:
    [_, check] = judged(samples(0.0, read=False), samples(0.0)).checks
    assert (check.name, check.result) == ("sampled likelihood", FAILED)
    [_, check] = judged(samples(0.0, prompts=1), samples(0.0, prompts=1)).checks
    assert (check.result, check.prompts_needed) == (UNDECIDED, None), (
        "one prompt says nothing about others"
    )
