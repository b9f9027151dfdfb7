"""What forward passes cost by batch size, and which draft length is the fastest for a number of
concurrent requests.

With one request the processor waits while weights are read, so verifying γ tokens costs about as
much as one token. Many requests use that capacity: then every rejected draft token is work taken
from another request. With B running requests, drafts of γ tokens and an acceptance rate α, a round
costs

    draft(B) · γ + target(B · (γ + 1)) + rest        and yields        1 + α + … + α^γ        tokens per request

(Leviathan 2023, Eq. 1 and Theorem 3.8, with a target whose cost depends on the batch size). Where
drafting and verifying overlap, the longer of the two counts and there is no bonus token. The draft
model also has to read every prompt, which plain decoding does not need: with R prompt tokens per
written token, that adds R tokens to the draft's forward passes for each of these. Every pass also
reads the keys and values of its text, so a longer context makes passes dearer. The cost of a
qualifier between draft and target is not modelled.

These predictions are where a server begins; what it then measures counts instead (draft_length.py).
"""  # noqa: E501

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from draftwell.serving.artifacts.forward_costs import ascending, extended, seconds_at
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.runtime.commands import Forward, Role
from draftwell.serving.runtime.output import Model

LONGEST = 32
"""Longest draft that is considered."""
MARGIN = 0.05
"""A draft must be predicted to save this share of the time of plain decoding, since predictions
have errors."""
MEASURE_SECONDS = 5.0
CONTEXT = 32
"""Tokens in each slot before a timed forward pass."""
REPEATS = 3


@dataclass(frozen=True, eq=False)
class BatchCosts:
    """Seconds of a pair's forward passes by total number of tokens, on this machine.

    Args:
        draft: total tokens → seconds of a draft forward pass; up to the number of requests, these
            are rows of one token each.
        target: total tokens → seconds of a target forward pass.
        split: the same two while both models run, each on its own cores; None where not measured.
        per_round, per_token: seconds outside forward passes, of a request's target call and of each
            token that it drafted.
        per_context: role → seconds by which each further token in a request's slot prolongs a pass.
        context: tokens in each slot where the passes were timed.
        batched: a forward pass over several requests costs what its total tokens cost; False: each
            request costs a pass of its own.
        source: short description of where the times come from.
    """

    draft: Mapping[int, float]
    target: Mapping[int, float]
    split: tuple[Mapping[int, float], Mapping[int, float]] | None = None
    per_round: float = 0.0
    per_token: float = 0.0
    per_context: Mapping[str, float] = field(default_factory=dict)
    context: int = 0
    batched: bool = True
    source: str = "hardware profile"

    def round_seconds(
        self,
        running: int,
        gamma: int,
        *,
        drafts: bool = True,
        overlaps: bool = False,
        share: float = 0.0,
        context: float | None = None,
    ) -> float:
        """Seconds of a round in which each of `running` requests drafts `gamma` tokens.

        Args:
            drafts: with the draft model.
            overlaps: while the target verifies.
            share: without the draft model, a draft step's share of a target pass; n-grams cost
                nothing.
            context: mean number of tokens in a slot; None: as where the passes were timed.
        """
        rows, times = (running, 1) if self.batched else (1, running)
        draft, target = (
            self.split if self.split and overlaps and gamma else (self.draft, self.target)
        )
        drafting = (
            times
            * gamma
            * (seconds_at(draft, rows) if drafts else share * seconds_at(target, rows))
        )
        verifying = times * seconds_at(target, rows * (gamma + 1))
        if context is not None:
            target_reads, draft_reads = (
                running * self.reading(role, context) for role in ("target", "draft")
            )
            verifying += target_reads
            drafting += gamma * (draft_reads if drafts else share * target_reads)
        rest = running * (self.per_round + gamma * self.per_token)
        return rest + (max(drafting, verifying) if overlaps else drafting + verifying)

    def reading(self, role: Role, context: float) -> float:
        """Seconds by which a request's pass takes longer at `context` tokens than where it was
        timed; less than 0 at fewer tokens."""
        return self.per_context.get(role, 0.0) * (context - self.context)

    def seconds_per_row(self, running: int, gamma: int) -> float:
        """Seconds of one more token in a verification, where `running` requests draft `gamma`
        tokens."""
        if not self.batched:
            return max(0.0, seconds_at(self.target, gamma + 2) - seconds_at(self.target, 2)) / max(
                1, gamma
            )
        most = running * (max(1, gamma) + 1)
        return max(0.0, seconds_at(self.target, most) - seconds_at(self.target, running)) / (
            most - running
        )

    @property
    def seconds_to_read(self) -> float:
        """Seconds of one prompt token in a draft forward pass: the slope between the smallest and
        the largest measured pass."""
        sizes = sorted(self.draft)
        return max(0.0, self.draft[sizes[-1]] - self.draft[sizes[0]]) / max(1, sizes[-1] - sizes[0])

    def seconds_per_token(
        self,
        running: int,
        gamma: int,
        alpha: float,
        *,
        drafts: bool = True,
        overlaps: bool = False,
        share: float = 0.0,
        prompt: float = 0.0,
        context: float | None = None,
    ) -> float:
        """Seconds in which each of `running` requests gets one more token, including the draft's
        reading of prompts.

        Args:
            prompt: prompt tokens read per written token.
        """
        last = gamma - 1 if overlaps and gamma else gamma  # an overlapped round has no bonus token
        reading = running * prompt * self.seconds_to_read if drafts and gamma else 0.0
        seconds = self.round_seconds(
            running, gamma, drafts=drafts, overlaps=overlaps, share=share, context=context
        )
        return reading + seconds / sum(alpha**i for i in range(last + 1))

    def best_gamma(
        self,
        running: int,
        alpha: float,
        *,
        drafts: bool = True,
        overlaps: bool = False,
        share: float = 0.0,
        prompt: float = 0.0,
    ) -> int:
        """The draft length with the fewest seconds per token, 0 to `LONGEST`; 0 where none saves
        `MARGIN` of plain decoding."""
        seconds = [
            self.seconds_per_token(
                running, gamma, alpha, drafts=drafts, overlaps=overlaps, share=share, prompt=prompt
            )
            for gamma in range(LONGEST + 1)
        ]
        best = seconds.index(min(seconds))
        return best if seconds[best] < (1 - MARGIN) * seconds[0] else 0


def from_profile(profile: HardwareProfile) -> BatchCosts:
    """Costs from the pair's hardware profile, which timed forward passes of one request.

    A batch of rows counts as one row with as many tokens. Beyond the largest timed verification a
    forward pass takes at least as long as a prompt of that size. A profile without details has only
    draft passes of one token, which then grow as the target's do, and one value for the time that a
    round of five draft tokens spends outside forward passes, divided among these.
    """
    target, details = ascending(profile.t_verify), profile.details
    largest = max(target)
    if details:
        target |= {
            size: max(seconds, seconds_at(target, size))
            for size, seconds in details.prefill.get("target", {}).items()
            if size > largest
        }
    if profile.t_draft is None:
        draft = {1: 0.0}
    else:
        draft = (
            ascending(details.t_draft)
            if details
            else {k: profile.t_draft * seconds / target[1] for k, seconds in target.items()}
        )
    split = None
    if profile.split is not None:
        t_draft, t_verify = profile.split
        split = (
            {size: seconds * t_draft / seconds_at(draft, 1) for size, seconds in draft.items()},
            {size: seconds * slower(profile, t_verify, size) for size, seconds in target.items()},
        )
    if details is None:
        return BatchCosts(draft, target, split, 0.0, profile.t_rest / 5)
    return BatchCosts(
        draft,
        target,
        split,
        details.rest.round,
        details.rest.token + details.rest.figure,
        per_context=details.per_context_token,
        context=details.context,
    )


def completed(timed: BatchCosts, known: BatchCosts) -> BatchCosts:
    """Timed batches, completed from a profile: larger sizes, overlapping models and the time
    outside forward passes.

    The profile's times are scaled by the ratio of the two where both were measured.
    """
    draft, target = extended(timed.draft, known.draft), extended(timed.target, known.target)
    split = None
    if known.split is not None:
        draft_split, target_split = known.split
        split = (
            {
                size: seconds * seconds_at(draft, size) / seconds_at(known.draft, size)
                for size, seconds in draft_split.items()
            },
            {
                size: seconds * seconds_at(target, size) / seconds_at(known.target, size)
                for size, seconds in target_split.items()
            },
        )
    return replace(
        timed,
        draft=draft,
        target=target,
        split=split,
        per_round=known.per_round,
        per_token=known.per_token,
        per_context=known.per_context,
        source="measured at start, and the hardware profile",
    )


def slower(profile: HardwareProfile, t_verify: Mapping[int, float], size: int) -> float:
    """Factor by which a target forward pass is slower on its share of the cores."""
    size = min(size, max(t_verify), max(profile.t_verify))
    return seconds_at(ascending(t_verify), size) / seconds_at(ascending(profile.t_verify), size)


def measure(
    models: Mapping[Role, Model],
    slots: int,
    *,
    batched: bool = True,
    seconds: float = MEASURE_SECONDS,
) -> BatchCosts:
    """Time batches of all sizes that `slots` requests can form, small ones first, for about
    `seconds`. The models must be idle.

    Sizes that are not reached in time are absent, and extrapolated from the others.

    Args:
        models: "target", and "draft" where there is one.
    """
    until = time.monotonic() + seconds
    rows = slots if batched else 1
    room = min(model.max_context for model in models.values())
    context = max(1, min(CONTEXT, room // 2))
    most = rows * max(1, min(8, room - context))
    # nearly linear in between
    sizes = sorted({4**i for i in range(most.bit_length()) if 4**i <= most} | {rows, most})
    draft = (
        time_batches("draft", models["draft"], sizes, rows, context, until - seconds * 2 / 3)
        if "draft" in models
        else {1: 0.0}
    )
    target = time_batches("target", models["target"], sizes, rows, context, until)
    return BatchCosts(draft, target, context=context, batched=batched, source="measured at start")


def time_batches(
    role: Role, model: Model, sizes: Sequence[int], rows: int, context: int, until: float
) -> dict[int, float]:
    """Total tokens → median seconds of a forward pass that spreads them over `rows` slots; the
    first size is always timed."""
    slots = [model.open() for _ in range(rows)]
    seconds: dict[int, float] = {}
    try:
        model.forward([Forward(role, slot, filler(model, context), prefill=True) for slot in slots])
        for size in sizes:
            if seconds and time.monotonic() > until:
                break
            shares = [size // rows + (i < size % rows) for i in range(min(rows, size))]
            # the draft needs only the last row of a prompt
            kept = [share if role == "target" else 1 for share in shares]
            batch = [
                Forward(role, slot, filler(model, share), keep=keep)
                for slot, share, keep in zip(slots, shares, kept, strict=False)
            ]
            # the first run is cold
            seconds[size] = median([timed(model, batch, context) for _ in range(REPEATS + 1)][1:])
    finally:
        for slot in slots:
            model.close(slot)
    return ascending(seconds)


def timed(model: Model, batch: Sequence[Forward], context: int) -> float:
    """Seconds of a forward pass, which is then rolled back."""
    started = time.perf_counter()
    outputs = model.forward(batch)
    outputs[-1].compact[-1, 0].item()  # waits for the device
    taken = time.perf_counter() - started
    for row in batch:
        model.rollback(row.slot, context)
    return taken


def filler(model: Model, count: int) -> tuple[int, ...]:
    """Valid token ids; their values do not affect the time."""
    return tuple(1 + i % (model.vocab_size - 1) for i in range(count))
