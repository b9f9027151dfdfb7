"""The gate as a pipeline step: measure a release against autoregressive decoding and the champion,
and record the verdict.

Its parts: `gate_parts.champion` (whom it is compared with), `bench` (what is measured), `checks`
(what needs no clock), `record` (what is kept).
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftwell.components.bench.schema import BenchReport
from draftwell.components.gate.own_prompts import JudgingPrompts
from draftwell.components.gate.settings import DEFAULTS, GateSettings
from draftwell.components.gate.temperatures import judge_artifacts
from draftwell.components.prompts.prompt import Prompt
from draftwell.flows.context import StepContext, artifact_prompts
from draftwell.flows.steps.champion import artifacts_of
from draftwell.flows.steps.gate_parts.bench import (
    BenchJudge,
    SampledVerdict,
    measured,
    sampled_verdict,
)
from draftwell.flows.steps.gate_parts.champion import ChampionComparison, find_rival
from draftwell.flows.steps.gate_parts.checks import (
    footprint_check,
    identity_verdict,
    missing,
    prediction_check,
    weights_check,
)
from draftwell.flows.steps.gate_parts.record import keep_bundle, keep_verdict, record_of, serves
from draftwell.registry.bundles.build import build_to_judge
from draftwell.registry.gates import load_gates
from draftwell.registry.releases import ReleaseVersion, find_release
from draftwell.registry.store import Store
from draftwell.serving.artifacts.base import Artifact
from draftwell.serving.artifacts.decoding_config import DecodingConfig
from draftwell.serving.artifacts.kinds import refuse_other_device
from draftwell.serving.bundle.bundle import open_bundle
from draftwell.serving.bundle.verdict import GateVerdict, Thresholds
from draftwell.serving.device import device_type
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.strategies import StrategyResources


@dataclass(frozen=True)
class Candidate:
    """The release that is judged, with what it pins.

    Args:
        artifacts: kind → artifact.
        resources: the same for strategies.
    """

    release: ReleaseVersion
    artifacts: dict[str, Artifact]
    resources: StrategyResources

    @property
    def config(self) -> DecodingConfig:
        """Its tuned choices."""
        found: Any = self.artifacts["decoding_config"]
        return found

    def greedy(self, thresholds: Thresholds) -> BenchJudge:
        """What judges its choice for greedy requests."""
        return BenchJudge(self.config.strategy, self.config.parameters, thresholds)


@dataclass(frozen=True)
class Judged:
    """What was found out about a candidate, but for its bundle.

    Args:
        report: the bench of greedy requests that its speed was judged by.
        verdict: on all but the bundle.
        sampled: what was found out about sampled requests; its verdict is part of the other.
    """

    report: BenchReport
    verdict: GateVerdict
    sampled: SampledVerdict


def gate_release(
    step: StepContext,
    prompts: Sequence[Prompt],
    settings: GateSettings = DEFAULTS,
    *,
    alias: str | int = "candidate",
    beside: Sequence[GateVerdict] = (),
) -> dict[str, Any]:
    """Measure a release, judge it and keep the verdict with it.

    Candidate and champion are measured in one run, prompt by prompt in turn, together with
    autoregressive decoding. The champion itself can be judged again; its record stays.

    Args:
        prompts: candidates: those that the release's artifacts were made from are left out, and of
            the others `settings.limit` taken.
        beside: verdicts of other parts of the gate, such as the counts: kept in the record with
            this one, so that they bind promotion.
    Returns:
        of this part alone: `report` (of the bench, as JSON), `passed`, `checks`, `release` (its
            number), `verdict`.
    """
    store, thresholds = Store(), load_gates()
    candidate = open_candidate(step, store, gated_device(step, settings), alias)
    release, rival = candidate.release, find_rival(step, store, candidate.release)
    found = judged(step, prompts, candidate, rival, thresholds, settings)
    verdict, report = found.verdict, found.report.to_json()
    written = [step.report("bench", report, per_device=True)]
    with tempfile.TemporaryDirectory() as place:
        bundle = build_to_judge(
            store,
            release,
            step.workspace.spec,
            step.workspace.files(),
            Path(place),
            sampled_as_greedy=found.sampled.as_greedy,
        )
        verdict += footprint_check(step, bundle, release, thresholds)
        if not settings.dry_run and serves(step, release):
            step.workspace.say(f"{release.name} is the champion: its record, from before, is kept")
        elif not settings.dry_run:
            total = sum(beside, start=verdict)
            digest = open_bundle(bundle).manifest.digest
            champion = rival.release.version if rival.release else None
            record = record_of(release, total, champion, digest, found.sampled)
            entry = candidate.greedy(thresholds).entry(found.report.strategies)
            keep_verdict(store, record, total, found.report, entry, written)
            if total.passed:
                keep_bundle(step, bundle, release, rival)
    return {
        "report": report,
        "verdict": verdict,
        "passed": verdict.passed,
        "release": release.version,
        "checks": [vars(check) for check in verdict.checks],
    }


def gated_device(step: StepContext, settings: GateSettings) -> str:
    """The device of the release: the one that the models are loaded on, since nothing else is
    measured."""
    loaded = device_type(step.pair.device)
    if settings.device not in (None, loaded):
        raise DraftwellError(
            f"the gate is for {settings.device}, and the models are loaded on {loaded}: "
            "load them with "
            f"--device {settings.device}",
            code="gated_on_other_device",
        )
    return loaded


def open_candidate(step: StepContext, store: Store, device: str, alias: str | int) -> Candidate:
    """The release to judge, read.

    Raises:
        DraftwellError: it is for other models than those that are loaded, or holds an artifact of
            another device.
    """
    release = find_release(store, step.workspace.spec.name, device, alias)
    if release.fingerprint != step.pair.fingerprint:
        raise DraftwellError(
            f"{release.name} was made for models with fingerprint "
            f"{release.fingerprint[:12]}, the loaded ones have "
            f"{step.pair.fingerprint[:12]}: gate it with its own draft and dtype, or tune "
            "and publish again",
            code="other_models",
        )
    artifacts = artifacts_of(store, release, release.fingerprint)
    for artifact in artifacts.values():
        refuse_other_device(
            artifact.kind,
            artifact.provenance.device_class,
            release.device,
            f"the {artifact.kind} of {release.name}",
        )
    return Candidate(release, artifacts, StrategyResources(artifacts, step.pair.special_tokens))


def judged(
    step: StepContext,
    prompts: Sequence[Prompt],
    candidate: Candidate,
    rival: ChampionComparison,
    thresholds: Thresholds,
    settings: GateSettings,
) -> Judged:
    """The benches, and the verdict on all but the bundle."""
    config, resources = candidate.config, candidate.resources
    used = artifact_prompts(candidate.artifacts, step.workspace.files().draft)
    rows = JudgingPrompts.choose(prompts, used, rival.prompts, settings.limit)
    report, verdict = measured(
        step, rows.prompts, candidate.greedy(thresholds), resources, rival, settings
    )
    sampled = sampled_verdict(step, rows.prompts, config, thresholds, resources, rival, settings)
    verdict = (
        rows.excuse(verdict)
        + rows.verdict(thresholds)
        + judge_artifacts(config, candidate.artifacts)
        + rows.excuse(sampled.verdict)
    )
    if thresholds.lossless_identical:
        verdict += identity_verdict(step, config, resources, rows.prompts)
    verdict += weights_check(step, rows.prompts, thresholds)
    if rival.unmeasured:
        verdict += missing("champion measured", rival.unmeasured, settings.unmeasured)
    verdict += prediction_check(
        step, candidate.artifacts, rival.comparable, thresholds, settings.unmeasured
    )
    return Judged(report, verdict, sampled)
