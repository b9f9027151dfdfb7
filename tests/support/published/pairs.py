"""Pairs that published loops and our strategies decode, and the rounds of ours."""

from __future__ import annotations

import copy
import functools
from typing import Any, NamedTuple

import pytest

from draftwell.serving.runtime.models.transformers_model import TransformersModel
from draftwell.serving.runtime.session.stats import Stats
from tests.support.models.resources import table_pair
from tests.support.models.tiny import llama, near
from tests.support.published.decoding import Reader, Round

PROMPT = [1, 0]
Seen = list[Round]


class Pair(NamedTuple):
    """Models as the engine takes them, and the same for loops without caches."""

    models: dict
    target: Reader
    draft: Reader


def tables(seed: int, vocab: int = 8, temperature: float = 0.0, **settings: Any) -> Pair:
    models = table_pair(vocab, seed, **settings)
    return Pair(models, Reader(models["target"], temperature), Reader(models["draft"], temperature))


@functools.cache
def llamas() -> Pair:
    """Two transformers; ours reads them with keys and values, the published loops whole texts."""
    modules = {"target": llama(2), "draft": near(llama(2), 0.06)}
    readers = {}
    for role, module in modules.items():
        whole = copy.deepcopy(module)
        whole.set_attn_implementation("eager")  # a model that the engine took over reads slots
        readers[role] = Reader(whole)
    models = {role: TransformersModel(module, slots=2) for role, module in modules.items()}
    return Pair(models, readers["target"], readers["draft"])


@functools.cache
def pairs() -> list[Pair]:
    return [tables(seed, noise=0.7) for seed in range(5)]


@functools.cache
def unsure_pairs() -> list[Pair]:
    """Drafts that begin several sequences now and then."""
    return [tables(seed, noise=0.4, sharpness=1.2) for seed in range(3)]


def rounds_seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """The rounds of our strategy, as long as somebody clears the list between requests."""
    seen: Seen = []
    count = Stats.count

    def watch(stats: Stats, draft, verdict) -> None:
        count(stats, draft, verdict)
        before = sum(one.drafted for one in seen)
        seen.append(Round(stats.drafted - before, verdict.judged, verdict.accepted))

    monkeypatch.setattr(Stats, "count", watch)
    return seen


def kinds_of(rounds: Seen) -> set[str]:
    """What happened in them, so that a comparison is of more than one kind of round."""
    return {
        "all" if one.accepted == one.judged else "some" if one.accepted else "none"
        for one in rounds
        if one.judged
    }
