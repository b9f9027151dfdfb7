"""Our server with a tiny pair on a device whose time is counted, not waited for, and what can be
planted in it.

A pass adds to the device's clock what it would last; the server's times, and those of probes, are
read from that clock. So an hour goes by in a minute, and what else the machine does is in no
figure.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from draftwell.components.engines.remote.client import EngineClient
from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import build_strategy
from draftwell.serving.server.metrics import metrics
from draftwell.serving.server.scheduling import scheduler as scheduling
from tests.support.server.served_pair import TunedModel, serving, tiny_pair

SLOTS = 34
"""For 32 clients and a probe."""
CONTEXT = 4032
"""Prompts of 3,900 tokens fit; the longest probes do not: their attention takes a second each."""
DRAFTED = 4
PASSES = {"target": (0.96, 0.02), "draft": (0.16, 0.002)}
"""Role → the device's seconds of a pass, and of each token in it: four requests fare better with
drafts, and a few dozen without. Thirty rounds a minute, as few as tell something."""
PAUSE = 0.004
"""Real seconds after a pass, in which clients take what came: they read the clock then."""
KNOWN, UNKNOWN = "abcdefghij klm", "αβγδε"
"""Letters that the draft was trained on, so to speak, and some that it was not."""
NEAR = 300
"""Position up to which the draft is as good as ever."""
FORGETS = 0.12
"""Noise on its hidden states at twice that position."""


def letters(order: random.Random, count: int, kind: str = KNOWN) -> str:
    """A text of random letters."""
    return "".join(order.choice(kind) for _ in range(count))


TEXTS = {kind: letters(random.Random(kind), 4000, kind) for kind in (KNOWN, UNKNOWN)}
"""How prompts of each kind begin."""


def prompt(order: random.Random, length: int = 200, kind: str = KNOWN) -> str:
    """A text of so many bytes that begins as others of its kind."""
    width = len(kind[0].encode())
    return TEXTS[kind][: (length - 40) // width] + letters(order, 40 // width, kind)


@dataclass
class DeviceClock:
    """Seconds that a device has worked.

    Args:
        slower: how many times as long everything takes as `PASSES` says.
    """

    begun: float = field(default_factory=time.time)
    seconds: float = 0.0
    slower: float = 1.0

    def now(self) -> float:
        """Unix seconds, if it had worked without a pause."""
        return self.begun + self.seconds


class ThreadClock:
    """In place of `time` in a server's modules: threads that ran passes have their device's time,
    all others the machine's."""

    perf_counter = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self.of_thread = threading.local()
        self.begun = time.monotonic()

    def monotonic(self) -> float:
        """Seconds."""
        clock = getattr(self.of_thread, "clock", None)
        return time.monotonic() if clock is None else self.begun + clock.seconds


def pace(pair: LoadedPair, clock: DeviceClock, threads: ThreadClock) -> None:
    """Let passes last what `PASSES` says. A prompt costs as many tokens as a draft has, however
    long it is."""

    def paced(forward: Any, fixed: float, each: float) -> Any:
        def run(rows: Sequence[Forward]) -> Any:
            threads.of_thread.clock = clock
            tokens = sum(min(len(row.tokens), DRAFTED + 1) for row in rows)
            clock.seconds += clock.slower * (fixed + each * tokens)
            spans = forward(rows)
            time.sleep(PAUSE)
            return spans

        return run

    for role, costs in PASSES.items():
        model: Any = pair.models[role]  # type: ignore[index]
        model.forward = paced(model.forward, *costs)


def watched_pair() -> LoadedPair:
    """A good draft for short prompts of known letters, which fares worse with others and at later
    positions: that is silent until such prompts come."""
    pair = tiny_pair(SLOTS, context=CONTEXT)
    target, draft = pair.modules["target"], pair.modules["draft"]
    generator = torch.Generator().manual_seed(7)
    unknown = sorted(set(pair.tokenizer.encode(UNKNOWN)))
    with torch.no_grad():
        for weight, other in zip(draft.parameters(), target.parameters(), strict=True):
            weight.lerp_(other, 0.8)
        embedding = draft.get_input_embeddings().weight
        shape = (len(unknown), embedding.shape[1])
        embedding[unknown] = 0.35 * torch.randn(shape, generator=generator)

    def forget(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        far = torch.log2(kwargs["position_ids"][0].clamp(min=NEAR) / NEAR)[None, :, None]
        states = output.last_hidden_state
        output.last_hidden_state = states + FORGETS * far * torch.randn(
            states.shape, generator=generator
        )
        return output

    draft.base_model.register_forward_hook(forget, with_kwargs=True)
    return pair


@dataclass
class LiveEngine:
    """A server that answers, and its parts."""

    url: str
    scheduler: Any
    pair: LoadedPair
    clock: DeviceClock


@contextmanager
def devices() -> Iterator[dict[str, DeviceClock]]:
    """Server's and probes' time by devices' clocks, by address."""
    clocks: dict[str, DeviceClock] = {}
    events = EngineClient.events

    def timed(client: EngineClient, *asked: Any) -> Iterator[Any]:
        clock = clocks[client.address.url]
        begun = clock.seconds
        for _, event in events(client, *asked):
            yield clock.seconds - begun, event

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineClient, "events", timed)
        threads = ThreadClock()
        patch.setattr(scheduling, "time", threads)
        patch.setattr(metrics, "time", threads)
        yield clocks


@contextmanager
def live_engine(
    clocks: dict[str, DeviceClock], strategy: str = "vanilla_sd"
) -> Iterator[LiveEngine]:
    """A server on a device of its own; `autoregressive` decodes plainly."""
    pair, clock = watched_pair(), DeviceClock()
    pace(pair, clock, scheduling.time)  # type: ignore[arg-type]
    more = {"num_speculative_tokens": DRAFTED} if strategy == "vanilla_sd" else {}
    served = TunedModel("tiny", pair, build_strategy(strategy, more), SLOTS)
    with serving(served) as (url, scheduler):
        clocks[url] = clock
        yield LiveEngine(url, scheduler, pair, clock)


@contextmanager
def noise_for(module: torch.nn.Module) -> Iterator[None]:
    """Random weights in a module's place."""
    before = [weight.clone() for weight in module.parameters()]
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(0.35 * torch.randn_like(weight))
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, old in zip(module.parameters(), before, strict=True):
                weight.copy_(old)
