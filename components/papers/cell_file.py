"""The file of a measured cell."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import Field

from draftwell.components.bench.schema import BenchReport, Frozen
from draftwell.components.papers.calibrated import Point
from draftwell.components.papers.cells import FORMAT, Cell
from draftwell.components.papers.estimates import Measured
from draftwell.components.papers.formulas import Passes
from draftwell.components.papers.rejections import RejectedPair
from draftwell.components.papers.roc import Roc
from draftwell.serving.artifacts.hardware_profile import HardwareProfile

UNEVEN = 0.05
"""Share by which a pass over more tokens may be faster than one over fewer: beyond that its profile
is not monotone, and what depends on it says little."""


class Costs(Frozen):
    """Seconds of single forward passes: timed between the texts of the cell, or once before it, by
    its hardware profile; of a round outside passes (`t_rest`) always the profile's.

    `alone`: each model on its own share of the cores, the other one idle; `busy`: both at once.
    """

    t_draft: float
    t_verify: dict[int, float]
    t_rest: float
    alone: Passes | None = None
    busy: Passes | None = None

    @classmethod
    def of(cls, profile: HardwareProfile) -> Costs:
        """Those of a profile."""
        return cls(
            t_draft=profile.draft_seconds,
            t_verify=profile.t_verify,
            t_rest=profile.t_rest,
            busy=profile.split,
            alone=None if profile.details is None else profile.details.split_alone,
        )


class CellFile(Frozen):
    """A cell that was measured."""

    version: int = Field(FORMAT, ge=FORMAT, le=FORMAT)
    cell: dict[str, Any]
    source: str = Field(description="of the prompts, in words")
    made_of: dict[str, str] = Field(
        description="`pair`: its fingerprint; kind → digest of the artifacts that were read"
    )
    seconds: float = Field(description="that the cell took, loading included")
    costs: Costs | None = None
    chosen_by: Costs | None = Field(
        None,
        description="the hardware profile's, which strategies choose by, where `costs` are others",
    )
    passes_timed: int = Field(
        0, ge=0, description="how often `costs` were timed between its texts; 0: once before it"
    )
    remarks: tuple[str, ...] = Field(
        (),
        description=(
            "how it was measured, such as what ran beside it, a sentence each; written by hand"
        ),
    )
    confidence: tuple[Any, ...] = Field(
        (),
        description="of kept cells: for each text and confidence bin of SPIDE's table, positions "
        "and how many of the draft's first choices were kept; not counted any more",
    )
    certainty: dict[str, Any] = Field(
        {},
        description="of kept cells: role → for each text that the target writes positions, and "
        "sums of entropy and of the first choice's probability; not measured any more",
    )
    roc: dict[str, Roc] = Field(
        {},
        description="of a cell with SPRINTER: λ → how well its verifier, or the first one that is "
        "trained for it, ranks the draft's tokens",
    )
    aucs: dict[str, dict[str, tuple[float, float, float]]] = Field(
        {},
        description="of a cell that trains verifiers: role → λ → AUC of the "
        "verifier that was trained for it, with the ends of its 95 % interval, "
        "on the cell's prompts",
    )
    points: dict[str, Point] = Field(
        {},
        description="of a counted cell with verifiers: contender → where its threshold was put",
    )
    rejections: tuple[RejectedPair, ...] = Field(
        (),
        description="of a cell that is replayed for them: the draft's most frequent rejected "
        "tokens, and how likely the target finds them",
    )
    report: BenchReport

    def measured(self) -> Measured:
        """Its entries by role."""
        return Measured(cell_of(self.cell), self.report.strategies)

    @property
    def kind(self) -> str:
        """How its values came about: measured, replayed or emulated."""
        return cell_of(self.cell).kind

    @property
    def cost(self) -> float | None:
        """c: a draft pass over a target pass, both over one token and with all cores."""
        return None if self.costs is None else self.costs.t_draft / self.costs.t_verify[1]

    @property
    def uneven(self) -> str:
        """Where a longer target pass beside a busy draft model was timed to be faster than a
        shorter one, in words; empty where times grow as they should."""
        costs = self.chosen_by or self.costs
        times = sorted(costs.busy[1].items()) if costs and costs.busy else []
        for (few, slow), (more, fast) in pairwise(times):
            if fast < (1 - UNEVEN) * slow:
                return f"{slow:.3f} s over {few} tokens at once, {fast:.3f} s over {more}"
        return ""


def cell_of(settings: dict[str, Any]) -> Cell:
    """A cell from its JSON, which has lists for tuples."""
    contenders = {role: tuple(specs) for role, specs in settings["contenders"].items()}
    return Cell.model_validate({**settings, "contenders": contenders})


def read_cell(path: Path) -> CellFile | None:
    """A measured cell; None where there is no file, or one that cannot be read (it is measured
    again)."""
    try:
        return CellFile.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
