"""A scheduler with feedback, run round by round, and records for a spool."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import build_strategy
from draftwell.serving.server.feedback.feedback import Feedback
from draftwell.serving.server.feedback.record import Record, RecordOrigin
from draftwell.serving.server.scheduling.detokenize import TextStream
from draftwell.serving.server.scheduling.scheduler import Scheduler
from draftwell.serving.server.scheduling.ticket import Event, Ticket
from tests.support.models.resources import table_resources

PROMPTS = (
    "the man in the inn",
    "an onion is in there",
    "on the other hand",
    "the end then",
    "in an hour",
    "none other",
)
TOKENS = 24
RECORD_ORIGIN = RecordOrigin("tiny", "none", "float32")


def feedback_of(folder: Path, **changes: Any) -> Feedback:
    """Feedback that records every request, unless told otherwise."""
    return Feedback(folder, **{"rate": 1.0, "per_minute": 1e6, "seed": 1, **changes})


class FeedbackServer:
    """A scheduler run round by round, with feedback; what it records is written when it closes."""

    def __init__(
        self,
        pair: Any,
        folder: Path,
        *,
        strategy: str = "vanilla_sd",
        spool: Any = None,
        follow: bool = True,
        **changes: Any,
    ):
        self.pair = pair
        self.feedback = feedback_of(folder, spool=spool, **changes)
        if follow:
            self.feedback.follow(pair)
        self.scheduler = Scheduler(
            pair.engine(),
            build_strategy(strategy, {}, table_resources(8)),
            4,
            threads=1,
            observers=[self.feedback],
        )

    def ask(
        self,
        prompts: Sequence[str],
        *,
        bodies: bool = True,
        cancel: bool = False,
        own: bool = False,
        strategy: Any = None,
        **asked: Any,
    ) -> list[list[Event]]:
        """Serve some prompts to their end; returns the events of each."""
        everything, tickets = [], []
        for prompt in prompts:
            events: list[Event] = []
            ids = self.pair.encode_prompt(prompt)
            sampling = self.pair.sampling(
                **{"max_tokens": TOKENS, "stop_token_ids": frozenset(), **asked}
            )
            body = (
                {"messages": [{"role": "user", "content": prompt}], "user": "someone"}
                if bodies
                else None
            )
            ticket = Ticket(
                ids,
                sampling,
                TextStream(self.pair.decode),
                events.append,
                body=body,
                strategy=strategy,
            )
            ticket.own = own
            self.scheduler.submit(ticket)
            everything.append(events)
            tickets.append(ticket)
        for turn in range(300):
            self.scheduler.turn()
            if cancel and turn == 1:
                for ticket in tickets:
                    ticket.cancel()
            if not self.scheduler.running and not self.scheduler.waiting:
                return everything
        raise AssertionError("the scheduler does not come to rest")

    def close(self) -> None:
        self.feedback.start()
        self.feedback.close()

    @property
    def counts(self) -> dict[str, int]:
        return self.feedback.counts


def record(n: int = 0, positions: int = 20, **changes: Any) -> Record:
    """A record of `positions` positions."""
    figures = [
        {"position": i, "draft_q": 1.0, "draft_p": 1.0, "confidence": 0.5 + i / 100}
        for i in range(positions)
    ]
    return Record(
        **{
            "id": f"r{n}",
            "origin": RECORD_ORIGIN,
            "sampling": Sampling(),
            "kind": "target",
            "positions": figures,
            **changes,
        }
    )
