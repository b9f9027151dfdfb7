"""Draw the maps of the page "What pays when", and print its table."""

from __future__ import annotations

import argparse
from pathlib import Path

from PIL import Image

from draftwell.components.regimes.page import table
from draftwell.components.regimes.picture import FILES, draw_map
from draftwell.components.regimes.points import our_points, published_points

COLOURS = 64
"""Of a picture's palette: a third of the bytes, and nothing that a reader sees."""


def main() -> None:
    """Write both pictures into a folder, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="of the pictures, such as docs/images")
    folder = parser.parse_args().folder
    points = [*published_points(), *our_points()]
    for placement, name in FILES.items():
        path = draw_map(placement, points, folder / name)
        with Image.open(path) as picture:
            small = picture.convert("RGB").quantize(COLOURS)
        small.save(path, optimize=True)
    print(table())


if __name__ == "__main__":
    main()
