"""Options that several commands share: where an engine is, and the command that starts it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from draftwell.flows.cli.options import read_several

EngineKeyFile = Annotated[
    Path | None,
    Field(
        description="With --engine URL: file of the server's key. Default: $DRAFTWELL_ENGINE_KEY."
    ),
]
EngineHeader = Annotated[
    list[str] | None,
    BeforeValidator(read_several),
    Field(
        description=(
            "With --engine URL: NAME:VALUE, a header of all requests, or a list. Lists of "
            "processes show it: it is no place for a key."
        )
    ),
]
EngineCa = Annotated[
    Path | None,
    Field(description="With --engine URL: file of the certificates that its own is checked by."),
]
EngineModel = Annotated[
    str | None,
    Field(description="With --engine URL: the name of the model there. Default: the only one."),
]
LaunchCommand = Annotated[
    str | None,
    Field(
        description=(
            "With --engine URL: the command that starts the engine, for a shell, or its file. In "
            "it {speculation_options} stands for the options that say how it speculates, "
            "{speculation_file} for a file with them, {port} and {url} for where it answers. See "
            "docs/launchers.md."
        )
    ),
]
StopCommand = Annotated[
    str | None,
    Field(
        description=(
            "With a launcher: ends an engine that does not end with the command that started it; "
            "with the same placeholders."
        )
    ),
]
StartMinutes = Annotated[
    float,
    Field(ge=0.05, description="With a launcher: how long an engine may take until it answers."),
]
EngineDraft = Annotated[
    str | None,
    Field(
        description=(
            "With a launcher: the draft model as the engine reads it, a folder, file or hub id. "
            "Default: the pair's, in a folder of this machine."
        )
    ),
]
EngineHead = Annotated[
    str | None,
    Field(
        description="With a launcher: the EAGLE-3 head as the engine reads it. Default: the pair's."
    ),
]
Grid = Annotated[
    bool,
    Field(
        description=(
            "With a launcher: measure every setting again at the end, and what the choice lost "
            "to the best of them."
        )
    ),
]
TuneMinutes = Annotated[
    float | None,
    Field(
        ge=1.0,
        description="With a launcher: measure what there is time for; grid comes on top. "
        "Default: all.",
    ),
]

ADDRESS: Mapping[str, tuple[Any, Any]] = {
    "engine_key_file": (EngineKeyFile, None),
    "engine_header": (EngineHeader, None),
    "engine_ca": (EngineCa, None),
    "engine_model": (EngineModel, None),
}
"""Name → type and default of the options that say where an engine is."""
LAUNCHER: Mapping[str, tuple[Any, Any]] = {
    "launcher": (LaunchCommand, None),
    "stop_command": (StopCommand, None),
    "start_minutes": (StartMinutes, 30.0),
    "engine_draft": (EngineDraft, None),
    "engine_head": (EngineHead, None),
}
"""Of the options that say how one is started."""
GRID: Mapping[str, tuple[Any, Any]] = {"minutes": (TuneMinutes, None), "grid": (Grid, False)}
"""Of those that say how long its settings are measured."""


def with_options(
    command: Callable[..., None], *shared: Mapping[str, tuple[Any, Any]]
) -> Callable[..., None]:
    """A command that takes shared options, too; it finds them in its context's `params`."""
    added = {name: option for options in shared for name, option in options.items()}
    signature = inspect.signature(command, eval_str=True)

    @functools.wraps(command)
    def run(**given: Any) -> None:
        command(**{name: value for name, value in given.items() if name not in added})

    more = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (kind, default) in added.items()
    ]
    run.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), *more]
    )
    return run
