"""The file of a measured cell."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from pydantic import ConfigDict, Field

from draftwell.components.bench.schema import BenchEntry, BenchReport, Frozen
from draftwell.components.formulas import Passes
from draftwell.components.papers.calibrated import Point
from draftwell.components.papers.cells import FORMAT, PLAIN, Cell
from draftwell.components.papers.estimates import pace, settings_of
from draftwell.components.papers.verifiers import Aucs
from draftwell.serving.errors import DraftwellError

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


class CellFile(Frozen):
    """A cell that was measured."""

    model_config = ConfigDict(extra="ignore")  # what older files have besides

    version: int = Field(ge=FORMAT, le=FORMAT)
    cell: Cell
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

    def label(self, role: str) -> str:
        """The contender that plays a role, the one that decodes fastest; a role may be one
        contender's spec."""
        labels = self.cell.labels().get(role) or [self.cell.label_of(role)]
        return min(labels, key=lambda label: pace(self.report.strategies[label].per_prompt))

    def entry(self, role: str) -> BenchEntry:
        """Its entry."""
        return self.report.strategies[self.label(role)]

    def has(self, role: str) -> bool:
        """Whether a role, or a contender's spec, was measured: a quick run has fewer."""
        try:
            return bool(self.label(role))
        except KeyError:
            return False

    @property
    def prompts(self) -> int:
        """How many different ones."""
        return len(set(self.report.prompt_ids))

    @property
    def base(self) -> str:
        """The role of vanilla SD; plain decoding's where a cell has none."""
        roles = (role for role in self.cell.contenders if role.partition(",")[0] in ("SD", "SpS"))
        return next(roles, PLAIN)

    def settings(self, role: str, over: str) -> str:
        """Draft lengths and thresholds of the contenders that a row compares, such as `τ 0.5; SD: γ
        5`."""
        mine = settings_of(self.entry(role))
        other = settings_of(self.entry(over)) if over and ":" not in over else ""
        return "; ".join(filter(None, (mine, f"{over}: {other}" if other else "")))

    @property
    def acceptance(self) -> float | None:
        """How many of the tokens that the target judged it kept, with vanilla SD."""
        return self.entry(self.base).acceptance_rate

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


def read_cell(path: Path) -> CellFile | None:
    """A measured cell; None where there is no file, or one that cannot be read (it is measured
    again)."""
    try:
        return CellFile.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, DraftwellError):
        return None
