"""The walk that all rules share: look at the draft's tokens in order, and end the round at the
first that is not kept.

A token that is kept and ends the text ends the round too; a draft that is kept whole yields a bonus
token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.logits import Span
from draftwell.serving.runtime.random_streams import Streams
from draftwell.serving.runtime.types import Draft, Verdict


@dataclass(frozen=True)
class TokenDecision:
    """What a rule decided about one draft token: it is kept, or `token` takes its place.

    Args:
        rescued: kept against the exact rule.
    """

    token: int | None = None
    rescued: bool = False


KEPT, RESCUED = TokenDecision(), TokenDecision(rescued=True)


class InOrder(ABC):
    """Base of the rules that look at one token at a time (an `AcceptanceRule`)."""

    reads_chances: ClassVar[bool] = True
    """`look` asks how likely the target finds the draft's tokens."""

    @abstractmethod
    def look(self, draft: Draft, i: int, target: Span, rng: Streams) -> Step[TokenDecision]:
        """Decide about draft token i; all before it were kept."""

    def judge(
        self, draft: Draft, target: Span, rng: Streams, *, bonus: bool = True
    ) -> Step[Verdict]:
        rescued: list[int] = []
        if self.reads_chances:
            yield from target.fetch_chances(range(len(draft)), draft.tokens)
        for i, token in enumerate(draft.tokens):
            look = yield from self.look(draft, i, target, rng)
            if look.token is not None:
                return Verdict(accepted=i, token=look.token, judged=i + 1, rescued_at=rescued)
            if look.rescued:
                rescued.append(i)
            if token in target.sampling.stop_token_ids:
                return Verdict(accepted=i + 1, token=None, judged=i + 1, rescued_at=rescued)
        k = len(draft)
        following = (yield from target.draw(k, rng.sample)).token if bonus else None
        return Verdict(accepted=k, token=following, judged=k, rescued_at=rescued)
