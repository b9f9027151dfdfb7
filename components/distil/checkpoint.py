"""Checkpoints of a training: weights, both Adam moments, progress, and which run they belong to."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from draftwell.serving.errors import DraftwellError

CHECKPOINT = "checkpoint.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""What AdamW keeps of every weight."""


def save(
    draft: Any,
    optimizer: Any,
    progress: Mapping[str, Any],
    folder: Path,
    identity: Mapping[str, str],
) -> None:
    """Write a checkpoint atomically: weights and both Adam moments in one safetensors file,
    progress and identity in its metadata."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, p in draft.named_parameters():
        if p.requires_grad:
            tensors[name] = p.detach()
            tensors |= {
                f"{name}#{key}": optimizer.state[p][key]
                for key in MOMENTS
                if key in optimizer.state.get(p, {})
            }
    partial = folder / "checkpoint.partial"
    save_file(
        tensors,
        partial,
        metadata={"progress": json.dumps(progress), "identity": json.dumps(identity)},
    )
    os.replace(partial, folder / CHECKPOINT)


def restore(
    draft: Any,
    optimizer: Any,
    folder: Path,
    identity: Mapping[str, str],
    *,
    absent: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Load the checkpoint of a folder, if there is one, and return the progress.

    Args:
        absent: what a checkpoint is taken to have been trained with where an older version did not
            record it.
    Raises:
        DraftwellError: it belongs to another run, or cannot be read; nothing was changed.
    """
    from safetensors import SafetensorError, safe_open

    path = folder / CHECKPOINT
    if not path.is_file():
        return {"steps": 0, "tokens": 0, "minutes": 0.0, "passes": 0, "position": 0, "curve": []}
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            recorded, progress = (
                json.loads(metadata.get("identity", "{}")),
                dict(json.loads(metadata["progress"])),
            )
            recorded = {**(absent or {}), **recorded}
            other = sorted(
                key for key in {*recorded, *identity} if recorded.get(key) != identity.get(key)
            )
            if other:
                raise DraftwellError(
                    (
                        f"{path} belongs to a training with another {' and '.join(other)}: "
                        "name another --work, or remove it"
                    ),
                    code="foreign_checkpoint",
                )
            known = set(file.keys())
            for name, p in draft.named_parameters():
                if name in known:
                    p.data.copy_(file.get_tensor(name))
                    # AdamW counts its steps on the CPU, whatever device the weights are on
                    optimizer.state[p] = {
                        key: file.get_tensor(f"{name}#{key}").to(
                            "cpu" if key == "step" else p.device
                        )
                        for key in MOMENTS
                        if f"{name}#{key}" in known
                    }
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise DraftwellError(
            (
                f"{path} is not a readable checkpoint ({type(error).__name__}): remove it to "
                "begin again"
            ),
            code="bad_checkpoint",
        ) from error
    return progress
