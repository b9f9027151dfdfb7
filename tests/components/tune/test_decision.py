"""The decision, the same for every engine."""

from __future__ import annotations

import pytest

from draftwell.components.report.intervals import FEWEST_PROMPTS
from draftwell.components.tune.decision import Contender, choosable, why_chosen, why_plain


def contender(
    name: str, ratio: float, low: float, prompts: int = FEWEST_PROMPTS, objection: str | None = None
) -> Contender[str]:
    return Contender(name, name, ratio, low, prompts, objection)


@pytest.mark.parametrize(("low", "chosen"), [(0.999, False), (1.0, False), (1.0001, True)])
def test_a_lower_bound_has_to_be_above_one(low: float, chosen: bool) -> None:
    """At 1 exactly nothing says that it is faster."""
    assert bool(choosable([contender("a", 1.2, low)])) == chosen


def test_the_fastest_that_may_be_chosen_is_first() -> None:
    rows = [
        contender("slow", 1.1, 1.05),
        contender("lossy", 2.0, 1.9, objection="it loses too much"),
        contender("unsure", 1.8, 0.9),
        contender("few", 1.7, 1.6, prompts=FEWEST_PROMPTS - 1),
        contender("fast", 1.4, 1.2),
    ]
    assert [one.setting for one in choosable(rows)] == ["fast", "slow"]
    assert why_chosen(choosable(rows)[0], "plain", 0.05) == (
        "fast is 1.40 times as fast as plain (at least 1.20 times, one-sided 95.0 %)"
    )


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "there was nothing to compare it with"),
        ([contender("a", 2.0, 1.9, objection="it loses")], "nothing keeps to the constraints: a"),
        ([contender("a", 2.0, 1.9, prompts=7)], "7 prompts are too few to choose anything else"),
        ([contender("a", 1.1, 0.9), contender("b", 1.2, 0.8)], "the best, b, measured 1.20"),
    ],
)
def test_plain_decoding_stays_with_a_reason(rows: list[Contender[str]], words: str) -> None:
    assert choosable(rows) == []
    assert why_plain(rows, "plain").startswith("plain, because ")
    assert words in why_plain(rows, "plain")
