"""Axes that end up as a PNG file, written atomically. matplotlib draws off screen and is imported
only here.

A picture can carry the digest of the artifact that it shows, in a text chunk; one that is drawn
again loses it.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftwell.serving.errors import missing_package
from draftwell.serving.files import write_atomically

INK, SECOND, FAINT = "#1f4e79", "#c55a11", "#9aa5b1"
TITLE = 64
"""Characters of a title's line."""
ARTIFACT = "draftwell artifact"
"""Key of the text chunk with an artifact's digest."""


def check_drawing() -> None:
    """Refuse, before any work, to draw plots where nothing can draw them."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise missing_package(
            "plots need", "matplotlib", "pipeline", code="missing_extra"
        ) from error


@contextmanager
def drawing(path: Path, title: str, x: str, y: str, height: float = 4.2) -> Iterator[Any]:
    """Axes to draw on, of a plot of so many inches; it is written to `path` after the block."""
    figure = canvas(7, height)
    axes = figure.add_subplot()
    axes.set(title=textwrap.fill(title, TITLE), xlabel=x, ylabel=y)
    axes.spines[["top", "right"]].set_visible(False)
    yield axes
    write_atomically(path, png_of(figure))


def canvas(width: float, height: float) -> Any:
    """An empty figure, in inches, that no display knows of."""
    check_drawing()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)  # no global state
    return figure


def png_of(figure: Any) -> bytes:
    """A figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def note_artifact(path: Path, digest: str) -> None:
    """Write into a PNG which artifact it shows."""
    from PIL import Image, PngImagePlugin

    info, buffer = PngImagePlugin.PngInfo(), io.BytesIO()
    info.add_text(ARTIFACT, digest)
    with Image.open(path) as picture:
        picture.save(buffer, format="png", pnginfo=info)
    write_atomically(path, buffer.getvalue())


def drawn_of(path: Path) -> str | None:
    """The digest of the artifact that a PNG shows; None where it has none, or where the file is not
    a PNG."""
    from PIL import Image

    try:
        with Image.open(path) as picture:
            picture.load()  # text chunks may come after the pixels
            return picture.info.get(ARTIFACT) or None
    except (OSError, ValueError, SyntaxError):
        return None
