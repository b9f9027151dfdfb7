"""`draftwell export`: the tuned settings in another engine's format. The command has one parameter
for each flag."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import BaseModel, NonNegativeInt, PositiveInt

from draftwell.flows.cli.options import (
    DeviceOption,
    Pair,
    check_folder,
    check_output,
    release_device,
    say,
    write_json,
)
from draftwell.flows.workspace import Workspace
from draftwell.registry.pairs import fetch, find_pair
from draftwell.registry.pairs.fetching import locate
from draftwell.registry.releases import find_release
from draftwell.registry.store import Store
from draftwell.serving.artifacts.base import MANIFEST
from draftwell.serving.artifacts.decoding_config import DecodingConfig
from draftwell.serving.artifacts.pair_files import fingerprint
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import read_text
from draftwell.serving.number_format import FORMATS, dtype_of

if TYPE_CHECKING:
    from draftwell.components.export.speculation import Weights
    from draftwell.registry.pairs import PairSpec
    from draftwell.registry.releases import ReleaseVersion
    from draftwell.serving.artifacts.pair_files import PairFiles
    from draftwell.serving.runtime.strategies import StrategyChoice


def add_to(app: typer.Typer) -> None:
    """Register this file's command."""
    app.command()(export)


To = Annotated[str, typer.Option("--to", help="Engine: vllm, sglang, llama.cpp or transformers.")]
Release = Annotated[
    str,
    typer.Option(
        "--release", "--alias", help="Alias or number of the release whose config is exported."
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help=(
            "A config instead of a release's: a decoding_config folder, or JSON with "
            "strategy and parameters."
        ),
    ),
]
DraftTokens = Annotated[
    int | None,
    typer.Option(
        "--draft-tokens",
        min=1,
        max=64,
        help="Constant draft length, for a rule that the engine cannot express.",
    ),
]
TargetModel = Annotated[
    str | None,
    typer.Option(
        "--target-model",
        help="Target for the engine: a hub id or a path (default: the pair's own).",
    ),
]
DraftModel = Annotated[
    str | None,
    typer.Option(
        "--draft-model",
        help="Draft for the engine: a hub id or a path (default: the pair's own).",
    ),
]
SaveDraft = Annotated[
    Path | None,
    typer.Option(
        "--save-draft",
        help=(
            "New folder for the complete weights of a distilled draft, which other engines need."
        ),
    ),
]
SaveHead = Annotated[
    Path | None,
    typer.Option(
        "--save-head",
        help=(
            "New folder for an EAGLE-3 head with the weights that it borrows, which other "
            "engines need."
        ),
    ),
]
Out = Annotated[
    Path | None, typer.Option("--out", help="File to write (default: print the document).")
]


def export(
    to: To,
    pair: Pair = "default",
    device: DeviceOption = None,
    release: Release = "champion",
    config: Config = None,
    draft_tokens: DraftTokens = None,
    target_model: TargetModel = None,
    draft_model: DraftModel = None,
    save_draft: SaveDraft = None,
    save_head: SaveHead = None,
    out: Out = None,
) -> None:
    """Write the tuned settings as documented settings of another engine, with notes on what it
    cannot express.

    Example: draftwell export --to vllm --pair vicuna-68m-7b --config config.json --out vllm.json
    """
    from draftwell.components.export.export import export_config

    if out is not None:
        check_output(out)
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
        if save_head is not None and weights.head not in document["settings"].values():
            raise DraftwellError(
                f"{to}'s settings of {choice.name} use no head: leave --save-head out",
                code="head_not_used",
            )
        if save_draft is not None:
            write_draft(spec, save_draft, released, Path(place))
        if save_head is not None:
            write_head(pair, save_head, released, Path(place))
    if out is None:
        typer.echo(json.dumps(document, indent=2, allow_nan=False))
    else:
        write_json(out, document)
        typer.echo(str(out))
    for note in document["notes"]:
        say(note)


def pinned(release: ReleaseVersion, kind: str, place: Path) -> Path:
    """An artifact that a release pins, downloaded into a folder.

    Raises:
        DraftwellError: it pins none.
    """
    if kind not in release.pins:
        raise DraftwellError(
            f"{release.name} pins no {kind}: run `draftwell tune` and release that",
            code=f"no_{kind}",
        )
    store = Store()
    return store.download(store.resolve(kind, release.pair, release.pins[kind]), place / kind)


def write_draft(spec: PairSpec, folder: Path, release: ReleaseVersion | None, place: Path) -> None:
    """Save a distilled draft as a folder of complete weights: the one that the release pins, or the
    pair's own without a release."""
    from draftwell.components.export.checkpoint import save_draft

    if not pins_draft(release) and (spec.draft is None or spec.draft.artifact is None):
        raise DraftwellError(
            (
                f"the draft of {spec.name} is not distilled: other engines read it as it is, "
                "leave --save-draft out"
            ),
            code="draft_not_distilled",
        )
    check_folder(folder)
    files: PairFiles = fetch(spec, progress=say)
    dtype: str = spec.number_format
    if release is not None:
        files, dtype = released_files(files, release, place)
    assert files.draft is not None
    save_draft(files.target, files.draft, folder, dtype_of(dtype))
    say(
        f"saved the draft to {folder}; other engines let it propose every token, Draftwell "
        "only those that its head was distilled for"
    )


def write_head(pair: str, folder: Path, release: ReleaseVersion | None, place: Path) -> None:
    """Save an EAGLE-3 head as a folder that other engines load: the one that the release pins, else
    the workspace's or the shipped one."""
    from draftwell.components.export.checkpoint import save_head
    from draftwell.serving.artifacts.eagle3_head import Eagle3Head

    check_folder(folder)
    space = Workspace(pair, None, say)
    found: Path | None = space.folder("eagle3_head")
    if release is not None and "eagle3_head" in release.pins:
        found = pinned(release, "eagle3_head", place)
    elif not (space.folder("eagle3_head") / MANIFEST).is_file():
        found = space.shipped_folder("eagle3_head")
    if found is None:
        raise DraftwellError(
            (
                f"pair {space.spec.name} has no EAGLE-3 head: run `draftwell train --kind "
                f"eagle3_head --pair {pair}`"
            ),
            code="artifact_missing",
        )
    save_head(space.files().target, Eagle3Head.load(found), folder)
    say(f"saved the head to {folder}")


def released_files(files: PairFiles, release: ReleaseVersion, place: Path) -> tuple[PairFiles, str]:
    """The models that a release was made for, its pinned draft downloaded into `place`, and their
    dtype.

    Raises:
        DraftwellError: the models here are different ones.
    """

    if pins_draft(release):
        files = replace(files, draft=pinned(release, "distilled_draft", place))
    for dtype in FORMATS:
        if fingerprint(files, dtype) == release.fingerprint:
            return files, dtype
    raise DraftwellError(
        f"{release.name} was made for other models (fingerprint "
        f"{release.fingerprint[:12]}) than those of pair "
        f"{release.pair} here: fetch the weights it names, or calibrate and release it again",
        code="other_models",
    )


def pins_draft(release: ReleaseVersion | None) -> bool:
    """Whether a release pins a distilled draft."""
    return release is not None and "distilled_draft" in release.pins


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
    if pins_draft(release):
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
