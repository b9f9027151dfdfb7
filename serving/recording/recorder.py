"""What both models predict at every position of one request's output, kept as the rows of a trace
while it is decoded.

Monitoring wants *every* position (docs/drift.md): a strategy drafts where the draft is sure, and
those positions alone would look like other traffic. The target judges or samples every token, so it
has a row for each. The draft has read every token but the last few; where it did not draft (after a
bonus token) its row comes with the next forward pass, one more row of logits.

Nothing here changes what is decoded: random streams are the recorder's own, and a recorder that
fails only stops recording.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftwell.serving.runtime.commands import Role
from draftwell.serving.runtime.logits import Span
from draftwell.serving.runtime.random_streams import RandomStream
from draftwell.serving.runtime.sampling import residual
from draftwell.serving.runtime.session.session import Session

log = logging.getLogger(__name__)

PURPOSE = 17
"""Number of the recorder's random stream; a request draws from 1 to 3."""
MOST_WAITING = 128
"""Rows that may wait for the other model's view, 200 kB each at most for 50,000 tokens. More wait
where nothing is drafted for long (a busy server), and that text is given up."""


@dataclass(frozen=True)
class ModelRow:
    """What a model predicts after `sequence[:index]`: one row of a forward pass."""

    sequence: Sequence[int]
    span: Span


class PositionRecorder:
    """Collects the positions of a request (a `Recorder`); attach it before the engine's next step.

    A record is a dict with the names of `trace.trace_schema`. As in a collected trace the draft's
    token and the target's correction are drawn for the record: at temperature 0 they are what was
    drafted and chosen, above it they follow the same distribution.

    Args:
        session: of the request, which has just been submitted; it needs a draft (or a shadow), and
            may not bias or penalise tokens.
        lossless: the text is the target's own; else its greedy tokens may be others than the
            target's choice.
        hidden: keep the draft's state that each token was drafted from.
    """

    def __init__(self, session: Session, *, lossless: bool, hidden: bool = False):
        self.text, self.sampling = session.text, session.sampling
        self.lossless, self.hidden = lossless, hidden
        self.positions: list[dict[str, Any]] = []
        self.failed = self.stopped = False
        self._session = session
        self._random = RandomStream(session.sampling.seed, PURPOSE)
        self._rows: dict[Role, dict[int, list[ModelRow]]] = {"target": {}, "draft": {}}
        session.record(self)

    def saw(self, role: Role, sequence: Sequence[int], span: Span, steps: int) -> None:
        """Keep the rows of a forward pass until both models have read up to a final token."""
        try:
            if steps > 1:
                sequence = [*sequence, *span.top[:-1]]
            first = len(sequence) - len(span) + 1
            for row in range(len(span)):
                if first + row >= self._next:
                    self._rows[role].setdefault(first + row, []).append(
                        # a view would hold the logits of the whole batch
                        ModelRow(sequence, Span.joined([span[row]], hidden=self.hidden))
                    )
            self.catch_up()
            self._forget_contradicted()
            if self.waiting > MOST_WAITING:
                self._fail("a model's view of a position never came")
        except Exception as error:
            self.give_up(error)

    def finish(self) -> list[dict[str, Any]]:
        """Stop, and return the positions from the first on. The last ones, which the draft did not
        read any more, are missing."""
        if not self.failed:
            try:
                self.catch_up()
            except Exception as error:
                self.give_up(error)
        self._stop()
        return self.positions

    def catch_up(self) -> None:
        """Record, in order, the final tokens for which both models have a row."""
        while (index := self._next) < len(self.text.ids):
            target, draft = self._valid("target", index), self._valid("draft", index)
            if target is None or draft is None:
                return
            self.positions.append(
                self._position(
                    index, draft.span.under(self.sampling), target.span.under(self.sampling)
                )
            )
            for of_role in self._rows.values():
                of_role.pop(index, None)

    @property
    def waiting(self) -> int:
        """Rows of one model that wait for the other's view."""
        return sum(len(rows) for of_role in self._rows.values() for rows in of_role.values())

    def _forget_contradicted(self) -> None:
        """Drop rows that follow rejected guesses: where many are rejected they outnumber all
        others."""
        for of_role in self._rows.values():
            for index in list(of_role):
                of_role[index] = [row for row in of_role[index] if self._follows_text(row, index)]

    def _follows_text(self, row: ModelRow, index: int) -> bool:
        """Whether a row's sequence is the text's, as far as there is text."""
        start = self.text.prompt_length
        written = self.text.ids[start:index]
        return list(row.sequence[start : start + len(written)]) == written

    def give_up(self, error: Exception) -> None:
        """Stop because of an error, and keep nothing."""
        self._fail(f"{type(error).__name__}: {error}")

    @property
    def _next(self) -> int:
        """Index in the text of the first token that is not recorded."""
        return self.text.prompt_length + len(self.positions)

    def _valid(self, role: Role, index: int) -> ModelRow | None:
        """The newest row of a model about a token that was read after what became the text."""
        return next(
            (
                row
                for row in reversed(self._rows[role].get(index, ()))
                if self._follows_text(row, index)
            ),
            None,
        )

    def _position(self, index: int, draft: Span, target: Span) -> dict[str, Any]:
        """The numbers of one position (docs/methods.md, "Two pairs of distributions")."""
        token = self.text.ids[index]
        drafted = draft.top[0] if self.sampling.greedy else self._random.draw(draft.probs(0))
        if self.sampling.greedy:
            correction = token if self.lossless else target.top[0]
            draft_q, draft_p = 1.0, float(drafted == correction)
        else:
            p = target.probs(0)
            q = draft.probs(0).to(p.device)
            draft_q, draft_p = float(q[drafted]), float(p[drafted])
            correction = self._random.draw(residual(p, q))
        raw_q, raw_p = draft.raw_prob(0, drafted), target.raw_prob(0, drafted)
        found: dict[str, Any] = {
            "position": index - self.text.prompt_length,
            "token": token,
            "correction": correction,
            "correction_p": target.raw_prob(0, correction),
            "draft_token": drafted,
            "draft_q": draft_q,
            "draft_p": draft_p,
            "draft_raw_q": raw_q,
            "draft_raw_p": raw_p,
            "ratio": raw_q / raw_p if raw_p else float("inf"),
            "rank": int((draft.raw(0) > raw_q).sum()),
            "confidence": draft.confidence(0),
            "entropy": draft.entropy(0),
        }
        if self.hidden:
            found["hidden_before"] = (
                draft.hidden(0).float().clamp(-65504, 65504).half().cpu().numpy()
            )
        return found

    def _fail(self, why: str) -> None:
        log.warning("a request is not recorded: %s", why)
        self.failed, self.positions = True, []
        self._stop()

    def _stop(self) -> None:
        self.stopped = True
        self._session.record(None)
        self._rows = {"target": {}, "draft": {}}
