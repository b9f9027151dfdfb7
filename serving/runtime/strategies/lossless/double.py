"""Double: draft and target run at once, and both look up what followed the text's end before
(2601.05524, and its code Sylvan820/Double-Spec).

A guess is what followed the same n-gram earlier in the text. Each round the draft makes γ passes;
each reads a guess and keeps as many of its tokens as it draws itself, and draws one more. At the
same time the target reads the unverified tokens and a guess of its own after them, and judges

1. the unverified tokens; if all are kept,
2. the draft's new tokens as far as they agree with its guess, and one more; where they end before
   the guess, the rest of that;
3. after a correction that is the guess's own token, the rest of the guess, which it has read.

New tokens that it had no rows for are unverified in the next round.

Ours: a drafted token is drawn from the draft as any other, so that guesses only say which rows are
read, and what is judged of the target's guess is a deterministic proposal: lossless at every
temperature. The published loop keeps what matches an argmax, with certainty, and is greedy
alone; and where the target's own tokens are as many as the new ones it takes those instead. Its
guesses also come from other requests' texts and from rejected tokens.
"""

from __future__ import annotations

from pydantic import Field

from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.runtime.acceptance.exact import Exact
from draftwell.serving.runtime.commands import Overlap, Step
from draftwell.serving.runtime.drafting.ngram import NGramIndex
from draftwell.serving.runtime.logits import Span
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.strategies.base import Strategy, StrategyConfig
from draftwell.serving.runtime.types import Draft, Verdict

LONGEST = 32


class Double(Strategy):
    name = "double"
    lossless = True
    paper = "Double, Shen 2026 (2601.05524), and its code"
    artifacts = ("hardware_profile",)
    overlaps = True

    class Config(StrategyConfig):
        passes: int | None = Field(
            None,
            ge=1,
            le=LONGEST,
            description="gamma: draft passes a round; None: in a verification",
        )
        max_matching_ngram_size: int = Field(3, ge=1, le=8, description="longest n-gram looked up")
        guess_tokens: int = Field(10, ge=0, le=32, description="longest guess")

    def run(self, session: Session) -> Step[None]:
        index = NGramIndex(self.config.max_matching_ngram_size)
        gamma, text, pending = self.gamma(), session.text, Draft()
        while not text.finished:
            if not len(pending) and (yield from session.follow_prediction()):
                continue
            if session.longest_draft == 0 and not len(pending):
                yield from session.decode_plainly()
                continue
            index.extend(text.ids)
            room = session.draft_room(len(pending))
            # none in the prompt's pass: it gives the first token
            most = 0 if session.target.fresh else session.draft_limit - len(pending)
            guess = Draft(
                self.guess(index, text.ids + pending.tokens, session, max(0, min(room, most)))
            )
            chain, held = pending + guess, len(text.ids)
            rows, new = yield Overlap(
                session.verify(chain), self.drafted(index, session, pending, gamma, room)
            )
            session.stats.drafted += len(guess) - same(new.tokens, guess.tokens)
            read = {"target": chain.tokens, "draft": pending.tokens + new.tokens}
            judged = pending + agreeing(new, guess)
            verdict = yield from self.judge(judged, chain, rows, session)
            left = new[len(judged) - len(pending) :] if verdict.token is None else Draft()
            at = verdict.accepted
            guessed = verdict.rejected and verdict.token in chain.tokens[at : at + 1]
            self.commit(judged[: at + 1] if guessed else judged, verdict, rows, session)
            if guessed and not text.finished:
                rest = chain[at + 1 :]
                more = yield from self.judge(rest, rest, rows[at + 1 :], session)
                self.commit(rest, more, rows[at + 1 :], session, at + 1)
            pending = Draft() if text.finished else left
            after = text.ids[held:] + pending.tokens
            for lane in session.lanes.values():
                lane.rollback(held + same(read[lane.role], after))

    def guess(self, index: NGramIndex, ids: list[int], session: Session, room: int) -> list[int]:
        """What followed the text's end before, no further than a stop token."""
        tokens = index.follow(ids, min(self.config.guess_tokens, room))
        stops = session.sampling.stop_token_ids
        end = next((i + 1 for i, token in enumerate(tokens) if token in stops), len(tokens))
        return tokens[:end]

    def drafted(
        self, index: NGramIndex, session: Session, pending: Draft, passes: int, room: int
    ) -> Step[Draft]:
        """Tokens drawn from the draft after the unverified ones, in so many passes."""
        draft, stops = Draft(), session.sampling.stop_token_ids
        if pending.tokens and pending.tokens[-1] in stops:
            return draft
        for _ in range(passes):
            if len(draft) >= room or (draft.tokens and draft.tokens[-1] in stops):
                break
            before = session.text.ids + pending.tokens + draft.tokens
            guess = self.guess(index, before, session, room - len(draft) - 1)
            rows = yield from session.draft.read(before + guess, keep=len(guess) + 1)
            for i, guessed in enumerate([*guess, None]):
                token, prob = yield from rows.draw(i, session.rng.draft)
                draft = draft + Draft([token], [rows[i]], probs=[prob])
                if token != guessed or token in stops:
                    break
            session.draft.rollback(len(before) + i)
        session.stats.drafted += len(draft)
        return draft

    def judge(self, judged: Draft, chain: Draft, rows: Span, session: Session) -> Step[Verdict]:
        """The verdict; a bonus only behind all that the target has read, if the text has room."""
        bonus = judged.tokens == chain.tokens and len(chain) < session.text.remaining
        return (yield from Exact().judge(judged, rows, session.rng, bonus=bonus))

    def commit(
        self, judged: Draft, verdict: Verdict, rows: Span, session: Session, start: int = 0
    ) -> None:
        """Make a verdict's tokens final; slots keep what they have read of them."""
        corrected = [] if verdict.token is None else [verdict.token]
        session.append([*judged.tokens[: verdict.accepted], *corrected], verdict.origins, rows)
        session.stats.count(judged, verdict, start)

    @property
    def longest_draft(self) -> int | None:
        measured = HardwareProfile.kind in self.resources.artifacts
        return self.gamma() if self.config.passes or measured else None

    def gamma(self) -> int:
        """Draft passes a round: as set, or as the profile says."""
        if self.config.passes is not None:
            return int(self.config.passes)
        return self.artifact(HardwareProfile).overlapped_length(LONGEST)


def agreeing(new: Draft, guess: Draft) -> Draft:
    """Of the draft's new tokens those that the target has rows for, and the rest of its guess where
    they end before it."""
    alike = same(new.tokens, guess.tokens)
    return new[: alike + 1] if len(new) > alike else new + guess[alike:]


def same(one: list[int], other: list[int]) -> int:
    """How many tokens both begin with."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
