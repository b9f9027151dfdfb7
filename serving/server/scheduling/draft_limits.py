"""How long drafts may be while several requests are decoded together.

Before each step every running request gets the draft length that its strategy's table,
`Strategy.draft_length_by_batch`, has for as many requests. Within that limit strategies decide as
before.

A limit changes which tokens a lossy strategy keeps, and which random numbers decide it, also where
it judges exactly: only lossless strategies couple. So requests of one whose answer must not depend
on other traffic have none (`repeats`): they draft as much as their config says.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.session.session import UNLIMITED, Session
from draftwell.serving.runtime.strategies import Strategy

Running = Sequence[tuple[Session, Strategy]]

PROBE_EVERY = 32
"""Every so many steps a recorded request that may not draft, and whose text this cannot change,
drafts one token: its draft then reads the tokens that it has missed
(serving/recording/recorder.py)."""


def draft_limit(strategy: Strategy, sampling: Sampling, running: int) -> int:
    """Longest draft of one of `running` requests, in tokens; `UNLIMITED` or less."""
    return UNLIMITED if repeats(strategy, sampling) else strategy.draft_limit(running)


def limit_drafts(engine: Engine, running: Running, *, probe: bool = False) -> None:
    """Limit the drafts that begin in the next step.

    Args:
        probe: let recorded requests that may not draft draft one token.
    """
    for session, strategy in running:
        session.draft_limit = draft_limit(strategy, session.sampling, len(running))
        if session.draft_limit == 0 and may_be_probed(session, strategy):
            if probe:
                session.probed_at = session.stats.verdicts
            # until a verification has ended: only then a draft begins
            if session.probed_at == session.stats.verdicts:
                session.draft_limit = 1
    engine.patience = patience_of(running)
    # cores are divided only for models that run at the same time
    overlaps = any(strategy.overlaps and session.draft_limit for session, strategy in running)
    engine.split = None if overlaps else False


def patience_of(running: Running) -> int | None:
    """Draft passes that a pass of the target waits for: as many as the longest draft that has a
    limit needs, and one for what the draft model has missed. None where nobody would wait for one
    who has no limit: all draft as long as they like, or nobody does."""
    drafters = [(session, strategy) for session, strategy in running if strategy.longest_draft]
    limited = [
        min(session.draft_limit, strategy.longest_draft or 0)
        for session, strategy in drafters
        if strategy.draft_length_by_batch and not repeats(strategy, session.sampling)
    ]
    all_free = not limited and len(drafters) == len(running)
    if all_free or len(limited) == len(drafters):
        return None
    longest = max(limited, default=0)
    return longest + 1 if longest else 0


def may_be_probed(session: Session, strategy: Strategy) -> bool:
    """Whether a request is recorded with a draft model and has the same text whatever it drafts."""
    same_text = session.sampling.has_choice and strategy.lossless
    return session.recorded and "draft" in session.lanes and same_text


def repeats(strategy: Strategy, sampling: Sampling) -> bool:
    """Whether a request has no limit, because its answer must be the same whatever else runs and a
    limit could change it."""
    return not strategy.lossless and (sampling.repeatable or strategy.resources.deterministic)
