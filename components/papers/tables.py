"""What a paper reports, and what is run here in its place: one YAML file in `claims/` a paper.

`published` has the paper's values with source, section, setting and unit; a row names them by a
path (`code.SD.vicuna.speed`), or by products and quotients of paths. The copies of the papers that
these files were made from have no page numbers: sections stand in their place.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar

import yaml
from pydantic import Field

from draftwell.components.formulas import token_acceptance
from draftwell.components.papers.cells import Cell, Scale, sized
from draftwell.components.papers.estimates import COUNTS, PAIRED
from draftwell.serving.errors import DraftwellError
from draftwell.serving.settings import Settings

FOLDER = Path(__file__).parent / "claims"
PAPERS = ("spide", "sprinter", "csd", "pyramidsd", "duodecoding")
"""In the order of the page."""


class Part(Settings):
    """A part of a paper's file."""

    called: ClassVar[str] = "a paper's"
    error_code: ClassVar[str] = "bad_claims"


class Published(Part):
    """Values as a paper prints them."""

    source: str
    section: str
    setting: str
    unit: str
    columns: list[str] = Field([], description="names of what a list in `values` holds")
    values: Any

    def value(self, path: list[str]) -> float:
        """The value at the end of a path."""
        found = self.values
        for name in path:
            found = found[self.columns.index(name)] if isinstance(found, list) else found[name]
        return float(found)


class Row(Part):
    """One value, the paper's and ours."""

    what: str
    paper: str = Field("", description="path or quotient of paths; empty: the paper has no value")
    metric: str = Field(pattern=f"^({'|'.join([*PAIRED, *COUNTS, 'auc'])})$")
    role: str = Field(description="of the cell's contenders, or the spec of one of them")
    over: str = Field("", description="what it is divided by, or what is subtracted")
    at: str = Field("", description="λ of an AUC")
    neutral: float | None = Field(1.0, description="value without an effect; none: no such value")
    unlike: str = Field("", description="key of `reasons`: why ours is not the paper's quantity")
    early: bool = Field(False, description="ours is flattered: it drafts beside the prompt")
    claim: str = Field("", description="key of the claim that it belongs to")


class Table(Part):
    """Rows of one or several cells."""

    title: str
    words: str = ""
    csv: bool = Field(False, description="in the CSV alone, not on the page")
    picture: bool = False
    each: list[dict[str, Any]] = Field(description="cell, label, and what fills the rows' braces")
    rows: list[dict[str, Any]]
    cost: str = Field("", description="the paper's c, at most")
    accepted: list[str] = Field([], description="accepted tokens of an SD round, and its γ")


class Claim(Part):
    """One of a paper's two main claims."""

    claim: str
    regime: str
    why: str
    emulated: list[str] = Field([])
    """Strategy and the one that it is compared with, in runs on emulated devices."""


class Placed(Part):
    """A row with the cell that it is measured in."""

    row: Row
    cell: str
    label: str
    paper: float | None
    source: str
    cost: float | None
    alpha: float | None


class Paper(Part):
    """One file."""

    name: str
    title: str
    citation: str
    claims: dict[str, Claim]
    reasons: dict[str, str]
    published: dict[str, Published]
    cells: dict[str, dict[str, Any]]
    tables: list[Table]
    deviations: list[str] = Field([])
    inconsistencies: list[str] = Field([])
    elsewhere: list[str] = Field([])
    untestable: list[str] = Field([])
    open: list[str] = Field([])
    appendix: str = Field("", description="Markdown behind its cells")

    def value(self, expression: str) -> float | None:
        """A number, a path, or products and quotients of them; None of an empty one."""
        if not expression:
            return None
        first, *rest = re.split(r" ([*/]) ", expression)
        found = self._operand(first)
        for sign, part in zip(rest[::2], rest[1::2], strict=True):
            found *= self._operand(part) ** (1 if sign == "*" else -1)
        return found

    def _operand(self, text: str) -> float:
        try:
            return float(text)
        except ValueError:
            name, *path = text.split(".")
            return self.published[name].value(path)

    def source(self, expression: str) -> str:
        """Where the first value of an expression is printed."""
        found = self.published.get(expression.partition(".")[0])
        return f"{found.source}, section {found.section}" if found else ""

    @cached_property
    def placed(self) -> list[tuple[Table, list[Placed]]]:
        """Its tables with the rows of all their cells."""
        return [(table, [*self._rows(table)]) for table in self.tables]

    def _rows(self, table: Table) -> list[Placed]:
        found = []
        for one in table.each:
            named = defaultdict(str, {key: str(value) for key, value in one.items()})

            def filled(text: Any, named: Mapping[str, str] = named) -> Any:
                return text.format_map(named) if isinstance(text, str) else text

            accepted = [self.value(filled(text)) for text in table.accepted]
            alpha = (
                token_acceptance(accepted[0] or 0.0, int(accepted[1] or 0)) if accepted else None
            )
            for fields in table.rows:
                row = Row(**{key: filled(value) for key, value in fields.items()})
                if row.unlike and row.unlike not in self.reasons:
                    raise DraftwellError(f"{self.name}: no reason {row.unlike}", code="bad_claims")
                found.append(
                    Placed(
                        row=row,
                        cell=one["cell"],
                        label=one["label"],
                        paper=self.value(row.paper),
                        source=self.source(row.paper),
                        cost=self.value(filled(table.cost)),
                        alpha=alpha,
                    )
                )
        return found

    def measured_in(self, scale: Scale) -> dict[str, Cell]:
        """Name → cell in a run of a size; what is counted has no place in another padding."""
        return {
            name: sized(scale, name, settings)
            for name, settings in self.cells.items()
            if scale.usual or not {"replay", "counted"} & settings.keys()
        }


@lru_cache
def read_paper(path: Path) -> Paper:
    """A paper's file.

    Raises:
        DraftwellError: a key that no part has, or a value of another type.
    """
    return Paper(**yaml.safe_load(path.read_text(encoding="utf-8")))


def papers_named(only: str | None = None) -> list[Paper]:
    """All papers, or one.

    Raises:
        DraftwellError: no paper has that name.
    """
    if only is not None and only not in PAPERS:
        raise DraftwellError(
            f"unknown paper {only}: choose from {', '.join(PAPERS)}, emulated", code="unknown_paper"
        )
    return [read_paper(FOLDER / f"{name}.yaml") for name in PAPERS if only in (None, name)]
