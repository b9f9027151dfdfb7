"""Mistakes that more than one test must catch."""

from __future__ import annotations

from draftwell.serving.runtime.acceptance.exact import Exact
from draftwell.serving.runtime.acceptance.tree import ExactTree
from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.logits import Span
from draftwell.serving.runtime.types import Draft, Verdict


class Twice(Exact):
    """Exact acceptance that tests the last token of a draft again where all of it was kept and no
    bonus follows."""

    def judge(self, draft: Draft, target: Span, rng, *, bonus: bool = True) -> Step[Verdict]:
        verdict = yield from super().judge(draft, target, rng, bonus=bonus)
        if len(draft) and not bonus and not verdict.rejected and draft.rows:
            again = yield from super().judge(draft[-1:], target[len(draft) - 1 :], rng, bonus=False)
            if again.rejected:
                return Verdict(len(draft) - 1, again.token, len(draft))
        return verdict


class LeavesTheDistribution(ExactTree):
    """Tests a second candidate against the distribution that the first was tested against."""

    def without(self, left: float, chance: float) -> float:
        return left
