"""Checkpoints of a training: weights, both Adam moments, progress, and which run they belong to."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from draftwell.serving.errors import DraftwellError

CHECKPOINT = "checkpoint.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""What AdamW keeps of every weight."""


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint of a run.

    Args:
        folder: of the file.
        identity: of the run; the checkpoint of another one is refused.
    """

    folder: Path
    identity: Mapping[str, str]

    def save(self, model: nn.Module, optimizer: Optimizer, progress: Mapping[str, Any]) -> None:
        """Write it atomically: weights and both Adam moments in one safetensors file, progress and
        identity in its metadata."""
        self.folder.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, Tensor] = {}
        for name, weight in model.named_parameters():
            if weight.requires_grad:
                moments = optimizer.state.get(weight, {})
                tensors[name] = weight.detach()
                tensors |= {f"{name}#{key}": moments[key] for key in MOMENTS if key in moments}
        metadata = {"progress": json.dumps(progress), "identity": json.dumps(dict(self.identity))}
        partial = self.folder / "checkpoint.partial"
        save_file(tensors, partial, metadata=metadata)
        os.replace(partial, self.folder / CHECKPOINT)

    def restore(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any] | None:
        """Load it and return its progress; None where there is none.

        Raises:
            DraftwellError: it belongs to another run, or cannot be read; nothing was changed.
        """
        path = self.folder / CHECKPOINT
        if not path.is_file():
            return None
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                progress = dict(json.loads(metadata["progress"]))
                self._check_identity(path, json.loads(metadata["identity"]))
                known = set(file.keys())
                for name, weight in model.named_parameters():
                    if name in known:
                        weight.data.copy_(file.get_tensor(name))
                        # AdamW counts its steps on the CPU, whatever device the weights are on
                        optimizer.state[weight] = {
                            key: file.get_tensor(f"{name}#{key}").to(
                                "cpu" if key == "step" else weight.device
                            )
                            for key in MOMENTS
                            if f"{name}#{key}" in known
                        }
        except (SafetensorError, KeyError, ValueError, OSError) as error:
            raise DraftwellError(
                f"{path} is not a readable checkpoint ({type(error).__name__}): remove it to "
                "begin again",
                code="bad_checkpoint",
            ) from error
        return progress

    def _check_identity(self, path: Path, recorded: Mapping[str, str]) -> None:
        names = sorted({*recorded, *self.identity})
        others = [name for name in names if recorded.get(name) != self.identity.get(name)]
        if others:
            raise DraftwellError(
                f"{path} belongs to a training with another {' and '.join(others)}: "
                "name another --work, or remove it",
                code="foreign_checkpoint",
            )
