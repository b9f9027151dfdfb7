"""Results of a watchdog's probes."""

from __future__ import annotations

from draftwell.components.engines.port import Acceptance
from draftwell.components.watch.schema import Probe


def probe(at: float, name: str, length: float, *, plain: bool = False, tokens: int = 200) -> Probe:
    rounds = round(1000 / length)
    return Probe(
        at=at,
        name=name,
        kind=name.split("-")[0],
        prompt_tokens=tokens,
        new_tokens=1000,
        seconds=10.0,
        plain=plain,
        acceptance=None
        if plain
        else Acceptance(rounds=rounds, drafted=4 * rounds, accepted=1000 - rounds),
        at_once=2.0,
    )
