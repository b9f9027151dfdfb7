"""Hardware profile: how long single forwards take on this machine.

Draft and target forwards of all sizes are measured in turn, round by round, so that a slow minute of the machine hits
all of them alike; medians, with the device synchronised before each clock is read. Forwards are timed twice: alone with
all cores, and as an overlapping strategy runs them, each model on its own share beside the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from threading import Event

import torch

from serving.runtime.artifacts.base import Provenance
from serving.runtime.artifacts.hardware_profile import HardwareProfile
from serving.runtime.device import device_class
from serving.runtime.pair import LoadedPair
from serving.runtime.strategies import build_strategy
from serving.runtime.types import DraftwellError, Forward, Role
from serving.runtime.workers import Workers

Log = Callable[[str, float, int], None]


def profile(pair: LoadedPair, provenance: Provenance, *, sizes: Sequence[int] = (1, 2, 4, 8, 16, 32), repeats: int = 15,
            context: int = 128, log: Log | None = None) -> HardwareProfile:
    """Measure single forwards behind a context, and what a round costs beside them.

    Args:
        provenance: of the profile; its device class is filled in where it is None.
        sizes: tokens of the target forwards; 1 is always measured, sizes that do not fit the context are left out.
        repeats: forwards a median is taken over.
        context: tokens in the slot before a measured forward.
        log: called with (name, milliseconds, tokens).
    Raises:
        DraftwellError: the pair has no draft.
    """
    if "draft" not in pair.models:
        raise DraftwellError(f"pair {pair.name} has no draft model: a hardware profile needs one")
    room = min(pair.models[role].max_context for role in ("target", "draft")) - context
    sizes = sorted({1, *(k for k in sizes if k <= room)})
    if room < 1:
        raise DraftwellError(f"a context of {context} tokens does not fit pair {pair.name}: profile with a shorter one")
    seconds = time_forwards(pair, sizes, repeats, context)
    t_draft = median(seconds["draft", 1])
    t_verify = {k: median(seconds["target", k]) for k in sizes}
    split = time_overlapped(pair, sizes, max(3, repeats // 3), context)
    onnx = time_overlapped(pair, [1], max(3, repeats // 3), context, "draft_onnx")[0] if "draft_onnx" in pair.models else None
    t_rest = rest_of_a_round(pair)
    if log:
        log("t_draft_ms", t_draft * 1e3, 1)
        for k, value in t_verify.items():
            log("t_verify_ms", value * 1e3, k)
        log("t_draft_split_ms", split[0] * 1e3, 1)
        for k, value in split[1].items():
            log("t_verify_split_ms", value * 1e3, k)
        if onnx is not None:
            log("t_draft_onnx_ms", onnx * 1e3, 1)
        log("t_rest_ms", t_rest * 1e3, 0)
    if provenance.device_class is None:
        provenance = provenance.model_copy(update={"device_class": device_class(pair.device)})
    return HardwareProfile(t_draft, t_verify, t_rest, provenance, split, onnx)


def time_forwards(pair: LoadedPair, sizes: Sequence[int], repeats: int, context: int) -> dict[tuple[Role, int], list[float]]:
    """(role, tokens) → seconds of each of `repeats` forwards; the first, cold round is dropped."""
    plan: list[tuple[Role, int]] = [("draft", 1), *(("target", k) for k in sizes)]
    seconds: dict[tuple[Role, int], list[float]] = {key: [] for key in plan}
    roles: tuple[Role, ...] = ("target", "draft")
    slots = {role: pair.models[role].open() for role in roles}
    try:
        for role in roles:
            pair.models[role].forward([Forward(role, slots[role], filler(pair, context), prefill=True)])
        for turn in range(repeats + 1):
            for role, k in plan:
                taken = timed(pair, role, slots[role], k, context)
                if turn:
                    seconds[role, k].append(taken)
    finally:
        for role, slot in slots.items():
            pair.models[role].close(slot)
    return seconds


def time_overlapped(pair: LoadedPair, sizes: Sequence[int], repeats: int, context: int,
                    draft: Role = "draft") -> tuple[float, dict[int, float]]:
    """Median seconds of a draft forward and of target forwards of all sizes, each on cores of its own, while the other runs."""
    roles: tuple[Role, ...] = ("target", draft)
    slots = {role: pair.models[role].open() for role in roles}
    workers = Workers([pair.models[role] for role in roles])
    drafted: list[float] = []
    verified: dict[int, list[float]] = {k: [] for k in sizes}

    def draft_until(over: Event) -> None:
        while True:
            drafted.append(timed(pair, draft, slots[draft], 1, context))
            if over.is_set():
                return

    try:
        for role in roles:
            pair.models[role].forward([Forward(role, slots[role], filler(pair, context), prefill=True)])
        for _ in range(repeats):
            for k in sizes:
                over = Event()
                drafting = workers.submit(pair.models[draft], draft_until, over)
                try:
                    verified[k].append(workers.submit(pair.models["target"], timed, pair, "target", slots["target"], k, context).result())
                finally:
                    over.set()
                    drafting.result()
    finally:
        workers.close()
        for role, slot in slots.items():
            pair.models[role].close(slot)
    return median(drafted), {k: median(seconds) for k, seconds in verified.items()}


def timed(pair: LoadedPair, role: Role, slot: int, tokens: int, context: int) -> float:
    """Seconds of one forward that returns the logits of all its tokens, as a verification does."""
    model = pair.models[role]
    command = Forward(role, slot, filler(pair, tokens), keep=tokens)
    synchronise(pair.device)
    start = time.perf_counter()
    model.forward([command])
    synchronise(pair.device)
    taken = time.perf_counter() - start
    model.rollback(slot, context)
    return taken


def filler(pair: LoadedPair, count: int) -> tuple[int, ...]:
    """Some valid token ids; which ones does not matter to the time."""
    return tuple(1 + i % (pair.models["target"].vocab_size - 1) for i in range(count))


def rest_of_a_round(pair: LoadedPair, tokens: int = 24) -> float:
    """Seconds outside forwards in a round of vanilla speculative decoding, from a short generation."""
    sampling = pair.sampling(max_tokens=tokens, stop_token_ids=frozenset())
    stats = pair.engine().generate(filler(pair, 8), sampling, build_strategy("vanilla_sd")).session.stats
    return stats.overhead_seconds / max(1, stats.rounds)


def synchronise(device: str) -> None:
    """Wait until the device is idle, so that a clock read next tells the truth."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
