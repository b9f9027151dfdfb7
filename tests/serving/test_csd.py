"""CSD's rescue rule and its memory."""

from __future__ import annotations

import math

import pytest
import torch

from serving.runtime.acceptance.rescue import Rescue
from serving.runtime.artifacts.correction_memory import CorrectionMemory
from serving.runtime.engine import Engine
from serving.runtime.sampling import LogitRows, Streams
from serving.runtime.strategies import build_strategy
from serving.runtime.types import Draft, Sampling
from tests.serving.kits import ORIGIN, table_kit, table_pair

LOGITS = torch.tensor([[0.0, 2.0, 1.0, -9.0], [0.0, 0.0, 3.0, 0.0], [3.0, 0.0, 0.0, 0.0]])


def judge(tokens: list[int], counts: dict, *, tau: float = 0.01, min_count: float = 6, special=frozenset(), **sampling):
    memory = CorrectionMemory(counts, ORIGIN)
    rule = Rescue(memory, min_count, tau, special)
    rows = LogitRows(LOGITS[: len(tokens) + 1], Sampling(**sampling))
    return rule.judge(Draft(tokens), rows, Streams(0)), memory


@pytest.mark.parametrize(("count", "rescued"), [(5, 0), (6, 1)])
def test_rescue_needs_lambda_sightings_read_before_the_update(count, rescued):
    verdict, memory = judge([2, 2], {(2, 1): count})
    assert verdict.rescued == rescued
    assert memory.count(2, 1) == count + 1, "every rejection updates, rescued or not"
    assert (verdict.accepted, verdict.token) == ((2, 0) if rescued else (0, 1))


def test_gate_reads_raw_logits_whatever_the_temperature():
    for temperature in (0.0, 0.01):
        verdict, _ = judge([2, 2], {(2, 1): 99}, tau=0.3, temperature=temperature)
        assert verdict.rescued == 1, "z(2) - z(1) = -1 >= log .3 at every temperature"
    verdict, _ = judge([2, 2], {(2, 1): 99}, tau=0.5)
    assert verdict.rescued == 0


@pytest.mark.parametrize("protected", [1, 2])
def test_stop_and_special_tokens_are_neither_rescued_nor_rescued_against(protected):
    assert judge([2], {(2, 1): 99}, special=frozenset({protected}))[0].rescued == 0
    assert judge([2], {(2, 1): 99}, stop_token_ids=frozenset({protected}))[0].rescued == 0


def test_tokens_without_warped_probability_are_not_rescued():
    verdict, _ = judge([2], {(2, 1): 99}, temperature=1.0, top_k=1)
    assert verdict.rescued == 0


def test_a_new_pair_survives_a_full_memory():
    memory = CorrectionMemory({}, ORIGIN, max_pairs=3)
    for pair in [(1, 1), (1, 1), (2, 2), (3, 3), (4, 4)]:
        memory.update(*pair)
    assert memory.counts == {(1, 1): 2, (3, 3): 1, (4, 4): 1}, "the oldest of the least counted goes, never the newest"
    for _ in range(6):
        memory.update(4, 4)
    assert memory.count(4, 4) == 7


def test_new_pairs_that_compete_in_a_full_memory_both_grow():
    memory = CorrectionMemory({(i, i): 5 for i in range(32)}, ORIGIN, max_pairs=32)
    for _ in range(20):
        memory.update(100, 1)
        memory.update(101, 1)
    assert memory.count(100, 1) == memory.count(101, 1) == 20
    assert len(memory.counts) == 32


def test_without_rescue_csd_is_vanilla_speculative_decoding():
    models, sampling = table_pair(vocab=8), Sampling(max_tokens=80, temperature=1.0, seed=3)
    csd = build_strategy("csd", {"min_count": math.inf, "num_speculative_tokens": 4}, table_kit(8))
    vanilla = build_strategy("vanilla_sd", {"num_speculative_tokens": 4})
    assert Engine(models).generate([1], sampling, csd).output == Engine(models).generate([1], sampling, vanilla).output


def test_gate_only_at_temperature_zero_keeps_what_the_target_finds_likely():
    models, sampling = table_pair(vocab=8, noise=2.0), Sampling(max_tokens=200)
    job = Engine(models).generate([1], sampling, build_strategy("csd", {"use_memory": False, "tau": 0.2}, table_kit(8)))
    assert job.session.stats.rescued > 0
    ids = [1, *job.output]
    for i in range(1, len(ids)):
        logits = models["target"].next_logits(ids[:i])
        assert float(logits[ids[i]] - logits.max()) >= math.log(0.2) - 1e-6
