"""Ends the server's process where something in it hangs: nothing else can end a forward pass that
does not return, or an event loop that does not turn. Its supervisor starts it again."""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
import traceback

from draftwell.serving.errors import DeviceLost
from draftwell.serving.server.deployment.deployments import Deployments
from draftwell.serving.server.process import HUNG
from draftwell.serving.server.scheduling.scheduler import HUNG_SECONDS
from draftwell.serving.server.scheduling.ticket import Failure

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
LOOKS = 4
"""How often in a row a pass is found hung."""
PAUSE_SECONDS = 5.0
"""Between two looks: the process was paused meanwhile."""
LOOP_SECONDS = 60.0
"""Longest turn of the event loop."""
START_SECONDS = 3600.0
"""Longest start, models of hundreds of gigabytes included."""
TELL_SECONDS = 2.0
"""For clients to be told."""


class Watchdog:
    """A thread that ends the process with `HUNG` when a forward pass hangs (`Scheduler.hung`), when
    the event loop stands still, when the server has not started after `START_SECONDS`, and when it
    has not ended in the time that `end_within` gave it.

    While it is entered as a context it watches; afterwards it only keeps what `end_within` said.
    """

    def __init__(self) -> None:
        self._deployments: Deployments | None = None
        self._silent = self._hung = 0  # looks in a row
        self._looked_at = time.monotonic()
        self._end_by, self._late = time.monotonic() + START_SECONDS, "start"
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run, name="draftwell-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._deployments = None
        if self._late == "start":
            self._end_by = math.inf
        self._left.set()

    def serve(self, deployments: Deployments) -> None:
        """Watch what serves from now on."""
        self._looked_at = time.monotonic()
        self._end_by, self._silent, self._deployments = math.inf, 0, deployments

    def beat(self) -> None:
        """Called on the event loop, often."""
        self._silent = 0

    def end_within(self, seconds: float) -> None:
        """End the process if it has not ended by itself after so many seconds, or sooner where an
        earlier call said so. Takes no lock: signal handlers may call it."""
        self._late, self._end_by = "end", min(self._end_by, time.monotonic() + seconds)

    @property
    def seconds_left(self) -> float:
        """Seconds until the process is ended if it has not ended by itself."""
        return self._end_by - time.monotonic()

    def fault(self) -> str | None:
        """Why the process has to end now; None while it need not. Counts what it sees, and not the
        time alone, which passes while a process is paused."""
        if time.monotonic() > self._end_by:
            return f"the server did not {self._late} in time"
        deployments = self._deployments
        if deployments is None:
            return None
        self._silent += 1
        if self._silent * LOOK_SECONDS > LOOP_SECONDS:
            return f"the event loop has stood still for {LOOP_SECONDS:g} s"
        now, before = time.monotonic(), self._looked_at
        self._looked_at = now
        if now - before > PAUSE_SECONDS:  # the pause is no time that a pass took
            self._hung = -int(HUNG_SECONDS / LOOK_SECONDS)
        seconds = deployments.hung_seconds
        self._hung = min(self._hung + 1, 0 if seconds is None else LOOKS)
        if self._hung == LOOKS:
            return f"a forward pass has not ended for {seconds:.0f} s"
        return None

    def _run(self) -> None:
        while not (self._left.is_set() and self._end_by == math.inf):
            why = None
            try:
                why = self.fault()
            except Exception:  # the next look may find more
                log.exception("the watchdog could not look")
            if why:
                # whatever this waits for, the process ends
                threading.Thread(target=self._tell, args=(why,), daemon=True).start()
                # clients of a server that was asked to end were told when its drain was over
                time.sleep(TELL_SECONDS if self._end_by == math.inf else LOOK_SECONDS)
                os._exit(HUNG)
            time.sleep(LOOK_SECONDS)

    def _tell(self, why: str) -> None:
        """Log it, answer the requests that wait, and log where all threads are."""
        log.critical("%s: the process ends with code %d, to be started again", why, HUNG)
        if self._deployments:
            error = DeviceLost("the server's device does not answer", code="device_hung")
            try:
                self._deployments.abort(Failure(error))
            except Exception:
                log.exception("requests could not be answered")
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            stack = "".join(traceback.format_stack(frame))
            log.critical("thread %s:\n%s", names.get(ident, ident), stack)
