"""What a card says, as sentences: the terminal, the page and the picture use the same ones."""

from __future__ import annotations

from draftwell.components.card.card import Card, Speed
from draftwell.components.report.tables import duration, number, plural

INTERVAL = "in brackets: 90 % interval over prompts; of fewer than four there is none"
PLAINLY = "plain decoding: nothing that was tried was chosen"
LOSSLESS = "yes, answers are the target's own"
ROUNDED = f"{LOSSLESS}, but for near-ties that rounding decides"
PREDICTED = "predicted"
TRIED = "tried in tuning, on other prompts, and not chosen"


def title(card: Card) -> str:
    """Which pair, and what serves it best."""
    return f"{card.pair}: {card.strategy}"


def headline(card: Card) -> str:
    """How many times as fast, or that it is not sure yet and what it would take."""
    needed = f"; {card.needs}" if card.needs else ""
    if card.speed is None:
        return PLAINLY if card.plain else f"not measured{needed}"
    if card.sure:
        return f"{card.speed.ratio:.2f} times as fast as plain decoding {evidence(card.speed)}"
    return f"not yet sure: {card.speed.ratio:.2f} {evidence(card.speed)}{needed}"


def evidence(speed: Speed) -> str:
    """What a ratio rests on.

    >>> evidence(Speed(name="pearl", ratio=1.3, prompts=0))
    'predicted'
    >>> evidence(Speed(name="all", ratio=1.31, low=0.98, high=1.7, prompts=9))
    '[0.98, 1.70] on 9 prompts'
    >>> evidence(Speed(name="all", ratio=1.31, prompts=1))
    'on 1 prompt'
    """
    if not speed.prompts:
        return PREDICTED
    return f"{interval(speed)} on {plural(speed.prompts, 'prompt')}".strip()


def interval(speed: Speed) -> str:
    """Its ends in brackets; empty where there were too few prompts."""
    if speed.low is None or speed.high is None:
        return ""
    return f"[{speed.low:.2f}, {speed.high:.2f}]"


def cells(speed: Speed) -> tuple[str, str, str, str, str]:
    """A row of a table: name, times as fast, interval, prompts, tokens per second."""
    return (
        speed.name,
        f"{speed.ratio:.2f}",
        interval(speed) or "–",
        str(speed.prompts or PREDICTED),
        number(speed.tokens_per_second, ".1f"),
    )


def settings_of(parameters: dict[str, object]) -> str:
    """Parameters of a strategy, as `--set` takes them.

    >>> settings_of({"gamma": 4, "tau": 0.25}), settings_of({})
    ('gamma=4, tau=0.25', '')
    """
    return ", ".join(f"{name}={value}" for name, value in parameters.items())


def facts(card: Card) -> dict[str, str]:
    """What the figures hold for, by name; what a card has none of is left out."""
    memory = None if card.memory_bytes is None else f"{card.memory_bytes / 1e9:.1f} GB at most"
    found = {
        "settings": settings_of(card.parameters),
        "exact": f"no, {card.loses}" if card.loses else LOSSLESS if card.exact else ROUNDED,
        "gate": card.verdict + (f", release {card.release}" if card.release is not None else ""),
        "formula": card.own_device,
        "memory": memory,
        "fits": card.fits,
        "machine": f"{card.machine}, {card.dtype}",
        "models": card.target + (f", draft {card.draft}" if card.draft else ""),
        "engine": card.engine,
        "bundle": card.bundle,
        "made": f"{card.made:%Y-%m-%d %H:%M %Z} in {duration(card.seconds)}, "
        f"draftwell {card.version}",
    }
    return {name: value for name, value in found.items() if value}
