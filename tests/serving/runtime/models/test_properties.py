"""Random sequences against slow references: slots of a real network, acceptance tables, correction
memories, warping."""

from __future__ import annotations

import copy
import functools
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings, strategies as st

from draftwell.serving.artifacts.acceptance_table import EDGES, MIDPOINTS, AcceptanceTable
from draftwell.serving.artifacts.correction_memory import CorrectionMemory
from draftwell.serving.runtime.models.transformers_model import TransformersModel
from draftwell.serving.runtime.pair import over_slots
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.sampling import residual, warp
from tests.support.models.resources import ORIGIN
from tests.support.models.slot_steps import CONTEXT, COUNT, STEPS, run_step
from tests.support.models.tiny import llama


@functools.cache
def networks(adapter: Any) -> tuple[Any, Any]:
    """The model over slots, one for all examples as for all requests, and the same weights as
    transformers runs them."""
    plain = copy.deepcopy(llama(2))
    plain.set_attn_implementation("eager")
    return adapter(copy.deepcopy(llama(2)), slots=COUNT, max_context=CONTEXT), plain


@pytest.mark.parametrize("adapter", [TransformersModel, over_slots])
@settings(max_examples=25, suppress_health_check=[HealthCheck.differing_executors])
@given(steps=STEPS)
@example(
    steps=[
        ("open",),
        ("feed", [(0, [3, 4, 5, 6], 4)]),
        ("back", 0, 2),
        ("fork", 0, 0, 1),
        ("feed", [(0, [9], 1), (1, [7, 8], 2)]),
        ("close", 1),
        ("fork", 0, 0, 2),
        ("feed", [(1, [5], 1)]),
    ]
)
def test_slots_of_a_network_equal_a_fresh_forward_over_the_whole_text(adapter, steps):
    """Whatever was opened, fed in ragged batches, rolled back, forked and closed: a slot is the
    text that it holds."""
    model, plain = networks(adapter)
    held: dict[int, list[int]] = {}
    branches: set[int] = set()
    try:
        for action, *arguments in steps:
            run_step(model, plain, held, branches, action, arguments)
            assert {slot: model.slots.lengths[slot] for slot in held} == {
                slot: len(text) for slot, text in held.items()
            }
    finally:
        for slot in held:
            model.close(slot)


CONFIDENCE = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1.0, *EDGES]))
TABLE_STEPS = st.lists(
    st.one_of(st.tuples(CONFIDENCE, st.booleans()), st.sampled_from(["copy", "disk"])), max_size=60
)


def interval(confidence: float) -> int:
    """The bin of a confidence, looked for one by one."""
    return sum(confidence >= edge for edge in EDGES)


@settings(max_examples=40)
@given(TABLE_STEPS)
def test_an_acceptance_table_is_a_dictionary_of_lists(steps):
    table, seen = AcceptanceTable.empty(ORIGIN), defaultdict(list)
    for step in steps:
        if step == "copy":
            left, table = table, table.copy()
            left.update(0.5, kept=True)  # must not reach the copy
        elif step == "disk":
            table = on_disk(table)
        else:
            table.update(step[0], kept=step[1])
            seen[interval(step[0])].append(step[1])
    for b, middle in enumerate(MIDPOINTS):
        kept = seen[b]
        assert (table.total[b], table.accepted[b]) == (len(kept), sum(kept))
        assert table.alpha(([0.0, *EDGES])[b]) == pytest.approx(
            (sum(kept) + 10 * middle) / (len(kept) + 10)
        )


def on_disk(artifact: Any) -> Any:
    """Saved and loaded."""
    with tempfile.TemporaryDirectory() as folder:
        artifact.save(Path(folder) / "a")
        return type(artifact).load(Path(folder) / "a", fingerprint=ORIGIN.fingerprint)


class SlowMemory:
    """Pairs in order of first sight. Full: of all but the newest eighth the least counted goes, the
    oldest of several."""

    def __init__(self, bound: int):
        self.bound, self.pairs = bound, []

    def update(self, pair: tuple[int, int]) -> None:
        for entry in self.pairs:
            if entry[0] == pair:
                entry[1] += 1
                return
        if len(self.pairs) == self.bound:
            settled = self.pairs[: max(1, len(self.pairs) - max(1, self.bound // 8))]
            least = min(count for _, count in settled)
            self.pairs.remove(next(entry for entry in settled if entry[1] == least))
        self.pairs.append([pair, 1])


PAIR = st.tuples(st.integers(0, 4), st.integers(0, 4))


@settings(max_examples=40)
@given(
    st.integers(1, 20),
    st.lists(st.one_of(PAIR, PAIR, PAIR, st.sampled_from(["copy", "disk"])), max_size=80),
)
def test_a_correction_memory_is_a_list_of_pairs(bound, steps):
    memory, slow = CorrectionMemory.empty(ORIGIN, max_pairs=bound), SlowMemory(bound)
    newest = None
    for step in steps:
        if step == "copy":
            left, memory = memory, memory.copy()
            left.update(99, 99)
        elif step == "disk":
            memory = on_disk(memory)
            memory.max_pairs = bound  # a setting, not content
        else:
            is_new = memory.count(*step) == 0
            memory.update(*step)
            slow.update(step)
            assert memory.count(*step) >= 1, "what was just seen is known"
            if is_new:
                assert (
                    newest is None or bound == 1 or newest == step or memory.count(*newest) >= 1
                ), "the newest before it has stayed"
                newest = step
        assert len(memory.counts) <= bound
        assert list(memory.counts.items()) == [(pair, count) for pair, count in slow.pairs]


LOGITS = st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=12, unique=True).map(
    torch.tensor
)
SAMPLINGS = st.builds(
    Sampling, temperature=st.floats(0.1, 2.0), top_k=st.integers(0, 6), top_p=st.floats(0.05, 1.0)
)


@settings(max_examples=60)
@given(LOGITS, SAMPLINGS, st.floats(-20, 20, width=32), st.randoms(use_true_random=False))
def test_warping_keeps_order_mass_and_names(logits, sampling, shift, random):
    probs = warp(logits, sampling)
    assert float(probs.sum()) == pytest.approx(1.0, abs=1e-5)
    ranked = probs[logits.argsort(descending=True)]
    assert bool((ranked[:-1] >= ranked[1:] - 1e-7).all()), "a higher logit never gets less"
    kept = int((probs > 0).sum())
    assert kept >= 1
    assert sampling.top_k == 0 or kept <= sampling.top_k
    moved = torch.tensor(random.sample(range(len(logits)), len(logits)))
    assert torch.equal(warp(logits[moved], sampling) > 0, probs[moved] > 0)
    assert torch.allclose(warp(logits[moved], sampling), probs[moved], atol=1e-6), (
        "names of tokens change nothing"
    )
    if sampling.top_p == 1.0:
        assert torch.allclose(warp(logits + shift, sampling), probs, atol=1e-4), (
            "only differences of logits count"
        )


@settings(max_examples=50)
@given(LOGITS, st.floats(0.05, 0.999))
def test_top_p_keeps_the_smallest_set_that_has_the_mass(logits, top_p):
    plain, cut = logits.softmax(-1).double(), warp(logits, Sampling(temperature=1.0, top_p=top_p))
    kept = cut > 0
    assert float(plain[kept].sum()) >= top_p - 1e-5
    assert float(plain[kept].sum() - plain[kept].min()) < top_p + 1e-5, (
        "without its last token it has not"
    )


@settings(max_examples=50)
@given(
    st.integers(2, 10).flatmap(
        lambda n: st.tuples(*[st.lists(st.floats(-8, 8, width=32), min_size=n, max_size=n)] * 2)
    ),
    SAMPLINGS,
)
def test_kept_drafts_and_residual_together_are_the_target(both, sampling):
    """min(p, q) + (1 − Σ min(p, q))·norm(max(0, p − q)) = p: why exact acceptance is lossless
    (Leviathan 2023, appendix A.1)."""
    p, q = (warp(torch.tensor(logits), sampling) for logits in both)
    rest = residual(p, q)
    kept = torch.minimum(p, q)
    assert float(rest.sum()) == pytest.approx(1.0, abs=1e-4)
    assert torch.allclose(kept + (1 - kept.sum()).clamp(min=0) * rest, p, atol=1e-5)
