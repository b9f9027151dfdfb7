"""Worker threads for models that run at once: one thread a model, on cores of its own.

Two OpenMP teams that share a core wait for each other at every barrier, which costs far more than the second core gains.
So each model gets a disjoint share of the process's cores, and its thread computes with as many threads as it has cores.
The first model (the target) gets the larger share where the cores cannot be divided evenly. On a CUDA device each has a stream.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any, TypeVar

import torch

from serving.device import core_ids
from serving.runtime.models.library_runner import computes_beside_others

T = TypeVar("T")
_reader = threading.local()


def shares(cores: Sequence[int], parts: int) -> list[list[int]]:
    """Divide cores into `parts` disjoint runs, the larger ones first; with fewer cores than parts all share all.

    >>> shares([0, 1, 2, 3, 4], 2), shares([3], 2)
    ([[0, 1, 2], [3, 4]], [[3], [3]])
    """
    if len(cores) < parts:
        return [list(cores)] * parts
    size, rest = divmod(len(cores), parts)
    starts = [i * size + min(i, rest) for i in range(parts + 1)]
    return [list(cores[a:b]) for a, b in pairwise(starts)]


class Workers:
    """One thread for each model; torch's thread count of the caller is as before once they are closed.

    Args:
        models: in order of importance. A model that computes on an accelerator takes no share of the cores.
    """

    def __init__(self, models: Sequence[Any]):
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(1)  # the caller samples and judges next to busy cores: a team of its own would wait for them
        computing = [m for m in models if getattr(getattr(m, "device", None), "type", "cpu") == "cpu"]
        mine = dict(zip(map(id, computing), shares(core_ids(), max(1, len(computing))), strict=False))
        threads = max(1, self._threads_before // max(1, len(computing)))
        self._pools = {
            id(model): ThreadPoolExecutor(1, thread_name_prefix=f"draftwell-{number}", initializer=bind_thread,
                                          initargs=(mine.get(id(model), []), threads, cuda_device(model)))
            for number, model in enumerate(models)}

    def submit(self, model: Any, work: Callable[..., T], *arguments: Any) -> Future[T]:
        """Run `work` on the model's thread; a model that came later gets a thread without cores of its own."""
        if id(model) not in self._pools:
            self._pools[id(model)] = ThreadPoolExecutor(1, initializer=bind_thread, initargs=([], 1, cuda_device(model)))
        device = cuda_device(model)
        if device is None:
            return self._pools[id(model)].submit(work, *arguments)
        return self._pools[id(model)].submit(on_own_stream, torch.cuda.current_stream(device), work, *arguments)

    def close(self) -> None:
        """End the threads; what is in flight ends first."""
        for pool in self._pools.values():
            pool.shutdown(wait=True)
        torch.set_num_threads(self._threads_before)  # torch hands the last value set to libraries that have one for all threads


def on_own_thread(work: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Do work that computes on a thread that ends with it, and return what it returns or raise what it raises.

    A thread that has computed with several cores keeps its OpenMP team for as long as it lives. libgomp counts the members of all teams:
    once they are more than there are cores, the threads of every team sleep between two operations instead of waiting for the next, and
    forward passes take twice as long. So whoever computes only now and then does it here, and leaves the cores to the thread that serves.
    A process that ends does not wait for it.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work(*arguments, **options))
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, name="draftwell-apart", daemon=True)
    thread.start()
    thread.join()
    return done.result()


def bind_thread(cores: Sequence[int], threads: int, device: torch.device | None = None) -> None:
    """Bind the calling thread to `cores` (none: leave it where it is), let torch compute with `threads` on it, and Python's lock be free
    while it computes.

    Args:
        device: a CUDA device, on which the thread gets a stream of its own: what two threads launch on one stream runs in turn.
    """
    computes_beside_others()
    torch.set_num_threads(threads)
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    if device is not None:
        torch.cuda.set_stream(torch.cuda.Stream(device))


def cuda_device(model: Any) -> torch.device | None:
    """Where a model computes, if that is a CUDA device."""
    device = getattr(model, "device", None)
    return device if isinstance(device, torch.device) and device.type == "cuda" else None


def on_own_stream(caller: Any, work: Callable[..., T], *arguments: Any) -> T:
    """Work on the calling thread's stream behind all that the caller's stream had when this was asked for; wait until it is done.

    Args:
        caller: stream of the thread that will read what comes out.
    """
    own = torch.cuda.current_stream(caller.device)
    own.wait_stream(caller)
    _reader.stream = caller
    try:
        return work(*arguments)
    finally:
        own.synchronize()


def lend(tensors: Iterable[torch.Tensor | None]) -> None:
    """On a worker's stream: keep the memory of tensors, once they are let go, until the caller's stream has read them, too.

    Memory goes back to the stream that it was taken on, and the next forward pass there would write to it.
    """
    stream = getattr(_reader, "stream", None)
    if stream is None:
        return
    for tensor in tensors:
        if tensor is not None and tensor.is_cuda:
            tensor.record_stream(stream)
