"""The gate's verdict as flows pass it on: which of the three it was, in words, and which of a
release's choices it is about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftwell.components.gate.verdict import FAILED, PASSED, UNDECIDED, Result

Gated = Mapping[str, Any]
"""`passed` and `checks` of a gate's result, or of a record; each check has at least `name`,
`passed` and `detail`."""
SAMPLED = "sampled "
"""How the names of the checks of a sampled choice begin (components/gate/temperatures.py)."""
SAID: dict[Result, str] = {PASSED: "passed", FAILED: "failed", UNDECIDED: "had not enough evidence"}


def result_of(gated: Gated) -> Result:
    """One of the three verdicts.

    >>> result_of(
    ...     {"passed": False, "checks": [{"passed": False, "enough": False}, {"passed": True}]}
    ... )
    'not enough evidence'
    """
    if gated["passed"]:
        return PASSED
    against = unmet(gated)
    return (
        UNDECIDED if against and not any(check.get("enough", True) for check in against) else FAILED
    )


def sentence(gated: Gated) -> str:
    """The verdict as a sentence without its end.

    >>> sentence({"passed": False, "checks": [{"passed": False}]})
    'the gate failed'
    """
    return f"the gate {SAID[result_of(gated)]}"


def unmet(gated: Gated) -> list[Mapping[str, Any]]:
    """The checks that were not passed."""
    return [check for check in gated["checks"] if not check["passed"]]


def only_sampled(gated: Gated) -> bool:
    """Whether nothing but the choice for sampled requests keeps a release from passing."""
    against = unmet(gated)
    return bool(against) and all(check.get("name", "").startswith(SAMPLED) for check in against)


def refusal(choice: dict[str, Any], gated: Gated, sampled: bool) -> str:
    """Why a choice, `sampled`: that for sampled requests, was not released, in a sentence."""
    kept = {"strategy": "an earlier choice", "parameters": ""}
    tuned = (choice["sampled"] or kept) if sampled else choice
    against = "; ".join(check["detail"] for check in unmet(gated))
    verdict = (
        "refused by the gate"
        if result_of(gated) == FAILED
        else "the gate had not enough evidence for it"
    )
    return (
        f"{tuned['strategy']} {tuned['parameters']}".rstrip() + f" was tuned, {verdict}: {against}"
    )
