"""The bookkeeping of CUDA graphs, with a device that only notes what it is asked: whose stream,
whose pool, and what ends with what."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.models.cuda import cuda_graph
from draftwell.serving.runtime.models.cuda.cuda_graph import WARM_UPS, ModelGraphs
from draftwell.serving.runtime.models.cuda.cuda_llama import CudaLlama
from tests.support.models.llama_shapes import llama, random_tokens


class Stream:
    def __init__(self, device: Any = None):
        self.waited: list[Any] = []

    def wait_stream(self, other: Any) -> None:
        self.waited.append(other)


class Graph:
    """Knows where it was captured; replaying one that was reset, or whose stream's workspaces are
    gone, is the fault to be found."""

    def __init__(self, device: Device):
        self.device, self.stream, self.pool, self.alive = device, None, None, True
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        assert self.alive, "a graph is replayed that was dropped"
        assert self.stream not in self.device.cleared, (
            "its workspaces went with a graph of the same stream"
        )

    def reset(self) -> None:
        """As PyTorch 2.13: the workspaces of the capture's stream are cleared."""
        self.alive = False
        self.device.cleared.add(self.stream)


class Device:
    """What `cuda_graph` uses of `torch.cuda`."""

    def __init__(self) -> None:
        self.caller, self.now, self.pools = Stream(), None, 0
        self.graphs: list[Graph] = []
        self.cleared: set[Any] = set()
        self.Stream = Stream
        self.Event = lambda enable_timing: SimpleNamespace(record=lambda: None)
        self.CUDAGraph = lambda: self.graphs.append(Graph(self)) or self.graphs[-1]

    def current_stream(self, device: Any) -> Any:
        return self.now or self.caller

    def graph_pool_handle(self) -> int:
        self.pools += 1
        return self.pools

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.now, before = stream, self.now
        yield
        self.now = before

    @contextmanager
    def graph(
        self, graph: Graph, pool: int, stream: Any, capture_error_mode: str
    ) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        graph.pool, graph.stream = pool, stream
        self.cleared.discard(stream)  # a capture makes workspaces of its own
        with self.stream(stream):
            yield


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    fake = Device()
    monkeypatch.setattr(cuda_graph, "cuda", fake)
    return fake


def double(graphs: ModelGraphs, key: str, value: int, where: list[Any] | None = None) -> int:
    """`value` twice, by the graph of `key`; as a replay would, the captured function is run on the
    static input."""

    def run(inputs: torch.Tensor) -> torch.Tensor:
        if where is not None:
            where.append(cuda_graph.cuda.current_stream(None))
        return inputs.mul_(1)

    graph = graphs.captured(key, run, lambda: torch.tensor([0]))
    graph.inputs.fill_(value)
    return 2 * int(graph.replay())


def test_a_graph_is_captured_once_and_given_its_input_each_time(device: Device) -> None:
    graphs, where = ModelGraphs(torch.device("cpu")), []
    assert [double(graphs, "a", n, where) for n in (3, 4, 5)] == [6, 8, 10]
    assert (len(graphs), len(device.graphs), len(where)) == (1, 1, WARM_UPS + 1)
    assert set(where) == {device.graphs[0].stream}, (
        "workspaces are made on the stream that is captured"
    )
    assert device.graphs[0].stream.waited == [device.caller]
    assert device.caller.waited == [device.graphs[0].stream], (
        "whoever goes on sees what the warm-ups wrote"
    )


def test_a_models_graphs_share_a_stream_and_a_pool_that_no_other_model_has(device: Device) -> None:
    first, second = (ModelGraphs(torch.device("cpu")) for _ in range(2))
    for key in "abc":
        double(first, key, 1)
        double(second, key, 1)
    mine, others = device.graphs[::2], device.graphs[1::2]
    for graphs in (mine, others):
        assert (
            len({id(graph.stream) for graph in graphs})
            == len({graph.pool for graph in graphs})
            == 1
        )
    assert mine[0].stream is not others[0].stream
    assert mine[0].pool != others[0].pool


def test_dropping_one_models_graphs_leaves_the_others_usable(device: Device) -> None:
    """Captured on one stream for all, the next replay would write to memory that is gone."""
    first, second = (ModelGraphs(torch.device("cpu")) for _ in range(2))
    for key in "ab":
        double(first, key, 1)
        double(second, key, 1)
    first.drop()
    assert len(first) == 0
    assert [graph.alive for graph in device.graphs] == [False, True, False, True], (
        "all of the model's, none of the other's"
    )
    assert [double(second, key, 4) for key in "ab"] == [8, 8]
    assert double(first, "a", 5) == 10
    assert device.graphs[-1].pool not in {graph.pool for graph in device.graphs[:-1]}
    assert double(second, "b", 6) == 12


def test_a_model_whose_slots_move_drops_its_graphs_before_they_do(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hold addresses; what is launched is waited for first, and the move before another pass,
    whose stream may be another."""
    model, order = CudaLlama(llama(), slots=1), []
    double(model._graphs, "a", 1)
    monkeypatch.setattr(model, "synchronize", lambda: order.append("wait"))
    monkeypatch.setattr(device.graphs[0], "reset", lambda: order.append("drop"))
    grow = model.slots.open_branch
    monkeypatch.setattr(
        model,
        "slots",
        SimpleNamespace(full=True, open_branch=lambda: order.append("move") or grow()),
    )
    model.open_branch()
    assert order == ["wait", "drop", "move", "wait"]
    assert len(model._graphs) == 0


def test_all_passes_are_six_graphs_which_are_captured_before(device: Device) -> None:
    """Prompts, drafts, trees and chains of any rows replay them."""
    model = CudaLlama(llama(), slots=3)
    model.captures = True
    assert model.warm_up()
    graphs = list(device.graphs)
    assert len(graphs) == len(model._graphs) == 6
    assert model.slots.lengths == [0] * 4
    assert not model.slots.whole[:, :, : model.slots.scratch].any()
    slots = [model.open() for _ in range(3)]
    model.forward(
        [
            Forward("target", slots[0], random_tokens(100)),
            Forward("target", slots[1], (1, 2, 3), 3, parents=(-1, 0, 0)),
            Forward("target", slots[2], (1, 2), steps=4),
        ]
    )
    assert device.graphs == graphs
    assert [graph.replays for graph in graphs] == [3, 0, 0, 1, 0, 0]


def test_graphs_that_keep_no_hidden_states_end_when_a_head_comes(device: Device) -> None:
    model = CudaLlama(llama(), slots=1)
    double(model._graphs, "a", 1)
    model.keep_hidden_states((0, 1))
    assert len(model._graphs) == 0
    double(model._graphs, "a", 1)
    model.keep_hidden_states((0, 1))
    assert len(model._graphs) == 1, "it keeps them already"


def test_a_pass_on_another_stream_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's, when the engine's thread moves slots."""
    model, waited = CudaLlama(llama(), slots=1), []
    monkeypatch.setattr(model, "captures", True)
    mine = SimpleNamespace(synchronize=lambda: waited.append("this thread's"))
    monkeypatch.setattr(cuda_graph.cuda, "current_stream", lambda device: mine)
    monkeypatch.setattr(
        model,
        "marks",
        SimpleNamespace(stop=SimpleNamespace(synchronize=lambda: waited.append("the last pass"))),
    )
    model.synchronize()
    assert waited == ["this thread's", "the last pass"]
