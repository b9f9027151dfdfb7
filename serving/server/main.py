"""`draftwell-serve`: answer HTTP requests from a bundle. Heavy libraries load when serving starts, so that --help is quick."""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from serving.errors import DraftwellError

if TYPE_CHECKING:
    from serving.server.deployment.deployments import Deployments
    from serving.server.feedback.settings import FeedbackSettings
    from serving.server.model.strategy_pool import Mode

log = logging.getLogger(__name__)
app = typer.Typer(add_completion=False, rich_markup_mode=None)

INTERRUPTED = 130
"""Exit code of what SIGINT ended."""
DRAIN_SECONDS = 20.0
FLUSH_SECONDS = 5
"""For clients to read what is written already. Both, and the writing of what is kept, end before the 30 s that Kubernetes waits."""
BACKLOG = 1024
KEEP_ALIVE_SECONDS = 75
"""That a connection may stay open between two requests: longer than proxies keep theirs (60 mostly), which else send requests down a
connection that is being closed. Uvicorn's own 5 are short for clients on a busy machine too."""


class StateMode(StrEnum):
    """The modes of a `StrategyPool`."""

    SHARED, TENANT, OFF = "shared", "tenant", "off"


@app.command(epilog="Example: draftwell-serve --bundle dist/smollm2-135m/current --port 8000 --slots 8")
def serve(
    bundle: Annotated[Path, typer.Option(help="Folder that `make deploy` wrote, or the link `current` to it.")],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    slots: Annotated[int, typer.Option(min=1, max=1024, help="Requests that run at once; others wait.")] = 8,
    queue: Annotated[int, typer.Option(min=1, help="Requests that may wait for a slot; more are answered 429.")] = 256,
    dtype: Annotated[str | None, typer.Option(help="Insist on this dtype; a bundle tuned in another one is refused.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Compute threads; by default PyTorch decides.")] = None,
    max_context: Annotated[int | None, typer.Option(min=2, help="Tokens of prompt and answer; by default the models' limit, "
                                                                "at most 4096.")] = None,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Start every request from the bundle's state and leave "
                                                                        "sampled and lossy drafts alone under load, so that a seed "
                                                                        "always gives the same answer.")] = False,
    api_key_file: Annotated[Path | None, typer.Option(help="File with API keys, one a line; without it the variable "
                                                           "DRAFTWELL_API_KEY counts, and without both everybody may ask.")] = None,
    cors_origin: Annotated[list[str] | None, typer.Option(help="Site whose pages may ask from a browser, as https://example.org; "
                                                               "may be given more than once.")] = None,
    request_timeout: Annotated[float | None, typer.Option(min=0.001, help="Seconds after which a request is given up.")] = None,
    drain_seconds: Annotated[float, typer.Option(min=0, help="Seconds that requests may still run after SIGTERM; then they are answered "
                                                             "503.")] = DRAIN_SECONDS,
    allow_parameters: Annotated[bool, typer.Option("--allow-parameters", help="Let requests, and the page at /, change the "
                                                                              "thresholds of strategies.")] = False,
    strategies: Annotated[str | None, typer.Option(help="What requests may ask for beside the tuned strategy and plain decoding, divided "
                                                        "by commas; by default all that models and artifacts allow.")] = None,
    state: Annotated[StateMode, typer.Option(help="Whose requests share what strategies learn: of all clients (shared), of each API key "
                                              "(tenant), or of none (off).")] = StateMode.SHARED,
    state_dir: Annotated[Path | None, typer.Option(help="Folder to keep that in over restarts; by default it lives in memory.")] = None,
    state_seconds: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks at it.")] = 30.0,
    feedback_dir: Annotated[Path | None, typer.Option(help="Folder of a spool for `draftwell monitor`.")] = None,
    feedback_rate: Annotated[float, typer.Option(min=0, max=1, help="Share of the requests that is recorded there.")] = 0.0,
    feedback_text: Annotated[bool, typer.Option("--feedback-text", help="Record prompts and outputs: recalibration needs them.")] = False,
    feedback_per_minute: Annotated[int, typer.Option(min=1, help="Requests that are recorded at most.")] = 60,
    feedback_megabytes: Annotated[int, typer.Option(min=1, help="Size of the spool; beyond it the oldest goes.")] = 256,
) -> None:
    """Answer /v1/chat/completions, /v1/completions and /v1/models from a bundle, as OpenAI's clients expect; /health and /ready beside.

    A new bundle (the link `current` leads elsewhere, or SIGHUP) takes over with no request lost. SIGTERM ends what runs, then exits.
    """
    from serving.server.feedback.settings import settings_of  # no heavy library: what is wrong with the flags is said at once

    feedback = settings_of(feedback_dir, feedback_rate, text=feedback_text, a_minute=feedback_per_minute, megabytes=feedback_megabytes)
    run(bundle, host=host, port=port, slots=slots, queue=queue, dtype=dtype, threads=threads, max_context=max_context,
        deterministic=deterministic, api_key_file=api_key_file, cors_origins=cors_origin or (), request_timeout=request_timeout,
        drain_seconds=drain_seconds, allow_parameters=allow_parameters, strategies=strategies, state=state.value, state_dir=state_dir,
        state_seconds=state_seconds, feedback=feedback)


def run(bundle: Path, *, host: str = "127.0.0.1", port: int = 8000, slots: int = 8, queue: int = 256, dtype: str | None = None,
        threads: int | None = None, max_context: int | None = None, deterministic: bool = False, api_key_file: Path | None = None,
        cors_origins: Sequence[str] = (), request_timeout: float | None = None, drain_seconds: float = DRAIN_SECONDS,
        allow_parameters: bool = False, strategies: str | None = None, state: Mode = "shared", state_dir: Path | None = None,
        state_seconds: float = 30.0, feedback: FeedbackSettings | None = None) -> None:
    """Load a bundle and serve it, and its successors, until SIGINT or SIGTERM; requests in flight are finished first, for
    `drain_seconds` at most.

    Raises:
        DraftwellError: the address is taken, the server's packages are missing, or the bundle is refused.
    """
    with listen(host, port) as listener, uncollected() as collect:  # a port in use should not cost the reading of the weights
        try:
            import uvicorn

            from serving.server.app import create_app
        except ImportError as error:
            raise DraftwellError(f"the server needs the package {error.name}: pip install 'draftwell[server]'") from error
        from serving.artifacts.pair_files import draftwell_home, models_root
        from serving.bundle.bundle import refuse_inside
        from serving.runtime.engine.workers import on_own_thread
        from serving.server.deployment.bundle_watch import BundleWatch
        from serving.server.feedback.persistence import Persistence
        from serving.server.http.errors import hide_folders
        from serving.server.http.security import Security, origins, read_keys
        from serving.server.model.served_model import ServedModel, from_bundle

        offered = None if strategies is None else names_of(strategies)
        logging.basicConfig(format="%(levelname)s: %(message)s")
        logging.getLogger("serving").setLevel(logging.INFO)
        security = Security(keys=read_keys(api_key_file), cors_origins=origins(cors_origins))

        written = {"DRAFTWELL_HOME": draftwell_home(), "--state-dir": state_dir, "--feedback-dir": feedback.folder if feedback else None}
        refuse_inside(bundle, {name: folder for name, folder in written.items() if folder})  # before any of them is made
        keeping = Persistence(state_dir, state_seconds, feedback)

        hide_folders(Path.home(), models_root())

        def load(folder: Path, beside: ServedModel | None = None) -> ServedModel:
            hide_folders(folder)
            return keeping.prepare(on_own_thread(from_bundle, folder, slots=slots, dtype=dtype, threads=threads, max_context=max_context,
                                         deterministic=deterministic, beside=beside, state=state, offered=offered))

        def take_over(folder: Path) -> bool:
            """False: not now, look again."""
            deployments.switch(lambda old: load(folder, old), keeping.follow)
            return not deployments.worth_another_try

        watch = BundleWatch(bundle, take_over)  # before the bundle is read: what changes meanwhile is then noticed
        with ended_by_interrupt():
            web = create_app(load(bundle),  # nobody else holds the models: they can be freed
                             drain_seconds=0.0,  # `server` has drained when the application ends
                             capacity=queue, observers=keeping.observers, security=security,
                             request_timeout=request_timeout, allow_parameters=allow_parameters)
        deployments: Deployments = web.state.deployments
        config = uvicorn.Config(web, log_level="info", access_log=False, backlog=BACKLOG, timeout_graceful_shutdown=FLUSH_SECONDS,
                                timeout_keep_alive=KEEP_ALIVE_SECONDS)
        if hasattr(signal, "SIGHUP"):
            signal.signal(signal.SIGHUP, lambda *_: watch.ask())
        watch.start()
        listener.listen(BACKLOG)  # whoever reads the next line can connect
        served = deployments.current.served
        keeping.follow(served)
        keeping.start()
        print(f"draftwell-serve: {served.name} with {served.strategy.name} in {served.pair.dtype}, {slots} slots, "
              f"on http://{address_of(listener)}/v1", flush=True)
        del served
        collect()
        try:
            server(config, deployments, drain_seconds).run(sockets=[listener])
        finally:
            watch.close()
            keeping.close()


@contextmanager
def uncollected() -> Iterator[Callable[[], None]]:
    """Collect no garbage until what this gives is called: imports make hundreds of thousands of objects that stay, and looking through them
    again and again takes a second of the start."""
    gc.disable()
    try:
        yield gc.enable
    finally:
        gc.enable()


@contextmanager
def ended_by_interrupt() -> Iterator[None]:
    """SIGINT ends the process at once, though its main thread waits for the one that loads: before it serves there is nothing to lose."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # somebody's own, or ignored as in the background
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))  # the system's own handler does nothing for a container's first process
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def names_of(strategies: str) -> tuple[str, ...]:
    """The names in a --strategies value.

    Raises:
        DraftwellError: one is no strategy, or there is none.
    """
    from serving.runtime.strategies import find_strategy

    names = tuple(name for word in strategies.split(",") if (name := word.strip()))
    if not names:
        raise DraftwellError("--strategies names none: write one, such as vanilla_sd, or leave it out to offer all")
    for name in names:
        find_strategy(name)
    return names


def server(config: Any, deployments: Deployments, drain_seconds: float = DRAIN_SECONDS) -> Any:
    """A uvicorn server that drains: at the first SIGTERM or SIGINT new requests are answered 503 while those that are here go on, for
    `drain_seconds` at most; what is left then is answered 503 too, or its stream ends with an error. Clients have `FLUSH_SECONDS` to read
    that; then it exits with code 0. A second signal does not wait for the drain."""
    import uvicorn

    class DrainingServer(uvicorn.Server):
        asked_at: float | None = None

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            """Only note it: a signal may interrupt code that holds a lock."""
            if self.asked_at is not None:
                super().handle_exit(sig, frame)
            self.asked_at = self.asked_at or time.monotonic()

        async def on_tick(self, counter: int) -> bool:
            """Called ten times a second; True ends the server."""
            if self.asked_at is not None:
                if not deployments.draining:
                    deployments.drain()
                over = self.should_exit or time.monotonic() - self.asked_at > drain_seconds
                if over and deployments.users:
                    log.warning("the drain is over with %d requests unfinished: they are answered 503", deployments.users)
                    deployments.abort()
                if over or deployments.users == 0:
                    return True
            return await super().on_tick(counter)

    return DrainingServer(config)


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; raises DraftwellError where the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise DraftwellError(f"cannot listen on {host}:{port} ({error.strerror or error}): choose another --host or --port") from error
    return listener


def address_of(listener: socket.socket) -> str:
    """host:port of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def main() -> None:
    """Console script: a user's mistake is one line on stderr and exit code 2."""
    try:
        code = app(standalone_mode=False)
    except DraftwellError as error:
        fail(str(error))
    except typer.Abort:
        sys.exit(130)
    except Exception as error:
        # a usage error: Typer's own class or Click's, depending on Typer's version
        if not hasattr(error, "format_message"):
            raise
        fail(f"{error.format_message()} (see draftwell-serve --help)")
    sys.exit(code if isinstance(code, int) else 0)


def fail(message: str) -> None:
    """Print one line and exit with code 2."""
    print(f"draftwell-serve: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
