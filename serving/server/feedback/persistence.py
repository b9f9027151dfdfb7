"""What a server keeps of its requests: online state across restarts (snapshots.py) and feedback (feedback.py). Both are off by default."""

from __future__ import annotations

from pathlib import Path

from serving.server.feedback.feedback import Feedback
from serving.server.model.served_model import ServedModel
from serving.server.model.snapshots import Snapshots
from serving.server.model.strategy_pool import StrategyPool
from serving.server.scheduling.observer import Observer
from serving.server.settings import STATE_SECONDS, FeedbackSettings


class Persistence:
    """Snapshots and feedback of whatever serves, one bundle after the other.

    Args:
        state_dir: None keeps online state in memory alone.
        state_seconds: between two snapshots.
        feedback: None records nothing.
    Raises:
        DraftwellError: a folder cannot be written to.
    """

    def __init__(self, state_dir: Path | None = None, state_seconds: float = STATE_SECONDS, feedback: FeedbackSettings | None = None):
        self.snapshots = Snapshots(state_dir, state_seconds) if state_dir else None
        self.feedback = Feedback(feedback) if feedback else None

    @property
    def observers(self) -> tuple[Observer, ...]:
        """Who wants to know of requests."""
        return (self.feedback,) if self.feedback else ()

    def prepare(self, served: ServedModel) -> ServedModel:
        """A model that was just loaded and does not serve yet: it goes on with what was learnt over its bundle."""
        if self.snapshots and isinstance(served.strategies, StrategyPool) and served.origin:
            self.snapshots.resume(served.strategies, served.origin)
            served.strategy = served.strategies.get()  # of the state that was resumed
        if self.feedback:
            self.feedback.follow(served.pair, served.artifacts)
        return served

    def follow(self, served: ServedModel) -> None:
        """A model serves now: its state is kept from here on."""
        if self.snapshots and isinstance(served.strategies, StrategyPool) and served.origin:
            self.snapshots.follow(served.strategies, served.origin)

    def start(self) -> None:
        """Start to write, on threads of their own."""
        if self.snapshots:
            self.snapshots.start()
        if self.feedback:
            self.feedback.start()

    def close(self) -> None:
        """Write what is left, once no request runs any more."""
        if self.feedback:
            self.feedback.close()
        if self.snapshots:
            self.snapshots.close()
