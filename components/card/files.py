"""A card as files of a folder: `card.json`, which is the card, and `card.html` and `card.png`, made
from it."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from draftwell.components.card.card import FORMAT, Card
from draftwell.components.card.page import card_html
from draftwell.components.card.picture import card_png, speed_by_kind
from draftwell.serving.bundle.card import CARD_JSON, CARD_PAGE, MOST_BYTES
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import write_atomically

CARD_PICTURE = "card.png"
KINDS_PICTURE = "speed_by_kind.png"


def write_card(card: Card, folder: Path) -> list[Path]:
    """Write a card into a folder, each file atomically and `card.json` last: where it is, the
    others are of the same card. Returns the files; the plot of kinds only where there are some."""
    page, picture, data = (folder / name for name in (CARD_PAGE, CARD_PICTURE, CARD_JSON))
    (folder / KINDS_PICTURE).unlink(missing_ok=True)
    kinds = speed_by_kind(card, folder / KINDS_PICTURE)
    write_atomically(page, card_html(card).encode())
    write_atomically(picture, card_png(card))
    write_atomically(data, (card.model_dump_json(indent=2) + "\n").encode())
    return [data, page, picture, *([kinds] if kinds else [])]


def read_card(path: Path) -> Card:
    """The card of a `card.json`.

    Raises:
        DraftwellError: it is not there or too large (`no_card`), of a newer version
            (`newer_card`), or damaged (`bad_card`).
    """
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise DraftwellError(
            f"there is no card at {path} ({error.strerror}): `draftwell tune` writes one",
            code="no_card",
        ) from error
    if len(data) > MOST_BYTES:
        raise DraftwellError(f"{path} is too large for a card: tune again", code="no_card")
    try:
        card = Card.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "its JSON"
        raise DraftwellError(
            f"{path} is not a card ({place}: {first['msg']}): tune again, or upgrade draftwell if "
            "a newer version made it",
            code="bad_card",
        ) from error
    if card.format != FORMAT:
        raise DraftwellError(
            f"{path} is a card of format {card.format}, this version reads {FORMAT}: tune again, "
            "or upgrade draftwell",
            code="newer_card",
        )
    return card
