"""Drafts, verdicts on them, and the protocol of stop policies.

Terms: *accepted* = a draft token kept; *recovered* = the token sampled from the target at a
rejection; *bonus* = the token sampled from the target after a fully accepted draft; *rescued* = a
draft token kept against the exact rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.logits import Rating, Span

Origin = Literal["accepted", "rescued", "recovered", "target"]
"""Where a final token comes from: the draft (kept by the exact rule, or against it), or the target
(at a rejection, or elsewhere: plain decoding, the prompt's first token, a bonus)."""


class Emitted(NamedTuple):
    """A final token as a request hands it out.

    Args:
        rating: where the request asked for log-probs.
    """

    id: int
    origin: Origin = "target"
    rating: Rating | None = None


@dataclass
class Draft:
    """Tokens proposed for verification.

    Args:
        tokens: the proposed ids, in order.
        rows: for each token the one-row distribution it was drawn from, None for one that was
            proposed deterministically (n-gram, ranked candidates), whose distribution is one-hot;
            empty where all were. Rules ask `row`.
        confidence: C of each token's distribution, where the drafter computes it (docs/methods.md,
            "Two pairs").
        probs: the warped probability with which each token was drawn, where the drafter knows it.
            Rules ask `prob`.
        cut: a busy server's limit ended it, so its length says nothing of the stop policy.
    """

    tokens: list[int] = field(default_factory=list)
    rows: list[Span | None] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    cut: bool = field(default=False, compare=False)
    probs: list[float] = field(default_factory=list, compare=False)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, part: slice) -> Draft:
        return Draft(
            self.tokens[part], self.rows[part], self.confidence[part], probs=self.probs[part]
        )

    def __add__(self, other: Draft) -> Draft:
        """Both proposals in order; each token keeps the distribution that it was drawn from.

        Raises:
            DraftwellError: only one of them has confidences, which would then belong to other
                tokens (`mixed_confidence`).
        """
        if len(self) and len(other) and bool(self.confidence) != bool(other.confidence):
            raise DraftwellError(
                "a draft with confidences cannot be joined to one without: let every "
                "drafter of the schedule record them, "
                "or none",
                code="mixed_confidence",
            )
        one_hot = not self.rows and not other.rows
        rows = [] if one_hot else [part.row(i) for part in (self, other) for i in range(len(part))]
        both = (self, other)
        unknown = any(part.rows and not part.probs for part in both)
        probs = [] if unknown else [part.prob(i) for part in both for i in range(len(part))]
        return Draft(
            self.tokens + other.tokens, rows, self.confidence + other.confidence, probs=probs
        )

    def row(self, i: int) -> Span | None:
        """The one-row distribution that token i was drawn from; None where it was proposed
        deterministically: that one is one-hot."""
        return self.rows[i] if self.rows else None

    def prob(self, i: int) -> float:
        """Warped probability with which token i was proposed; 1 where it was proposed
        deterministically."""
        if self.probs:
            return self.probs[i]
        return 1.0 if (row := self.row(i)) is None else row.prob(0, self.tokens[i])


@dataclass
class Verdict:
    """What an acceptance rule decided about a draft.

    Args:
        accepted: number of leading draft tokens kept (rescued ones included).
        token: the token sampled from the target after them, or None when the text ended inside the
            draft.
        judged: number of draft tokens looked at: the kept ones and the first rejected.
        rescued_at: places of the draft tokens kept against the exact rule.
    """

    accepted: int
    token: int | None
    judged: int
    rescued_at: Sequence[int] = ()

    @property
    def rejected(self) -> bool:
        return self.judged > self.accepted

    @property
    def rescued(self) -> int:
        """How many were kept against the exact rule."""
        return len(self.rescued_at)

    @property
    def origins(self) -> list[Origin]:
        """Of the kept tokens, and of the one after them if there is one.

        >>> Verdict(accepted=2, token=9, judged=3, rescued_at=[1]).origins
        ['accepted', 'rescued', 'recovered']
        """
        kept: list[Origin] = [
            "rescued" if i in self.rescued_at else "accepted" for i in range(self.accepted)
        ]
        if self.token is not None:
            kept.append("recovered" if self.rejected else "target")
        return kept


@dataclass
class CandidateChoice:
    """What a rule decided about alternatives for one position.

    Args:
        rank: index of the candidate kept, or None.
        token: the candidate kept, or the token sampled from the target in its place.
        tested: candidates looked at.
    """

    rank: int | None
    token: int
    tested: int


class StopPolicy(Protocol):
    """Decides when a draft is long enough; one object serves one request.

    It may read the draft's own distributions and tokens, never the uniforms or the target of this
    round. The token it looked at stays in the draft: dropping it would bias the output
    (docs/methods.md, condition 2).
    """

    def start(self) -> None:
        """A new draft begins."""

    def stop_before(self, row: Span) -> bool:
        """Whether to stop before a token is drawn from the one-row `row`; the draft may then be
        empty."""

    def stop_after(self, row: Span, token: int) -> bool:
        """Whether to stop after `token`, drawn from the one-row `row`."""
