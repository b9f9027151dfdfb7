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
    tokens; and from minute 125 on, after a baseline, a plain probe of 48 tokens a minute."""

    def sample(minute: int, probed: int) -> Counters:
        sent = sum((8, 10, 16)[i % 3] for i in range(minute))
        return Counters(
            at=60.0 * minute,
            started=0.0,
            requests=sent + probed,
            prompt_tokens=200 * (sent + probed),
            new_tokens=24 * sent + 48 * probed,
            rounds=10 * sent,
            drafted=40 * sent,
            accepted=14 * sent,
            decode_seconds=1.5 * (sent / 2.4 + probed),
            decode_steps=sent + probed,
        )

    samples = [sample(minute, max(0, minute - 125)) for minute in range(5, 200)]
    asked = [probe(60.0 * minute + 50, "prose", 1.0, plain=True) for minute in range(125, 199)]
    return samples, [one.model_copy(update={"new_tokens": 48}) for one in asked]
