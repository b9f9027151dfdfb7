"""Peak memory: what is allocated and freed again inside a generation is seen, what was there before
is not."""

import numpy as np
import pytest

from draftwell.components.bench import peak_memory as memory
from draftwell.components.bench.peak_memory import (
    peak_during,
    peaks_over_models,
    resident,
    touch_caches,
)
from draftwell.components.bench.runner import Generation, contenders_of
from draftwell.serving.runtime.session.stats import Stats
from draftwell.serving.runtime.strategies import StrategyChoice, StrategyResources
from tests.support.models.tiny import llama_pair

needs_proc = pytest.mark.skipif(
    not memory.reset_peak(), reason="this system does not let a process reset its peak memory"
)
HUNDRED = 100_000_000


class Hungry:
    """A contender that holds memory while it runs."""

    label = "hungry"

    def __init__(self, size: int):
        self.size = size

    def reset(self) -> None:
        pass

    def generate(self, ids, sampling):
        block = np.ones(self.size, dtype=np.uint8)
        return Generation([int(block[0])], Stats(emitted=1, wall_seconds=1.0))


@pytest.mark.slow
@needs_proc
def test_a_peak_is_seen_though_the_memory_is_free_again():
    held = np.ones(HUNDRED, dtype=np.uint8)
    before = resident()
    peak = peak_during(lambda: np.ones(HUNDRED, dtype=np.uint8))
    assert 0.9 * HUNDRED < peak - before < 1.5 * HUNDRED
    assert peak_during(lambda: None) - resident() < 0.2 * HUNDRED, "the peak of before is forgotten"
    assert held[0] == 1


@needs_proc
@pytest.mark.slow
def test_each_contender_is_charged_for_its_own():
    pair = llama_pair(slots=1)
    (plain,) = contenders_of(pair, StrategyResources(), [StrategyChoice("vanilla_sd")])
    plain.generate([5, 6, 7], pair.sampling(max_tokens=4))
    peaks = peaks_over_models(
        pair, [Hungry(HUNDRED), plain], [5, 6, 7], pair.sampling(max_tokens=8)
    )
    assert 90 < peaks["hungry"] < 150
    assert 0 <= peaks["vanilla_sd"] < 50


@pytest.mark.slow
def test_where_the_system_does_not_tell_it_is_none(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "CLEAR", tmp_path / "missing" / "clear_refs")
    monkeypatch.setattr(memory, "STATUS", tmp_path / "missing")
    done = []
    assert peak_during(lambda: done.append(1)) is None
    assert done == [1]
    pair = llama_pair(slots=1)
    assert peaks_over_models(pair, [Hungry(1)], [5], pair.sampling(max_tokens=2)) == {
        "hungry": None
    }


def test_touching_the_caches_changes_no_output():
    pair = llama_pair(slots=1)
    (contender,) = contenders_of(pair, StrategyResources(), [StrategyChoice("vanilla_sd")])
    before = contender.generate([5, 6, 7], pair.sampling(max_tokens=12)).tokens
    touch_caches(pair)
    assert contender.generate([5, 6, 7], pair.sampling(max_tokens=12)).tokens == before
