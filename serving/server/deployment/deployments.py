"""What is being served, and how one bundle gives way to the next with no request lost.

Every HTTP request belongs to the deployment that was newest when its body had come (`PinDeployment`), so an answer is wholly by one
version. A switch loads the next bundle beside the old, sends one request through it, and only then makes it the newest. The old
one takes what its requests still submit, finishes it however long that takes, and is freed; a client that reads slowly delays
nobody. What cannot be loaded or does not answer leaves the old serving. Deployments of one fingerprint share models, engine and
scheduler thread: a switch is then a new strategy, and costs nothing.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from serving.errors import DraftwellError
from serving.runtime.strategies import Strategy
from serving.server.http.errors import without_paths
from serving.server.http.service import Service
from serving.server.model.served_model import ServedModel
from serving.server.scheduling.detokenize import TextStream
from serving.server.scheduling.load_control import LoadControl
from serving.server.scheduling.observer import Observer
from serving.server.scheduling.scheduler import QUEUE_CAPACITY, Scheduler
from serving.server.scheduling.ticket import DeadlineExceeded, Delta, End, Event, Failure, Ticket

log = logging.getLogger(__name__)

Load = Callable[[ServedModel], ServedModel]
"""Loads the next model, given the one that serves now, whose pair it may share."""

CHECKER = "draftwell"
"""Client key of the checks, for observers."""
CHECK_SECONDS = 60.0
"""The check's request may wait for slots that others hold."""


class NoAnswerInTime(DraftwellError):
    """The new model was not answered in time: perhaps the server was busy, and it is worth another try."""

    code = "no_answer_in_time"


_pinned: ContextVar[RequestPin | None] = ContextVar("pin", default=None)


class Intake:
    """A scheduler as one deployment sees it: tickets that bring no strategy get the deployment's, whoever else shares the scheduler."""

    def __init__(self, scheduler: Scheduler, strategy: Strategy):
        self.scheduler, self.strategy = scheduler, strategy

    def submit(self, *tickets: Ticket, urgent: bool = False) -> None:
        """As `Scheduler.submit`: an HTTP request does so once, and the scheduler then finishes what it took by itself."""
        for ticket in tickets:
            ticket.strategy = ticket.strategy or self.strategy
        self.scheduler.submit(*tickets, urgent=urgent)
        if pin := _pinned.get():
            pin.release()

    @property
    def running(self) -> int:
        return self.scheduler.running

    @property
    def waiting(self) -> int:
        return self.scheduler.waiting

    @property
    def accepts(self) -> bool:
        return self.scheduler.accepts


class Deployment:
    """A served model with what answers for it."""

    def __init__(self, served: ServedModel, scheduler: Scheduler):
        self.served, self.scheduler = served, scheduler
        self.intake = Intake(scheduler, served.strategy)
        self.service = Service(served, self.intake)  # type: ignore[arg-type]  # an Intake is all of a Scheduler that it uses

    def pace(self) -> None:
        """Let drafts shorten under load by this deployment's costs, if the scheduler was another's."""
        scheduler, costs = self.scheduler, self.served.costs
        if costs is not None and scheduler.load is None:
            scheduler.load = LoadControl(costs)
        elif costs is not None and scheduler.load is not None:
            scheduler.load.costs = costs

    def check(self, timeout: float = CHECK_SECONDS) -> None:
        """Send one short request through; what it teaches the strategy is forgotten.

        Raises:
            NoAnswerInTime: it was not answered in time.
            DraftwellError: it failed.
        """
        strategy, over = self.served.strategy, threading.Event()
        rehearsal = type(strategy)(strategy.config, strategy.resources.private())
        ends: list[Event] = []

        def deliver(event: Event) -> None:
            ends.append(event)
            if not isinstance(event, Delta):
                over.set()

        sampling = self.served.pair.sampling(max_tokens=8)
        ticket = Ticket(self.served.encode("Hello"), sampling, TextStream(self.served.decode), deliver, client=CHECKER,
                        deadline=time.monotonic() + timeout, strategy=rehearsal)
        self.intake.submit(ticket, urgent=True)
        answered = over.wait(timeout + 5)
        if not answered or not isinstance(ends[-1], End):
            ticket.cancel()
            failed = ends[-1].error if ends and isinstance(ends[-1], Failure) else "no answer"
            late = not answered or isinstance(failed, DeadlineExceeded)
            raise (NoAnswerInTime if late else DraftwellError)(f"the new model does not answer ({failed})")


class Deployments:
    """The newest deployment, and switching to the next.

    Args:
        capacity, observers: of every scheduler.
    """

    def __init__(self, served: ServedModel, *, capacity: int = QUEUE_CAPACITY, observers: Sequence[Observer] = ()):
        self._capacity, self._observers = capacity, tuple(observers)
        self._lock = threading.Lock()  # a request is pinned either before a switch, and waited for, or after it
        self._switching = threading.Lock()  # one switch at a time
        self._newest = self._deploy(served, None)
        self._pins = {self._newest.scheduler: 0}  # requests that may still submit to each scheduler that lives
        self.users = 0
        """HTTP requests that are being answered, from the first byte to the last; counted on the server's loop."""
        self._draining = False
        self.switches = 0
        self.last_switch_error: str | None = None
        self.worth_another_try = False
        """Whether the last switch was refused for want of time alone."""

    @property
    def current(self) -> Deployment:
        """Inside an HTTP request the deployment that it is pinned to; elsewhere the newest."""
        pin = _pinned.get()
        return pin.deployment if pin else self._newest

    @property
    def draining(self) -> bool:
        """Whether the server is going down."""
        return self._draining

    @property
    def ready(self) -> bool:
        """Whether new requests are taken."""
        return not self._draining and self._newest.scheduler.accepts

    def health(self) -> dict[str, Any]:
        """Plain JSON for people and probes; `status` is "ok", "draining", or "failed" where nothing will be answered any more."""
        now = self._newest
        load = now.scheduler.load
        status = "draining" if self._draining else "ok" if now.scheduler.alive else "failed"
        return {"status": status, "model": now.served.name, "version": now.served.version, "strategy": now.served.strategy.name,
                "slots": now.served.slots, "running": now.scheduler.running, "waiting": now.scheduler.waiting,
                "switches": self.switches, "last_switch_error": self.last_switch_error,
                "speculation_under_load": load.describe() if load else "unlimited: what batches cost was not measured"}

    def start(self) -> None:
        """Start to take requests."""
        self._newest.scheduler.start()

    def drain(self) -> None:
        """Refuse new requests; those that are here go on. Never from a signal handler, which may interrupt who holds the lock."""
        with self._lock:
            self._draining, schedulers = True, list(self._pins)
        for scheduler in schedulers:
            scheduler.stop_taking()

    def abort(self) -> None:
        """Refuse new requests and answer those that are here with a 503, or with an error at the end of their stream."""
        self.drain()
        for scheduler in list(self._pins):
            scheduler.abort()

    def close(self, timeout: float | None = None) -> None:
        """Finish what is here, for `timeout` seconds at most, and end."""
        self.drain()
        until = None if timeout is None else time.monotonic() + timeout
        for scheduler in list(self._pins):
            scheduler.close(None if until is None else max(0.0, until - time.monotonic()))

    def switch(self, load: Load, follow: Callable[[ServedModel], object] = lambda served: None) -> bool:
        """Load the next model and make it the newest, from a thread of the caller's. The old one ends on a thread of its own.

        Args:
            follow: told of the new model as soon as it serves.
        Returns:
            False where it was refused, which is logged and kept in `last_switch_error`; the old one goes on serving.
        """
        with self._switching:
            old, started = self._newest, time.monotonic()
            try:
                new = self._prepare(load, old)
            except Exception as error:
                self.last_switch_error = without_paths(str(error) or type(error).__name__)
                self.worth_another_try = isinstance(error, NoAnswerInTime)
                log.error("the new bundle is refused, %s goes on serving: %s", old.served.label, " ".join(str(error).split()),
                          exc_info=None if isinstance(error, DraftwellError) else error)
                return False
            new.pace()
            with self._lock:
                self._newest = new
                self._pins.setdefault(new.scheduler, 0)
                if self._draining:  # the server began to go down meanwhile
                    new.scheduler.stop_taking()
            self.switches += 1
            self.last_switch_error, self.worth_another_try = None, False
            log.info("%s serves instead of %s, after %.1f s", new.served.label, old.served.label, time.monotonic() - started)
            if old.scheduler is not new.scheduler:
                leaving, gone = [old.scheduler], weakref.ref(old.served)
                del old
                threading.Thread(target=self._retire, args=(leaving, gone), name="draftwell-retire", daemon=True).start()
            follow(new.served)
            return True

    def _prepare(self, load: Load, old: Deployment) -> Deployment:
        served = load(old.served)
        shared = served.pair is old.served.pair
        new = self._deploy(served, old.scheduler if shared else None)
        if not shared:
            new.scheduler.start()
        try:
            new.check()
        except BaseException:
            if not shared:
                new.scheduler.close(0)
            raise
        return new

    def _deploy(self, served: ServedModel, scheduler: Scheduler | None) -> Deployment:
        if scheduler is None:
            load = LoadControl(served.costs) if served.costs else None
            scheduler = Scheduler(served.pair.engine(), served.strategy, served.slots, threads=served.threads, capacity=self._capacity,
                                  observers=self._observers, load=load)
        return Deployment(served, scheduler)

    def _retire(self, leaving: list[Scheduler], served: weakref.ref[ServedModel]) -> None:
        """End a scheduler once no request submits to it any more and all are answered, and let its models go."""
        scheduler = leaving.pop()  # the thread's arguments would hold it to the end
        while self._pins[scheduler]:  # it only falls from now on
            time.sleep(0.02)
        scheduler.close()
        with self._lock:
            del self._pins[scheduler]
        del scheduler
        for pause in (0.0, 0.1, 1.0, 10.0, 60.0):  # clients may still read their answers
            time.sleep(pause)
            over = served() is None
            gc.collect()  # modules refer to themselves, and weights are large
            if over:
                return

    def pin(self) -> Deployment:
        """Take the newest deployment for a request; `unpin` gives it back."""
        with self._lock:
            self._pins[self._newest.scheduler] += 1
            return self._newest

    def unpin(self, deployment: Deployment) -> None:
        """It submits nothing more."""
        with self._lock:
            self._pins[deployment.scheduler] -= 1


class RequestPin:
    """What ties one HTTP request to a deployment, from when it first asks which until its tickets are with the scheduler."""

    def __init__(self, deployments: Deployments):
        self._deployments = deployments
        self._deployment: Deployment | None = None
        self._held = False

    @property
    def deployment(self) -> Deployment:
        """The newest when it was first asked for; the same ever after."""
        if self._deployment is None:
            self._deployment, self._held = self._deployments.pin(), True
        return self._deployment

    def release(self) -> None:
        """What was submitted is finished without it."""
        if self._held and self._deployment is not None:
            self._held = False
            self._deployments.unpin(self._deployment)


class PinDeployment:
    """ASGI middleware that lets every HTTP request see one deployment only."""

    def __init__(self, app: Any, deployments: Deployments):
        self.app, self.deployments = app, deployments

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        pin = RequestPin(self.deployments)
        token = _pinned.set(pin)
        self.deployments.users += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.deployments.users -= 1
            _pinned.reset(token)
            pin.release()
