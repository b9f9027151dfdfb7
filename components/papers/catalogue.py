"""The papers, in the order of the page."""

from __future__ import annotations

from draftwell.components.papers import csd, duodecoding, pyramidsd, spide, sprinter
from draftwell.components.papers.tables import Paper
from draftwell.serving.errors import DraftwellError

PAPERS: dict[str, Paper] = {
    paper.name: paper
    for paper in (spide.PAPER, sprinter.PAPER, csd.PAPER, pyramidsd.PAPER, duodecoding.PAPER)
}


def papers_named(only: str | None) -> list[Paper]:
    """All papers, or one.

    Raises:
        DraftwellError: no paper has that name.
    """
    if only is not None and only not in PAPERS:
        raise DraftwellError(
            f"unknown paper {only}: choose from {', '.join(PAPERS)}", code="unknown_paper"
        )
    return [paper for name, paper in PAPERS.items() if only in (None, name)]
