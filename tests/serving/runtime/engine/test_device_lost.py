"""A device that has failed for good is recognised, and nothing is asked of it any more."""

from __future__ import annotations

import pytest
import torch

from draftwell.serving.errors import DeviceLost
from draftwell.serving.runtime.engine import decisions
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.failures import lost_device, readable
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import build_strategy
from tests.support.errors import raises_code
from tests.support.models.resources import table_pair

ILLEGAL = (
    "CUDA error: an illegal memory access was encountered\nSearch for "
    "`cudaErrorIllegalAddress' in the CUDA documentation\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
)


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError(ILLEGAL),
        torch.AcceleratorError("CUDA error: device-side assert triggered"),
        torch.AcceleratorError("CUDA error: unknown error"),
        RuntimeError(ILLEGAL),
        RuntimeError("CUDA error: unspecified launch failure"),
        DeviceLost("seen before"),
    ],
    ids=lambda error: str(error).splitlines()[0],
)
def test_errors_after_which_cuda_repeats_itself(error):
    assert lost_device(error)
    assert isinstance(readable(error), DeviceLost)
    assert "\n" not in str(readable(error))


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: out of memory"),
        torch.AcceleratorError("CUDA error: invalid configuration argument"),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("a kernel failed"),
        ValueError("CUDA error"),
        MemoryError(),
    ],
    ids=repr,
)
def test_errors_of_one_request(error):
    assert not lost_device(error)
    assert not isinstance(readable(error), DeviceLost)


def broken_after(model, passes: int):
    """A model whose device fails at a pass, and at every later one."""
    forward, calls = model.forward, []

    def failing(rows):
        calls.append(len(rows))
        if len(calls) > passes:
            raise torch.AcceleratorError(ILLEGAL)
        return forward(rows)

    model.forward = failing
    return calls


@pytest.mark.parametrize("split", [False, True])
def test_all_requests_end_with_it_and_no_further_one_is_taken(split):
    models = table_pair(vocab=8)
    calls = broken_after(models["target"], 3)
    engine = Engine(models, split=split)
    jobs = [
        engine.submit([i, 2], Sampling(max_tokens=50), build_strategy(name))
        for i, name in enumerate(("autoregressive", "vanilla_sd", "vanilla_sd"))
    ]
    while not all(job.finished for job in jobs):
        engine.step()
    assert all(isinstance(job.error, DeviceLost) for job in jobs)
    assert len(calls) == 4, "it is not asked again, request by request"
    assert {len(model.slots._free) for model in models.values()} == {8}
    with raises_code("device_lost", "illegal memory access", "restart", error=DeviceLost):
        engine.submit([1], Sampling(), build_strategy("autoregressive"))
    assert len(calls) == 4


def test_it_may_show_where_a_result_is_read_rather_than_where_it_was_computed(monkeypatch):
    """CUDA computes behind the program: the error comes with the first transfer."""
    models = table_pair(vocab=8)

    def broken(logits):
        raise torch.AcceleratorError(ILLEGAL)

    monkeypatch.setattr("draftwell.serving.runtime.logits.likeliest", broken)
    engine = Engine(models)
    with raises_code("device_lost", error=DeviceLost):
        engine.generate([1], Sampling(), build_strategy("autoregressive"))
    assert engine.device_lost is not None


def test_it_may_show_where_requests_are_decided(monkeypatch):
    """The first transfer of a sampled request is that of its draws."""
    models, calls = table_pair(vocab=8), []

    def broken(commands):
        calls.append(len(commands))
        raise torch.AcceleratorError(ILLEGAL)

    monkeypatch.setattr("draftwell.serving.runtime.engine.engine.decide", broken)
    engine = Engine(models)
    jobs = [
        engine.submit([1, i], Sampling(temperature=1.0), build_strategy("autoregressive"))
        for i in range(3)
    ]
    engine.step()
    assert all(isinstance(job.error, DeviceLost) for job in jobs)
    assert calls == [3], "it is not asked again, request by request"
    assert len(models["target"].slots._free) == models["target"].slots.count


def test_a_decision_that_fails_for_one_request_leaves_the_others_alone(monkeypatch):
    models, decide = table_pair(vocab=8), decisions.decide

    def run(broken):
        def fails(commands):
            if broken and any(one.rows.sampling.seed == 1 for one in commands):
                raise MemoryError("too little memory")
            return decide(commands)

        monkeypatch.setattr("draftwell.serving.runtime.engine.engine.decide", fails)
        engine = Engine(models)
        jobs = [
            engine.submit(
                [1, 2],
                Sampling(max_tokens=12, temperature=1.0, seed=seed),
                build_strategy("vanilla_sd"),
            )
            for seed in range(3)
        ]
        while not all(job.finished for job in jobs):
            engine.step()
        return jobs

    right, jobs = run(broken=False), run(broken=True)
    assert [job.error is None for job in jobs] == [True, False, True]
    assert [jobs[i].output for i in (0, 2)] == [right[i].output for i in (0, 2)]
    assert len(models["target"].slots._free) == models["target"].slots.count


def test_it_may_show_where_a_slot_is_cleared(monkeypatch):
    models = table_pair(vocab=8)

    def broken():
        raise torch.AcceleratorError(ILLEGAL)

    monkeypatch.setattr(models["target"], "open", broken)
    engine = Engine(models)
    with raises_code("device_lost", error=DeviceLost):
        engine.submit([1], Sampling(), build_strategy("vanilla_sd"))
    assert engine.device_lost is not None


def test_an_ordinary_error_leaves_the_engine_as_it_was():
    models = table_pair(vocab=8)
    engine = Engine(models)
    job = engine.submit([1], Sampling(max_tokens=9), build_strategy("sprinter"))
    assert job.error is not None
    assert engine.device_lost is None
    assert (
        len(engine.generate([1], Sampling(max_tokens=9), build_strategy("vanilla_sd")).output) == 9
    )
