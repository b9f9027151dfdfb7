"""The gate as a pipeline step: measure a release against autoregressive decoding and the champion,
and record the verdict.

Its parts: `gate_parts.champion` (whom it is compared with), `bench` (what is measured), `checks`
(what needs no clock), `judged` (all of that), `elsewhere` (the same on a machine without the
registry), `record` (what is kept).
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftwell.components.bench.schema import BenchReport
from draftwell.components.bench.until import Until
from draftwell.components.gate.settings import DEFAULTS, GateSettings
from draftwell.components.prompts.prompt import Prompt
from draftwell.flows.context import StepContext, encoder_of
from draftwell.flows.steps.champion import artifacts_of, champion_of
from draftwell.flows.steps.gate_parts.champion import ChampionComparison, find_rival
from draftwell.flows.steps.gate_parts.checks import footprint_check
from draftwell.flows.steps.gate_parts.elsewhere import read_measurement
from draftwell.flows.steps.gate_parts.judged import Candidate, Judged, judged
from draftwell.flows.steps.gate_parts.record import (
    keep_bundle,
    keep_verdict,
    record_of,
    record_stays,
)
from draftwell.flows.workspace import Workspace, in_turn
from draftwell.registry.bundles.build import build_to_judge
from draftwell.registry.gates import load_gates
from draftwell.registry.releases import ReleaseVersion, find_release
from draftwell.registry.store import Store
from draftwell.serving.artifacts.kinds import refuse_other_device
from draftwell.serving.bundle.bundle import open_bundle
from draftwell.serving.bundle.verdict import GateVerdict, settled
from draftwell.serving.device import device_type
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.strategies import StrategyResources


@in_turn("draftwell gate")
def gate_release(
    step: StepContext,
    prompts: Sequence[Prompt],
    settings: GateSettings = DEFAULTS,
    *,
    alias: str | int = "candidate",
    beside: Sequence[GateVerdict] = (),
    until: Until | None = None,
    greedy: dict[str, Any] | None = None,
    file: str | None = None,
) -> dict[str, Any]:
    """Measure a release, judge it and keep the verdict with it.

    Candidate and champion are measured in one run, prompt by prompt in turn, together with
    autoregressive decoding. The champion itself can be judged again; its record stays unless it
    fails.

    Args:
        prompts: candidates: those that the release's artifacts were made from are left out, and of
            the others `settings.limit` taken.
        beside: verdicts of other parts of the gate, such as the counts: kept in the record with
            this one, so that they bind promotion.
        until: begin with a few of the prompts, and take others as far as this asks for them.
        greedy: bench report of a release with the same choice for greedy requests, just measured
            on these prompts; None measures.
        file: name of the file that a person named prompts in for this gate alone, for its record;
            None: they are the pair's own.
    Returns:
        of this part alone: `report` (of the bench, as JSON), `passed`, `checks`, `release` (its
            number), `verdict`.
    """
    store = Store()
    release, candidate = open_candidate(step, store, device_type(step.pair.device), alias)
    rival = find_rival(step, store, release)
    known = None if greedy is None else BenchReport.model_validate(greedy)
    found = judged(step, prompts, candidate, rival, load_gates(), settings, until, known)
    return concluded(step, store, (release, candidate), found, rival, settings, beside, file)


@in_turn("draftwell gate")
def gate_imported(
    space: Workspace,
    settings: GateSettings,
    *,
    alias: str | int = "candidate",
    beside: Sequence[GateVerdict] = (),
) -> dict[str, Any]:
    """Judge a release for a device that is not here by what was measured there and imported
    (`draftwell reproduce import`), and keep the verdict with it; `gate_release` has the arguments.

    Raises:
        DraftwellError: nothing was imported, or something else was measured than the release pins,
            or by other thresholds.
    """
    store, device, step = Store(), space.device, StepContext(space, encoder_of(space))
    release, candidate = open_candidate(step, store, device, alias)
    measured = read_measurement(space, device)
    measured.refuse_other(release.name, candidate.artifacts, load_gates())
    champion, rival = champion_of(space, device), ChampionComparison()
    if champion is not None and champion.version != release.version:
        why = f"{champion.name}, the champion, was not measured on {measured.device_class}"
        rival = ChampionComparison(champion, unmeasured=why)
    judged = measured.as_judged()
    return concluded(step, store, (release, candidate), judged, rival, settings, beside)


def concluded(
    step: StepContext,
    store: Store,
    judged: tuple[ReleaseVersion, Candidate],
    found: Judged,
    rival: ChampionComparison,
    settings: GateSettings,
    beside: Sequence[GateVerdict],
    file: str | None = None,
) -> dict[str, Any]:
    """Build and judge the bundle of what was measured, and keep the verdict, as `gate_release`
    returns it."""
    (release, candidate), thresholds = judged, load_gates()
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
        verdict += rival.skipped() + footprint_check(step, bundle, release, thresholds)
        verdict = settled(verdict, thresholds, release.device, settings.unmeasured)
        total = sum(beside, start=verdict)
        if not settings.dry_run and not record_stays(step.workspace, release, total):
            digest = open_bundle(bundle).manifest.digest
            champion = rival.release.version if rival.release else None
            bench = (found.sampled, found.judged, file)
            record = record_of(release, total, champion, digest, *bench)
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


def open_candidate(
    step: StepContext, store: Store, device: str, alias: str | int
) -> tuple[ReleaseVersion, Candidate]:
    """The release to judge, and what it pins.

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
    resources = StrategyResources(artifacts, step.pair.special_tokens)
    return release, Candidate(artifacts, resources)
