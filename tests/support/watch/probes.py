"""Results of a watchdog's probes."""

from __future__ import annotations

from draftwell.components.engines.port import Acceptance
from draftwell.components.engines.remote.counters import Counters
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


def probed_engine() -> tuple[list[Counters], list[Probe]]:
    """Eight to sixteen requests of 24 tokens a minute, whose rounds take 1.5 seconds and bring 2.4
    tokens; and from minute 125 on, after a baseline, a plain probe every minute, beside which
    rounds take 1.4 times as long."""
    probed = range(125, 160)
    sent, seconds, samples = 0, 0.0, []
    for minute in range(160):
        more = (8, 10, 16, 12)[minute % 4]
        sent += more
        seconds += more * 1.5 / 2.4 * (1.4 if minute in probed else 1)
        samples.append(
            Counters(
                at=60.0 * (minute + 1),
                started=-300.0,
                requests=sent,
                prompt_tokens=200 * sent,
                new_tokens=24 * sent,
                rounds=10 * sent,
                drafted=40 * sent,
                accepted=14 * sent,
                decode_seconds=seconds,
                decode_steps=sent,
            )
        )
    return samples, [probe(60.0 * minute + 50, "prose", 1.0, plain=True) for minute in probed]
