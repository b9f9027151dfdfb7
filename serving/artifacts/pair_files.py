"""The model files of a pair on this machine, and the digests that identify them.

The *pair fingerprint* is what artifacts are bound to: sha256 over the weights of every model, the
target's tokenizer and the number format. Paths, machines and file dates do not enter it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from draftwell.serving.artifacts.base import MANIFEST, digest_of
from draftwell.serving.artifacts.near_copy import RECIPE, is_near_copy
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import json_digest, sha256_file, write_atomically
from draftwell.serving.number_format import FORMATS

log = logging.getLogger(__name__)

HASHING_THREADS = 4
"""Hashing lets go of the interpreter."""
SIDECAR = ".weights.sha256.json"
"""Digests of a folder's weight files, with the size and date they were computed at."""

TOKENIZERS = (
    ("tokenizer.json",),
    ("tokenizer.model",),
    ("vocab.json", "merges.txt"),
    ("tekken.json",),
    ("tiktoken.model",),
    ("spiece.model",),
    ("vocab.txt",),
)
"""Files that fix a vocabulary; the first complete set counts (settings and chat templates do
not)."""
SETTINGS = (".json", ".model", ".txt", ".jinja")
"""Suffixes of what is next to weights: configurations, tokenizer, chat template, generation
config."""

ModelRole = Literal["target", "draft", "qualifier"]
"""Models of a pair that have files."""


@dataclass(frozen=True)
class PairFiles:
    """Where a pair's models are.

    Args:
        name: name of the pair in the catalogue.
        target: folder with config.json, safetensors weights and tokenizer files.
        draft: such a folder, or that of a distilled draft (it holds artifact.json) or of a near
            copy of the target (near_copy.json); None where no draft is needed.
        qualifier: the model between the two, where there are three.
    """

    name: str
    target: Path
    draft: Path | None = None
    qualifier: Path | None = None

    def roles(self) -> dict[ModelRole, Path]:
        """The models that are present, by role."""
        found: dict[ModelRole, Path | None] = {
            "target": self.target,
            "draft": self.draft,
            "qualifier": self.qualifier,
        }
        return {role: path for role, path in found.items() if path is not None}


def draftwell_home() -> Path:
    """Folder of all state: `$DRAFTWELL_HOME`, by default `.draftwell` in the current directory."""
    return Path(os.environ.get("DRAFTWELL_HOME") or ".draftwell").absolute()


def models_root() -> Path:
    """Folder of converted and fetched models: `$DRAFTWELL_MODELS`, by default `models` in the
    home."""
    return Path(os.environ.get("DRAFTWELL_MODELS") or draftwell_home() / "models").absolute()


def is_artifact(folder: Path) -> bool:
    """Whether a model folder is an artifact of ours (a distilled draft) and not a model of
    transformers."""
    return (folder / MANIFEST).is_file()


def combine_digests(digests: Mapping[str, str]) -> str:
    """One digest of several weight files: that of the file itself, or sha256 over all names and
    digests."""
    if len(digests) == 1:
        return next(iter(digests.values()))
    return hashlib.sha256(json.dumps(sorted(digests.items())).encode()).hexdigest()


def weights_digest(folder: Path, *, in_full: bool = False) -> str:
    """sha256 over the safetensors weights of a model folder.

    Digests are kept in a sidecar file, keyed by size and date, so that large weights are read once;
    a folder that cannot be written to is only slower.

    Args:
        in_full: read all of the weights now: whoever may write to the folder may have written the
            sidecar, too.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise DraftwellError(
            f"{folder} holds no safetensors weights: fetch the model again, "
            "or convert it with save_pretrained",
            code="no_weights",
        )
    if in_full:
        return _read_in_full(folder, files)
    return combine_digests(digests_kept(files, folder / SIDECAR))


def digests_kept(files: Sequence[Path], sidecar: Path) -> dict[str, str]:
    """sha256 of files of different names, by name; a sidecar file keeps them, with the sizes and
    dates of the files, where it can be written."""
    known = _read_sidecar(sidecar)
    entries = {}
    for file in files:
        stat = file.stat()
        state = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
        entry = known.get(file.name)
        if not isinstance(entry, dict) or entry != {**state, "sha256": entry.get("sha256")}:
            entry = {
                **state,
                "sha256": _sha256_once(file.resolve(), stat.st_size, stat.st_mtime_ns),
            }
        entries[file.name] = entry
    if entries != known:
        with contextlib.suppress(OSError):
            write_atomically(sidecar, json.dumps(entries, indent=2, sort_keys=True).encode())
    return {name: str(entry["sha256"]) for name, entry in entries.items()}


def _read_in_full(folder: Path, files: Sequence[Path]) -> str:
    started = time.monotonic()
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        digests = dict(
            zip((file.name for file in files), pool.map(sha256_file, files), strict=True)
        )
    log.info(
        "read the weights of %s in full: %.1f GB in %.1f s",
        folder,
        sum(file.stat().st_size for file in files) / 1e9,
        time.monotonic() - started,
    )
    return combine_digests(digests)


@functools.lru_cache
def _sha256_once(file: Path, size: int, mtime_ns: int) -> str:
    """sha256 of a file, computed once in a process as long as size and date stay: a folder may be
    read-only."""
    return sha256_file(file)


def _read_sidecar(sidecar: Path) -> dict[str, object]:
    try:
        known = json.loads(sidecar.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def model_digest(folder: Path, *, in_full: bool = False) -> str:
    """Digest of a model folder of any form: an artifact's own digest, that of a near copy's recipe,
    or that of the weights (`weights_digest`)."""
    if is_near_copy(folder):
        return sha256_file(folder / RECIPE)
    if is_artifact(folder):
        return digest_of(folder)
    return weights_digest(folder, in_full=in_full)


def tokenizer_digest(folder: Path) -> str:
    """sha256 over the files that fix the vocabulary."""
    return combine_digests({path.name: sha256_file(path) for path in tokenizer_files(folder)})


def tokenizer_files(folder: Path) -> list[Path]:
    """The files that fix the vocabulary.

    Raises:
        DraftwellError: there are none (`no_tokenizer`).
    """
    for names in TOKENIZERS:
        paths = [folder / name for name in names]
        if all(path.is_file() for path in paths):
            return paths
    others = ", ".join("+".join(names) for names in TOKENIZERS[1:])
    raise DraftwellError(
        f"{folder} holds no tokenizer (tokenizer.json, or one of {others}): fetch the model again, "
        "or save one there",
        code="no_tokenizer",
    )


def settings_digest(files: PairFiles) -> str:
    """sha256 over everything next to the weights: what a pair reads, says and stops at, and the
    fingerprint leaves out.

    An artifact's folder does not count: its digest, which the fingerprint holds, is over all of it.
    """
    return json_digest(
        {
            role: model_settings_digest(folder)
            for role, folder in files.roles().items()
            if not is_artifact(folder)
        }
    )


def model_settings_digest(folder: Path) -> str:
    """sha256 over everything next to a model's weights."""
    return json_digest(
        {
            path.name: sha256_file(path)
            for path in folder.iterdir()
            if path.is_file() and path.suffix in SETTINGS and not path.name.startswith(".")
        }
    )


def combine_fingerprint(weights: Mapping[ModelRole, str], tokenizer: str, dtype: str) -> str:
    """The pair fingerprint from digests that are already known.

    Args:
        weights: role → digest of the model's weights; roles that a pair lacks are left out.
        tokenizer: digest of the target's tokenizer.
        dtype: one of `draftwell.serving.number_format.FORMATS`.
    """
    if dtype not in FORMATS:
        raise DraftwellError(
            f"unknown dtype {dtype}: choose from {', '.join(FORMATS)}", code="unknown_dtype"
        )
    return hashlib.sha256(
        json.dumps([sorted(weights.items()), tokenizer, dtype]).encode()
    ).hexdigest()


def fingerprint(files: PairFiles, dtype: str) -> str:
    """sha256 over weights, tokenizer and dtype: what every artifact of the pair is bound to."""
    weights = {role: model_digest(folder) for role, folder in files.roles().items()}
    return combine_fingerprint(weights, tokenizer_digest(files.target), dtype)
