"""`draftwell export`: the tuned settings in another engine's format. The command has one parameter
for each flag."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt

from draftwell.flows.cli.engine_options import refuse_beside
from draftwell.flows.cli.options import (
    Pair,
    ReleaseDevice,
    check_folder,
    check_output,
    release_device,
    say,
    write_json,
)
from draftwell.flows.cli.settings_option import add_command, names_of
from draftwell.registry.pairs import fetch, find_pair
from draftwell.registry.pairs.fetching import locate
from draftwell.registry.releases import find_release
from draftwell.registry.store import Store
from draftwell.serving.artifacts.decoding_config import DecodingConfig
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import read_text

if TYPE_CHECKING:
    from draftwell.components.export.speculation import Weights
    from draftwell.registry.pairs import PairSpec
    from draftwell.registry.releases import ReleaseVersion
    from draftwell.serving.runtime.strategies import StrategyChoice


def add_to(app: typer.Typer) -> None:
    """Register this file's command."""
    add_command(app, export, file=True)


To = Annotated[str, typer.Option("--to", help="Engine: vllm, sglang, llama.cpp or transformers.")]
Release = Annotated[
    str,
    typer.Option("--release", help="Alias or number of the release whose config is exported."),
]
Config = Annotated[
    Path | None,
    Field(
        description=(
            "A config instead of a release's: a decoding_config folder, or JSON with "
            "strategy and parameters."
        )
    ),
]
DraftTokens = Annotated[
    int | None,
    Field(
        ge=1, le=64, description="Constant draft length, for a rule that the engine cannot express."
    ),
]
TargetModel = Annotated[
    str | None,
    Field(description="Target for the engine: a hub id or a path (default: the pair's own)."),
]
DraftModel = Annotated[
    str | None,
    Field(description="Draft for the engine: a hub id or a path (default: the pair's own)."),
]
SaveDraft = Annotated[
    Path | None,
    Field(
        description="New folder for the complete weights of a distilled draft, which other "
        "engines need."
    ),
]
SaveHead = Annotated[
    Path | None,
    Field(
        description=(
            "New folder for an EAGLE-3 head with the weights that it borrows, which other "
            "engines need."
        )
    ),
]
Measured = Annotated[
    Path | None,
    Field(
        description=(
            "Figures of `draftwell bench --out` that go with save_head or save_draft as "
            "speculation_profile.json."
        )
    ),
]
Out = Annotated[
    Path | None, typer.Option("--out", help="File to write (default: print the document).")
]


def export(
    context: typer.Context,
    to: To,
    pair: Pair = "default",
    device: ReleaseDevice = None,
    release: Release = "champion",
    config: Config = None,
    draft_tokens: DraftTokens = None,
    target_model: TargetModel = None,
    draft_model: DraftModel = None,
    save_draft: SaveDraft = None,
    save_head: SaveHead = None,
    measured: Measured = None,
    out: Out = None,
) -> None:
    """Write the tuned settings as documented settings of another engine, with notes on what it
    cannot express.

    Example: draftwell export --to vllm --pair vicuna-68m-7b --set config=config.json --out
    vllm.json
    """
    from draftwell.components.export.export import export_config
    from draftwell.flows.steps.exported_weights import Known, pinned, write_draft, write_head

    if config is not None:
        of_release = {"release", "device"}
        beside = tuple(set(names_of(context.command)) - of_release)
        refuse_beside(context, "--set config", beside, "config_option")
    check_written(out, measured, [one for one in (save_draft, save_head) if one is not None])
    spec = find_pair(pair)
    released: ReleaseVersion | None = None
    with tempfile.TemporaryDirectory() as place:
        if config is None:
            released = find_release(Store(), spec.name, release_device(device), release)
            config = pinned(released, "decoding_config", Path(place))
        choice = read_config(config)
        if save_draft is not None and draft_model is None:
            draft_model = str(save_draft.resolve())
        weights = weights_of(spec, to, target_model, draft_model, released)
        if save_head is not None:
            weights = replace(weights, head=str(save_head.resolve()))
        document = export_config(
            to,
            choice.name,
            choice.parameters,
            weights,
            draft_tokens=draft_tokens,
            draft_length_by_batch=choice.draft_length_by_batch,
        )
        if save_head is not None:
            check_head_used(document["settings"], weights.head, f"{to}'s settings of {choice.name}")
        if save_draft is not None:
            known = Known("draft_model", measured if save_head is None else None, weights.target)
            write_draft(spec, save_draft, released, Path(place), known, say)
        if save_head is not None:
            known = Known("eagle3", measured, weights.target)
            write_head(pair, save_head, released, Path(place), known, say)
    show(document, out)


def show(document: Mapping[str, Any], out: Path | None) -> None:
    """Print or write the settings, and tell the notes."""
    if out is None:
        typer.echo(json.dumps(document, indent=2, allow_nan=False))
    else:
        write_json(out, document)
        typer.echo(str(out))
    for note in document["notes"]:
        say(note)


def check_head_used(settings: Mapping[str, Any], head: str | None, whose: str) -> None:
    """Refuse to save a head that settings do not name."""
    if head not in settings.values():
        raise DraftwellError(f"{whose} use no head: leave save_head out", code="head_not_used")


def check_written(out: Path | None, measured: Path | None, folders: Sequence[Path]) -> None:
    """Refuse, before any work, what cannot be written."""
    if out is not None:
        check_output(out)
    if measured is not None and not folders:
        raise DraftwellError(
            "measured goes beside the weights that are exported: add save_head or save_draft",
            code="measured_without_weights",
        )
    for folder in folders:
        check_folder(folder)


class ConfigFile(BaseModel):
    """A strategy, its parameters, and its draft lengths by requests at once."""

    strategy: str
    parameters: dict[str, Any] = {}
    draft_length_by_batch: dict[PositiveInt, NonNegativeInt] = {}


def read_config(path: Path) -> StrategyChoice:
    """The choice for greedy requests of an artifact's folder, or of JSON such as its
    config.json."""
    from draftwell.serving.runtime.strategies import StrategyChoice, served_choice

    if path.is_dir():
        return served_choice(DecodingConfig.load(path), 0.0)
    try:
        found = ConfigFile.model_validate_json(read_text(path))
    except ValueError as error:
        raise DraftwellError(
            f"{path} names no config: name a decoding_config folder, or JSON such as "
            '{"strategy": "…", "parameters": {…}}',
            code="bad_config_file",
        ) from error
    return StrategyChoice(found.strategy, found.parameters, found.draft_length_by_batch)


def weights_of(
    spec: PairSpec,
    engine: str,
    target: str | None,
    draft: str | None,
    release: ReleaseVersion | None,
) -> Weights:
    """Names of the pair's models for the engine; no draft where it, or the one that the release
    pins, is stored in Draftwell's own format.

    Nothing is fetched except a target from a Python package, which has no name on the hub.
    """
    from draftwell.components.export.speculation import Weights

    names: dict[str, str] = {}
    for role, source in spec.sources().items():
        if source.hub is not None:
            names[role] = source.hub
        elif source.path is not None:
            names[role] = str((spec.folder / source.path).resolve())
        elif source.package is not None and (role != "target" or target is None):
            names[role] = str(
                locate(source.package)
                if engine == "llama.cpp"
                else fetch(spec, progress=say).roles()[role]
            )
    if release is not None and "distilled_draft" in release.pins:
        names.pop("draft", None)
    pinned = {
        role: source.revision if source.revision != "main" else None
        for role, source in spec.sources().items()
    }
    return Weights(
        target or names["target"],
        draft or names.get("draft"),
        pinned.get("draft") if draft is None else None,
        pinned["target"] if target is None else None,
    )
