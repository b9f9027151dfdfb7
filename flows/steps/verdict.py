"""The gate's verdict as flows pass it on: which of the three it was, in words, and which of a
release's choices it is about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftwell.serving.bundle.verdict import FAILED, PASSED, UNDECIDED, Check, Result, result_of

Gated = Mapping[str, Any]
"""`passed` and `checks` of a gate's result, or of a record; each check is the fields of a
`Check`."""
SAMPLED = "sampled "
"""How the names of the checks of a sampled choice begin (components/gate/temperatures.py)."""
SAID: dict[Result, str] = {PASSED: "passed", FAILED: "failed", UNDECIDED: "had not enough evidence"}


def verdict_of(gated: Gated) -> Result:
    """One of the three verdicts.

    >>> lacking = vars(Check("speedup", 1.1, 1.0, passed=False, enough=False))
    >>> verdict_of({"passed": False, "checks": [lacking]})
    'not enough evidence'
    """
    return PASSED if gated["passed"] else result_of(Check(**check) for check in unmet(gated))


def sentence(gated: Gated) -> str:
    """The verdict as a sentence without its end.

    >>> sentence({"passed": False, "checks": []})
    'the gate failed'
    """
    return f"the gate {SAID[verdict_of(gated)]}"


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
        if verdict_of(gated) == FAILED
        else "the gate had not enough evidence for it"
    )
    return (
        f"{tuned['strategy']} {tuned['parameters']}".rstrip() + f" was tuned, {verdict}: {against}"
    )
