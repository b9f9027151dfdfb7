"""What drafters and acceptance rules offer to schedules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.logits import Span
from draftwell.serving.runtime.random_streams import Streams
from draftwell.serving.runtime.trees import DraftTree, TreeVerdict
from draftwell.serving.runtime.types import CandidateChoice, Draft, Verdict

if TYPE_CHECKING:
    from draftwell.serving.runtime.session.lane import DraftSequence
    from draftwell.serving.runtime.session.session import Session


class Drafter(Protocol):
    """Proposes tokens after text and pending draft."""

    def propose(self, session: Session, limit: int, pending: Draft | None = None) -> Step[Draft]:
        """At most `limit` >= 0 tokens after the session's text and the unverified `pending`
        tokens."""


class SequenceDrafter(Protocol):
    """Proposes several sequences that start at the same position."""

    def propose(
        self, session: Session, budget: int, limit: int, pending: Draft
    ) -> Step[list[DraftSequence]]:
        """Sequences after text and `pending`, best first, with different first tokens.

        Args:
            budget: tokens of all sequences together, at least 1.
            limit: tokens of one sequence at most, at least 1.
        """


class TreeDrafter(Protocol):
    """Proposes a tree of tokens after the text."""

    def propose(self, session: Session, limit: int) -> Step[DraftTree]:
        """A tree of at most `limit` >= 0 levels; a chain where the request allows no tree
        (`Lane.trees` of its target), with at most `session.draft_limit` tokens, which it shares
        with chains: what a busy server verifies is priced by tokens."""


class TreeRule(Protocol):
    """Judges a tree against the target's distributions."""

    lossless: ClassVar[bool]

    def judge(self, tree: DraftTree, target: Span, rng: Streams) -> Step[TreeVerdict]:
        """Decide which path stays; `target` has the row after the text, then one after each token
        of the tree."""


class CandidateRule(Protocol):
    """Judges alternatives for one position."""

    lossless: ClassVar[bool]

    def choose(
        self, candidates: Sequence[int], row: int, target: Span, rng: Streams
    ) -> Step[CandidateChoice]:
        """Keep at most one of different tokens, tested in order against a row of the target; else
        sample another token."""


class AcceptanceRule(Protocol):
    """Judges a draft against the target's distributions."""

    lossless: ClassVar[bool]

    def judge(
        self, draft: Draft, target: Span, rng: Streams, *, bonus: bool = True
    ) -> Step[Verdict]:
        """Decide how much of a draft stays.

        Args:
            draft: k proposed tokens.
            target: the target's rows for the k tokens and, if `bonus`, one more.
            rng: tests read `rng.test`, sampled tokens `rng.sample`.
            bonus: sample a token after a fully kept draft (False when the next draft token will be
                tested there).
        """
