"""ASD: draft tokens that the target did not choose stay within a budget of regret (2608.03447).

Regret of draft token x_i is what the target's choice is likelier than it: r_i = max z_i − z_i(x_i)
on raw logits, which is ln p̄(t*) − ln p̄(x_i), and 0 for the choice itself. In order of the draft of
K tokens one that is not the choice stays iff

1. the request's regret, this one's included, is at most B;
2. r_i <= g·(K − i), i from 0: what the rest of the draft is worth;
3. fewer than m others of this draft stayed.

The first that does not stay is replaced by the target's choice. All kept: bonus. So a greedy text's
log-likelihood under the target is at most B nats below that of the target's choices after the same
prefixes, whatever drafts.

Ours: no stop or special token stays, nor any against one, nor a banned token. A sampled request,
and one that penalises or biases tokens, is judged exactly: regret is about what the target would
choose by itself.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from draftwell.serving.runtime.acceptance.exact import Exact, keeps, recover
from draftwell.serving.runtime.acceptance.in_order import KEPT, RESCUED, TokenDecision
from draftwell.serving.runtime.acceptance.rescue import allowed
from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.drafting.draft_model import DraftModel
from draftwell.serving.runtime.drafting.stopping import FixedLength
from draftwell.serving.runtime.logits import Span
from draftwell.serving.runtime.random_streams import Streams
from draftwell.serving.runtime.schedules.serial import serial
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.strategies.base import Strategy, StrategyConfig
from draftwell.serving.runtime.types import Draft, Verdict


class WithinBudget(Exact):
    """Exact acceptance but for tokens of little regret; one object serves one request.

    Args:
        budget: B, nats of a request.
        gate: g, nats of a token for each draft token from it on.
        most: m, tokens of a draft.
        special_tokens: tokens that never stay, and against which none stays.
    """

    lossless: ClassVar[bool] = False

    def __init__(
        self, budget: float, gate: float, most: int, special_tokens: frozenset[int] = frozenset()
    ):
        self.budget, self.gate, self.most = budget, gate, most
        self.special_tokens = special_tokens
        self.spent = 0.0
        """Regret of the request so far, never more than the budget."""
        self._stayed = 0  # of this draft

    def judge(
        self, draft: Draft, target: Span, rng: Streams, *, bonus: bool = True
    ) -> Step[Verdict]:
        self._stayed = 0
        return (yield from super().judge(draft, target, rng, bonus=bonus))

    def look(self, draft: Draft, i: int, target: Span, rng: Streams) -> Step[TokenDecision]:
        sampling = target.sampling
        if not sampling.greedy or sampling.penalises or sampling.biases:
            return (yield from super().look(draft, i, target, rng))
        if (yield from keeps(draft, i, target, rng)):
            return KEPT
        token = draft.tokens[i]
        protected = sampling.stop_token_ids | self.special_tokens
        if protected.isdisjoint((token, target.top[i])) and (yield from allowed(token, i, target)):
            regret = target.raw_logit(i, target.top[i]) - target.raw_logit(i, token)
            worthwhile = regret <= self.gate * (len(draft) - i)
            affordable = self.spent < self.budget and self.spent + regret <= self.budget
            if worthwhile and affordable and self._stayed < self.most:
                self.spent += regret
                self._stayed += 1
                return RESCUED
        return TokenDecision((yield from recover(draft, i, target, rng)))


class ASD(Strategy):
    name = "asd"
    lossless = False
    paper = "ASD, Feng 2026 (2608.03447), and its code"
    length_field = "num_speculative_tokens"
    regret_field = "budget"

    class Config(StrategyConfig):
        num_speculative_tokens: int = Field(5, ge=1, le=32, description="K: draft tokens per round")
        budget: float = Field(8.0, ge=0, description="B: regret of a request at most, in nats")
        gate: float = Field(
            0.25,
            ge=0,
            description="g: regret of a token at most, for each draft token from it to the end",
        )
        exceptions: int = Field(
            2, ge=0, le=32, description="m: tokens of a draft that may stay against the target"
        )

    def run(self, session: Session) -> Step[None]:
        config = self.config
        rule = WithinBudget(
            config.budget, config.gate, config.exceptions, self.resources.special_tokens
        )
        yield from serial(session, DraftModel(FixedLength(config.num_speculative_tokens)), rule)
