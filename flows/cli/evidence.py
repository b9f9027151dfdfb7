"""`draftwell gate --evidence`: the verdict on what others' benchmark tools measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from draftwell.components.engines.vllm import NAME, device_for
from draftwell.components.gate.evidence_files.reading import read_evidence
from draftwell.flows.cli.engine_options import refuse_beside
from draftwell.flows.cli.options import pick_device, say
from draftwell.flows.steps.engine.evidence import gate_by_evidence, judge_files
from draftwell.flows.steps.engine.release import find_engine_release
from draftwell.flows.steps.engine.space import EngineSpace
from draftwell.flows.workspace import Workspace
from draftwell.registry.gates import load_gates
from draftwell.serving.bundle.verdict import settled
from draftwell.serving.errors import DraftwellError

if TYPE_CHECKING:
    from draftwell.serving.bundle.verdict import GateVerdict

BESIDE = (
    *("evidence", "plain_evidence", "pair", "dtype", "device", "release", "engine", "sampled"),
    *("dry_run", "report"),
)
"""Options that mean something; others are about a measurement, which files take the place of."""


def gate_on_evidence(context: typer.Context) -> list[tuple[str, GateVerdict]]:
    """A title and the verdict on `--evidence` beside plain_evidence; kept with the release that
    was named, if any.

    Raises:
        DraftwellError: one of both is missing, an option about measuring was named too
            (`evidence_option`), or evidence is none or cannot be compared (as `read_evidence` and
            `judge_evidence` say).
    """
    given = context.params
    paths = [[Path(one) for one in given[side] or ()] for side in ("evidence", "plain_evidence")]
    if not all(paths):
        raise DraftwellError(
            "--evidence and --set plain_evidence=FILE go together: name what was measured with "
            "speculation, and without it",
            code="evidence_option",
        )
    refuse_beside(context, "--evidence", BESIDE, "evidence_option")
    other, plain = map(read_evidence, paths)
    if given["release"] is None:
        verdict, _ = judge_files(other, plain)
        return [("evidence", settled(verdict, load_gates(), NAME))]
    if given["engine"] != NAME:
        raise DraftwellError(
            f"--release with --evidence needs --engine {NAME}: our own engine's releases are "
            "measured here, and other engines have none",
            code="evidence_option",
        )
    device = pick_device(device_for(given["device"]))
    space = EngineSpace(Workspace(given["pair"], given["dtype"], say, device), 1)
    released = find_engine_release(space, given["release"], float(given["sampled"]))
    verdict = gate_by_evidence(space, released, other, plain, keep=not given["dry_run"])
    tuned = released.config.contents
    title = f"{released.release.name}, {tuned.engine} {tuned.version}, {tuned.label}, by evidence"
    return [(title, verdict)]
