"""Greedy drafts of fixed length as one command: the same text, drafts and counters as token by
token."""

from __future__ import annotations

import pytest
import torch

from draftwell.serving.errors import NotFinite
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.models.cuda.cuda_llama import CudaLlama
from draftwell.serving.runtime.models.lean_llama import LeanLlama
from draftwell.serving.runtime.random_streams import Streams
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.sampling import residual, warp
from draftwell.serving.runtime.strategies import build_strategy
from tests.support.models.counters import counters
from tests.support.models.llama_shapes import MODULES, random_tokens
from tests.support.models.spans import span_of


class Counted(CudaLlama):
    """Remembers the commands that it was given."""

    def forward(self, rows):
        self.commands = [*getattr(self, "commands", []), *rows]
        return super().forward(rows)


def run(kind, prompts, strategy="vanilla_sd", **sampling):
    models = {role: kind(module, slots=len(prompts)) for role, module in MODULES.items()}
    engine = Engine(models)
    jobs = [
        engine.submit(prompt, Sampling(max_tokens=24, **sampling), build_strategy(strategy))
        for prompt in prompts
    ]
    engine.run(jobs)
    return models, [(job.output, counters(job.session.stats)) for job in jobs]


@pytest.mark.parametrize("prompts", [1, 3])
def test_chains_give_the_text_and_the_counters_of_single_steps(prompts):
    texts = [random_tokens(5 + i, seed=i) for i in range(prompts)]
    models, got = run(Counted, texts)
    _, want = run(LeanLlama, texts)
    assert got == want
    assert 0 < got[0][1]["accepted"] < got[0][1]["judged"]
    assert max(c.steps for c in models["draft"].commands) > 1


def test_a_stop_token_inside_a_chain_ends_the_draft():
    _, [(text, _)] = run(LeanLlama, [random_tokens(5)])
    for stop in set(text):
        got = run(CudaLlama, [random_tokens(5)], stop_token_ids=frozenset({stop}))[1]
        want = run(LeanLlama, [random_tokens(5)], stop_token_ids=frozenset({stop}))[1]
        assert [output for output, _ in got] == [output for output, _ in want]
        for name in ("drafted", "judged", "accepted", "target_calls", "rounds"):
            assert got[0][1][name] == want[0][1][name]


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.7},
        {"banned_token_ids": frozenset({3})},
        {"frequency_penalty": 1.0},
        {"logit_bias": {3: 2.0}},
    ],
)
def test_requests_that_alter_or_sample_are_drafted_token_by_token(sampling):
    models, got = run(Counted, [random_tokens(5)], **sampling)
    assert {c.steps for c in models["draft"].commands} == {1}
    assert got == run(LeanLlama, [random_tokens(5)], **sampling)[1]


def test_drafts_and_targets_of_both_kinds_work_together():
    for kinds in ((LeanLlama, CudaLlama), (CudaLlama, LeanLlama)):
        engine = Engine(
            {role: kind(MODULES[role]) for role, kind in zip(MODULES, kinds, strict=True)}
        )
        job = engine.generate(
            random_tokens(5), Sampling(max_tokens=24), build_strategy("vanilla_sd")
        )
        assert job.output == run(LeanLlama, [random_tokens(5)])[1][0][0]


class Reads(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts what would make the host wait for a device."""

    READS = frozenset(
        {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal"}
    )

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.name() in self.READS
        return function(*args, **(kwargs or {}))


def test_a_greedy_round_of_fixed_length_is_read_twice(monkeypatch):
    """Once for the draft, once for the verification, and once after the prompt."""
    prompt, lists = random_tokens(5), []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: lists.append(1) or tolist(tensor))
    with Reads() as reads:
        [(_, stats)] = run(CudaLlama, [prompt])[1]
    assert reads.count == 0
    assert len(lists) == 1 + stats["rounds"] + stats["target_calls"]


def test_distributions_are_computed_without_reading_them():
    """`meta` tensors have no numbers to read, so a hidden read would fail."""
    logits = torch.empty(50, device="meta")
    for sampling in (Sampling(), Sampling(temperature=0.7, top_k=5, top_p=0.9)):
        assert residual(warp(logits, sampling), warp(logits, sampling)).shape == (50,)


def test_a_draw_is_one_read():
    with Reads() as reads:
        Streams(0).draft.draw(torch.rand(50))
    assert reads.count == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_bad_logit_among_many_rows_is_found(bad):
    logits = torch.randn(4, 50)
    assert span_of(logits, Sampling()).top == logits.argmax(-1).tolist()
    logits[2, 7] = bad
    with pytest.raises(NotFinite):
        _ = span_of(logits, Sampling()).top
    with pytest.raises(NotFinite):
        _ = span_of(torch.full((1, 5), float("-inf")), Sampling()).top
