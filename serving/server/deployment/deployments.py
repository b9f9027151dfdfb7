"""What is being served, and how one bundle replaces another without losing a request.

Every HTTP request belongs to the deployment that was newest when its body had arrived
(`Deployments.use`), so one version gives the whole answer. A switch loads the next bundle alongside
the old one, sends the last requests through it, and only then makes it the newest. If the next
bundle cannot be loaded or does not answer, the old one continues; if it fails too many of its first
requests (trial.py), the old one serves again. Then the old one accepts what its requests still
submit, finishes it however long that takes, and is freed; a client that reads slowly delays nobody.
Deployments of one fingerprint share models, engine and scheduler thread: a switch
between them is only a new strategy, and costs nothing.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from draftwell.serving.errors import DeviceLost, DraftwellError
from draftwell.serving.memory import collect_garbage
from draftwell.serving.runtime.engine.prompt_budget import PromptBudget
from draftwell.serving.server.deployment.deployment import Deployment, NoAnswerInTime
from draftwell.serving.server.deployment.mirror import Mirror
from draftwell.serving.server.deployment.trial import Trial
from draftwell.serving.server.http.errors import without_paths
from draftwell.serving.server.model.loading import NO_ROOM
from draftwell.serving.server.model.served_model import ServedModel
from draftwell.serving.server.scheduling.observer import Observer
from draftwell.serving.server.scheduling.scheduler import Scheduler
from draftwell.serving.server.scheduling.ticket import CANCELLED, Cancelled, Failure
from draftwell.serving.server.settings import QUEUE

log = logging.getLogger(__name__)

TRIAL_SECONDS = 60.0
"""How long the old deployment can serve again after a switch."""

Load = Callable[[ServedModel], ServedModel]
"""Loads the next model, given the one that serves now, whose pair it may share."""


class TakenBack(Exception):
    """The deployment that the next one was loaded beside was taken back meanwhile."""


class Deployments:
    """The newest deployment, and switching to the next.

    Args:
        capacity, observers: of every scheduler.
        prompt_tokens: of every engine's `PromptBudget`.
    """

    def __init__(
        self,
        served: ServedModel,
        *,
        capacity: int = QUEUE,
        observers: Sequence[Observer] = (),
        prompt_tokens: int | None = None,
    ):
        self._mirror, self._trial = Mirror(), Trial()
        self._trying: threading.Thread | None = None
        self._capacity, self._observers, self._prompt_tokens = (
            capacity,
            (*observers, self._mirror, self._trial),
            prompt_tokens,
        )
        # a request begins either before a switch, which then waits for it, or after it
        self._lock = threading.Lock()
        self._switching = threading.Lock()  # one switch at a time
        self.current = self._deploy(served, None)
        self._pins = {self.current.scheduler: 0}  # requests that may still submit to each scheduler
        self.users = 0
        """HTTP requests being answered, from the first byte to the last; counted on the event
        loop."""
        self._draining = False
        self.switches = 0
        self.last_switch_error: str | None = None
        self.worth_another_try = False
        """Whether the last switch was refused for want of time, or of memory that will be free."""

    @property
    def draining(self) -> bool:
        """Whether the server is shutting down."""
        return self._draining

    @property
    def ready(self) -> bool:
        """Whether new requests are accepted, and no device is stuck."""
        stuck = any(scheduler.stalled for scheduler in list(self._pins))
        return not self._draining and self.current.scheduler.accepts and not stuck

    @property
    def device_lost(self) -> DeviceLost | None:
        """The error of a device that has failed for good: only a new process answers again."""
        return next(
            (scheduler.device_lost for scheduler in list(self._pins) if scheduler.device_lost), None
        )

    @property
    def hung_seconds(self) -> float | None:
        """How long a round has taken that will hardly end, of any deployment; None without one."""
        return next((it.busy_seconds for it in list(self._pins) if it.hung), None)

    def health(self) -> dict[str, Any]:
        """Plain JSON for people and probes; `status` is "ok", "draining", or "failed": only a
        restart helps."""
        now = self.current
        ended = not now.scheduler.alive and not self._draining  # a drain ends it
        failed = ended or self.device_lost or self.hung_seconds is not None
        status = "failed" if failed else "draining" if self._draining else "ok"
        return {
            "status": status,
            "model": now.served.name,
            "version": now.served.version,
            "strategy": now.served.strategy.name,
            "tuned": now.served.tuned,
            "slots": now.served.slots,
            "running": now.scheduler.running,
            "waiting": now.scheduler.waiting,
            "switches": self.switches,
            "last_switch_error": self.last_switch_error,
            "draft_length_by_batch": now.served.strategy.draft_length_by_batch,
        }

    def start(self) -> None:
        """Begin to accept requests."""
        self.current.scheduler.start()

    def drain(self) -> None:
        """Refuse new requests; those already accepted continue. Never call it from a signal
        handler, which may interrupt a holder of the lock."""
        with self._lock:
            self._draining, schedulers = True, list(self._pins)
        for scheduler in schedulers:
            scheduler.stop_taking()

    def abort(self, event: Failure | Cancelled = CANCELLED) -> None:
        """Refuse new requests, and answer those already accepted with a 503, or with an error at
        the end of their stream."""
        self.drain()
        for scheduler in list(self._pins):
            scheduler.abort(event)

    def close(self, timeout: float | None = None) -> bool:
        """Finish accepted requests, for `timeout` seconds at most, and end; False if a pass hangs
        that cannot be ended."""
        self.drain()
        until = None if timeout is None else time.monotonic() + timeout
        ended = [
            scheduler.close(None if until is None else max(0.0, until - time.monotonic()))
            for scheduler in list(self._pins)
        ]
        return all(ended)

    def switch(
        self, load: Load, follow: Callable[[ServedModel], object] = lambda served: None
    ) -> bool:
        """Load the next model and make it the newest, from a thread of the caller's. The old one
        ends on a thread of its own, when the new one has stood its trial, or serves again.

        Args:
            follow: called with the model that serves, as soon as it does.
        Returns:
            False if it was refused, which is logged and kept in `last_switch_error`; the old one
            keeps serving.
        """
        with self._switching:
            started = time.monotonic()
            with self.use() as tried:  # taken back or not, it goes on until the next one is checked
                new = self._accepted(load, tried)
            if new is None:  # a trial of the switch before goes on
                collect_garbage()  # modules refer to themselves, and weights are large
                return False
            old = self.current
            with self._lock:
                self.current = new
                self._pins.setdefault(new.scheduler, 0)
                if self._draining:  # the server began to shut down meanwhile
                    new.scheduler.stop_taking()
            self.switches += 1
            self.last_switch_error, self.worth_another_try = None, False
            log.info(
                "switched to %s from %s, in %.1f s",
                new.served.label,
                old.served.label,
                time.monotonic() - started,
            )
            follow(new.served)
            self._trial.begin(new.served)
            self._trying = threading.Thread(
                target=self._try_out, args=(new, old, follow), name="draftwell-trial", daemon=True
            )
            self._trying.start()
            return True

    def _try_out(
        self, new: Deployment, old: Deployment, follow: Callable[[ServedModel], object]
    ) -> None:
        """Wait for the new deployment's trial and end the one that lost."""
        fault = self._trial.fault(TRIAL_SECONDS)
        if fault is not None:
            with self._lock:
                self.current = old
            said = f"{new.served.label} {fault}: {old.served.label} serves again"
            self.last_switch_error = without_paths(said)
            log.error("%s", " ".join(said.split()))
            follow(old.served)
        leaving = old if fault is None else new
        if old.scheduler is not new.scheduler:
            threading.Thread(
                target=self._retire,
                args=([leaving.scheduler], weakref.ref(leaving.served)),
                name="draftwell-retire",
                daemon=True,
            ).start()

    def _accepted(self, load: Load, old: Deployment) -> Deployment | None:
        """The next deployment, with the trial of the switch before at its end; None if it is
        refused."""
        try:
            new = self._prepare(load, old)
            self._end_trial(old, new)
            return new
        except Exception as error:
            self.last_switch_error = without_paths(str(error) or type(error).__name__)
            # an old deployment that still answers gives its memory back
            no_room = getattr(error, "code", None) == NO_ROOM and len(self._pins) > 1
            self.worth_another_try = isinstance(error, NoAnswerInTime | TakenBack) or no_room
            log.error(
                "the new bundle is refused, %s keeps serving: %s",
                self.current.served.label,
                " ".join(str(error).split()),
                exc_info=None if isinstance(error, DraftwellError) else error,
            )
            return None

    def _end_trial(self, tried: Deployment, new: Deployment) -> None:
        """End the trial of the switch before, whose deployment may have been taken back while the
        next one was loaded.

        Raises:
            TakenBack: it was, and the next one shares its models, which are being freed.
        """
        self._trial.settle()
        if self._trying:
            self._trying.join()
        if new.scheduler is tried.scheduler is not self.current.scheduler:
            raise TakenBack(f"{tried.served.label}, whose models it shares, was taken back")

    def _prepare(self, load: Load, old: Deployment) -> Deployment:
        served = load(old.served)
        shared = served.pair is old.served.pair
        new = self._deploy(served, old.scheduler if shared else None)
        if not shared:
            new.scheduler.start()
        try:
            new.check(self._mirror.requests())
        except BaseException as error:
            while not shared and not new.scheduler.close(0):  # a second each
                if new.scheduler.hung:
                    raise DraftwellError(
                        "the new model's passes do not end: restart the server to try it again",
                        code="new_model_hangs",
                    ) from error
            raise
        return new

    def _deploy(self, served: ServedModel, scheduler: Scheduler | None) -> Deployment:
        if scheduler is None:
            engine = served.pair.engine(
                budget=PromptBudget(self._prompt_tokens), governor=served.governor
            )
            scheduler = Scheduler(
                engine,
                served.strategy,
                served.slots,
                threads=served.threads,
                capacity=self._capacity,
                observers=self._observers,
                prompt_sharing=served.prompt_sharing,
            )
        return Deployment(served, scheduler)

    def _retire(self, leaving: list[Scheduler], served: weakref.ref[ServedModel]) -> None:
        """End a scheduler when no request can submit to it and all are answered, and free its
        models."""
        scheduler = leaving.pop()  # the thread's arguments would keep it alive
        while self._pins[scheduler]:  # from now on it only decreases
            time.sleep(0.02)
        scheduler.close()
        with self._lock:
            del self._pins[scheduler]
        del scheduler
        for pause in (0.0, 0.1, 1.0, 10.0, 60.0):  # clients may still read their answers
            time.sleep(pause)
            over = served() is None
            collect_garbage()  # modules refer to themselves, and weights are large
            if over:
                return

    @contextmanager
    def use(self) -> Iterator[Deployment]:
        """The newest deployment, for a request that submits nothing afterwards."""
        with self._lock:
            now = self.current
            self._pins[now.scheduler] += 1
        try:
            yield now
        finally:
            with self._lock:
                self._pins[now.scheduler] -= 1


class CountUsers:
    """ASGI middleware that counts the HTTP requests that are being answered."""

    def __init__(self, app: Any, deployments: Deployments):
        self.app, self.deployments = app, deployments

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        self.deployments.users += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.deployments.users -= 1
