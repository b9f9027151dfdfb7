"""Memory that a second set of models needs beside what is there, and what is free."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

from draftwell.serving.artifacts.checkpoint import CONFIG, computed_bytes
from draftwell.serving.artifacts.pair_files import PairFiles
from draftwell.serving.cpu_quota import group_folders
from draftwell.serving.number_format import dtype_of

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LOADING = {"cpu": 3.0, "cuda": 1.1}
"""What loading takes, as a multiple of the weights in the dtype that they are computed in. Measured
on the CPU: as read, packed, and for moments a part in another dtype, 2.3 to 2.8 together."""
LONGEST_CONTEXT = 4096
"""Positions of a slot where the settings name none."""


def collect_garbage() -> None:
    """Free what refers to itself, and leave the rest out of collections from now on: looking at all
    that libraries hold takes a quarter of a second, in which every stream stands still."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.collect()  # of what is left, which is little: how much decides when Python does it again


def free_memory(device: str = "cpu", root: Path = Path("/")) -> int | None:
    """Bytes that may be taken: on a GPU those of its memory, else what Linux and every control
    group around this process leave; None where nobody says.

    Args:
        root: of the file system.
    """
    if device.startswith("cuda"):
        import torch  # `draftwell gate` asks for the CPU's alone, and need not wait for it

        if not torch.cuda.is_available():  # it is another machine's
            return None
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + idle
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
    groups = (left_in(folder) for folder in group_folders(root, "memory"))
    return min([*free, *(left for left in groups if left is not None)], default=None)


def left_in(folder: Path) -> int | None:
    """Bytes that a control group may still take, caches that it can drop included; None: no limit,
    or no such group."""
    second = (folder / "memory.max").is_file()
    names = ("max", "current") if second else ("limit_in_bytes", "usage_in_bytes")
    try:
        limit, used = (int((folder / f"memory.{name}").read_text()) for name in names)
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # v2 writes "max" where there is no limit
        return None
    # weights that were read more than once are active
    droppable = sum(int(stat.get(f"{kind}_file", 0)) for kind in ("inactive", "active"))
    return limit - used + droppable


def weight_bytes(files: PairFiles) -> int:
    """Bytes of a pair's weights on disk."""
    found = (folder.glob("*.safetensors") for folder in files.roles().values())
    return sum(path.stat().st_size for paths in found for path in paths)


def needed(
    files: PairFiles, dtype: str, device: str, slots: int, max_context: int | None
) -> tuple[float, float]:
    """Bytes that loading a pair takes: of its weights, and of its slots' keys and values.

    Args:
        dtype: such as `float32` or `bfloat16-int8`.
        slots, max_context: as in `LoadSettings`.
    """
    # imports transformers; `draftwell gate` asks for less, and need not wait for it
    from draftwell.serving.runtime.model_files import read_config

    number = BYTES[dtype_of(dtype)]
    weights = positions = 0.0
    for folder in files.roles().values():
        weights += computed_bytes(folder, number)
        if not (folder / CONFIG).is_file():  # one of ours, which is small
            continue
        config = read_config(folder).get_text_config()
        longest = getattr(config, "max_position_embeddings", None) or LONGEST_CONTEXT
        context = min(max_context or LONGEST_CONTEXT, longest)
        positions += context * numbers_of_a_position(config)
    loading = LOADING["cuda" if device.startswith("cuda") else "cpu"]
    return loading * weights, slots * number * positions


def numbers_of_a_position(config: Any) -> int:
    """Keys and values that all layers keep of one token; 0 where the configuration does not say."""
    heads = getattr(config, "num_attention_heads", None) or 1
    width = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // heads
    kept = getattr(config, "num_key_value_heads", None) or heads
    return int(2 * getattr(config, "num_hidden_layers", 0) * kept * width)
