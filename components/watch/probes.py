"""The watchdog's own requests: fixed prompts of several kinds and lengths, and the budget that they
keep to. A prompt that never changes tells an engine that got worse from traffic that did."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from draftwell.components.watch.schema import Probe
from draftwell.serving.files import write_json

LENGTHS = (200, 1000, 4000)
"""Tokens of a prompt."""
NEW_TOKENS = 48
TOKENS_PER_PROBE = 2000
"""That the budget counts for each probe an hour, about the mean of these prompts with answers."""
HOUR = 3600.0
NAMES = ("Ana", "Bruno", "Chen", "Dora", "Emil", "Farah", "Goran", "Hana", "Ivo", "Jun", "Kira")
THINGS = ("hinge", "lamp", "rope", "filter", "valve", "crate", "bolt", "panel", "sensor")
PLACES = ("Lyon", "Porto", "Graz", "Turku", "Ghent", "Cadiz", "Brno")
VERBS = ("packs", "weighs", "paints", "repairs", "counts", "sends", "orders", "returns")


@dataclass(frozen=True)
class ProbePrompt:
    """A fixed prompt; `name` is its kind and its length."""

    name: str
    kind: str
    ids: tuple[int, ...]

    def unanswered(self, at: float, *, plain: bool, elsewhere: bool) -> Probe:
        """That it was asked, and not answered in time."""
        return Probe(
            at=at,
            name=self.name,
            kind=self.kind,
            prompt_tokens=len(self.ids),
            new_tokens=1,
            seconds=HOUR,
            plain=plain,
            elsewhere=elsewhere,
            answered=False,
        )


def pick(words: Sequence[str], place: int, step: int) -> str:
    """A word that changes with the place, the same on every machine."""
    return words[(place * step + place // len(words)) % len(words)]


def prose(place: int) -> str:
    """A paragraph of a story."""
    who, other = pick(NAMES, place, 3), pick(NAMES, place, 7)
    thing, town = pick(THINGS, place, 5), pick(PLACES, place, 2)
    return (
        f"On day {place + 1} {who} {pick(VERBS, place, 3)} the {thing} from {town}, while {other} "
        f"{pick(VERBS, place, 5)} the rest. They talk about the weather in {pick(PLACES, place, 4)}"
        f" and agree that the {pick(THINGS, place, 2)} can wait until evening.\n"
    )


def code(place: int) -> str:
    """A function."""
    verb, thing = pick(VERBS, place, 3)[:-1], pick(THINGS, place, 5)
    return (
        f"def {verb}_{thing}_{place}(items, limit={place % 9 + 1}):\n"
        f'    """Return each {thing} that weighs more than the limit."""\n'
        f"    found = [item for item in items if item.weight > limit]\n"
        f"    return sorted(found, key=lambda item: item.name)\n\n\n"
    )


def records(place: int) -> str:
    """A line of a list."""
    return (
        f"{1000 + 17 * place}; {pick(NAMES, place, 3)}; {place % 12 + 1} x {pick(THINGS, place, 5)}"
        f"; {pick(PLACES, place, 2)}; {'paid' if place % 3 else 'open'}\n"
    )


KINDS: dict[str, tuple[Callable[[int], str], str]] = {
    "prose": (prose, "\nWhat happens on the next day? Tell it in three sentences.\n"),
    "code": (code, "\n# the same for items that weigh less than the limit\ndef "),
    "copy": (records, "\nThe first ten lines of the list, word for word:\n1000; Ana; 1 x hinge"),
}
"""Kind → what its prompts repeat with changes, and how they end: free text, code, and an answer
that stands in the prompt."""


def probe_prompts(
    encode: Callable[[str], Sequence[int]], lengths: Sequence[int] = LENGTHS
) -> list[ProbePrompt]:
    """The fixed prompts in an engine's tokens, each of exactly its length."""
    found = []
    for kind, (part, question) in KINDS.items():
        end = list(encode(question))
        # no tokenizer joins more than eight of these letters to a token on average
        parts: list[str] = []
        letters = 0
        while letters < 8 * max(lengths):
            parts.append(part(len(parts)))
            letters += len(parts[-1])
        body = list(encode("".join(parts)))
        for length in lengths:
            ids = (*body[: length - len(end)], *end)
            if len(ids) == length:
                found.append(ProbePrompt(f"{kind} {length}", kind, ids))
    return found


class ProbeBudget:
    """Requests and tokens of the last hour, in a file, so that a restart does not forget them.

    Args:
        per_hour: requests, at most; `TOKENS_PER_PROBE` times as many tokens of prompts and answers.
    """

    def __init__(self, file: Path, per_hour: int):
        self.file, self.per_hour = file, per_hour

    def spent(self, now: float) -> list[tuple[float, int]]:
        """(time, tokens) of the requests of the last hour; of a file that cannot be read, as many
        as there may be, so that a damaged one spends nothing."""
        try:
            rows = json.loads(self.file.read_text(encoding="utf-8"))
            return [(float(at), int(tokens)) for at, tokens in rows if now - at < HOUR]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError):
            return [(now, TOKENS_PER_PROBE)] * self.per_hour

    def due(self, now: float, requests: int) -> int:
        """How many times so many requests may be sent now: what is left of the hour, spread over
        it, so that a look a minute does not spend it all at once."""
        spent = self.spent(now)
        left = min(
            self.per_hour - len(spent),
            (self.per_hour * TOKENS_PER_PROBE - sum(tokens for _, tokens in spent))
            // TOKENS_PER_PROBE,
        )
        if not spent:
            earned = self.per_hour if self.file.exists() else requests
        else:
            # one request is earned in each part of the hour; a few seconds do not matter
            earned = int((now - max(at for at, _ in spent) + 5) * self.per_hour / HOUR)
        return max(0, min(left, earned)) // requests

    def spend(self, now: float, tokens: int) -> None:
        """Note a request before it is sent: one that fails has cost something too."""
        write_json(self.file, [*self.spent(now), (now, tokens)])

    def take_back(self) -> None:
        """Forget the last request: the engine had no room for it and decoded nothing."""
        write_json(self.file, json.loads(self.file.read_text(encoding="utf-8"))[:-1])


def least_recent(prompts: Sequence[ProbePrompt], asked: dict[str, float]) -> Iterator[ProbePrompt]:
    """Prompts in the order in which they are due: the one that was asked longest ago first.

    Args:
        asked: name → time of its last answer.
    """
    yield from sorted(prompts, key=lambda prompt: asked.get(prompt.name, 0.0))
