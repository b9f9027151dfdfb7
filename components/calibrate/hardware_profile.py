"""Hardware profile: measured times of single forward passes on this machine.

Draft and target passes of all sizes are measured alternately, round by round, so that a slow minute
of the machine affects all of them equally. Times are medians, with the device synchronised before
each reading of the clock. Forward passes are timed with all cores, and as an overlapping strategy
runs them: each model on its own cores, with the other model busy and with it idle. Predictions of
complete requests also need the times of prompts, the cost of a longer context and the time that
strategies spend outside forward passes. About ten seconds in total on the default pair.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from threading import Event
from typing import Any, TypeVar

import torch

from draftwell.components.report.machine import draft_device_of
from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.base import Artifact, Provenance
from draftwell.serving.artifacts.eagle3_head import Eagle3Head
from draftwell.serving.artifacts.hardware_profile import (
    HardwareProfile,
    RequestTimes,
    RoundOverheads,
)
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.commands import Forward, Role
from draftwell.serving.runtime.engine.workers import Workers
from draftwell.serving.runtime.machine_class import machine_class
from draftwell.serving.runtime.models.eagle3_model import head_of
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.session.stats import Stats
from draftwell.serving.runtime.strategies import StrategyResources, build_strategy

DRAFT_SIZES = (1, 2, 4, 8, 32, 128)
"""Tokens of draft passes: one is a step, two follow a bonus, more follow a prompt or a draft that
the target overtook."""
SIZES = (1, 2, 3, 4, 6, 8, 16, 32)
"""Tokens of target passes."""
PROMPT_SIZES = (64, 128, 256, 512)
HEAD_STEPS = 3
DEEP_CONTEXT = 512
TURNS, SHORT_TOKENS = 3, 24
"""Times that each of the short generations is run, and its length."""
SHORT_RUNS: dict[str, dict[str, Any]] = {
    "autoregressive": {},
    "vanilla_sd": {},
    "svip": {},
    "spide": {"parallel": False},
}
"""Strategy → parameters of the short generations that determine the time outside forward passes.
A sample: new strategies are not entered."""
ROLES: tuple[Role, ...] = ("target", "draft")
K = TypeVar("K")


def measure_profile(
    pair: LoadedPair,
    provenance: Provenance,
    *,
    sizes: Sequence[int] = SIZES,
    repeats: int = 15,
    context: int = 128,
    head: Eagle3Head | None = None,
    requests: bool = True,
) -> HardwareProfile:
    """Measure single forward passes after a context, and the time that a round spends outside them.

    Args:
        provenance: of the profile; a device class of None is filled in.
        sizes: tokens of the target passes; 1 is always measured, sizes that do not fit the context
            are left out.
        repeats: passes per median; a third of that for prompts, and a third, at least three, for
            overlapped passes and deep contexts.
        context: tokens in the slot before a measured pass.
        head: an EAGLE-3 head, where the pair has one: its step is measured too.
        requests: whether to measure what only predictions of whole requests read (long on large
            targets): prompts, the cost of a longer context, and what reading a confidence costs.
            Without them those times are empty, the last one 0.
    Raises:
        DraftwellError: no room for the context (`context_too_long`).
    """
    roles, room = roles_of(pair), room_after(pair, context)
    sizes = sorted({1, *(k for k in sizes if k <= room)})
    few = max(3, repeats // 3)
    drafts = [k for k in DRAFT_SIZES if k <= room]
    seconds = time_forwards(pair, sizes, repeats, context, drafts)
    t_draft = {k: median(times) for (role, k), times in seconds.items() if role == "draft"}
    t_verify = {k: median(seconds["target", k]) for k in sizes}
    overlapped = partial(time_overlapped, pair, repeats=few, context=context)
    split = overlapped(sizes=sizes) if "draft" in roles else None
    onnx = overlapped(sizes=[1], draft="draft_onnx")[0] if "draft_onnx" in pair.models else None
    runs = short_runs(pair, list(SHORT_RUNS) if requests else ["autoregressive", "vanilla_sd"])
    prompts = [k for k in PROMPT_SIZES if k <= room + context] if requests else []
    deep = min(DEEP_CONTEXT, room + context - 1)
    details = RequestTimes(
        t_draft=t_draft,
        prefill=time_prompts(pair, prompts, max(1, repeats // 3)),
        per_context_token=slopes(pair, few, context, deep) if requests else {},
        context=context,
        split_alone=overlapped(sizes=sizes, busy=False) if "draft" in roles else None,
        rest=overheads_from(runs),
        chains="draft" in pair.models and pair.models["draft"].chains,
    )
    t_head = None if head is None else time_head(pair, head, repeats, context)
    rest, first = rest_of_round(runs), t_draft.get(1)
    made = HardwareProfile(first, t_verify, rest, provenance, split, onnx, details, t_head=t_head)
    if provenance.device_class is None:
        made.provenance = provenance.model_copy(update={"device_class": machine_class(pair)})
    return made


def room_after(pair: LoadedPair, context: int) -> int:
    """Tokens that fit every timed model behind a context.

    Raises:
        DraftwellError: none do (`context_too_long`).
    """
    room = min(pair.models[role].max_context for role in roles_of(pair)) - context
    if room < 1:
        raise DraftwellError(
            f"a context of {context} tokens does not fit pair {pair.name}: profile with a "
            "shorter one",
            code="context_too_long",
        )
    return room


def roles_of(pair: LoadedPair) -> list[Role]:
    """The roles whose passes are timed: target, and draft where there is one."""
    return [role for role in ROLES if role in pair.models]


@contextmanager
def slots_with(pair: LoadedPair, roles: Sequence[Role], context: int) -> Iterator[dict[Role, int]]:
    """A slot of each model, with so many tokens in it."""
    slots = {role: pair.models[role].open() for role in roles}
    try:
        if context:
            for role in roles:
                row = Forward(role, slots[role], filler(pair, context), prefill=True)
                pair.models[role].forward([row])
        yield slots
    finally:
        for role, slot in slots.items():
            pair.models[role].close(slot)


def in_turns(passes: Mapping[K, Callable[[], float]], repeats: int) -> dict[K, list[float]]:
    """The seconds that each of some passes returns, which take turns; the first, cold round is
    dropped."""
    rounds = [{key: timed() for key, timed in passes.items()} for _ in range(repeats + 1)]
    return {key: [taken[key] for taken in rounds[1:]] for key in passes}


def time_forwards(
    pair: LoadedPair,
    sizes: Sequence[int],
    repeats: int,
    context: int,
    draft_sizes: Sequence[int] = (1,),
) -> dict[tuple[Role, int], list[float]]:
    """(role, tokens) → seconds of each of `repeats` forward passes."""
    roles = roles_of(pair)
    wanted: dict[Role, Sequence[int]] = {"draft": draft_sizes, "target": sizes}
    with slots_with(pair, roles, context) as slots:
        return in_turns(
            {
                (role, k): partial(timed, pair, role, slots[role], k, context)
                for role in wanted
                if role in roles
                for k in wanted[role]
            },
            repeats,
        )


def time_prompts(
    pair: LoadedPair, sizes: Sequence[int], repeats: int
) -> dict[str, dict[int, float]]:
    """role → tokens → median seconds of a prompt's forward pass, which keeps one row; empty without
    sizes."""
    seconds = time_forwards(pair, sizes, repeats, 0, sizes)
    return {role: {k: median(seconds[role, k]) for k in sizes} for role in roles_of(pair) if sizes}


def time_head(pair: LoadedPair, head: Eagle3Head, repeats: int, context: int) -> float:
    """Median seconds of a head's step in a draft of `HEAD_STEPS` after a context.

    The draft follows a target pass, as in decoding: what that has driven from the processor's
    caches has to be read again.
    """
    model = head_of(pair.models["target"], head)
    own = torch.ones(1, model.hidden_size)
    read = own.repeat(context, len(head.layers))
    slot = model.open()

    def draft() -> None:
        # what a verification brought
        model.forward([Forward("head", slot, filler(pair, 2), features=read[:2])])
        for _ in range(HEAD_STEPS - 1):
            model.forward([Forward("head", slot, (1,), features=own)])

    def one() -> float:
        timed(pair, "target", slots["target"], 1, context)
        taken = seconds_of(pair.device, draft)
        model.rollback(slot, context)
        return taken / HEAD_STEPS

    try:
        model.forward([Forward("head", slot, filler(pair, context), features=read)])
        with slots_with(pair, ["target"], context) as slots:
            return median(in_turns({"head": one}, repeats)["head"])
    finally:
        model.close(slot)


def slopes(pair: LoadedPair, repeats: int, context: int, deep: int) -> dict[str, float]:
    """role → additional seconds of a one-token forward pass for every further token in its slot, at
    least 0."""
    if deep <= context:
        return dict.fromkeys(roles_of(pair), 0.0)
    near, far = (time_forwards(pair, [1], repeats, length) for length in (context, deep))
    return {
        role: max(0.0, median(far[role, 1]) - median(near[role, 1])) / (deep - context)
        for role in roles_of(pair)
    }


def time_overlapped(
    pair: LoadedPair,
    sizes: Sequence[int],
    repeats: int,
    context: int,
    draft: Role = "draft",
    *,
    busy: bool = True,
) -> tuple[float, dict[int, float]]:
    """Median seconds of a draft pass and of target passes of all sizes, each model on its own
    cores.

    Args:
        busy: the other model runs at the same time; False: it is idle.
    """
    target, drafter = pair.models["target"], pair.models[draft]
    drafted: list[float] = []

    def draft_until(over: Event) -> None:
        while True:
            drafted.append(timed(pair, draft, slots[draft], 1, context))
            if over.is_set():
                return

    def verify(k: int) -> float:
        over = Event()
        drafting = workers.submit(drafter, draft_until, over)
        if not busy:
            over.set()
            drafting.result()
        try:
            taken = workers.submit(target, timed, pair, "target", slots["target"], k, context)
            return taken.result()
        finally:
            over.set()
            drafting.result()

    workers = Workers([target, drafter])
    try:
        with slots_with(pair, ["target", draft], context) as slots:
            rounds = [{k: verify(k) for k in sizes} for _ in range(repeats)]
    finally:
        workers.close()
    return median(drafted), {k: median(taken[k] for taken in rounds) for k in sizes}


def timed(pair: LoadedPair, role: Role, slot: int, tokens: int, context: int) -> float:
    """Seconds of one forward pass after a context. It returns logits of all its tokens, as a
    verification does; a prompt's, of one."""
    model = pair.models[role]
    row = Forward(
        role, slot, filler(pair, tokens), keep=tokens if context else 1, prefill=not context
    )
    taken = seconds_of(pair.device, lambda: model.forward([row]))
    model.rollback(slot, context)
    return taken


def seconds_of(device: str, run: Callable[[], object]) -> float:
    """How long something takes on a device."""
    synchronise(device)
    start = time.perf_counter()
    run()
    synchronise(device)
    return time.perf_counter() - start


def filler(pair: LoadedPair, count: int) -> tuple[int, ...]:
    """Valid token ids; their values do not affect the time."""
    return tuple(1 + i % (pair.models["target"].vocab_size - 1) for i in range(count))


def short_runs(pair: LoadedPair, names: Sequence[str] = tuple(SHORT_RUNS)) -> dict[str, Stats]:
    """Strategy → counters of a short generation, of several the one with the least time outside
    forward passes: whatever else a machine does adds to it. The four differ in the proportions of
    target calls, drafted tokens and rows read; without a draft model there is plain decoding alone.

    Args:
        names: of `SHORT_RUNS`, plain decoding among them.
    """
    origin = Provenance(pair=pair.name, fingerprint=pair.fingerprint)
    resources = StrategyResources(
        {
            "acceptance_table": AcceptanceTable.empty(origin),
            "hardware_profile": HardwareProfile(1.0, {1: 1.0}, 0.0, origin),
        }
    )

    def run(name: str, budget: int) -> Stats:
        sampling = pair.sampling(max_tokens=budget, stop_token_ids=frozenset())
        return (
            pair.engine()
            .generate(filler(pair, 8), sampling, build_strategy(name, SHORT_RUNS[name], resources))
            .session.stats
        )

    able = names if "draft" in pair.models else ["autoregressive"]
    run(able[-1], 4)  # one-time work (caches, imports) is not counted
    turns = [{name: run(name, SHORT_TOKENS) for name in able} for _ in range(TURNS)]
    return {
        name: min((turn[name] for turn in turns), key=lambda stats: stats.overhead_seconds)
        for name in able
    }


def rest_of_round(runs: Mapping[str, Stats]) -> float:
    """Seconds of a round outside forward passes: of drafting, else of plain decoding."""
    drafting = runs.get("vanilla_sd")
    if drafting is None:
        return overheads_from(runs).round
    return drafting.overhead_seconds / max(1, drafting.rounds)


def overheads_from(runs: Mapping[str, Stats]) -> RoundOverheads:
    """Seconds outside forward passes of a target call, of a drafted token and of a row whose
    confidence is read, from `short_runs`.

    Each is determined by one more run: plain decoding only calls the target, a draft of fixed
    length reads no confidence. Never below 0; what was not run counts as 0.
    """
    plain, fixed = runs["autoregressive"], runs.get("vanilla_sd")
    round_ = plain.overhead_seconds / max(1, plain.target_calls)
    if fixed is None:
        return RoundOverheads(round=round_, token=0.0, figure=0.0)
    token = max(0.0, fixed.overhead_seconds - round_ * fixed.target_calls) / max(
        1, fixed.draft_calls
    )
    others = [stats for name, stats in runs.items() if name not in ("autoregressive", "vanilla_sd")]
    drafted = sum(stats.draft_calls for stats in others)
    left = (
        sum(stats.overhead_seconds - round_ * stats.target_calls for stats in others)
        - token * drafted
    )
    return RoundOverheads(round=round_, token=token, figure=max(0.0, left) / max(1, drafted))


def synchronise(device: str) -> None:
    """Wait for what the calling thread has launched, so that the next reading of the clock is
    correct; not for what another model does."""
    if device.startswith("cuda"):
        torch.cuda.current_stream(device).synchronize()


def fits_here(profile: Artifact, pair: LoadedPair, head: Artifact | None = None) -> bool:
    """Whether a hardware profile has the times of this machine, and of all that will run.

    One of other layers does not, and none on disk has those of a padded target, or of a draft on
    another device than the target's.
    """
    if not isinstance(profile, HardwareProfile) or pair.padded_to is not None:
        return False
    timed = {"draft": profile.t_draft, "draft_onnx": profile.t_draft_onnx}
    return (
        draft_device_of(pair) is None
        and profile.provenance.device_class == machine_class(pair)
        and all(name not in pair.models or seconds for name, seconds in timed.items())
        and (head is None or profile.t_head is not None)
    )
