"""What only a CUDA device can do: capture and replay of a forward pass, and times that cost no
synchronisation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, cuda

WARM_UPS = 2
"""Runs before a capture: libraries choose kernels and allocate workspaces in the first."""
_capturing = threading.Lock()


class ModelGraphs:
    """The CUDA graphs of one model: captured when first asked for, on one stream and in one memory
    pool, and dropped together.

    A graph remembers where the workspaces of its stream were, and PyTorch (2.13) clears those
    workspaces when any graph that was captured on the stream is destroyed. So no two models may
    capture on the same stream, and no graph may outlive another of its model.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._graphs: dict[Hashable, CapturedForward] = {}
        # kept when the graphs go: streams come from a small set, and another model has the next one
        self._stream: Any = None
        self._pool: Any = None

    def __len__(self) -> int:
        return len(self._graphs)

    def captured(
        self, key: Hashable, run: Callable[[Tensor], Any], harmless: Callable[[], Tensor]
    ) -> CapturedForward:
        """The graph of `key`; its outputs are valid until another graph of this model is replayed.

        Args:
            run: fixed shapes, no host reads.
            harmless: makes an input for the capture, which runs with it a few times; it becomes the
                static input.
        """
        if key not in self._graphs:
            self._stream = self._stream or cuda.Stream(self._device)
            self._pool = self._pool or cuda.graph_pool_handle()
            self._graphs[key] = CapturedForward(run, harmless(), self._stream, self._pool)
        return self._graphs[key]

    def drop(self) -> None:
        """Let go of all graphs and their memory; no replay may be on its way."""
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()
        self._pool = None


class Uncaptured:
    """What `CapturedForward` is, without a graph: for CPUs."""

    def __init__(self, run: Callable[[Tensor], Any], inputs: Tensor):
        self._run, self.inputs = run, inputs

    def replay(self) -> Any:
        return self._run(self.inputs)


class CapturedForward:
    """A function of one tensor, captured as a CUDA graph: copy into `inputs`, `replay`, read what
    comes back.

    Args:
        run: fixed shapes, no host reads; called with `inputs`, whose content must be harmless
            during the capture.
        inputs: the static input on the device.
        stream: of the model alone; libraries choose kernels and make their workspaces on it before
            the capture.
        pool: of the model alone, from `graph_pool_handle()`: its graphs share memory.
    """

    def __init__(self, run: Callable[[Tensor], Any], inputs: Tensor, stream: Any, pool: Any):
        self.inputs = inputs
        caller = cuda.current_stream(inputs.device)
        stream.wait_stream(caller)
        with _capturing:  # two models may meet a new bucket at once, each on its own thread
            with cuda.stream(stream):
                for _ in range(WARM_UPS):
                    run(inputs)
            caller.wait_stream(stream)
            self._graph = cuda.CUDAGraph()
            # thread_local: what other threads do on the device meanwhile is their affair
            with cuda.graph(
                self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"
            ):
                self.outputs = run(inputs)

    def replay(self) -> Any:
        self._graph.replay()
        return self.outputs

    def reset(self) -> None:
        """Give the graph and its memory back; it cannot be replayed any more."""
        self._graph.reset()


class Marks:
    """Events around a forward pass on the current stream: recorded now, read when the request is
    over."""

    def __init__(self, make: Callable[[], Any] | None = None):
        self._make = make or (lambda: cuda.Event(enable_timing=True))
        self.start = self.record()
        self.stop: Any = None

    def record(self) -> Any:
        event = self._make()
        event.record()
        return event

    def end(self) -> Marks:
        self.stop = self.record()
        return self


def read_marks(marks: Sequence[Marks]) -> list[tuple[float, float]]:
    """(start, end) of every forward pass in seconds of `time.perf_counter`; waits for the device,
    once.

    An event of now, whose moment the host knows, ties the device's clock to the host's.
    """
    if not marks:
        return []
    now = marks[0].record()
    now.synchronize()
    moment = time.perf_counter()
    return [
        (moment - mark.start.elapsed_time(now) / 1000, moment - mark.stop.elapsed_time(now) / 1000)
        for mark in marks
    ]
