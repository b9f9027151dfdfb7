"""Random decisions: delays on either model change nothing, and no uniform is ever read twice."""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any, ClassVar

import numpy as np
import pytest

from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.random_streams import RandomStream
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import STRATEGIES, build_strategy
from tests.support.models.resources import table_pair, table_resources

PARALLEL: dict[str, dict[str, Any]] = {
    "spide": {"tau": 0.4, "max_draft": 5},
    "pearl": {"num_speculative_tokens": 4},
    "double": {"passes": 3},
    "duo_decoding": {"num_speculative_tokens": 6},
}
SAMPLING = Sampling(max_tokens=40, temperature=1.0, seed=5)


class Delayed:
    """A model whose forwards take a random time, on whichever thread they run."""

    def __init__(self, model, most: float, seed: int):
        self.model, self.most, self.random = model, most, random.Random(seed)

    def __getattr__(self, name):
        return getattr(self.model, name)

    def forward(self, rows):
        time.sleep(self.random.uniform(0.0, self.most))
        return self.model.forward(rows)


def decode(name: str, target: float = 0.0, draft: float = 0.0, seed: int = 0, prompts=((1, 2),)):
    """Outputs and counters of concurrent requests over models with delays of at most so many
    seconds."""
    models = table_pair(vocab=9, noise=0.5, sharpness=0.6)
    if target or draft:
        models = {
            "target": Delayed(models["target"], target, seed),
            "draft": Delayed(models["draft"], draft, seed + 1),
        }
    engine = Engine(models)
    jobs = [
        engine.submit(prompt, SAMPLING, build_strategy(name, PARALLEL[name], table_resources(9)))
        for prompt in prompts
    ]
    engine.run(jobs)
    return [
        (
            job.output,
            {
                key: value
                for key, value in vars(job.session.stats).items()
                if "seconds" not in key and key != "timeline"
            },
        )
        for job in jobs
    ]


@pytest.mark.parametrize("name", list(PARALLEL))
def test_delays_on_either_model_change_neither_text_nor_counters(name):
    calm = decode(name)
    for target, draft, seed in ((0.004, 0.0, 1), (0.0, 0.004, 2), (0.003, 0.003, 3)):
        assert decode(name, target, draft, seed) == calm


@pytest.mark.parametrize("name", list(PARALLEL))
def test_delays_change_nothing_for_concurrent_requests_either(name):
    prompts = ((1, 2), (3,), (4, 5, 6))
    assert (
        decode(name, 0.002, 0.002, 4, prompts)
        == decode(name, prompts=prompts)
        == [decode(name, prompts=(p,))[0] for p in prompts]
    )


def test_every_strategy_that_can_overlap_is_here():
    def overlaps(name, cls) -> bool:
        try:
            return bool(build_strategy(name, {}, table_resources()).overlaps)
        except Exception:  # a setting without default: none of those overlaps
            return bool(cls.overlaps)

    assert {name for name, cls in STRATEGIES.items() if overlaps(name, cls)} == set(PARALLEL)


class Spy:
    """A generator that notes which of its uniforms were read."""

    read: ClassVar[Counter] = Counter()

    def __init__(self, generator: np.random.Generator, stream: tuple[int, ...]):
        self.generator, self.stream = generator, stream

    def random(self) -> float:
        place = (
            tuple(map(int, self.generator.bit_generator.state["state"]["counter"])),
            self.generator.bit_generator.state["buffer_pos"],
        )
        Spy.read[self.stream, place] += 1
        return float(self.generator.random())


@pytest.mark.parametrize("name", list(PARALLEL))
def test_no_uniform_is_used_twice(monkeypatch, name):
    """The key of a stream and its counter name a uniform; streams of one request differ in their
    key."""
    original = RandomStream.__init__

    def spied(self, seed, purpose):
        original(self, seed, purpose)
        self._generator = Spy(self._generator, (seed, purpose))

    monkeypatch.setattr(RandomStream, "__init__", spied)
    monkeypatch.setattr(Spy, "read", Counter())
    [(output, counters)] = decode(name, 0.001, 0.001)
    assert len(output) == 40
    assert max(Spy.read.values()) == 1
    streams = Counter(stream for stream, _ in Spy.read)
    drafts = counters["drafted"] if name != "duo_decoding" else 0  # its proposals are deterministic
    if name == "double":  # and so are the target's guesses
        assert 0 < streams[5, 1] < drafts
    else:
        assert streams[5, 1] == drafts
    assert streams[5, 2] == counters["judged"]
    assert streams[5, 3] == counters["sampled"]
