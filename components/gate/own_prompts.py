"""Which prompts a release is judged on: none that it was trained, calibrated or tuned on, and none
that only the champion was.

What the champion learnt from favours the champion. Where too few prompts are new to both, those
stay: a candidate that passes in spite of them passes, and a regression on them is not enough
evidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from draftwell.components.prompts.overlap import WHY_UNKNOWN, TrainingPrompts
from draftwell.components.prompts.prompt import Prompt
from draftwell.serving.bundle.verdict import FAILED, Check, GateVerdict, Thresholds

FEWEST = 8
"""Untouched prompts that a verdict needs, or as many as were asked for: as few as a choice of the
tuner needs."""


@dataclass(frozen=True)
class JudgingPrompts:
    """The prompts that a release is judged on, and what is to be said of them.

    Args:
        prompts: in the order of the candidates. Where too few are new to the release, also its own:
            then `objection` fails the gate, and the measurement shows how it does on its own
            prompts.
        objection: the check `untouched prompts` where it failed.
        favoured: what of the champion was made from some of them, as text; "" where nothing was.
        notes: what was left out.
        unknown: what carries no record of its prompts, or no complete one, of release and champion.
    """

    prompts: list[Prompt]
    objection: Check | None = None
    favoured: str = ""
    notes: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    @classmethod
    def choose(
        cls,
        prompts: Sequence[Prompt],
        used: TrainingPrompts,
        rival: TrainingPrompts,
        limit: int | None,
    ) -> JudgingPrompts:
        """Choose from candidates, in the order in which they are taken.

        Args:
            used, rival: what release and champion were made from.
            limit: how many to judge on; None takes all that are left.
        """
        left, own = used.split(prompts)
        wanted = min(len(prompts), limit or len(prompts))
        least = min(wanted, FEWEST)
        unknown = (
            *used.unknown,
            *(f"the champion's {name}" for name in rival.unknown if name not in used.unknown),
        )
        if len(left) < least:
            return cls(
                list(prompts[:wanted]), too_few(len(left), own, least, used), unknown=unknown
            )
        notes = (
            [f"{len(own)} prompts left out: they were used to make {used.users_of(own)}"]
            if own
            else []
        )
        fair, theirs = rival.split(left)
        if len(fair) < least:
            rows = [*fair, *theirs][:wanted]
            return cls(rows, None, rival.users_of(rows), tuple(notes), unknown)
        if theirs:
            notes.append(
                f"{len(theirs)} prompts left out: they were used to make the champion's "
                f"{rival.users_of(theirs)}"
            )
        return cls(fair[:wanted], None, "", tuple(notes), unknown)

    def verdict(self, thresholds: Thresholds) -> GateVerdict:
        """The checks of the prompts themselves."""
        parts: list[Check | str | None] = [self.objection, *self.notes]
        named = ", ".join(self.unknown)
        if self.favoured:
            parts.append(
                f"some prompts were used to make the champion's {self.favoured}, and "
                "favour it: too few others are left"
            )
        if thresholds.unknown_prompts == "refuse":
            detail = f"not recorded: {named}" if named else "every artifact records its prompts"
            count = len(self.unknown)
            parts.append(Check("training prompts known", count, 0, not count, detail))
        elif named:
            parts.append(
                f"warning: training prompts unknown: {named} ({WHY_UNKNOWN}); what it learnt from "
                "may be among the prompts"
            )
        return GateVerdict.of(parts)

    def excuse(self, verdict: GateVerdict) -> GateVerdict:
        """A verdict of the bench in which a regression on the champion's own prompts is not enough
        evidence."""
        if not self.favoured:
            return verdict
        why = (
            f"; not enough evidence: the champion's {self.favoured} were made from some of "
            "these prompts (name others with --prompts)"
        )
        checks = tuple(
            replace(check, enough=False, detail=check.detail + why)
            if check.name.endswith("regression") and check.result == FAILED
            else check
            for check in verdict.checks
        )
        return replace(verdict, checks=checks)


def too_few(left: int, own: Sequence[Prompt], least: int, used: TrainingPrompts) -> Check:
    """The check that fails where too few prompts are new to the release."""
    detail = (
        f"judged on its own training prompts: {len(own)} of {left + len(own)} were used to "
        f"make {used.users_of(own)}, and "
        f"{left} others are too few (at least {least}): name a file of other prompts with --prompts"
    )
    return Check("untouched prompts", left, least, False, detail)
