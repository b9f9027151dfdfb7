"""What the gate keeps: the verdict and its evidence with the release, and the bundle that was
judged."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftwell.components.bench.report.plots import bench_plots
from draftwell.components.bench.schema import BenchEntry, BenchReport
from draftwell.components.gate.verdict_report import verdict_markdown
from draftwell.components.prompts.overlap import hashes_of
from draftwell.components.prompts.prompt import Prompt
from draftwell.components.report.provenance import code_digest
from draftwell.flows.context import StepContext, now
from draftwell.flows.steps.champion import champion_number
from draftwell.flows.steps.gate_parts.bench import SampledVerdict
from draftwell.flows.steps.gate_parts.champion import ChampionComparison
from draftwell.flows.workspace import Workspace
from draftwell.registry.bundles.judged import keep_judged
from draftwell.registry.gates import GateRecord, thresholds_digest
from draftwell.registry.promotion import champion_since, withdrawal
from draftwell.registry.releases import (
    ReleaseVersion,
    find_release,
    objection,
    record_gate,
    standing_record,
)
from draftwell.registry.store import Store
from draftwell.serving.bundle.verdict import FAILED, GateVerdict
from draftwell.serving.files import json_digest

COMPARED = (
    "tokens_per_second",
    "speedup",
    "speedup_low",
    "acceptance_rate",
    "mat",
    "cost_ratio",
    "ttft_ms",
    "tpot_ms",
    "tpot_p95_ms",
)
"""Metrics of the candidate's bench that MLflow compares releases by."""


def record_stays(space: Workspace, release: ReleaseVersion, verdict: GateVerdict) -> bool:
    """Whether a release is the champion and its valid record outlives a verdict: one that leaves it
    open, or a slow minute of the machine, must not withdraw what serves; a failure does, and what
    becomes of it is said."""
    if champion_number(space, release.device) != release.version or not has_passed(release):
        return False
    failed = [c.name for c in verdict.checks if c.result == FAILED and not c.transient]
    said = (
        f"fails its gate now ({', '.join(failed)}): it serves on, and is neither deployed nor "
        "rolled back to until it passes"
        if failed
        else "keeps its record"
    )
    space.say(f"{release.name}, the champion, {said}")
    return not failed


def has_passed(release: ReleaseVersion) -> bool:
    """Whether a release has a valid record."""
    return objection(release, standing_record(release)) is None


def judged_digest(prompts: Sequence[Prompt], max_tokens: int) -> str:
    """Digest of what a gate judges with."""
    return json_digest([sorted(hashes_of(prompts)), max_tokens])


def record_of(
    release: ReleaseVersion,
    verdict: GateVerdict,
    champion: int | None,
    bundle_digest: str | None = None,
    sampled: SampledVerdict | None = None,
    judged: str | None = None,
    prompts: str | None = None,
) -> GateRecord:
    """The verdict as the registry keeps it."""
    return GateRecord(
        pair=release.pair,
        device=release.device,
        release_version=release.version,
        pins=release.pins,
        release_digest=release.published.digest,
        passed=verdict.passed,
        checks=verdict.checks,
        baseline_version=champion,
        bundle_digest=bundle_digest,
        created=now(),
        sampled_lower_bound=sampled.low if sampled else None,
        sampled_as_greedy=sampled is not None and sampled.as_greedy,
        judged=judged,
        prompts=prompts,
        thresholds=thresholds_digest(),
        code=code_digest(),
    )


def keep_verdict(
    store: Store,
    record: GateRecord,
    verdict: GateVerdict,
    shown: BenchReport,
    entry: BenchEntry,
    written: Sequence[Path],
) -> None:
    """Keep the verdict with its release: record, text, metrics of the candidate to compare, the
    benches, and plots of one.

    Args:
        shown: the bench that is drawn.
        entry: the candidate's.
        written: files of the benches.
    """
    figures = {
        name: float(value) for name in COMPARED if (value := getattr(entry, name)) is not None
    }
    with tempfile.TemporaryDirectory() as place:
        files = [*written, *bench_plots(shown, Path(place))]
        record_gate(store, record, words=verdict_markdown(verdict), figures=figures, files=files)


def keep_bundle(
    step: StepContext, bundle: Path, release: ReleaseVersion, rival: ChampionComparison
) -> None:
    """Keep the bundle that passed, and the champion's, for a deployment on this machine."""
    try:
        keep_judged(bundle, release, others=[rival.release.version] if rival.release else [])
    # the verdict counts more: without the bundle a deployment builds it again and says so
    except OSError as error:
        step.workspace.say(
            f"the judged bundle was not kept ({error}): `draftwell deploy` will build it again"
        )


def earlier_verdict(
    space: Workspace, device: str, number: int, champion: int | None
) -> dict[str, Any] | None:
    """The gate's verdict about a release beside the champion of today; None where the gate has to
    run. `withdrawn`: why there will be none.

    The champion itself is not judged again while its record is valid. A refused candidate that
    nothing has changed is not measured until it passes by luck; one that could not be measured at
    that moment is. One that is no longer champion stays as it is: a person rolled it back, or
    another release was better.
    """
    pair = space.spec.name
    release = find_release(Store(), pair, device, number)
    if number == champion:
        return {"passed": True, "checks": []} if has_passed(release) else None
    record = standing_record(release)
    checks = [vars(check) for check in record.checks] if record else []
    why = withdrawal(Store(), release)
    if why is None and champion_since(Store(), release):
        why = (
            f"it was champion before; `draftwell release promote --pair {pair} --set "
            f"device={device} "
            f"--release {number}` to promote it again"
        )
    if why is not None:
        return {
            "passed": False,
            "checks": checks,
            "withdrawn": f"neither judged nor promoted, {why}",
        }
    if record is None or record.baseline_version != champion:
        return None
    if record.undecided or (record.passed and objection(release, record)):
        return None
    space.say(f"release {number} was judged beside this champion already, on {record.created}")
    return {"passed": record.passed, "checks": checks}
