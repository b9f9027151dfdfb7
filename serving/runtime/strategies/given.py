"""Drafts that come with the request, in front of any strategy: what its grammar leaves no choice
about, and a client's prediction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from draftwell.serving.runtime.acceptance.exact import Exact
from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.drafting.prediction import Prediction
from draftwell.serving.runtime.grammar.masks import GrammarMasks
from draftwell.serving.runtime.session.session import Follow, Session
from draftwell.serving.runtime.session.stats import Stats
from draftwell.serving.runtime.trees import DraftTree
from draftwell.serving.runtime.types import Draft, Verdict

LEAST_WORTH = 0.5
"""Tokens that a draft of the prediction must be expected to bring, also where the strategy drafts
nothing."""
FEWEST_FORCED, MOST_FORCED = 2, 32
"""Forced tokens of a draft. A single one is not worth a round in which the strategy drafts
nothing."""


class Given(Protocol):
    """A source of such drafts; one object serves one request.

    Args:
        name: in the counts of what drafted the tokens that were kept.
    """

    name: str

    def propose(self, session: Session) -> Draft:
        """What probably comes next; nothing where it cannot say."""

    def learn(self, session: Session, draft: Draft, verdict: Verdict) -> None:
        """Note and count what became of a draft."""


class Predicted:
    """What the client's prediction says."""

    name = "prediction"

    def __init__(self, prediction: Prediction):
        self.prediction = prediction

    def propose(self, session: Session) -> Draft:
        return self.prediction.propose(
            session.text, session.verified_room, worth=self.worth(session.stats)
        )

    @staticmethod
    def worth(stats: Stats) -> float:
        """Draft tokens that a round of the strategy's own has brought, on average; one round that
        brought one token is added. At least `LEAST_WORTH`: a busy server pays for each token."""
        kept = stats.accepted - stats.predicted_accepted - stats.forced_accepted
        rounds = stats.verdicts - stats.predicted_rounds - stats.forced_rounds
        return max(LEAST_WORTH, (kept + 1) / (max(0, rounds) + 1))

    def learn(self, session: Session, draft: Draft, verdict: Verdict) -> None:
        stats = session.stats
        stats.predicted += len(draft)
        stats.predicted_rounds += 1
        stats.predicted_judged += verdict.judged
        stats.predicted_accepted += verdict.accepted
        self.prediction.learn(draft, verdict)


class Forced:
    """What the grammar leaves no choice about, in its usual spelling: the target may spell it with
    other tokens."""

    name = "grammar"

    def __init__(self, grammar: GrammarMasks):
        self.grammar = grammar

    def propose(self, session: Session) -> Draft:
        room = min(session.verified_room, MOST_FORCED)
        forced = self.grammar.forced(session.text.output)[:room] if room >= FEWEST_FORCED else []
        return Draft(forced if len(forced) >= FEWEST_FORCED else [])

    def learn(self, session: Session, draft: Draft, verdict: Verdict) -> None:
        stats = session.stats
        stats.forced += len(draft)
        stats.forced_rounds += 1
        stats.forced_judged += verdict.judged
        stats.forced_accepted += verdict.accepted


class GivenRounds:
    """Rounds whose draft is given, judged exactly whatever the strategy's own rule; one object
    serves one request.

    Between two rounds of any schedule nothing is pending, and the text may have grown by whatever
    an exact rule kept.

    Args:
        sources: the first that proposes something has the round.
    """

    def __init__(self, sources: Sequence[Given]):
        self.sources, self.rule = sources, Exact()

    def __call__(self, session: Session, follow: Follow | None) -> Step[bool]:
        """One round; False: nothing is known of what comes next."""
        for source in self.sources:
            draft = source.propose(session)
            if len(draft):
                break
        else:
            return False
        session.stats.drafted += len(draft)
        rows = yield from session.verify(draft)
        verdict = yield from self.rule.judge(draft, rows, session.rng)
        before, session.stats.drafter = session.stats.drafter, source.name
        session.commit(draft, verdict, rows)
        session.stats.drafter = before
        source.learn(session, draft, verdict)
        if follow:
            follow(
                DraftTree(draft.tokens, list(range(-1, len(draft) - 1))),
                list(range(verdict.accepted)),
                rows,
            )
        return True


def draft_given(session: Session) -> None:
    """Let what comes with a request be verified before anything else is drafted, if there is
    anything."""
    sources: list[Given] = []
    if session.grammar is not None and session.sampling.draft_forced:
        sources.append(Forced(session.grammar))
    if session.sampling.prediction:
        sources.append(Predicted(Prediction(session.sampling.prediction)))
    if sources:
        session.given = GivenRounds(sources)
