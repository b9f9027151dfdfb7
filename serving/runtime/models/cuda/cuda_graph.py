"""What only a CUDA device can do: capture and replay of a forward pass, and times that cost no synchronisation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

WARM_UPS = 2
"""Runs before a capture: libraries choose kernels and allocate workspaces in the first."""
_capturing = threading.Lock()


class CapturedForward:
    """A function of one int64 tensor, captured as a CUDA graph: copy into `inputs`, `replay`, read `outputs`.

    Graphs of one model share a memory pool, so `outputs` are valid until another of them is replayed.

    Args:
        run: fixed shapes, no host reads; called with `inputs`, whose content must be harmless during the capture.
        inputs: the static input on the device.
        pool: from `torch.cuda.graph_pool_handle()`.
    """

    def __init__(self, run: Callable[[Tensor], Tensor], inputs: Tensor, pool: Any):
        self.inputs = inputs
        side, caller = torch.cuda.Stream(inputs.device), torch.cuda.current_stream(inputs.device)
        side.wait_stream(caller)
        with _capturing:  # two models may meet a new bucket at once, each on its own thread
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    run(inputs)
            caller.wait_stream(side)
            self._graph = torch.cuda.CUDAGraph()
            # thread_local: what other threads do on the device meanwhile is their affair
            with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
                self.outputs = run(inputs)

    def replay(self) -> Tensor:
        self._graph.replay()
        return self.outputs


class Marks:
    """Events around a forward pass on the current stream: recorded now, read when the request is over."""

    def __init__(self, make: Callable[[], Any] | None = None):
        self._make = make or (lambda: torch.cuda.Event(enable_timing=True))
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
    """(start, end) of every forward pass in seconds of `time.perf_counter`; waits for the device, once.

    An event of now, whose moment the host knows, ties the device's clock to the host's.
    """
    if not marks:
        return []
    now = marks[0].record()
    now.synchronize()
    moment = time.perf_counter()
    return [(moment - mark.start.elapsed_time(now) / 1000, moment - mark.stop.elapsed_time(now) / 1000) for mark in marks]
