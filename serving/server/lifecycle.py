"""A server's life: load a bundle, serve it and its successors, and let running requests finish at
SIGTERM."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from draftwell.serving.artifacts.pair_files import draftwell_home, models_root
from draftwell.serving.bundle.bundle import refuse_inside
from draftwell.serving.errors import DeviceLost, DraftwellError
from draftwell.serving.memory import collect_garbage
from draftwell.serving.runtime.engine.workers import StillRunning, on_own_thread
from draftwell.serving.server.app import create_app
from draftwell.serving.server.deployment.bundle_watch import BundleWatch
from draftwell.serving.server.deployment.deployments import Deployments
from draftwell.serving.server.feedback.persistence import Persistence
from draftwell.serving.server.http.addresses import plain_path
from draftwell.serving.server.http.errors import hide_folders
from draftwell.serving.server.http.keys import read_keys, security_log
from draftwell.serving.server.http.security import Security, hosts_of, is_loopback, origins
from draftwell.serving.server.model.loading import from_bundle
from draftwell.serving.server.model.served_model import ServedModel
from draftwell.serving.server.process import DEVICE_FAILED, HUNG, address_of, ended_by_signals
from draftwell.serving.server.scheduling.observer import Observer
from draftwell.serving.server.settings import DRAIN_SECONDS, STEADY_PROMPT_TOKENS, ServerSettings
from draftwell.serving.server.watchdog import Watchdog

try:
    import resource
except ImportError:  # Windows, where sockets are no files
    resource = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

OPEN_FILES = 16_384
FLUSH_SECONDS = 5
"""For clients to read what is already written, after the drain."""
WRITE_SECONDS = 3
"""For online state and feedback behind that; with the default drain and the watchdog's second the
process has ended after 29 s, before the 30 s that Kubernetes waits."""
LOAD_SECONDS = 1800.0
"""Longest time in which a bundle is loaded beside the one that serves."""
BACKLOG = 1024
KEEP_ALIVE_SECONDS = 75
"""How long a connection may stay open between two requests. Longer than proxies keep theirs
(usually 60 s), which otherwise send requests over a connection that is being closed. Uvicorn's
default of 5 s is also too short for clients on a busy machine."""


class DrainingServer(uvicorn.Server):
    """A web server that drains. At the first SIGTERM or SIGINT new requests are answered 503 while
    running ones get `drain_seconds` to finish; what is left then is answered 503, or its stream
    ends with an error. Clients have `FLUSH_SECONDS` to read that; then the server exits with code
    0. A second signal skips the drain. What hangs then is ended by the watchdog.

    A device that has failed for good ends the server at once: whoever supervises it starts a new
    process (`device_lost` is set then).

    Args:
        watchdog: one that watches; None: nothing ends what hangs.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        deployments: Deployments,
        drain_seconds: float = DRAIN_SECONDS,
        watchdog: Watchdog | None = None,
    ):
        super().__init__(config)
        self._deployments, self._drain_seconds = deployments, drain_seconds
        self._watchdog = watchdog or Watchdog()
        self._asked_at: float | None = None
        self.device_lost: DeviceLost | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Only take note: a signal may interrupt code that holds a lock."""
        drain = 0.0 if self._asked_at else self._drain_seconds
        self._watchdog.end_within(drain + FLUSH_SECONDS + WRITE_SECONDS)
        if self._asked_at is not None:
            self.should_exit = True  # uvicorn's own would end the process before state is written
        self._asked_at = self._asked_at or time.monotonic()

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; True ends the server."""
        self._watchdog.beat()
        self.device_lost = self._deployments.device_lost
        if self.device_lost:
            log.critical("%s", self.device_lost)
            self._watchdog.end_within(FLUSH_SECONDS + WRITE_SECONDS)
            return True
        if self._asked_at is not None:
            deployments = self._deployments
            if not deployments.draining:
                deployments.drain()
            over = self.should_exit or time.monotonic() - self._asked_at > self._drain_seconds
            if over and deployments.users:
                log.warning(
                    "the drain is over with %d requests unfinished: they are answered 503",
                    deployments.users,
                )
                deployments.abort()
            if over or deployments.users == 0:
                return True
        return await super().on_tick(counter)


def raise_file_limit() -> None:
    """Raise the soft limit of open files to `OPEN_FILES` where the system allows it: the usual one
    of 1,024 is less than the connections that many clients keep open."""
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def serve_bundles(settings: ServerSettings, listener: socket.socket) -> int:
    """Load the bundle and answer requests on a bound socket until SIGINT or SIGTERM; follow the
    bundle's link meanwhile.

    Returns:
        the process's exit code: 0, or `DEVICE_FAILED`.
    Raises:
        DraftwellError: the bundle, an option or a file that an option names is refused.
    """
    _ = settings.offered  # a wrong name is reported before anything is loaded
    _set_logging()
    settings, security = _secured(settings, address_of(listener))
    _refuse_folders_inside(settings)
    persistence = Persistence(settings)
    hide_folders(Path.home(), models_root())
    raise_file_limit()

    def load(folder: Path, serving_now: ServedModel | None = None) -> ServedModel:
        hide_folders(folder)
        return persistence.prepare(_loaded(settings.for_bundle(folder), serving_now))

    def take_over(folder: Path) -> bool:
        """False: not now, try again later."""
        deployments.switch(lambda old: load(folder, old), persistence.follow)
        return not deployments.worth_another_try

    # before the bundle is read, so that a change during loading is noticed
    watch = BundleWatch(settings.bundle, take_over)
    with Watchdog() as watchdog:
        with ended_by_signals():
            # no other reference to the models stays: they can be freed
            app = _application(load(settings.bundle), settings, security, persistence.observers)
        deployments: Deployments = app.state.deployments
        collect_garbage()
        if hasattr(signal, "SIGHUP"):
            signal.signal(signal.SIGHUP, lambda *_: watch.ask())
        watch.start()
        listener.listen(BACKLOG)  # whoever reads the line that `announce` prints can connect
        persistence.follow(deployments.current.served)
        persistence.start()
        announce(deployments.current.served, listener)
        watchdog.serve(deployments)
        server = DrainingServer(web_config(app), deployments, settings.drain_seconds, watchdog)
        try:
            server.run(sockets=[listener])
        finally:
            watch.close()
            left = min(DRAIN_SECONDS, watchdog.seconds_left - WRITE_SECONDS)
            _write(deployments, persistence, left)
    return DEVICE_FAILED if server.device_lost else 0


def _loaded(settings: ServerSettings, serving_now: ServedModel | None) -> ServedModel:
    """A bundle's models, loaded on a thread of its own. Another switch can follow a load that hangs
    beside a model that serves; one at the start is the watchdog's.

    Raises:
        DraftwellError: it has not ended in time (`load_hangs`).
    """
    limit = None if serving_now is None else LOAD_SECONDS
    try:
        return on_own_thread(from_bundle, settings, serving_now, limit=limit)
    except StillRunning as error:
        raise DraftwellError(
            f"the bundle was not loaded within {LOAD_SECONDS:g} s: look at its storage, and send "
            "SIGHUP to try it again",
            code="load_hangs",
        ) from error


def _application(
    served: ServedModel, settings: ServerSettings, security: Security, observers: Sequence[Observer]
) -> FastAPI:
    """What answers requests, with the options of the settings."""
    return create_app(
        served,
        drain_seconds=0.0,  # `DrainingServer` has drained when the application ends
        capacity=settings.queue,
        observers=observers,
        security=security,
        request_timeout=settings.request_timeout,
        allow_parameters=settings.allow_parameters,
        # steady where answers must not depend on load
        prompt_tokens=STEADY_PROMPT_TOKENS if settings.deterministic else None,
    )


def _write(deployments: Deployments, persistence: Persistence, seconds: float) -> None:
    """Write what is left once no request runs any more. A pass that takes longer than so many
    seconds to end may still change it, and the interpreter's end would wait for it: then the
    process ends here."""
    if deployments.close(max(0.0, seconds)):
        persistence.close()
        return
    log.error("a forward pass does not end: what was learnt since the last snapshot is not kept")
    os._exit(HUNG)


def _set_logging() -> None:
    """Log what the server does, a line each."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    logging.getLogger("draftwell.serving").setLevel(logging.INFO)


def _secured(settings: ServerSettings, address: str) -> tuple[ServerSettings, Security]:
    """The settings with the keys that are read, and keys, origins and sizes of the server."""
    keys = read_keys(settings.api_key_file)
    if not keys:
        _refuse_open(settings, address)
    settings = settings.with_keys(bool(keys))
    return settings, Security(
        keys=keys,
        cors_origins=origins(settings.cors_origin),
        hosts=hosts_of(settings.host, settings.allowed_host, keys=bool(keys)),
        root=plain_path(settings.root_path).rstrip("/"),
    )


def _refuse_open(settings: ServerSettings, address: str) -> None:
    """Refuse to serve without keys where not this machine alone can send requests."""
    host = settings.host or "''"  # all addresses
    if not is_loopback(settings.host):
        option, senders, mend = f"host {host}", "other machines", "listen on 127.0.0.1"
    elif "*" in origins(settings.cors_origin):
        option, senders, mend = "cors-origin *", "pages of all sites", "name the sites"
    elif "*" in settings.allowed_host:
        option, senders, mend = "allowed-host *", "pages of other sites", "name the hosts"
    else:
        return
    if not settings.insecure:
        raise DraftwellError(
            f"--{option} lets {senders} send requests, and there is no API key: name a file of "
            f"keys (--api-key-file), {mend}, or say --insecure",
            code="open_without_keys",
        )
    security_log.warning("security: event=started_without_keys address=%s", address)


def _refuse_folders_inside(settings: ServerSettings) -> None:
    """Refuse folders inside the bundle that the server would write to, before any is created."""
    written = {
        "DRAFTWELL_HOME": draftwell_home(),
        "--state-dir": settings.state_dir,
        "--feedback-dir": settings.feedback_dir,
    }
    refuse_inside(settings.bundle, {name: folder for name, folder in written.items() if folder})


def announce(served: ServedModel, listener: socket.socket) -> None:
    """Print the line that says what is served, and where."""
    greedy, sampled = served.tuned["greedy"], served.tuned["sampled"]
    chosen = greedy if greedy == sampled else f"{greedy} (greedy) and {sampled} (sampled)"
    print(
        f"draftwell-serve: {served.name} with {chosen} in {served.pair.dtype}, "
        f"{served.slots} slots, "
        f"on http://{address_of(listener)}/v1",
        flush=True,
    )


def web_config(app: FastAPI) -> uvicorn.Config:
    """Uvicorn's settings for an application."""
    return uvicorn.Config(
        app,
        log_level="info",
        access_log=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=FLUSH_SECONDS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        ws="none",
    )
