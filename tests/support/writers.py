"""What writes a number to disk, each in the way of the product, and what reads it back."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from draftwell.components.distil.corpus import read_corpus, save_shard
from draftwell.components.export.checkpoint import new_folder
from draftwell.components.results import Results
from draftwell.components.train.checkpoint import Checkpoint
from draftwell.registry.bundles.places import link_current
from draftwell.registry.pairs.fetching import place
from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.base import Provenance


class Writer(NamedTuple):
    """What writes a number below a folder, and reads it: None where nothing is there."""

    write: Callable[[Path, int], object]
    read: Callable[[Path], int | None]
    replaces: bool = True


def save_table(root: Path, number: int) -> None:
    made = Provenance(pair="tiny", fingerprint="f" * 64)
    AcceptanceTable([number + 9] * 20, [number] * 20, made).save(
        root / "artifacts" / "acceptance_table"
    )


def load_table(root: Path) -> int | None:
    folder = root / "artifacts" / "acceptance_table"
    return int(AcceptanceTable.load(folder).accepted[0]) if folder.exists() else None


def save_checkpoint(root: Path, number: int) -> None:
    model = torch.nn.Linear(2, 2)
    Checkpoint(root / "work", {}).save(model, torch.optim.AdamW(model.parameters()), {"at": number})


def load_checkpoint(root: Path) -> int | None:
    model = torch.nn.Linear(2, 2)
    found = Checkpoint(root / "work", {}).restore(model, torch.optim.AdamW(model.parameters()))
    return None if found is None else int(found["at"])


def read_shard(root: Path) -> int | None:
    shards = list(root.glob("*.safetensors"))
    return int(read_corpus(shards)[0].ids[0]) if shards else None


def put_result(root: Path, number: int) -> None:
    Results[int](root / "new" / "results.jsonl", "subject", int).put("key", number)


def result(root: Path) -> int | None:
    known = Results[int](root / "new" / "results.jsonl", "subject", int)
    return next((value for _, value in known.items()), None)


def export(root: Path, number: int) -> None:
    with new_folder(root / "model", "draft") as place:
        for name in ("config", "weights"):
            (place / name).write_text(str(number))


def exported(root: Path) -> int | None:
    return number_of(root / "model")


def number_of(folder: Path) -> int | None:
    if not folder.exists():
        return None
    first, second = (int((folder / name).read_text()) for name in ("config", "weights"))
    assert first == second
    return first


def build_model(root: Path, number: int) -> None:
    def build(folder: Path) -> None:
        for name in ("config", "weights"):
            (folder / name).write_text(str(number))

    place(root / "models" / "model", build)


def built_model(root: Path) -> int | None:
    return number_of(root / "models" / "model")


def link_bundle(root: Path, number: int) -> None:
    (root / str(number)).mkdir(exist_ok=True)
    link_current(root, root / str(number), "cpu")


def linked_bundle(root: Path) -> int | None:
    return int(os.readlink(root / "current")) if (root / "current").is_symlink() else None


WRITERS: dict[str, Writer] = {
    "artifact": Writer(save_table, load_table),
    "checkpoint": Writer(save_checkpoint, load_checkpoint),
    "corpus": Writer(
        lambda root, number: save_shard(
            root / "s.safetensors", [([number], [2])], [torch.zeros(1, 4)]
        ),
        read_shard,
    ),
    "results": Writer(put_result, result),
    "model": Writer(build_model, built_model),
    "link": Writer(link_bundle, linked_bundle),
    "export": Writer(export, exported, replaces=False),
}
