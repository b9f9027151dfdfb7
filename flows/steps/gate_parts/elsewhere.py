"""A gate in two places: measured on a machine that has the device, judged and kept where the
registry is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from draftwell.components.bench.schema import BenchReport, Frozen
from draftwell.components.gate.settings import GateSettings
from draftwell.components.prompts.prompt import Prompt
from draftwell.components.report.provenance import code_digest
from draftwell.flows.context import StepContext
from draftwell.flows.steps.gate_parts.bench import SampledVerdict
from draftwell.flows.steps.gate_parts.champion import ChampionComparison
from draftwell.flows.steps.gate_parts.judged import Candidate, Judged, judged
from draftwell.flows.workspace import Workspace
from draftwell.registry.gates import load_gates
from draftwell.serving.artifacts.base import Artifact
from draftwell.serving.artifacts.kinds import find_kind
from draftwell.serving.bundle.verdict import Check, GateVerdict, Skipped, Thresholds
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.strategies import StrategyResources

MEASUREMENT = "gate_measured.json"
"""Among a workspace's reports of the device."""
AGAIN = "measure it again with `make gpu` there, and import that"


class GateMeasurement(Frozen):
    """What the gate measured of a workspace's choice, before there was a release of it."""

    fingerprint: str
    device_class: str
    code: str
    """`code_digest` of the sources that measured."""
    artifacts: dict[str, str]
    """Kind → digest of all that a release of it pins, but a draft."""
    thresholds: Thresholds
    judged: str
    checks: tuple[Check, ...]
    notes: tuple[str, ...]
    skipped: tuple[Skipped, ...]
    bench: BenchReport
    sampled_lower_bound: float | None = None
    sampled_as_greedy: bool = False

    def as_judged(self) -> Judged:
        """The same as the gate has it on one machine."""
        notes = (*self.notes, f"measured on {self.device_class}")
        sampled = SampledVerdict(GateVerdict(()), self.sampled_lower_bound, self.sampled_as_greedy)
        verdict = GateVerdict(self.checks, notes, self.skipped)
        return Judged(self.bench, verdict, sampled, self.judged)

    def refuse_other(
        self, name: str, artifacts: Mapping[str, Artifact], thresholds: Thresholds
    ) -> None:
        """Refuse to judge a release by it that pins something else, by other sources or by other
        thresholds.

        Args:
            name: the release's.
            artifacts: kind → artifact that it pins.
        """
        pinned = {kind: artifact.digest for kind, artifact in artifacts.items()}
        kinds = sorted(pinned.keys() | self.artifacts.keys())
        if other := [kind for kind in kinds if pinned.get(kind) != self.artifacts.get(kind)]:
            raise DraftwellError(
                f"{name} pins another {other[0]} than was measured on {self.device_class}: {AGAIN}",
                code="measured_something_else",
            )
        if self.code != code_digest():
            raise DraftwellError(
                f"other sources than these measured {name} on {self.device_class}: {AGAIN}",
                code="measured_by_other_code",
            )
        if thresholds != self.thresholds:
            raise DraftwellError(
                f"gates.yaml has other thresholds than {name} was measured by on "
                f"{self.device_class}: {AGAIN}",
                code="measured_by_other_thresholds",
            )


def measure_candidate(
    step: StepContext, prompts: Sequence[Prompt], settings: GateSettings
) -> GateMeasurement:
    """Measure the workspace's choice as the gate measures a release of it, with no champion beside
    it; no registry is asked."""
    space, thresholds = step.workspace, load_gates()
    artifacts = {
        kind: find_kind(kind).load_class().load(folder, fingerprint=step.pair.fingerprint)
        for kind, folder in space.to_release(space.device).items()
        if kind != "distilled_draft"
    }
    candidate = Candidate(artifacts, StrategyResources(artifacts, step.pair.special_tokens))
    found = judged(step, prompts, candidate, ChampionComparison(), thresholds, settings)
    return GateMeasurement(
        fingerprint=step.pair.fingerprint,
        code=code_digest(),
        device_class=str(candidate.config.provenance.device_class),
        artifacts={kind: str(artifact.digest) for kind, artifact in artifacts.items()},
        thresholds=thresholds,
        judged=found.judged,
        checks=found.verdict.checks,
        notes=found.verdict.notes,
        skipped=found.verdict.skipped,
        bench=found.report,
        sampled_lower_bound=found.sampled.low,
        sampled_as_greedy=found.sampled.as_greedy,
    )


def measurement_file(space: Workspace, device: str) -> Path:
    """Where an imported measurement is kept."""
    return space.root / device / "reports" / MEASUREMENT


def read_measurement(space: Workspace, device: str) -> GateMeasurement:
    """The imported measurement of a device.

    Raises:
        DraftwellError: there is none (`nothing_imported`), or it cannot be read.
    """
    file = measurement_file(space, device)
    try:
        return GateMeasurement.model_validate(json.loads(file.read_text()))
    except FileNotFoundError as error:
        raise DraftwellError(
            f"there is no {device} device here, and no measurement of one: run `make gpu` on a "
            "machine that has one, then `draftwell reproduce import FILE` here",
            code="nothing_imported",
        ) from error
    except (ValidationError, ValueError) as error:
        raise DraftwellError(
            f"{file} is no measurement of the gate: import it again", code="measurement_unreadable"
        ) from error
