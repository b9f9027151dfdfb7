"""The file of a measured cell."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from draftwell.components.bench.schema import BenchReport, Frozen
from draftwell.components.papers.aucs import Aucs
from draftwell.components.papers.calibrated import Point
from draftwell.components.papers.cells import FORMAT, Cell
from draftwell.components.papers.estimates import Measured
from draftwell.components.papers.formulas import Passes
from draftwell.serving.artifacts.hardware_profile import HardwareProfile

UNEVEN = 0.05
"""Share by which a pass over more tokens may be faster than one over fewer: beyond that its profile
is not monotone, and what depends on it says little."""


class Costs(Frozen):
    """Seconds of single forward passes; `busy`: both models at once, each on its own share of the
    cores, by the hardware profile that strategies chose by."""

    model_config = ConfigDict(extra="ignore")  # what older files have besides

    t_draft: float
    t_verify: dict[int, float]
    busy: Passes | None = None

    @classmethod
    def of(cls, profile: HardwareProfile) -> Costs:
        """Those of a profile."""
        return cls(
            t_draft=profile.draft_seconds,
            t_verify=profile.t_verify,
            busy=profile.split,
        )


class CellFile(Frozen):
    """A cell that was measured."""

    model_config = ConfigDict(extra="ignore")  # what older files have besides

    version: int = Field(FORMAT, ge=FORMAT, le=FORMAT)
    cell: dict[str, Any]
    source: str = Field(description="of the prompts, in words")
    made_of: dict[str, str] = Field(
        description="`pair`: its fingerprint; kind → digest of the artifacts that were read"
    )
    seconds: float = Field(description="that the cell took, loading included")
    costs: Costs | None = None
    remarks: tuple[str, ...] = Field(
        (),
        description=(
            "how it was measured, such as what ran beside it, a sentence each; written by hand"
        ),
    )
    aucs: Aucs = Field({}, description="of a cell with SPRINTER, on its prompts")
    points: dict[str, Point] = Field(
        {},
        description="of a counted cell with verifiers: contender → where its threshold was put",
    )
    report: BenchReport

    def measured(self) -> Measured:
        """Its entries by role."""
        return Measured(cell_of(self.cell), self.report.strategies)

    @property
    def kind(self) -> str:
        """How its values came about: measured or replayed."""
        return cell_of(self.cell).kind

    @property
    def cost(self) -> float | None:
        """c: a draft pass over a target pass, both over one token and with all cores."""
        return None if self.costs is None else self.costs.t_draft / self.costs.t_verify[1]

    @property
    def uneven(self) -> str:
        """Where a longer target pass beside a busy draft model was timed to be faster than a
        shorter one, in words; empty where times grow as they should."""
        busy = self.costs.busy if self.costs else None
        times = sorted(busy[1].items()) if busy else []
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
