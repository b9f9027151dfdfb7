"""What a server stores about its requests: online state across restarts (model/snapshots.py) and
feedback (feedback.py). Both are off by default."""

from __future__ import annotations

from draftwell.serving.server.feedback.feedback import PER_MINUTE, Feedback
from draftwell.serving.server.model.served_model import ServedModel
from draftwell.serving.server.model.snapshots import STATE_SECONDS, Snapshots
from draftwell.serving.server.scheduling.observer import Observer
from draftwell.serving.server.settings import ServerSettings


class Persistence:
    """Snapshots and feedback of the serving model, across switches of bundles.

    Args:
        settings: those of `state_dir` and of feedback are used here; without either nothing is
            kept.
    Raises:
        DraftwellError: a folder cannot be written to.
    """

    def __init__(self, settings: ServerSettings):
        folder, spool = settings.state_dir, settings.feedback_dir
        self.snapshots = None if folder is None else Snapshots(folder, STATE_SECONDS)
        self.feedback = (
            None
            if spool is None
            else Feedback(
                spool,
                settings.feedback_rate,
                text=settings.feedback_text,
                days=settings.feedback_days,
                per_minute=PER_MINUTE,
            )
        )

    @property
    def observers(self) -> tuple[Observer, ...]:
        """Observers of requests."""
        return (self.feedback,) if self.feedback else ()

    def prepare(self, served: ServedModel) -> ServedModel:
        """Let a loaded model that does not serve yet start from what was learnt over its bundle;
        returns the model."""
        if self.snapshots and served.origin:
            self.snapshots.resume(served.strategies, served.origin)
            served.strategy = served.strategies.get()  # of the state that was resumed
        if self.feedback:
            self.feedback.follow(served.pair, served.artifacts)
        return served

    def follow(self, served: ServedModel) -> None:
        """Keep the state of the model that serves from now on."""
        if self.snapshots and served.origin:
            self.snapshots.follow(served.strategies, served.origin)

    def start(self) -> None:
        """Start the threads that write."""
        if self.snapshots:
            self.snapshots.start()
        if self.feedback:
            self.feedback.start()

    def close(self) -> None:
        """Write what is left, the worth most first: time may be short; call it when no request
        runs any more."""
        if self.snapshots:
            self.snapshots.close()
        if self.feedback:
            self.feedback.close()
