"""`draftwell tune`: from two models, or a pair, and prompts to a release that is served, and a
card."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftwell.flows.cli.options import EXIT_FAILED, EXIT_UNDECIDED, DeviceOption, read_engine, say
from draftwell.serving.errors import DraftwellError

if TYPE_CHECKING:
    from draftwell.components.card.card import Card

EXIT_CODES = {"passed": 0, "failed": EXIT_FAILED, "undecided": EXIT_UNDECIDED}

Target = Annotated[
    str | None, typer.Option("--target", metavar="DIR|HUB", help="The model to make faster.")
]
Draft = Annotated[
    str | None,
    typer.Option(
        "--draft",
        metavar="DIR|HUB",
        help="A small model of the same vocabulary. Default: only what needs none is tried.",
    ),
]
Pair = Annotated[
    str | None,
    typer.Option(
        "--pair",
        metavar="NAME",
        help="A pair that is known already, or its YAML file. Default without --target: the "
        "shipped one.",
    ),
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        help="Your traffic: JSON, JSONL, CSV or Parquet in any usual layout, ShareGPT's too. "
        "Default: shipped prompts.",
    ),
]
Engine = Annotated[
    str,
    typer.Option(
        "--engine", parser=read_engine, metavar="draftwell|vllm|URL", help="What decodes."
    ),
]
Minutes = Annotated[
    float | None,
    typer.Option(
        "--minutes",
        min=1.0,
        help="Time for everything but --distil. Default: 10; with vllm 45.",
    ),
]
Distil = Annotated[
    float | None,
    typer.Option(
        "--distil",
        metavar="MINUTES",
        min=0.01,
        help="Train a draft for a target without one for so long, first.",
    ),
]
Launcher = Annotated[
    str | None,
    typer.Option(
        "--launcher",
        metavar="FILE",
        help="With --engine URL: file of the command that starts the engine.",
    ),
]
SettingsFile = Annotated[
    Path | None,
    typer.Option(
        "--settings", help="YAML file of further settings.", rich_help_panel="Rarely needed"
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="One of them; may be repeated.",
        rich_help_panel="Rarely needed",
    ),
]
FreshOption = Annotated[
    bool, typer.Option("--fresh", help="Begin again instead of where a run was stopped.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the card as JSON.")]


def add_to(app: typer.Typer) -> None:
    """Register this file's command."""
    app.command()(tune)


def tune(
    target: Target = None,
    draft: Draft = None,
    pair: Pair = None,
    prompts: Prompts = None,
    engine: Engine = "draftwell",
    minutes: Minutes = None,
    distil: Distil = None,
    launcher: Launcher = None,
    device: DeviceOption = None,
    settings: SettingsFile = None,
    set_: Set = None,
    fresh: FreshOption = False,
    json: Json = False,
) -> None:
    """Find what makes a model faster on your prompts, prove it, and deploy it; ends with a card.

    A run that was stopped continues when it is started again. Exit code: 0 where a release passed
    the gate, 1 where the gate failed, 3 where it had not enough evidence.

    Example: draftwell tune --target models/big --draft models/small --prompts chats.json
    """
    from draftwell.flows.cli.signals import ends_what_it_started
    from draftwell.flows.orchestration.whole import TuneModelsSettings, tune_models

    wanted = TuneModelsSettings(
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
        more=further_settings(settings, set_ or ()),
    )
    with ends_what_it_started():
        card = tune_models(wanted, say)
    show(card, as_json=json)
    raise typer.Exit(EXIT_CODES[card.verdict])


def further_settings(file: Path | None, pairs: Any) -> dict[str, Any]:
    """Settings of a YAML file, and over them those of KEY=VALUE, whose values are YAML.

    Raises:
        DraftwellError: the file is no mapping (`bad_yaml`), or as `parse_settings`.
    """
    import yaml

    from draftwell.flows.workspace import parse_settings

    found: dict[str, Any] = {}
    if file is not None:
        try:
            read = yaml.safe_load(file.read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise DraftwellError(f"{file} is no YAML: correct it", code="bad_yaml") from error
        if not isinstance(read or {}, dict):
            raise DraftwellError(
                f"{file} is no YAML mapping of settings, such as bench_prompts: 32",
                code="bad_yaml",
            )
        found |= read or {}
    named = parse_settings(pairs)
    return found | {key: yaml.safe_load(value) for key, value in named.items()}


def show(card: Card, *, as_json: bool) -> None:
    """Print a card."""
    from draftwell.components.card.text import card_text
    from draftwell.flows.cli.options import wide_console

    if as_json:
        typer.echo(card.model_dump_json(indent=2))
    else:
        wide_console().print(card_text(card))
