"""Each round the drafter that is expected to gain most: what followed the text's end before, a
head, a draft model, or none.

What is expected is counted while requests run: for each drafter, by its confidence, how often its
tokens were kept; and for head and draft model, whose drafts cost time before anything is known of
them, what their rounds gained on average.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.datastore import Continuations, Datastore
from draftwell.serving.runtime.commands import Role, Step
from draftwell.serving.runtime.drafting.alternatives import Alternatives
from draftwell.serving.runtime.drafting.continuations import likeliest_chain
from draftwell.serving.runtime.drafting.expected_gain import RoundCosts, WorthDrafting
from draftwell.serving.runtime.drafting.stopping import count_kept
from draftwell.serving.runtime.drafting.suffix import SuffixIndex
from draftwell.serving.runtime.protocols import Drafter
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.trees import DraftTree, TreeVerdict
from draftwell.serving.runtime.types import Draft, Verdict

PROBE, MOST_PATIENCE = 12, 192
"""A model whose rounds gain less than others is tried again after so many rounds, since text
changes; twice as many after each time that it did not gain more than they, up to the second
number."""
MEMORY = 24
"""Rounds over which a model's gain is averaged."""
FIRST_GAIN, FIRST_ROUNDS = 0.3, 3
"""What a model's round is expected to gain before any was seen, enough to try it; and how many
rounds that counts for."""
TRIAL_SHARE = 0.02
"""Of the time since a model was last tried: what reading the text may cost so that it can be tried
again."""
ROUND_TOKENS = 2
"""Tokens of a round with a model, to tell how many rounds are left of a request."""
READ_ALONG = 8
"""Unread tokens that a model reads in about the time of one: what plain rounds left since it
drafted last costs nothing extra."""
EASY = 0.9
"""Share of a model's tokens that is kept where text is easy to predict."""
CONFIDENCE = (0.3, 0.5, 0.7, 0.8, 0.86, 0.9, 0.93, 0.95)
"""Where in the table a continuation begins to be counted, by the length of what matched, the tokens
drafted since included."""


@dataclass
class Experience:
    """What was counted of a head or draft model, of all requests that share it.

    Args:
        table: confidence → how often a token was kept.
        gain: of its rounds, an average that forgets, in tokens of plain decoding.
        ahead: the chance that a token is kept, before its distribution is known.
        rounds: how many there were.
        idle: rounds since the last one, of all requests that could have used the model.
        patience: idle rounds after which it is tried again.
        alternatives: the probability of a token that it ranked second or third → how often that was
            the target's choice.
    """

    table: AcceptanceTable = field(default_factory=AcceptanceTable.empty)
    gain: float = FIRST_GAIN
    ahead: float = 0.5
    rounds: int = 0
    idle: int = 0
    patience: int = PROBE
    alternatives: AcceptanceTable = field(default_factory=AcceptanceTable.empty)


@dataclass
class Shared:
    """What all requests of one class of temperatures have counted: of continuations of a request's
    own text and of a datastore's, which are right more or less often at the same confidence, and of
    head and draft model."""

    lookup: AcceptanceTable
    models: dict[str, Experience]
    stored: AcceptanceTable = field(default_factory=AcceptanceTable.empty)


class Candidate:
    """A head or draft model as one request uses it.

    Args:
        make: its drafter, given the policy that ends its drafts.
        costs: of a round with it.
        seen: shared experience.
        longest: tokens of a draft at most.
        role: of the model.
        alone: count the prompt as unread also where an earlier request left it in the slot, so that
            the choice does not depend on others.
        alternatives: to each token of a head's draft, at most; 0: chains alone.
    """

    def __init__(
        self,
        make: Callable[[WorthDrafting], Drafter],
        costs: RoundCosts,
        seen: Experience,
        longest: int,
        role: Role = "draft",
        *,
        alone: bool = False,
        alternatives: int = 0,
    ):
        self.costs, self.seen, self.role, self.alone = costs, seen, role, alone
        self.stop = WorthDrafting(costs, seen.table, seen.ahead, longest)
        self.drafter = make(self.stop)
        self.alternatives = Alternatives(costs, seen.table, seen.alternatives, alternatives)
        self._longest, self._steps = longest, 0
        self._pays: dict[int, bool] = {}

    def able(self, session: Session, limit: int) -> bool:
        """Whether the text fits into the model's context, and a draft pays at least where text is
        easiest."""
        if limit not in self._pays:
            self._pays[limit] = self.costs.outlook(0, 1.0, [EASY] * limit, computed=0) > 0.0
        return (
            self._pays[limit]
            and len(session.text.ids) + limit <= session.lanes[self.role].model.max_context
        )

    def debt(self, session: Session) -> float:
        """What reading the text costs before the first draft, in target passes over one token."""
        lane = session.lanes[self.role]
        held = 0 if self.alone and lane.fresh else lane.length
        return self.costs.reading * max(0, len(session.text.ids) - held - READ_ALONG)

    def outlook(self, session: Session) -> float:
        """What drafting with it for the rest of the request gains over plain decoding, its reading
        of the text included."""
        return self.seen.gain * session.text.remaining / ROUND_TOKENS - self.debt(session)

    def due(self, session: Session) -> bool:
        """Whether it is time to try it again, though others gain more, and the request has room for
        a draft to show something."""
        return session.text.remaining >= self._longest and self.seen.idle >= max(
            self.seen.patience, self.debt(session) / TRIAL_SHARE
        )

    def propose(self, session: Session, limit: int) -> Step[Draft]:
        """Its draft, ended where no further token is worth it."""
        self.seen.idle, self.stop.ahead, self.stop.max_draft = (
            0,
            self.seen.ahead,
            min(limit, self._longest),
        )
        before = session.stats.draft_calls
        draft = yield from self.drafter.propose(session, limit)
        draft.confidence = self.stop.confidence[: len(draft)]
        self._steps = session.stats.draft_calls - before
        return draft

    def widened(self, session: Session, draft: Draft) -> DraftTree | None:
        """The draft with alternatives beside it; None: nothing but the draft, which is judged as a
        chain."""
        self.alternatives.ranked = []
        if (
            not self.alternatives.most
            or not draft.tokens
            or not session.sampling.has_choice
            or not session.target.trees
        ):
            return None
        tree = self.alternatives.around(draft, min(self._longest, session.tree_room()))
        session.stats.drafted += len(tree) - len(draft)
        return None if tree.is_chain else tree

    def learn(
        self, draft: Draft, verdict: Verdict, rival: float, *, beside: int = 0, kept_beside: int = 0
    ) -> None:
        """Count what was judged, and what the round gained.

        Args:
            rival: what the round would have gained otherwise: a model that gains less is not tried
                again soon.
            beside: alternatives that were verified; `kept_beside`: of these kept, 0 or 1.
        """
        seen = self.seen
        corrected = [verdict.token] if verdict.rejected and verdict.token is not None else []
        self.alternatives.count([*draft.tokens[: verdict.accepted], *corrected])
        count_kept(seen.table, draft, verdict)
        for i in range(verdict.judged):
            seen.ahead += ((i < verdict.accepted) - seen.ahead) / (4 * MEMORY)
        gained = (
            verdict.accepted
            + kept_beside
            - self.costs.lengthening(0, len(draft) + beside)
            - self.costs.step * self._steps
        )
        seen.patience = PROBE if gained > rival else min(2 * seen.patience, MOST_PATIENCE)
        seen.rounds += 1
        seen.gain += (gained - seen.gain) / min(MEMORY, FIRST_ROUNDS + seen.rounds)


class BestDrafter:
    """A `Drafter` for one request; `learn` must be called with every verdict.

    Args:
        costs: of a round whose draft costs nothing.
        lookup: continuation's confidence → how often a token was kept, shared; `stored`: the same
            of the datastore's.
        models: head and draft model, as far as there are any.
        longest: tokens of a draft at most.
        datastore: texts of the target, where there are any, to look into besides the request's own.
    """

    def __init__(
        self,
        costs: RoundCosts,
        lookup: AcceptanceTable,
        models: Sequence[Candidate],
        longest: int,
        datastore: Datastore | None = None,
        stored: AcceptanceTable | None = None,
    ):
        self.costs, self.lookup, self.models, self.longest, self.datastore = (
            costs,
            lookup,
            models,
            longest,
            datastore,
        )
        self.stored = AcceptanceTable.empty() if stored is None else stored
        self._source = lookup
        self.index = SuffixIndex()
        self._rival = 0.0
        self.chosen: Candidate | None = None
        """What drafted in this round; None: nothing, or a look-up."""

    def propose(self, session: Session, limit: int, pending: Draft | None = None) -> Step[Draft]:
        limit = min(limit, self.longest)
        found, gain = self._look_up(session, limit)
        self.chosen = self._choose(session, found, gain, limit)
        session.stats.drafter = "text" if self.chosen is None else self.chosen.role
        if self.chosen is not None:
            return (yield from self.chosen.propose(session, limit))
        session.stats.drafted += len(found)
        return found

    def _choose(self, session: Session, found: Draft, gain: float, limit: int) -> Candidate | None:
        """The model to draft with, if one is expected to gain more than what was found."""
        able = [one for one in self.models if limit > 0 and one.able(session, limit)]
        for one in able:
            one.seen.idle += 1
        best = max(able, key=lambda one: one.outlook(session), default=None)
        if best is not None and (
            best.outlook(session) <= 0.0 or (len(found) and gain >= best.seen.gain)
        ):
            best = None
        due = (
            None
            if len(found)
            else next((one for one in able if one is not best and one.due(session)), None)
        )
        chosen = due or best
        self._rival = max([0.0, gain, *(one.seen.gain for one in able if one is not chosen)])
        return chosen

    def _look_up(self, session: Session, limit: int) -> tuple[Draft, float]:
        """What followed the longest match of the text's end, as far as it is worth verifying, and
        what it is expected to gain."""
        if limit == 0:
            return Draft(), 0.0
        self.index.extend(session.text.ids)
        found = [(self.index.continuations(limit), self.lookup)]
        if self.datastore is not None:
            found.append((self.datastore.continuations(session.text.ids, limit), self.stored))
        worth = [
            (*self._worth(one, limit, session.sampling.stop_token_ids, table), table)
            for one, table in found
        ]
        tokens, confidence, gain, self._source = max(worth, key=lambda one: one[2])
        return Draft(tokens, confidence=confidence), gain

    def _worth(
        self, found: Continuations, limit: int, stops: frozenset[int], table: AcceptanceTable
    ) -> tuple[list[int], list[float], float]:
        """Tokens of the likeliest continuation that are worth verifying, their confidences, and the
        expected gain."""
        tokens, shares = likeliest_chain(found, limit)
        end = next((i + 1 for i, token in enumerate(tokens) if token in stops), len(tokens))
        confidence = [
            share * CONFIDENCE[min(found.length + i, len(CONFIDENCE)) - 1]
            for i, share in enumerate(shares[:end])
        ]
        count, gain = self.costs.best_length([table.alpha(one) for one in confidence])
        return tokens[:count], confidence[:count], gain

    def widened(self, session: Session, draft: Draft) -> DraftTree | None:
        """The draft with alternatives beside it, where what drafted it has any that pay."""
        return None if self.chosen is None else self.chosen.widened(session, draft)

    def learn_tree(self, draft: Draft, tree: DraftTree, verdict: TreeVerdict) -> None:
        """As `learn`, of a draft that was verified with alternatives."""
        assert self.chosen is not None, "look-ups have no alternatives"
        alone = self.chosen.alternatives.learn(draft, tree, verdict)
        self.chosen.learn(
            draft,
            alone,
            self._rival,
            beside=len(tree) - len(draft),
            kept_beside=len(verdict.path) - alone.accepted,
        )

    def learn(self, draft: Draft, verdict: Verdict) -> None:
        """Count what was judged."""
        if self.chosen is not None:
            self.chosen.learn(draft, verdict, self._rival)
            return
        count_kept(self._source, draft, verdict)
