"""Options of commands that start an engine at an address."""

from __future__ import annotations

from typing import Annotated

import typer

LaunchCommand = Annotated[
    str | None,
    typer.Option(
        "--launcher",
        metavar="COMMAND",
        help="With --engine URL: the command that starts the engine, for a shell. In it "
        "{speculation_options} stands for the options that say how it speculates, {speculation} "
        "for their JSON, {speculation_file} for a file with them, {port} and {url} for where it "
        "answers. See docs/launchers.md.",
    ),
]
StopCommand = Annotated[
    str | None,
    typer.Option(
        "--stop-command",
        metavar="COMMAND",
        help="With --launcher: ends an engine that does not end with the command that started it; "
        "with the same placeholders.",
    ),
]
StartMinutes = Annotated[
    float,
    typer.Option(
        "--start-minutes",
        min=0.05,
        help="With --launcher: how long an engine may take until it answers.",
    ),
]
EngineDraft = Annotated[
    str | None,
    typer.Option(
        "--engine-draft",
        metavar="NAME",
        help="With --launcher: the draft model as the engine reads it, a folder, file or hub id. "
        "Default: the pair's, in a folder of this machine.",
    ),
]
EngineHead = Annotated[
    str | None,
    typer.Option(
        "--engine-head",
        metavar="NAME",
        help="With --launcher: the EAGLE-3 head as the engine reads it. Default: the pair's.",
    ),
]
Grid = Annotated[
    bool,
    typer.Option(
        "--grid",
        help="With --launcher: measure every setting again at the end, and what the choice lost "
        "to the best of them.",
    ),
]
TuneMinutes = Annotated[
    float | None,
    typer.Option(
        "--minutes",
        min=1.0,
        help="With --launcher: measure what there is time for; --grid comes on top. Default: all.",
    ),
]
