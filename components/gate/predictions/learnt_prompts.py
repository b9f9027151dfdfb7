"""Which prompts of a trace are left to judge a predicting artifact on: none that it learnt from,
and none that only the champion's did."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from draftwell.components.gate.own_prompts import FEWEST
from draftwell.serving.artifacts.kinds import find_kind, temperature_of
from draftwell.serving.errors import DraftwellError
from draftwell.serving.temperature import class_of

if TYPE_CHECKING:
    from draftwell.serving.artifacts.base import Artifact


@dataclass(frozen=True)
class UnseenPrompts:
    """Prompts to judge on.

    Args:
        names: ids, in the trace's order.
        notes: what was left out, and what is not known.
        favours_champion: the champion's artifact has learnt from some of them, because too few
            others are left.
    """

    names: tuple[str, ...]
    notes: tuple[str, ...] = ()
    favours_champion: bool = False

    @classmethod
    def choose(
        cls,
        kind: str,
        names: Sequence[str],
        mine: Collection[str] | None,
        theirs: Collection[str] = (),
    ) -> UnseenPrompts:
        """Choose among a trace's prompts.

        Args:
            names: ids, each once.
            mine, theirs: those that the candidate's and the champion's artifact learnt from; None
                where that is not known.
        Raises:
            DraftwellError: the candidate's has learnt from all (`no_untouched_prompts`).
        """
        notes: list[str] = []
        if mine is None:
            notes.append(
                f"whether the {kind} has learnt from prompts that it is judged on is "
                "unknown: it, or the trace, does not record "
                "its prompts"
            )
        new = [name for name in names if name not in (mine or ())]
        if not new:
            raise DraftwellError(
                f"the {kind} has learnt from every prompt of the traces: make it again "
                "from these traces "
                f"(`{find_kind(kind).made_by}`), or collect others (`draftwell collect "
                "--fresh --prompts FILE`)",
                code="no_untouched_prompts",
            )
        if len(new) < len(names):
            notes.append(
                f"the {kind} has learnt from {len(names) - len(new)} of the traces' "
                "prompts: left out"
            )
        fair = [name for name in new if name not in theirs]
        if len(fair) < min(FEWEST, len(new)):
            known = len(new) - len(fair)
            why = (
                f"the champion's {kind} has learnt from {known} of the {len(new)} prompts, "
                "which favours it: too few others are left"
            )
            return cls(tuple(new), (*notes, why), True)
        if len(fair) < len(new):
            notes.append(
                f"the champion's {kind} has learnt from {len(new) - len(fair)} of the "
                "traces' prompts: left out"
            )
        return cls(tuple(fair), tuple(notes))


def learnt_by_hash(
    artifact: Artifact, names: Sequence[str], hashes: Mapping[str, str] | None
) -> set[str] | None:
    """Of a trace's prompts those whose hashes an artifact records; None where artifact or trace
    does not record its prompts.

    Args:
        hashes: prompt id → hash (`draftwell.components.collect.plan.prompt_hashes`).
    """
    learnt = artifact.provenance.training_prompts
    if learnt is None or hashes is None:
        return None
    known = set(learnt)
    return {name for name in names if hashes.get(name) in known}


def for_other_requests(mine: Artifact, rival: Artifact) -> str | None:
    """Why two artifacts cannot be compared: they are for different classes of temperatures. None
    where they can, or it is not known."""
    ours, theirs = temperature_of(mine), temperature_of(rival)
    if ours is None or theirs is None or class_of(ours) == class_of(theirs):
        return None
    return f"the champion's is for temperature {theirs:g}, this one for {ours:g}"
