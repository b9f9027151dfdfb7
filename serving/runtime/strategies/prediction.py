"""A client's prediction in front of any strategy: the drafter and the rule of the rounds that verify it."""

from __future__ import annotations

from serving.runtime.acceptance.exact import Exact
from serving.runtime.commands import Step
from serving.runtime.drafting.prediction import Prediction
from serving.runtime.session.session import Follow, Session
from serving.runtime.trees import DraftTree


class PredictedRounds:
    """Rounds whose draft is the prediction, judged exactly whatever the strategy's own rule; one object serves one request.

    Between two rounds of any schedule nothing is pending, and the text may have grown by whatever an exact rule kept.
    """

    def __init__(self, prediction: Prediction):
        self.prediction, self.rule = prediction, Exact()

    def __call__(self, session: Session, follow: Follow | None) -> Step[bool]:
        """One round; False: the prediction says nothing of what comes next."""
        draft = self.prediction.propose(session.text, session.predicted_room)
        if not len(draft):
            return False
        stats = session.stats
        stats.drafted += len(draft)
        stats.predicted += len(draft)
        rows = yield from session.verify(draft)
        verdict = self.rule.judge(draft, rows, session.rng)
        session.commit(draft, verdict, rows)
        stats.predicted_rounds += 1
        stats.predicted_judged += verdict.judged
        stats.predicted_accepted += verdict.accepted
        self.prediction.learn(draft, verdict)
        if follow:
            follow(DraftTree(draft.tokens, list(range(-1, len(draft) - 1))), list(range(verdict.accepted)), rows)
        return True


def predict(session: Session) -> None:
    """Let a request's prediction be verified before anything else is drafted, if it has one."""
    if session.sampling.prediction:
        session.prediction = PredictedRounds(Prediction(session.sampling.prediction))
