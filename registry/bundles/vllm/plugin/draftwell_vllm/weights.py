"""Weights of the draft, replaced while vLLM serves: a way of its own to update draft weights, with
a folder on the server's disk instead of a trainer's connection.

    --weight-transfer-config '{"backend": "draftwell"}'

An update that fails half-way leaves vLLM with a draft that it cannot run. So a folder is looked at
first, and refused before anything is changed; safetensors alone are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)


@dataclass
class Nothing(WeightTransferInitInfo):
    """There is no connection to make."""


@dataclass
class Folder(WeightTransferUpdateInfo):
    """Where the new weights are, on the server's machine."""

    folder: str


class FolderWeights(WeightTransferEngine[Nothing, Folder]):
    """Reads a folder of safetensors into the draft that vLLM was started with, layer by layer as
    vLLM loads it."""

    init_info_cls = Nothing
    update_info_cls = Folder

    def init_transfer_engine(self, init_info: Nothing) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Nothing to do before the folder was looked at."""

    def receive_weights(self, update_info: Folder) -> None:
        """Load a folder's weights.

        Raises:
            ValueError: they are not of the names, shapes and types of what was started with;
                nothing was changed.
        """
        folder = Path(update_info.folder)
        refuse_other(folder, Path(self.model_config.model))
        initialize_layerwise_reload(self.model)
        try:
            self.model.load_weights(tensors(folder))
        finally:
            finalize_layerwise_reload(self.model, self.model_config)

    def finish_weight_update(self) -> None:
        """Nothing to do."""

    def shutdown(self) -> None:
        """Nothing to release."""


def refuse_other(folder: Path, started_with: Path) -> None:
    """Refuse weights that are not of the names, shapes and types of what vLLM was started with.

    Raises:
        ValueError: what differs, in a line.
    """
    new, old = shapes(folder), shapes(started_with)
    differing = sorted(name for name in new.keys() | old.keys() if new.get(name) != old.get(name))
    if differing:
        name = differing[0]
        raise ValueError(
            f"{folder}: {name} is {new.get(name, 'missing')} and was {old.get(name, 'missing')} "
            f"({len(differing)} differ): restart vLLM with it"
        )


def shapes(folder: Path) -> dict[str, str]:
    """Tensor → type and shape of a folder's safetensors; no weights are read."""
    found = {}
    for path in files(folder):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                found[name] = f"{part.get_dtype()}{list(part.get_shape())}"
    return found


def tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """Names and tensors of a folder's safetensors."""
    for path in files(folder):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)


def files(folder: Path) -> list[Path]:
    """A folder's safetensors.

    Raises:
        ValueError: there are none.
    """
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise ValueError(f"{folder} has no safetensors: name a draft's or a head's folder")
    return found
