"""Keeping a card: in the workspace, and with the release that it is about."""

from __future__ import annotations

from pathlib import Path

from draftwell.components.card.card import Card
from draftwell.components.card.files import read_card, write_card
from draftwell.flows.steps.own_pair import safe_name
from draftwell.flows.workspace import Workspace
from draftwell.registry.release_card import keep_card
from draftwell.registry.releases import find_release
from draftwell.registry.store import Store
from draftwell.serving.bundle.card import CARD_JSON
from draftwell.serving.errors import DraftwellError

FOLDER = "card"
"""Among a device's reports; another engine's has its name."""
OF_A_RUN = {"made", "seconds", "fits", "memory_bytes"}
"""Fields that differ from run to run."""


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
    files = write_card(first_of_the_same(card, folder), folder)
    space.say(f"the card is in {folder}")
    if card.release is not None:
        store = Store()
        release = find_release(store, space.spec.name, device or space.device, card.release)
        keep_card(store, release, files)


def first_of_the_same(card: Card, folder: Path) -> Card:
    """The card that is there already where the new one says the same of the same release, as that
    of a resumed command does where measurements are kept (engines that restart): its bundle stays
    the same, too."""
    try:
        earlier = read_card(folder / CARD_JSON)
    except DraftwellError:
        return card
    same = earlier.model_dump(exclude=OF_A_RUN) == card.model_dump(exclude=OF_A_RUN)
    same &= (earlier.memory_bytes is None) == (card.memory_bytes is None)
    return earlier if same else card
