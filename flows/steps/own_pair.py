"""A pair of two models that a user names by their folders or hub ids: its catalogue entry is made
once and found again by what the models are, so that every other command takes it by its name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any, Literal

from draftwell.flows.steps.distil import model_source
from draftwell.registry.pairs import ModelSource, PairSpec, fetch, list_pairs, write_pair
from draftwell.serving.artifacts.base import MANIFEST
from draftwell.serving.artifacts.checkpoint import CONFIG, computed_bytes, read_object
from draftwell.serving.artifacts.compiled_libraries import libraries_folder, wanted_mode
from draftwell.serving.artifacts.pair_files import (
    PairFiles,
    draftwell_home,
    model_digest,
    tokenizer_files,
)
from draftwell.serving.device import cuda_available, lacks_bfloat16
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import json_digest
from draftwell.serving.runtime.model_files import load_tokenizer, read_config
from draftwell.serving.runtime.models.native.library import compiler, find
from draftwell.serving.runtime.models.transformers_model import PACKED
from draftwell.serving.runtime.vocabulary import check_alike, names_of

Say = Callable[[str], None]
Sources = dict[str, ModelSource]


def pair_of_models(target: str, draft: str | None, device: str, say: Say = print) -> PairSpec:
    """The pair of models that are named by folder or hub id; its entry is written to
    `$DRAFTWELL_HOME/pairs/` where there is none yet.

    Args:
        draft: None: only strategies that need no draft are used.
        device: that it will be tuned on, which decides the dtype.
    Raises:
        DraftwellError: there is no such model, or no such files in it (`no_model`, `no_weights`,
            `no_tokenizer`), or the two have different vocabularies (`vocabulary_mismatch`).
    """
    sources = {
        role: source_of(named, role)
        for role, named in (("target", target), ("draft", draft))
        if named is not None
    }
    files = fetch(unnamed(sources), progress=say)
    check_models(files)
    models = digest_of_models(files)
    own = [spec for spec in list_pairs() if spec.folder == draftwell_home() / "pairs"]
    for spec in own:
        if spec.models == models:
            return found_again(spec, sources)
    changed = [spec.name for spec in own if spec.models and spec.sources() == sources]
    spec = PairSpec(
        name=free_name(sources),
        description=" with ".join(words_of(source) for source in sources.values()),
        licence="; ".join(dict.fromkeys(licence_of(path) for path in files.roles().values())),
        models=models,
        dtype=dtype_for(files, device),
        devices=("cpu", "cuda") if cuda_available() else ("cpu",),
        **sources,
    )
    if changed:
        say(f"the models have changed since {changed[-1]} was tuned: now they are {spec.name}")
    return written(spec, gigabytes_of(files, spec.dtype))


def source_of(named: str, role: str) -> ModelSource:
    """Where a model comes from.

    Raises:
        DraftwellError: it is no folder and no hub id (`no_model`).
    """
    folder = Path(named).expanduser()
    if (folder / MANIFEST).is_file():
        return ModelSource(artifact=str(folder.absolute()))
    if folder.suffix == ".gguf" and folder.is_file():
        return ModelSource(path=str(folder.absolute()))
    if (source := model_source(named, f"--{role}")) is None:
        raise DraftwellError(
            f"--{role} {named}: no such folder, and no hub id (ORG/NAME): a pair of the catalogue "
            "is named with --pair",
            code="no_model",
        )
    return source


def unnamed(sources: Mapping[str, ModelSource]) -> PairSpec:
    """A pair that is nowhere written, for its files."""
    return PairSpec.model_validate({"name": "models", **sources})


def check_models(files: PairFiles) -> None:
    """Refuse, before weights are read, what cannot be loaded or has two vocabularies."""
    for folder in files.roles().values():
        if not (folder / MANIFEST).is_file():
            read_config(folder)
            tokenizer_files(folder)
    draft = files.draft
    if draft is not None and not (draft / MANIFEST).is_file():
        own, theirs = (names_of(load_tokenizer(folder)) for folder in (files.target, draft))
        check_alike(f"draft {draft.name}", theirs, f"target {files.target.name}", own)


def digest_of_models(files: PairFiles) -> str:
    """What the models are, wherever they lie."""
    return json_digest({role: model_digest(folder) for role, folder in files.roles().items()})


def found_again(spec: PairSpec, sources: Sources) -> PairSpec:
    """The pair of the same models; where its folders are gone, it takes those that are named
    now."""
    paths = [
        Path(place)
        for source in spec.sources().values()
        if (place := source.path or source.artifact) is not None
    ]
    if all(path.exists() for path in paths):
        return spec
    return written(spec.model_copy(update=dict(sources)), spec.gigabytes)


def written(spec: PairSpec, gigabytes: float | None) -> PairSpec:
    """The pair, after its entry was written."""
    spec = spec.model_copy(update={"gigabytes": gigabytes})
    folder = draftwell_home() / "pairs"
    folder.mkdir(parents=True, exist_ok=True)
    write_pair(spec, folder / f"{spec.name}.yaml")
    return next(one for one in list_pairs() if one.name == spec.name)


def words_of(source: ModelSource) -> str:
    """A model as a user named it, without the folders above it; of a pair's artifact, which all are
    called `draft`, with the one above."""
    parts = Path(source.path or source.artifact or "").parts
    return source.hub or "/".join(parts[-2 if source.artifact else -1 :])


def free_name(sources: Mapping[str, ModelSource]) -> str:
    """A name that no pair has, of the target's and, where that is taken, the draft's too."""
    taken = {name for spec in list_pairs() for name in (spec.name, *spec.aliases)}
    return next(name for name in names_for(sources) if name not in taken)


def names_for(sources: Mapping[str, ModelSource]) -> Iterator[str]:
    """Names for a pair, the best first.

    >>> found = names_for({"target": ModelSource(hub="Qwen/Qwen3-8B")})
    >>> next(found), next(found)
    ('qwen3-8b', 'qwen3-8b-2')
    """
    target, *draft = [safe_name(words_of(source)) for source in sources.values()]
    yield target
    longest = "-with-".join([target, *draft])
    if draft:
        yield longest
    for number in count(2):
        yield f"{longest}-{number}"


def safe_name(words: str) -> str:
    """Words as the name of a pair.

    >>> safe_name("Qwen/My Model_7B.gguf"), safe_name("…")
    ('my-model_7b', 'pair')
    """
    last = words.rpartition("/")[2].lower().removesuffix(".gguf")
    return re.sub(r"[^a-z0-9._-]+", "-", last).strip("-._") or "pair"


def licence_of(folder: Path) -> str:
    """What the model's card or its configuration says."""
    import yaml

    card, stated = folder / "README.md", None
    if card.is_file():
        head = re.match(r"---\n(.*?)\n---", card.read_text(errors="replace"), re.DOTALL)
        try:
            told = yaml.safe_load(head[1]) if head else None
        except yaml.YAMLError:
            told = None
        stated = told.get("license") if isinstance(told, dict) else None
    if stated is None and (folder / CONFIG).is_file():
        stated = read_object(folder / CONFIG).get("license")
    return stated if isinstance(stated, str) and stated else "not stated"


def dtype_for(files: PairFiles, device: str) -> Literal["bfloat16", "float32"]:
    """bfloat16, but where this CPU has no instructions for it and layers of ours, which need none,
    do not run the target."""
    if device != "cpu" or not lacks_bfloat16():
        return "bfloat16"
    compiled = wanted_mode() != "off" and (compiler() or find(libraries_folder()))
    model_type: Any = read_object(files.target / CONFIG).get("model_type")
    return "bfloat16" if compiled and model_type in PACKED else "float32"


def gigabytes_of(files: PairFiles, dtype: str) -> float | None:
    """What the weights take, in 10⁹ bytes."""
    number = {"bfloat16": 2, "float32": 4}[dtype]
    found = sum(computed_bytes(folder, number) for folder in files.roles().values())
    return float(f"{found / 1e9:.3g}") or None
