"""Checkpoints of a training: weights, both Adam moments, and progress. A training has a file of its
own, named by all that its weights depend on: another one in the same folder begins beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import json_digest, put_file

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""What AdamW keeps of every weight."""


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint of a training.

    Args:
        folder: of the file.
        identity: what the weights depend on.
    """

    folder: Path
    identity: Mapping[str, Any]

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / f"checkpoint-{json_digest(dict(self.identity))[:16]}.safetensors"

    def save(self, model: nn.Module, optimizer: Optimizer, progress: Mapping[str, Any]) -> None:
        """Write it atomically: weights and both Adam moments in one safetensors file, progress in
        its metadata."""
        tensors: dict[str, Tensor] = {}
        for name, weight in model.named_parameters():
            if weight.requires_grad:
                moments = optimizer.state.get(weight, {})
                tensors[name] = weight.detach()
                tensors |= {f"{name}#{key}": moments[key] for key in MOMENTS if key in moments}
        written = {"progress": json.dumps(progress)}
        put_file(self.path, lambda file: save_file(tensors, file, metadata=written))

    def restore(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any] | None:
        """Load it and return its progress; None where there is none.

        Raises:
            DraftwellError: it cannot be read.
        """
        if not self.path.is_file():
            return None
        try:
            with safe_open(self.path, "pt") as file:
                progress = dict(json.loads(file.metadata()["progress"]))
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
        except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
            raise DraftwellError(
                f"{self.path} is not a readable checkpoint ({type(error).__name__}): remove it to "
                "begin again",
                code="bad_checkpoint",
            ) from error
        return progress
