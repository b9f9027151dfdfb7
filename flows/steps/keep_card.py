"""Keeping a card: in the workspace, and with the release that it is about."""

from __future__ import annotations

from draftwell.components.card.card import Card
from draftwell.components.card.files import write_card
from draftwell.flows.steps.own_pair import safe_name
from draftwell.flows.workspace import Workspace
from draftwell.registry.release_card import keep_card
from draftwell.registry.releases import find_release
from draftwell.registry.store import Store

FOLDER = "card"
"""Among a device's reports; another engine's has its name."""


def keep_with_release(space: Workspace, card: Card, device: str | None = None) -> None:
    """Write a card as data, page and picture, and keep them with its release. Before that is
    deployed: its bundle takes them from there.

    Args:
        device: of the release; None: the workspace's.
    """
    engine = card.engine.partition(" ")[0]
    folder = space.device_reports / (
        FOLDER if engine == "draftwell" else f"{FOLDER}-{safe_name(engine)}"
    )
    folder.mkdir(parents=True, exist_ok=True)
    files = write_card(card, folder)
    space.say(f"the card is in {folder}")
    if card.release is not None:
        store = Store()
        release = find_release(store, space.spec.name, device or space.device, card.release)
        keep_card(store, release, files)
