"""Each round the drafter that is expected to gain most: what followed the text's end before, a model or head, or none.

What is expected is counted while requests run: for each drafter, by its confidence, how often its tokens were kept; and for the model,
whose drafts cost time before anything is known of them, what its rounds gained on average.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from serving.artifacts.acceptance_table import AcceptanceTable
from serving.artifacts.datastore import Continuations, Datastore
from serving.runtime.commands import Step
from serving.runtime.drafting.continuations import likeliest_chain
from serving.runtime.drafting.draft_model import DraftModel
from serving.runtime.drafting.expected_gain import RoundCosts, WorthDrafting
from serving.runtime.drafting.head import HeadChain
from serving.runtime.drafting.suffix import SuffixIndex
from serving.runtime.protocols import Drafter
from serving.runtime.session.session import Session
from serving.runtime.types import Draft, Verdict

Source = Literal["lookup", "model", "none"]
PROBE = 12
"""A model whose rounds gain nothing is tried again after so many rounds: text changes."""
MEMORY = 24
"""Rounds over which a model's gain is averaged."""
FIRST_GAIN = 0.3
"""What a model's round is expected to gain before any was seen: enough to try it."""
EASY = 0.9
"""Share of a model's tokens that is kept where text is easy to predict."""
CONFIDENCE = (0.3, 0.5, 0.7, 0.8, 0.86, 0.9, 0.93, 0.95)
"""Where in the table a continuation begins to be counted, by the length of what matched, the tokens drafted since included."""


@dataclass
class Experience:
    """What was counted so far, of all requests that share it.

    Args:
        lookup, model: confidence → how often a token was kept.
        gain: of the model's rounds, an exponential average, in tokens of plain decoding.
        ahead: the chance that a token of the model is kept, before its distribution is known.
    """

    lookup: AcceptanceTable = field(default_factory=AcceptanceTable.empty)
    model: AcceptanceTable = field(default_factory=AcceptanceTable.empty)
    gain: float = FIRST_GAIN
    ahead: float = 0.5

    def copy(self) -> Experience:
        """The same, counted on apart."""
        return replace(self, lookup=self.lookup.copy(), model=self.model.copy())


class BestDrafter:
    """A `Drafter` for one request; `learn` must be called with every verdict.

    Args:
        costs: of a round.
        seen: shared experience.
        model: what drafts where no continuation is worth it; None: nothing does.
        longest: tokens of a draft at most.
        datastore: texts of the target, where there are any, to look into besides the request's own.
    """

    def __init__(self, costs: RoundCosts, seen: Experience, model: Literal["head", "draft"] | None, longest: int,
                 datastore: Datastore | None = None):
        self.costs, self.seen, self.longest, self.datastore = costs, seen, longest, datastore
        self.stop = WorthDrafting(costs, seen.model, seen.ahead, longest)
        self.model: Drafter | None = None
        if model is not None:
            self.model = (HeadChain if model == "head" else DraftModel)(self.stop, with_confidence=True)
        self.index = SuffixIndex()
        self.source: Source = "none"
        self._steps, self._idle = 0, 0

    def propose(self, session: Session, limit: int, pending: Draft | None = None) -> Step[Draft]:
        limit = min(limit, self.longest)
        found, gain = self._look_up(session, limit)
        self.source = "lookup" if len(found) else "none"
        if self.model is None or limit == 0 or (len(found) and gain >= self.seen.gain):
            return found
        if self.costs.outlook(0, 1.0, [EASY] * limit, computed=0) <= 0.0:  # too dear even for the easiest text
            return found
        self._idle += 1
        if self.seen.gain <= 0.0 and (len(found) or self._idle < PROBE):
            return found
        self.source, self._idle = "model", 0
        self.stop.ahead = self.seen.ahead
        before = session.stats.draft_calls
        draft = yield from self.model.propose(session, limit, pending)
        self._steps = session.stats.draft_calls - before
        return draft

    def _look_up(self, session: Session, limit: int) -> tuple[Draft, float]:
        """What followed the longest match of the text's end, as far as it is worth verifying, and what it is expected to gain."""
        if limit == 0:
            return Draft(), 0.0
        self.index.extend(session.text.ids)
        found = [self.index.continuations(limit)]
        if self.datastore is not None:
            found.append(self.datastore.continuations(session.text.ids, limit))
        tokens, confidence, gain = max((self._worth(one, limit, session.sampling.stop_token_ids) for one in found), key=lambda one: one[2])
        session.stats.drafted += len(tokens)
        return Draft(tokens, confidence=confidence), gain

    def _worth(self, found: Continuations, limit: int, stops: frozenset[int]) -> tuple[list[int], list[float], float]:
        """Tokens of the likeliest continuation that are worth verifying, their confidences, and the expected gain."""
        tokens, shares = likeliest_chain(found, limit)
        end = next((i + 1 for i, token in enumerate(tokens) if token in stops), len(tokens))
        confidence = [share * CONFIDENCE[min(found.length + i, len(CONFIDENCE)) - 1] for i, share in enumerate(shares[:end])]
        count, gain = self.costs.best_length([self.seen.lookup.alpha(one) for one in confidence])
        return tokens[:count], confidence[:count], gain

    def learn(self, draft: Draft, verdict: Verdict) -> None:
        """Count what was judged, and what a model's round gained."""
        seen = self.seen
        table = seen.model if self.source == "model" else seen.lookup
        for i, confidence in enumerate(draft.confidence[: verdict.judged]):
            table.update(confidence, kept=i < verdict.accepted)
        if self.source == "model":
            gained = verdict.accepted - self.costs.lengthening(0, len(draft)) - self.costs.step * self._steps
            seen.gain += (gained - seen.gain) / MEMORY
            for i in range(verdict.judged):
                seen.ahead += ((i < verdict.accepted) - seen.ahead) / (4 * MEMORY)
