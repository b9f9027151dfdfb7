"""Is a draft that was loaded into a running engine the one that was judged?"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from draftwell.components.engines.port import Answer
from draftwell.components.gate.draft_swap import Counts, acceptance_check, outputs_check
from draftwell.serving.runtime.requests import Sampling

TUNED: list[Counts] = [(12, 20), (9, 20), (14, 20), (11, 20), (10, 20), (13, 20), (12, 20), (9, 20)]


@pytest.mark.parametrize(
    ("probed", "passed"),
    [
        (TUNED, True),
        ([(kept - 1, drafts) for kept, drafts in TUNED], True),  # .05, which does not matter
        ([(kept + (-1) ** i * 4, n) for i, (kept, n) in enumerate(TUNED)], True),
        ([(kept // 3, drafts) for kept, drafts in TUNED], False),  # the draft before, or noise
        ([(min(20, kept + 6), drafts) for kept, drafts in TUNED], False),  # another draft
        ([(0, 0)] * len(TUNED), False),  # nothing was drafted
    ],
)
def test_first_tokens_are_kept_as_often_as_in_the_tuning(
    probed: Sequence[Counts], passed: bool
) -> None:
    assert acceptance_check(probed, TUNED, 0.06).passed is passed


def answer(*tokens: int) -> Answer:
    return Answer(tokens=list(tokens), seconds=1.0, first_token_seconds=0.5)


@pytest.mark.parametrize(("gap", "passed"), [(0.0001, True), (0.1, False)])
def test_outputs_part_at_near_ties_alone(gap: float, passed: bool) -> None:
    def decode(prompts: Any, sampling: Sampling) -> Any:
        rows = [[(2, -0.5), (3, -0.5 - gap)]] if sampling.max_tokens == 1 else None
        found = answer(4) if sampling.max_tokens > 1 else answer(2)
        return SimpleNamespace(answers=[found.model_copy(update={"top_logprobs": rows})])

    engine: Any = SimpleNamespace(decode=decode)
    before, after = [answer(1, 2, 4), answer(5)], [answer(1, 3, 4), answer(5)]
    asked = Sampling(max_tokens=4)
    found = outputs_check([[7], [8]], before, after, engine, "float32", asked)
    assert (found.passed, found.value) == (passed, 0 if passed else 1)
    same = outputs_check([[7], [8]], before, before, engine, "float32", asked)
    assert (same.passed, same.value) == (True, 0)
