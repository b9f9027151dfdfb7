"""A picture says which artifact it was drawn of: a text chunk of the PNG holds that one's digest.

A picture that is drawn again loses its stamp, so an old stamp is never on a new picture.
"""

from __future__ import annotations

import io
from pathlib import Path

from serving.files import write_atomically

KEY = "draftwell artifact"


def stamp(path: Path, digest: str) -> None:
    """Write an artifact's digest into a PNG."""
    from PIL import Image, PngImagePlugin

    info = PngImagePlugin.PngInfo()
    info.add_text(KEY, digest)
    buffer = io.BytesIO()
    with Image.open(path) as picture:
        picture.save(buffer, format="png", pnginfo=info)
    write_atomically(path, buffer.getvalue())


def stamped(path: Path) -> str | None:
    """The digest in a PNG; None where it has none, or where this is no PNG."""
    from PIL import Image

    try:
        with Image.open(path) as picture:
            picture.load()  # chunks may follow the picture
            digest = picture.info.get(KEY)
    except (OSError, ValueError, SyntaxError):
        return None
    return str(digest) if digest else None
