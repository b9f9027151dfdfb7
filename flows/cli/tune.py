"""`draftwell tune`: from two models, or a pair, and prompts to a release that is served, and a
card."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftwell.components.engines.remote.address import is_address
from draftwell.flows.cli import OUTPUT
from draftwell.flows.cli.options import EXIT_FAILED, EXIT_UNDECIDED, read_engine, say
from draftwell.flows.cli.settings_option import OtherKeys, add_command, from_text, from_yaml
from draftwell.flows.settings import OF_TRAFFIC, PipelineSettings

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from draftwell.components.card.card import Card
    from draftwell.flows.orchestration.whole import TuneRequest

OPTIONS = ("pair", "prompts", "engine", "minutes", "device", "fresh")
"""Settings of the loop that are options."""
NOT_HERE = (
    *OF_TRAFFIC,
    *("sampled_prompts", "calibrate_prompts", "step_hours", "runner", "workers"),
)
"""Settings of the loop for served traffic, and for many prompts: of flows that run on schedule."""
SEVERAL = ("methods", "levels")
"""Settings with several values."""
EXIT_CODES = {"passed": 0, "failed": EXIT_FAILED, "undecided": EXIT_UNDECIDED}

Target = Annotated[
    str | None, typer.Option("--target", metavar="DIR|HUB", help="The model to make faster.")
]
Draft = Annotated[
    str | None,
    typer.Option(
        "--draft", metavar="DIR|HUB", help="A small model of its family, if there is one."
    ),
]
Pair = Annotated[
    str | None,
    typer.Option("--pair", metavar="NAME", help="A known pair. Default: the shipped one."),
]
Prompts = Annotated[
    Path | None,
    typer.Option("--prompts", metavar="FILE", help="Your traffic, ShareGPT's JSON for example."),
]
Engine = Annotated[
    str,
    typer.Option(
        "--engine", parser=read_engine, metavar="NAME|URL", help="draftwell, vllm or a server."
    ),
]
Minutes = Annotated[
    float | None,
    typer.Option("--minutes", metavar="N", min=1.0, help="For all. Default: 10; vllm: 45."),
]
Distil = Annotated[
    float | None,
    typer.Option("--distil", metavar="MINUTES", min=0.01, help="First train a draft for so long."),
]
Launcher = Annotated[
    str | None,
    typer.Option("--launcher", metavar="COMMAND", help="With a URL: what starts it, or its file."),
]
Device = Annotated[
    str | None,
    typer.Option("--device", metavar="cpu|cuda", help="Default: cuda where there is one."),
]
LOOP_KEYS = tuple(
    name for name in PipelineSettings.model_fields if name not in (*OPTIONS, *NOT_HERE)
)
"""Settings of the loop that `--set` takes."""
ADDRESS_KEYS = (
    *("engine_key_file", "engine_header", "engine_ca", "engine_model", "plain"),
    *("stop_command", "start_minutes", "engine_draft", "engine_head"),
)
"""Those of an engine at an address."""


def fields_of_settings() -> Mapping[str, FieldInfo]:
    """What each setting is."""
    from draftwell.flows.steps.engine.at_address import AddressSettings

    return AddressSettings.model_fields | PipelineSettings.model_fields


More = Annotated[
    dict[str, str] | None,
    OtherKeys((*LOOP_KEYS, *ADDRESS_KEYS), several=("engine_header",), fields=fields_of_settings),
]
FreshOption = Annotated[
    bool, typer.Option("--fresh", help="Begin again, not where it was stopped.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the card as JSON.")]


def add_to(app: typer.Typer) -> None:
    """Register this file's command."""
    add_command(app, tune, file=True)


def tune(
    target: Target = None,
    draft: Draft = None,
    pair: Pair = None,
    prompts: Prompts = None,
    engine: Engine = "draftwell",
    minutes: Minutes = None,
    distil: Distil = None,
    launcher: Launcher = None,
    device: Device = None,
    fresh: FreshOption = False,
    json: Json = False,
    more: More = None,
) -> None:
    """Find what makes a model faster on your prompts, prove it, and deploy it; ends with a card.

    A run that was stopped continues when it is started again. The gate's verdict is the exit code:
    0 passed, 1 failed, 3 undecided.

    Example: draftwell tune --target big --draft small --prompts chats.json
    """
    from draftwell.flows.cli.signals import ends_what_it_started
    from draftwell.flows.live import LiveView
    from draftwell.flows.orchestration.whole import (
        TuneRequest,
        refuse_mistakes,
        tune_models,
    )

    wanted = TuneRequest(
        target=target,
        draft=draft,
        pair=pair,
        prompts=prompts,
        engine=engine,
        minutes=minutes,
        distil=distil,
        launcher=launcher,
        device=device,
        fresh=fresh,
        more={key: value_of(key, text) for key, text in (more or {}).items()},
    )
    refuse_mistakes(wanted)  # before there is a log
    seconds = None if minutes is None else 60 * minutes
    again = None if runs_already(wanted) else resuming(sys.argv[1:])
    with (
        ends_what_it_started(),
        LiveView("tune", again, quiet=OUTPUT.quiet, seconds=seconds),
    ):
        card = tune_models(wanted, say)
    show(typed(card, pair), as_json=json)
    raise typer.Exit(EXIT_CODES[card.verdict])


def runs_already(settings: TuneRequest) -> bool:
    """Whether nothing is tuned, so that a run that is stopped keeps nothing."""
    return is_address(settings.engine) and settings.launcher is None


def resuming(words: Sequence[str]) -> str:
    """The command that continues one of these words: that begins again only once; empty: the
    same.

    >>> resuming(["tune", "--fresh", "--target", "my model"]), resuming(["tune"])
    ("draftwell tune --target 'my model'", '')
    """
    if "--fresh" not in words:
        return ""
    return shlex.join(["draftwell", *(word for word in words if word != "--fresh")])


def typed(card: Card, pair: str | None) -> Card:
    """The card, with the next command as it can be typed here: a card names no folders."""
    if pair is None or not pair.endswith((".yaml", ".yml")):
        return card
    named = f"--pair {shlex.quote(Path(pair).name)}"
    command = card.next_command.replace(named, f"--pair {shlex.quote(pair)}")
    return card.model_copy(update={"next_command": command})


def value_of(key: str, text: str) -> Any:
    """A setting's value, as every command reads it; several are written with commas, too, but for
    headers, which may hold some."""
    found = from_text(fields_of_settings()[key].annotation, text)
    if key == "engine_header" and isinstance(found, str):
        return [found]
    if key in SEVERAL and isinstance(found, str):
        return [from_yaml(part.strip()) for part in found.split(",")]
    return found


def show(card: Card, *, as_json: bool) -> None:
    """Print a card."""
    from draftwell.components.card.text import card_text
    from draftwell.flows.cli.options import wide_console

    if as_json:
        typer.echo(card.model_dump_json(indent=2))
    else:
        wide_console().print(card_text(card))
        if card.bundle is not None:
            typer.echo(f"bundle: {card.bundle}")
