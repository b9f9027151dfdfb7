"""`draftwell-serve`: the command line of the server, made from `ServerSettings`. Heavy libraries
load when serving starts, so that --help is quick."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Annotated, Any, NoReturn

import typer
from pydantic import BeforeValidator
from pydantic.fields import FieldInfo
from typer.core import TyperCommand

from draftwell.serving.device import keep_freed_memory
from draftwell.serving.errors import DraftwellError, missing_package
from draftwell.serving.server.process import listen
from draftwell.serving.server.settings import ServerSettings
from draftwell.serving.settings import refuse_empty

app = typer.Typer(add_completion=False, rich_markup_mode=None)

VLLM_NAMES = {"cors_origin": ["--allowed-origins"]}
"""Options that are known by vLLM's names, too."""
REMOVED = {
    "--dtype": "the bundle's manifest names its dtype, and the line at the start says it",
    "--prompt-tokens": "a step reads prompts by time, and 64 tokens with --deterministic",
    "--body-megabytes": "the bodies of all requests may always take 256 MiB",
    "--additional-properties": 'a schema opens its objects with "additionalProperties": true, and '
    "a request with disable_additional_properties: false",
    "--state-seconds": "state is always written every 30 s",
    "--feedback-per-minute": "at most 60 requests a minute are recorded",
    "--feedback-megabytes": "a spool always takes up to 256 MiB",
}
"""Earlier options, and what holds in their place."""


class ServeCommand(TyperCommand):
    """A command that says of an earlier option what replaces it, and refuses empty texts."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse earlier options and empty texts, then parse as usual."""
        refuse_removed(args)
        refuse_empty(self, ctx, args)
        return super().parse_args(ctx, args)


def refuse_removed(words: Iterable[str]) -> None:
    """Say of an earlier option in a command line what holds in its place (`removed_option`)."""
    for word in words:
        if (option := word.partition("=")[0]) in REMOVED:
            raise DraftwellError(
                f"{option} is no option any more, leave it out: {REMOVED[option]}",
                code="removed_option",
            )


def option_of(name: str, field: FieldInfo) -> inspect.Parameter:
    """A field of the settings as a command-line option: same name, type, default, bounds and
    description."""
    limits = {
        option: getattr(limit, bound)
        for bound, option in (("ge", "min"), ("le", "max"))
        for limit in field.metadata
        if hasattr(limit, bound)
    }
    kind: Any = field.annotation
    default = inspect.Parameter.empty if field.is_required() else field.default
    if kind == tuple[str, ...]:
        kind, default = list[str] | None, None
    # it reads words, and the settings check what it makes of them
    if any(isinstance(one, BeforeValidator) for one in field.metadata):
        kind, limits = str | None, {}
    flags = [f"--{name.replace('_', '-')}", *VLLM_NAMES.get(name, ())]
    option = typer.Option(*flags, help=field.description, **limits)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def with_options(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command one option for each field of `ServerSettings`."""
    options = [option_of(name, field) for name, field in ServerSettings.model_fields.items()]
    command.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return command


@app.command(
    cls=ServeCommand,
    epilog="Example: draftwell-serve --bundle dist/smollm2-135m/current --port 8000 --slots 8",
)
@with_options
def serve(**options: Any) -> int:
    """Serve a bundle over the OpenAI API: /v1/chat/completions, /v1/completions and /v1/models,
    with /health and /ready for probes.

    When the link `current` points to a new bundle, or on SIGHUP, the server switches to it without
    losing a request. SIGTERM lets running requests finish, then the server exits.
    """
    lists = {name: tuple(options[name] or ()) for name in ("cors_origin", "allowed_host")}
    return run(ServerSettings.from_options(**options | lists))


def run(settings: ServerSettings) -> int:
    """Load a bundle and serve it, and its successors, until SIGINT or SIGTERM; running requests get
    `drain_seconds` to finish.

    Returns:
        the exit code: 0, or `DEVICE_FAILED` after an error from which only a new process recovers.
    Raises:
        DraftwellError: the address is taken, the server's packages are missing (`missing_package`),
            or the bundle is refused.
    """
    keep_freed_memory()
    # the cheap check first
    with listen(settings.host, settings.port) as listener:
        try:
            from draftwell.serving.server.lifecycle import serve_bundles
        except ImportError as error:
            raise missing_package("the server needs", error.name, "server") from error
        return serve_bundles(settings, listener)


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


def fail(message: str) -> NoReturn:
    """Print one line and exit with code 2."""
    print(f"draftwell-serve: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
