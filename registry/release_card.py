"""The card of a tuning, kept with the run of the release that came of it: pictures and pages for
people, and what the release's bundle carries of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from draftwell.registry.releases import ReleaseVersion
from draftwell.registry.store import Store
from draftwell.serving.bundle.card import CARD_FILES, MOST_BYTES
from draftwell.serving.files import json_digest

FOLDER = "card"
"""Of the run's artifacts."""
TAG = "card_digest"
"""Of the release: what its card's files are."""


def keep_card(store: Store, release: ReleaseVersion, files: Sequence[Path]) -> None:
    """Keep a card's files (`components.card.files.write_card`) with a release's run in MLflow. A
    bundle that is built from the release later has it: keep it before the release is deployed."""
    store.log_files(release.published, files, FOLDER)
    found = {file.name: file.read_bytes() for file in files if file.name in CARD_FILES}
    store.set_tag(release.published, TAG, card_digest(found))


def kept_card(store: Store, release: ReleaseVersion) -> dict[str, bytes]:
    """Name → content of what a bundle carries of a release's card. Empty where there is none, and
    where it was changed since or is larger than a card may be: a deployment does not fail for a
    page."""
    digest = release.published.tags.get(TAG)
    if not digest:
        return {}
    found = {name: store.read_file(release.published, f"{FOLDER}/{name}") for name in CARD_FILES}
    files = {name: data for name, data in found.items() if data and len(data) <= MOST_BYTES}
    return files if card_digest(files) == digest else {}


def card_digest(files: dict[str, bytes]) -> str:
    """One digest of all files of a card."""
    return json_digest({name: hashlib.sha256(files[name]).hexdigest() for name in sorted(files)})
