"""The check that a release is not judged on the prompts that it was trained, calibrated or tuned on."""

from __future__ import annotations

from collections.abc import Sequence

from components.gate.verdict import Check, GateVerdict
from components.prompts.overlap import TrainingPrompts
from components.prompts.prompt import Prompt

FEWEST = 8
"""Untouched prompts that a verdict needs, or as many as were asked for: as few as a choice of the tuner needs."""


def untouched_prompts(prompts: Sequence[Prompt], used: TrainingPrompts, limit: int | None) -> tuple[list[Prompt], GateVerdict]:
    """The prompts to judge a release on, and a check that fails where too few of them are new to it.

    Args:
        prompts: candidates, in the order in which they are taken.
        used: what the release's artifacts were made from.
        limit: how many to judge on; None takes all that are left.
    Returns:
        untouched prompts; where these are too few, as many of all prompts, and the check `untouched prompts` has failed. Then the
        measurement shows how the release does on its own prompts, and cannot promote it.
    """
    left, own = used.split(prompts)
    wanted = min(len(prompts), limit or len(prompts))
    least = min(wanted, FEWEST)
    notes = (f"training prompts unknown: {', '.join(used.unknown)} (made by an older version)",) if used.unknown else ()
    if len(left) >= least:
        more = (f"{len(own)} prompts left out: they were used to make {used.users_of(own)}",) if own else ()
        return left[:wanted], GateVerdict((), (*more, *notes))
    detail = (f"judged on its own training prompts: {len(own)} of {len(left) + len(own)} were used to make {used.users_of(own)}, and "
              f"{len(left)} others are too few (at least {least}): name a file of other prompts with --prompts")
    return list(prompts[:wanted]), GateVerdict((Check("untouched prompts", len(left), least, False, detail),), notes)
