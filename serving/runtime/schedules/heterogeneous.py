"""DuoDecoding's schedule: draft and target run at once, on devices or cores of their own
(DuoDecoding, Algorithms 1 and 2).

Every round the target reads what the last round left unverified, while the draft makes this round's
sequences after it. The leftover is judged first, and a rejection in it discards the sequences. All
kept: the sequences' first tokens are tested, in rank order, on the row after it. The winner's other
tokens are the next leftover; without a winner a token is sampled and nothing is left over. There is
no bonus. The prompt's round drafts one token, for the shortest time to first token.
"""

from __future__ import annotations

from draftwell.serving.runtime.commands import Overlap, Step
from draftwell.serving.runtime.logits import Span
from draftwell.serving.runtime.protocols import AcceptanceRule, CandidateRule, SequenceDrafter
from draftwell.serving.runtime.session.lane import DraftSequence
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.types import Draft, Verdict


def heterogeneous(
    session: Session,
    drafter: SequenceDrafter,
    rule: AcceptanceRule,
    candidates: CandidateRule,
    budget: int,
) -> Step[None]:
    """Run a request to its end.

    Args:
        rule: judges leftovers.
        candidates: judges the first tokens of a round's sequences.
        budget: gamma, tokens that the draft makes while the target verifies, at least 1.
    """
    leftover, gamma = Draft(), 1
    while not session.text.finished:
        if not len(leftover) and (yield from session.follow_prediction()):
            gamma = budget
            continue
        if session.longest_draft == 0 and not len(leftover):
            yield from session.decode_plainly()
            continue
        rows, sequences = yield from verify_and_draft(session, leftover, drafter, gamma)
        verdict = yield from rule.judge(leftover, rows, session.rng, bonus=False)
        if verdict.rejected or not sequences:
            session.commit(leftover, verdict, rows)
            leftover = Draft()
        else:
            leftover = yield from choose_sequence(
                session, leftover, sequences, rows, candidates, chosen=gamma > 1
            )
        gamma = budget


def verify_and_draft(
    session: Session, leftover: Draft, drafter: SequenceDrafter, budget: int
) -> Step[tuple[Span, list[DraftSequence]]]:
    """Target rows for the leftover and the position after it, and the sequences drafted meanwhile
    (none after the end)."""
    limit = session.draft_room(len(leftover))
    if limit == 0 or (leftover.tokens and leftover.tokens[-1] in session.sampling.stop_token_ids):
        return (yield from session.verify(leftover)), []
    proposal = drafter.propose(session, min(budget, session.draft_limit), limit, leftover)
    both: tuple[Span, list[DraftSequence]] = yield Overlap(session.verify(leftover), proposal)
    return both


def choose_sequence(
    session: Session,
    leftover: Draft,
    sequences: list[DraftSequence],
    rows: Span,
    candidates: CandidateRule,
    *,
    chosen: bool = True,
) -> Step[Draft]:
    """Commit a kept leftover and the token after it; return the next leftover.

    Args:
        chosen: whether there could have been another number of sequences, so that the round is
            counted.
    """
    kept = len(leftover)
    branching = len(session.text.ids) + kept
    firsts = [sequence.draft.tokens[0] for sequence in sequences]
    choice = yield from candidates.choose(firsts, kept, rows, session.rng)
    judged = kept + choice.tested
    if chosen:
        session.stats.sequences[len(sequences), choice.rank == 0] += 1
    if choice.rank is None:
        session.commit(leftover + sequences[0].draft[:1], Verdict(kept, choice.token, judged), rows)
        return Draft()
    winner = sequences[choice.rank]
    session.commit(leftover + winner.draft[:1], Verdict(kept + 1, None, judged), rows)
    if choice.rank > 0:
        session.draft.rollback(branching)  # it has read the first sequence
        if winner.lane is not session.draft:
            session.draft.adopt(winner.lane)
    return winner.draft[1:]
