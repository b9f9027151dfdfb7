"""What the forward passes of a replay cost: tables of seconds, made once from a hardware profile.

A strategy that overlaps its models gives each its own cores. While both run, a forward pass takes
the *busy* time. Once the shorter side of an overlap has ended, the rest of the longer one takes the
time of a model that runs *alone* on its cores, as do forward passes outside overlaps. Other
strategies have one time, measured with all cores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from draftwell.serving.artifacts.forward_costs import seconds_table
from draftwell.serving.artifacts.hardware_profile import (
    HardwareProfile,
    RequestTimes,
    RoundOverheads,
)
from draftwell.serving.runtime.commands import Forward

LONGEST_DRAFT = 128
"""A forward pass reads at most the tokens of a text and so many draft tokens."""


@dataclass(frozen=True)
class Rates:
    """Seconds of forward passes.

    Args:
        forward: role → seconds by number of tokens, for a slot that holds `context` tokens.
        prefill: role → the same for an empty slot.
        per_token: role → additional seconds for every further token in the slot.
    """

    forward: Mapping[str, Sequence[float]]
    prefill: Mapping[str, Sequence[float]]
    per_token: Mapping[str, float]
    context: int

    def seconds(self, command: Forward, length: int) -> float:
        """Seconds of a forward pass on a slot of `length` tokens; every further step of a chain is
        a pass over one token."""
        role = command.model
        table = self.prefill if command.prefill else self.forward
        seconds = table[role][len(command.tokens)] + (command.steps - 1) * self.forward[role][1]
        reading = command.steps - command.prefill  # forward passes that read a slot
        return seconds + reading * self.per_token[role] * (length - self.context)


@dataclass(frozen=True)
class ReplayCosts:
    """The costs of a replay, in seconds.

    Args:
        alone, busy: forward passes, as defined above; equal for a strategy that overlaps nothing.
        round, token, figure: time outside forward passes of a target call, of a drafted token, and
            of a row whose confidence, entropy or probability was read.
    """

    alone: Rates
    busy: Rates
    round: float
    token: float
    figure: float

    def together(self, sides: Sequence[tuple[float, float]]) -> float:
        """Seconds of an overlap whose sides take (alone, busy) seconds."""
        *others, (alone, busy) = sorted(sides, key=lambda side: side[1])
        shared = max((other for _, other in others), default=0.0)
        return shared + alone * (1 - shared / busy) if busy else 0.0


def costs_of(profile: HardwareProfile, overlapping: bool, longest: int) -> ReplayCosts:
    """The costs of a strategy.

    Args:
        overlapping: whether the strategy overlaps draft and target, each on its own cores.
        longest: tokens of the longest text.
    """
    details, count = profile.details or scaled_details(profile), longest + LONGEST_DRAFT
    if overlapping and profile.split is not None:
        busy = detailed_rates(profile, details, profile.split, count)
        own = details.split_alone
        alone = detailed_rates(profile, details, own, count) if own else busy
    else:
        all_cores = (profile.draft_seconds, profile.t_verify)
        alone = busy = detailed_rates(profile, details, all_cores, count)
    rest = details.rest
    return ReplayCosts(alone, busy, rest.round, rest.token, rest.figure)


def scaled_details(profile: HardwareProfile) -> RequestTimes:
    """What stands for details that were not measured: the draft's times grow with the number of
    tokens as the target's do."""
    scale = profile.draft_seconds / profile.t_verify[1]
    return RequestTimes(
        t_draft={k: seconds * scale for k, seconds in profile.t_verify.items()},
        prefill={},
        per_context_token={},
        context=0,
        rest=RoundOverheads(round=profile.t_rest, token=0.0, figure=0.0),
    )


def detailed_rates(
    profile: HardwareProfile,
    details: RequestTimes,
    times: tuple[float, Mapping[int, float]],
    count: int,
) -> Rates:
    """Rates under the given (t_draft, t_verify); times that were measured with all cores only are
    scaled accordingly."""
    t_draft, t_verify = times
    largest = max(t_verify)
    stretch = {
        "target": t_verify[largest] / profile.verify_seconds(largest),
        "draft": t_draft / profile.draft_seconds,
    }
    sizes = {
        "target": t_verify,
        "draft": {k: seconds * stretch["draft"] for k, seconds in details.t_draft.items()},
    }
    forward = {role: seconds_table(known, count) for role, known in sizes.items()}
    prefill = {}
    for role, known in sizes.items():
        prompts = {
            k: seconds * stretch[role] for k, seconds in details.prefill.get(role, {}).items()
        }
        short = {k: seconds for k, seconds in known.items() if k < min(prompts, default=count)}
        prefill[role] = seconds_table(short | prompts, count)
    slopes = {role: details.per_context_token.get(role, 0.0) * stretch[role] for role in sizes}
    return Rates(forward, prefill, slopes, details.context)
