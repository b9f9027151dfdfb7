"""Worker threads for models that run at once: one thread a model, on cores of its own.

Two OpenMP teams that share a core wait for each other at every barrier, which costs far more than
the second core gains. So each model gets a disjoint share of the process's cores, and its thread
computes with as many threads as it has cores. The first model (the target) gets the larger share
where the cores cannot be divided evenly. On a CUDA device models whose memory stays in place (CUDA
graphs) have a stream each.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch

from draftwell.serving.device import core_ids
from draftwell.serving.runtime.logits import Span

T = TypeVar("T")
_streams: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""Model → its CUDA stream."""
_reader = threading.local()
"""On a worker with a stream: that of the thread which reads its outputs."""


def shares(cores: Sequence[int], parts: int) -> list[list[int]]:
    """Divide cores into `parts` disjoint runs, the larger ones first; with fewer cores than parts
    all share all.

    >>> shares([0, 1, 2, 3, 4], 2), shares([3], 2)
    ([[0, 1, 2], [3, 4]], [[3], [3]])
    """
    if len(cores) < parts:
        return [list(cores)] * parts
    size, rest = divmod(len(cores), parts)
    starts = [i * size + min(i, rest) for i in range(parts + 1)]
    return [list(cores[a:b]) for a, b in pairwise(starts)]


class Workers:
    """One thread for each model; torch's thread count of the caller is as before once they are
    closed.

    Args:
        models: in order of importance. A model that computes on an accelerator takes no share of
            the cores.
    """

    def __init__(self, models: Sequence[Any]):
        self._threads_before = torch.get_num_threads()
        # the caller samples and judges next to busy cores: a team of its own would wait for them
        torch.set_num_threads(1)
        computing = [m for m in models if m.device.type == "cpu"]
        mine = dict(
            zip(map(id, computing), shares(core_ids(), max(1, len(computing))), strict=False)
        )
        threads = max(1, self._threads_before // max(1, len(computing)))
        self._pools = {
            id(model): ThreadPoolExecutor(
                1,
                thread_name_prefix=f"draftwell-{number}",
                initializer=bind_thread,
                initargs=(mine.get(id(model), []), threads, own_stream(model)),
            )
            for number, model in enumerate(models)
        }

    def submit(self, model: Any, work: Callable[..., T], *arguments: Any) -> Future[T]:
        """Run `work` on the model's thread; a model that came later gets a thread without cores of
        its own."""
        own = own_stream(model)
        if id(model) not in self._pools:
            self._pools[id(model)] = ThreadPoolExecutor(
                1, initializer=bind_thread, initargs=([], 1, own)
            )
        pool = self._pools[id(model)]
        if own is None:
            return pool.submit(work, *arguments)
        return pool.submit(
            on_own_stream, own, torch.cuda.current_stream(own.device), work, *arguments
        )

    def close(self) -> None:
        """End the threads; what is in flight ends first."""
        for pool in self._pools.values():
            pool.shutdown(wait=True)
        # torch hands the last value set to libraries that have one for all threads
        torch.set_num_threads(self._threads_before)


class StillRunning(Exception):
    """Work on a thread of its own has not ended in time."""


def on_own_thread(
    work: Callable[..., T], *arguments: Any, limit: float | None = None, **options: Any
) -> T:
    """Do work that computes on a thread that ends with it, and return what it returns or raise what
    it raises.

    A thread that has computed with several cores keeps its OpenMP team for as long as it lives.
    libgomp counts the members of all teams: once they are more than there are cores, the threads of
    every team sleep between two operations instead of waiting for the next, and forward passes take
    twice as long. So whoever computes only now and then does it here, and leaves the cores to the
    thread that serves. A process that ends does not wait for it.

    Args:
        limit: seconds after which it is no longer waited for; None: none.
    Raises:
        StillRunning: the limit is over, and what it returns is dropped.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work(*arguments, **options))
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, name="draftwell-apart", daemon=True)
    thread.start()
    thread.join(limit)
    if thread.is_alive():
        raise StillRunning
    return done.result()


def bind_thread(cores: Sequence[int], threads: int, stream: Any = None) -> None:
    """Bind the calling thread to `cores` (none: leave it where it is), and let torch compute with
    `threads` on it.

    Args:
        stream: of CUDA, which becomes the thread's own: what two threads launch on one stream runs
            in turn.
    """
    torch.set_num_threads(threads)
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    if stream is not None:
        torch.cuda.set_stream(stream)


def own_stream(model: Any) -> Any:
    """The CUDA stream of a model whose memory stays in place; None for all others, which launch on
    their thread's current stream.

    A model keeps it: PyTorch has 32 streams and hands them out in turn, so that a stream for each
    thread would soon be another's.
    """
    if not model.captures:
        return None
    if model not in _streams:
        _streams[model] = torch.cuda.Stream(model.device)
    return _streams[model]


def on_own_stream(own: Any, caller: Any, work: Callable[..., T], *arguments: Any) -> T:
    """Work on a stream behind all that the caller's stream had when this was asked for; leave
    nothing running.

    Args:
        own: of the model; current on its thread.
        caller: of the thread that will read what comes out.
    """
    _reader.stream = caller
    with suppress(RuntimeError):  # a lost device, of which the work will say so
        own.wait_stream(caller)
    try:
        return work(*arguments)
    finally:
        with suppress(RuntimeError):  # the same
            own.synchronize()


def finish(model: Any, spans: Iterable[Span]) -> None:
    """On a worker: wait for what a model's forward pass launched, whose logits the caller reads
    next.

    Memory goes back to the stream that it was taken on, where the pass that runs meanwhile may be
    given it. So the logits' is kept, once they are let go, until the caller's stream has read
    them, too.
    """
    if model.marks is None:  # it has waited itself
        return
    model.synchronize()
    if (stream := getattr(_reader, "stream", None)) is not None:
        for tensor in (
            tensor
            for whole in {span.whole for span in spans}
            for tensor in (whole.values, whole.hidden, whole.support)
        ):
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(stream)
