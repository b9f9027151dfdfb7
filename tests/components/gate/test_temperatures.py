"""A release whose artifacts are for other temperatures than its choices fails by name, also where a person pinned them."""

from __future__ import annotations

from typing import Any

import pytest

from components.bench.schema import BenchEntry
from components.gate.temperatures import judge_artifacts, judge_sampled
from components.gate.verdict import Check, GateVerdict, Thresholds
from serving.artifacts.acceptance_table import AcceptanceTable
from serving.artifacts.decoding_config import DecodingConfig, SampledChoice
from tests.support.models.resources import ORIGIN

SPIDE = SampledChoice(0.7, "spide", {})


def table(temperature: float) -> dict[str, Any]:
    made = ORIGIN.model_copy(update={"parameters": {"temperature": temperature}})
    return {"acceptance_table": AcceptanceTable([5] * 20, [3] * 20, made)}


@pytest.mark.parametrize(("config", "made", "passed"), [
    (DecodingConfig("spide", {}, {}, ORIGIN), 0.0, True), (DecodingConfig("spide", {}, {}, ORIGIN), 0.7, False),
    (DecodingConfig("svip", {}, {}, ORIGIN, SPIDE), 0.7, True), (DecodingConfig("svip", {}, {}, ORIGIN, SPIDE), 0.0, False),
    (DecodingConfig("svip", {}, {}, ORIGIN), 0.7, True)])
def test_a_table_from_another_temperature_fails_by_name(config: DecodingConfig, made: float, passed: bool) -> None:
    verdict = judge_artifacts(config, table(made))
    [check] = verdict.checks
    assert check.passed == passed
    assert passed or ("acceptance_table" in check.detail and f"{made:g}" in check.detail)
    assert len(verdict.notes) == (config.sampled is None), "untuned sampled requests are a note, not a verdict"


@pytest.mark.parametrize(("lossless", "kl", "passed"), [(True, None, True), (False, 0.02, True), (False, -0.4, False), (False, 0.4, False),
                                                        (False, None, False)])
def test_a_lossy_sampled_choice_needs_a_likelihood_near_the_targets_own(lossless: bool, kl: float | None, passed: bool) -> None:
    measured = GateVerdict((Check("speedup", 1.2, 1.0, True, "fast"),), ("noted",))
    verdict = judge_sampled(measured, BenchEntry(strategy="x", lossless=lossless, kl=kl), 0.7, Thresholds(max_surprisal_shift=0.1))
    assert verdict.passed == passed
    assert verdict.checks[0].name == "sampled speedup"
    assert verdict.notes == ("at temperature 0.7: noted",)
