"""What the gate measures of a candidate and says of it, but for its bundle: no registry is
asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from draftwell.components.bench.schema import BenchReport
from draftwell.components.bench.until import Until
from draftwell.components.gate.own_prompts import JudgingPrompts
from draftwell.components.gate.settings import GateSettings
from draftwell.components.gate.temperatures import judge_artifacts
from draftwell.components.prompts.prompt import Prompt
from draftwell.flows.context import StepContext, artifact_prompts
from draftwell.flows.steps.gate_parts.bench import (
    BenchJudge,
    SampledVerdict,
    held_to,
    measured,
    sampled_verdict,
)
from draftwell.flows.steps.gate_parts.champion import ChampionComparison
from draftwell.flows.steps.gate_parts.checks import (
    identity_verdict,
    layers_check,
    load_check,
    prediction_check,
    weights_check,
)
from draftwell.flows.steps.gate_parts.record import judged_digest
from draftwell.serving.artifacts.base import Artifact
from draftwell.serving.artifacts.decoding_config import DecodingConfig
from draftwell.serving.bundle.verdict import GateVerdict, Thresholds
from draftwell.serving.runtime.strategies import StrategyResources, served_choice


@dataclass(frozen=True)
class Candidate:
    """What is judged: what a release pins, or will pin.

    Args:
        artifacts: kind → artifact.
        resources: the same for strategies.
    """

    artifacts: dict[str, Artifact]
    resources: StrategyResources

    @property
    def config(self) -> DecodingConfig:
        """Its tuned choices."""
        found: Any = self.artifacts["decoding_config"]
        return found

    def greedy(self, thresholds: Thresholds) -> BenchJudge:
        """What judges its choice for greedy requests."""
        config = self.config
        return BenchJudge(config.strategy, config.parameters, held_to(thresholds, config.evidence))


@dataclass(frozen=True)
class Judged:
    """What was found out about a candidate, but for its bundle.

    Args:
        report: the bench of greedy requests that its speed was judged by.
        verdict: on all but the bundle.
        sampled: what was found out about sampled requests; its verdict is part of the other.
        judged: digest of what it was measured on (`judged_digest`).
    """

    report: BenchReport
    verdict: GateVerdict
    sampled: SampledVerdict
    judged: str


def judged(
    step: StepContext,
    prompts: Sequence[Prompt],
    candidate: Candidate,
    rival: ChampionComparison,
    thresholds: Thresholds,
    settings: GateSettings,
    until: Until | None = None,
    greedy: BenchReport | None = None,
) -> Judged:
    """The benches, and the verdict on all but the bundle; `until`: as `run_bench` takes it, of
    greedy requests. Everything else is measured on the prompts that these took; with `greedy`
    they have been measured."""
    config, resources = candidate.config, candidate.resources
    used = artifact_prompts(candidate.artifacts, step.workspace.files().draft)
    rows = JudgingPrompts.choose(prompts, used, rival.prompts, settings.limit)
    judging = candidate.greedy(thresholds)
    report, verdict = (
        measured(step, rows.prompts, judging, resources, rival, settings, until=until)
        if greedy is None
        else (greedy, judging.of(greedy))
    )
    rows = replace(rows, prompts=rows.prompts[: report.prompts])
    # the time for more of them is spent on greedy requests
    few = rows.prompts if until is None else rows.prompts[: until.fewest]
    sampled = sampled_verdict(step, few, config, thresholds, resources, rival, settings)
    verdict = (
        rows.excuse(verdict)
        + rows.verdict(thresholds)
        + judge_artifacts(config, candidate.artifacts)
        + rows.excuse(sampled.verdict)
    )
    if thresholds.lossless_identical:
        verdict += identity_verdict(step, config, resources, rows.prompts)
    verdict += weights_check(step, rows.prompts, thresholds)
    verdict += layers_check(step, rows.prompts, thresholds)
    verdict += load_check(step, served_choice(config, 0.0), resources, rows.prompts, thresholds)
    verdict += prediction_check(step, candidate.artifacts, rival.comparable, thresholds)
    return Judged(report, verdict, sampled, judged_digest(rows.prompts, settings.max_tokens))
