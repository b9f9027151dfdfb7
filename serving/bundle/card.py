"""The card of the tuning that a bundle comes from: two files that the bundle carries for people and
that nothing is computed from.

A release is judged before its card is complete, so the judged bundle has none: `without_card` is
what both have in common.
"""

from __future__ import annotations

from pathlib import Path

from draftwell.serving.bundle.manifest import Manifest

CARD_JSON, CARD_PAGE = "card.json", "card.html"
CARD_FILES = (CARD_JSON, CARD_PAGE)
MOST_BYTES = 1 << 20
"""Of each file."""


def without_card(manifest: Manifest) -> str:
    """The digest that a bundle's manifest would have without its card; its own where it has
    none."""
    files = {name: one for name, one in manifest.files.items() if name not in CARD_FILES}
    return manifest.model_copy(update={"files": files}).computed_digest()


def read_card_files(bundle: Path, manifest: Manifest) -> dict[str, bytes]:
    """Name → content of a checked bundle's card; empty where it has none, or one that is larger
    than a card may be."""
    listed = [manifest.files.get(name) for name in CARD_FILES]
    if any(one is None or one.size > MOST_BYTES for one in listed):
        return {}
    return {name: (bundle / name).read_bytes() for name in CARD_FILES}
