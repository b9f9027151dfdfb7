"""`draftwell-serve`: answer HTTP requests from a bundle. Heavy libraries load when serving starts, so that --help is quick."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from serving.runtime.types import DraftwellError

app = typer.Typer(add_completion=False, rich_markup_mode=None)

DRAIN_SECONDS = 30
BACKLOG = 1024


@app.command(epilog="Example: draftwell-serve --bundle dist/smollm2-135m/current --port 8000 --slots 8")
def serve(
    bundle: Annotated[Path, typer.Option(help="Folder that `make deploy` wrote, or the link `current` to it.")],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    slots: Annotated[int, typer.Option(min=1, max=1024, help="Requests that run at once; others wait.")] = 8,
    dtype: Annotated[str | None, typer.Option(help="Insist on this dtype; a bundle tuned in another one is refused.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Compute threads; by default PyTorch decides.")] = None,
    max_context: Annotated[int | None, typer.Option(min=2, help="Tokens of prompt and answer; by default the models' limit, "
                                                                "at most 4096.")] = None,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Start every request from the bundle's state, so that a "
                                                                        "seed always gives the same answer.")] = False,
) -> None:
    """Answer /v1/chat/completions, /v1/completions, /v1/models and /health from a bundle, as OpenAI's clients expect."""
    run(bundle, host=host, port=port, slots=slots, dtype=dtype, threads=threads, max_context=max_context, deterministic=deterministic)


def run(bundle: Path, *, host: str = "127.0.0.1", port: int = 8000, slots: int = 8, dtype: str | None = None,
        threads: int | None = None, max_context: int | None = None, deterministic: bool = False) -> None:
    """Load a bundle and serve it until SIGINT or SIGTERM; requests in flight are finished first.

    Raises:
        DraftwellError: the address is taken, the server's packages are missing, or the bundle is refused.
    """
    with listen(host, port) as listener:  # first of all: a port in use should not cost the reading of the weights
        try:
            import uvicorn

            from serving.server.app import create_app
        except ImportError as error:
            raise DraftwellError(f"the server needs the package {error.name}: pip install 'draftwell[server]'") from error
        from serving.server.served import from_bundle

        served = from_bundle(bundle, slots=slots, dtype=dtype, threads=threads, max_context=max_context, deterministic=deterministic)
        config = uvicorn.Config(create_app(served, drain_seconds=DRAIN_SECONDS), log_level="info", access_log=False, backlog=BACKLOG,
                                timeout_graceful_shutdown=DRAIN_SECONDS)
        listener.listen(BACKLOG)  # whoever reads the next line can connect
        print(f"draftwell-serve: {served.name} with {served.strategy.name} in {served.pair.dtype}, {slots} slots, "
              f"on http://{address_of(listener)}/v1", flush=True)
        uvicorn.Server(config).run(sockets=[listener])


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
