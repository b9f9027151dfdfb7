"""Judging a release for another engine, or no release at all, by what benchmark tools measured."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from draftwell.components.engines.vllm import NAME
from draftwell.components.gate.evidence_files.judgement import judge_evidence
from draftwell.components.gate.evidence_files.reading import Evidence
from draftwell.components.gate.verdict_report import verdict_markdown
from draftwell.flows.steps.champion import champion_number
from draftwell.flows.steps.engine.release import EngineRelease
from draftwell.flows.steps.engine.space import EngineSpace
from draftwell.flows.steps.gate_parts.record import record_of, record_stays
from draftwell.flows.workspace import in_turn
from draftwell.registry.gates import load_gates
from draftwell.registry.releases import record_gate
from draftwell.registry.store import Store
from draftwell.serving.bundle.verdict import GateVerdict, settled
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import json_digest, write_json

NOT_KEPT: Any = {"requests": True, "details": True, "conditions": {"extra", "extras"}}
"""Of a run: the file's digest says what it was, and what was added to requests may hold a key."""


def judge_files(other: Evidence, plain: Evidence) -> tuple[GateVerdict, dict[str, Any]]:
    """The verdict on runs with speculation beside plain ones, and what it rests on: each file's
    sha256, each run without its requests, and the figures.

    Raises:
        DraftwellError: they cannot be compared (as `judge_evidence` says), or a run is on both
            sides (`unlike_evidence`).
    """
    if any(run in plain.runs for run in other.runs):
        raise DraftwellError(
            "a run is evidence of speculation and of plain decoding: name two measurements",
            code="unlike_evidence",
        )
    verdict, figures = judge_evidence(other.runs, plain.runs, load_gates())
    sides = {"with speculation": other, "plain": plain}
    document = {
        "figures": [figure.model_dump(mode="json") for figure in figures],
        "sides": {
            name: side.model_dump(mode="json", exclude={"runs": {"__all__": NOT_KEPT}})
            for name, side in sides.items()
        },
    }
    notes = [
        f"evidence {name}: {file}, sha256 {digest[:16]}"
        for name, side in sides.items()
        for digest, file in side.digests.items()
    ]
    return verdict + GateVerdict((), (measured_by(other), *notes)), document


def measured_by(evidence: Evidence) -> str:
    """Who measured, and when."""
    run = evidence.runs[0]
    tool = f"{run.tool} {run.version or '(its file names no version)'}"
    model = f"model {run.model}" if run.model else "its file names no model"
    return (
        f"measured by {tool}, {run.when or 'its file does not say when'}, {model}: nothing was run "
        "here, and no file proves which release it is of"
    )


@in_turn("draftwell gate")
def gate_by_evidence(
    space: EngineSpace, released: EngineRelease, other: Evidence, plain: Evidence, *, keep: bool
) -> GateVerdict:
    """Judge a release by evidence, whose digests and figures are kept with the verdict.

    Args:
        keep: whether the verdict is recorded with the release (`record_stays`).
    Raises:
        DraftwellError: the evidence names another engine or version than the release was tuned for
            (`tuned_elsewhere`).
    """
    refuse_other_engine(released, other)
    verdict, document = judge_files(other, plain)
    verdict = settled(verdict, load_gates(), NAME)
    release = released.release
    if keep and not record_stays(space.workspace, release, verdict):
        digests = sorted([*other.digests, *plain.digests])
        champion = champion_number(space.workspace, release.device)
        record = record_of(release, verdict, champion, judged=json_digest(digests))
        with tempfile.TemporaryDirectory() as place:
            file = write_json(Path(place) / "evidence.json", document)
            record_gate(Store(), record, words=verdict_markdown(verdict), files=[file])
    return verdict


def refuse_other_engine(released: EngineRelease, evidence: Evidence) -> None:
    """Refuse evidence that says that another engine or version was measured."""
    tuned = released.config.contents
    for run in evidence.runs:
        said = {
            "engine": (run.engine, tuned.engine),
            "version": (run.engine_version, tuned.version),
            "dtype": (run.conditions.get("dtype"), tuned.dtype),
        }
        for what, (there, here) in said.items():
            if there not in (None, here):
                raise DraftwellError(
                    f"{released.release.name} was tuned for {what} {here!r}, and {there!r} was "
                    "measured: measure what it was tuned for",
                    code="tuned_elsewhere",
                )
