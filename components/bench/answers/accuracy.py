"""Accuracy of answers that can be checked, by task, compared with that of another run's answers.

Small models answer few such prompts rightly, and few prompts decide little: every comparison comes
with its interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

from draftwell.components.bench.answers.checks import Checker, checker_for
from draftwell.components.bench.answers.sandbox import SandboxUnavailable
from draftwell.components.prompts.prompt import Prompt
from draftwell.components.report.intervals import TAIL

Checked = bool | str | None
"""Whether an answer is right; None where nothing can check it, a sentence where this machine
cannot."""


def checked(prompts: Sequence[Prompt], answers: Sequence[str]) -> list[Checked]:
    """For each answer to a prompt whether it is right."""
    return [
        verdict(checker_for(prompt), prompt, answer)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def verdict(checker: Checker | None, prompt: Prompt, answer: str) -> Checked:
    """One entry of `checked`."""
    if checker is None:
        return None
    try:
        return checker(prompt, answer)
    except SandboxUnavailable as error:
        return str(error)


def task_accuracy(
    prompts: Sequence[Prompt],
    answers: Sequence[Checked],
    reference: Sequence[Checked] | None = None,
) -> dict[str, dict[str, Any]]:
    """Accuracy by task, and how far it is from the reference's.

    Args:
        answers, reference: of `checked`, for the same prompts; a prompt without a checker belongs
            to no task.
    Returns:
        task → `accuracy` in [0, 1], `count` of prompts, `difference` (accuracy less the
        reference's) with `low` and `high` (5 % at each end), and `note`: why there is no accuracy,
        None where there is one.
    """
    tasks: dict[str, list[tuple[bool | str, Checked]]] = {}
    for prompt, ours, theirs in zip(
        prompts, answers, reference or [None] * len(prompts), strict=True
    ):
        if ours is not None:
            tasks.setdefault(prompt.task or "other", []).append((ours, theirs))
    return {
        task: accuracy_of([ours for ours, _ in rows], [theirs for _, theirs in rows])
        for task, rows in tasks.items()
    }


def accuracy_of(ours: Sequence[bool | str], theirs: Sequence[Checked]) -> dict[str, Any]:
    """One entry of `task_accuracy`."""
    found: dict[str, Any] = {
        "accuracy": None,
        "count": len(ours),
        "difference": None,
        "low": None,
        "high": None,
        "note": None,
    }
    right = [one for one in ours if isinstance(one, bool)]
    if len(right) < len(ours):
        return found | {"note": next(one for one in ours if isinstance(one, str))}
    found["accuracy"] = sum(right) / len(right)
    known = [one for one in theirs if isinstance(one, bool)]
    if len(known) == len(right):
        found["difference"], found["low"], found["high"] = paired_difference(right, known)
    return found


def paired_difference(ours: Sequence[bool], theirs: Sequence[bool]) -> tuple[float, float, float]:
    """Share of ours that is right less that of theirs on the same prompts, with an interval.

    Agresti and Min 2005 ("Simple improved confidence intervals for comparing matched proportions"):
    Wald's interval after half a prompt is added to each of the four cells. A bootstrap would call
    eight wrong answers on both sides a certain tie.

    >>> [
    ...     round(x, 2)
    ...     for x in paired_difference([True, False, True, False], [False, False, True, False])
    ... ]
    [0.25, -0.2, 0.54]
    """
    gained = sum(a and not b for a, b in zip(ours, theirs, strict=True))
    lost = sum(b and not a for a, b in zip(ours, theirs, strict=True))
    n, b, c = len(ours) + 2, gained + 0.5, lost + 0.5
    centre = (b - c) / n
    reach = NormalDist().inv_cdf(1 - TAIL) * math.sqrt((b + c) - (b - c) ** 2 / n) / n
    return (gained - lost) / len(ours), max(-1.0, centre - reach), min(1.0, centre + reach)
