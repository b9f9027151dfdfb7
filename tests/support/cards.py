"""Cards as a tuning could make them."""

from __future__ import annotations

import datetime
from typing import Any

from draftwell.components.card.card import Card, Speed, Tried

CARD = Card(
    version="0.10.0",
    made=datetime.datetime(2026, 11, 30, 0, 40, tzinfo=datetime.UTC),
    seconds=581,
    pair="smollm2-135m",
    target="SmolLM2-135M-Instruct",
    draft="three of its layers",
    engine="draftwell",
    machine="AMD EPYC 9R14, 2 cores",
    dtype="float32",
    fits="0.54 GB of 15.6 GB, up to 8 requests at once",
    memory_bytes=1_430_000_000,
    strategy="eagle3",
    parameters={"num_speculative_tokens": 4},
    speed=Speed(name="all", ratio=1.84, low=1.71, high=1.97, prompts=24, tokens_per_second=61.2),
    by_kind=(
        Speed(name="code", ratio=2.31, low=2.1, high=2.55, prompts=16, tokens_per_second=75.0),
        Speed(name="chat", ratio=1.2, prompts=1, tokens_per_second=47.1),
    ),
    by_requests=(
        Speed(name="1", ratio=1.84, low=1.71, high=1.97, prompts=24, tokens_per_second=61.2),
        Speed(name="8", ratio=1.02, low=0.95, high=1.09, prompts=24, tokens_per_second=181.5),
    ),
    exact=True,
    tried=(
        Tried(
            speed=Speed(name="csd", ratio=1.9, low=1.7, high=2.1, prompts=8),
            parameters={"tau": 0.4},
            why_not="loses 12 % of ROUGE-L, where 10 % are allowed",
        ),
    ),
    verdict="passed",
    release=3,
    bundle="dist/smollm2-135m/3-cpu",
    next_command="draftwell serve --pair smollm2-135m",
)


def changed(**fields: Any) -> Card:
    """The card with other values."""
    return Card.model_validate({**CARD.model_dump(), **fields})


UNSURE = changed(
    speed=Speed(name="all", ratio=1.31, low=0.98, high=1.7, prompts=9),
    needs="about 24 more prompts would do",
    exact=False,
    loses="it loses 2.1 % of ROUGE-L",
)
PLAIN = changed(speed=None, strategy="autoregressive", parameters={}, by_kind=(), by_requests=())


def crowded() -> Card:
    """A card with more of everything than a terminal has room for."""
    speed = Speed(name="a kind whose name fills a line of its own " * 2, ratio=1.2, prompts=4)
    long = "a long sentence about it " * 20
    return changed(
        speed=CARD.speed and CARD.speed.model_copy(update={"prompts": 15}),
        needs=long,
        by_kind=(speed,) * 12,
        by_requests=(speed,) * 12,
        tried=(Tried(speed=speed, parameters={"gamma": 4}, why_not=long),) * 12,
        parameters={f"parameter_{i}": i for i in range(30)},
        exact=False,
        own_device=long,
        **dict.fromkeys(("pair", "loses", "fits", "machine", "engine", "target", "bundle"), long),
        next_command="draftwell serve --pair " + "x" * 110,
    )
