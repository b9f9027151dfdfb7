"""Whether a pair's models fit a device of this machine. Those that fit none are for export alone:
settings for an engine elsewhere need no weights here.

A pair's YAML file may say how much its weights take (`gigabytes`); one that does not is never
refused.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

from draftwell.registry.pairs.catalogue import PairSpec
from draftwell.serving.device import cuda_available
from draftwell.serving.errors import DraftwellError
from draftwell.serving.number_format import dtype_of, weights_of

BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "int4": 0.5}
"""What a weight takes. int8 and int4 are for the target's alone, and the other models are counted
with it: they are the small ones."""
ROOM = 1.1
"""Memory needed, as a multiple of the weights: slots, activations and the libraries come on top."""


def device_gigabytes() -> dict[str, float]:
    """Memory of this machine's devices, in 10⁹ bytes: cpu is the main memory, cuda the largest
    single GPU (models are not split)."""
    found = {}
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        here = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        found["cpu"] = min(here, memory_limit()) / 1e9
    if cuda_available():
        import torch

        found["cuda"] = (
            max(
                torch.cuda.get_device_properties(i).total_memory
                for i in range(torch.cuda.device_count())
            )
            / 1e9
        )
    return found


def memory_limit(root: Path = Path("/")) -> float:
    """Bytes that a container allows (cgroup v2); infinite where nothing limits them.

    Args:
        root: of the file system.
    """
    try:
        return int((root / "sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return math.inf


def weight_gigabytes(spec: PairSpec, number_format: str | None = None) -> float | None:
    """What a pair's weights take in a number format, which may be another than the pair's own; None
    where its file does not say."""
    if spec.gigabytes is None:
        return None
    wanted = number_format or spec.number_format
    return spec.gigabytes * BYTES[weights_of(wanted) or dtype_of(wanted)] / BYTES[spec.dtype]


def too_large(
    spec: PairSpec,
    device: str,
    memory: Mapping[str, float] | None = None,
    number_format: str | None = None,
) -> str | None:
    """Why a pair's models do not fit a device of this machine, in words; None where they do, or
    where nothing is known.

    Args:
        device: cpu or cuda.
        memory: device → 10⁹ bytes; None asks this machine.
        number_format: such as `float32` or `bfloat16-int8`; None takes the pair's own.
    """
    has = (device_gigabytes() if memory is None else memory).get(device)
    takes = weight_gigabytes(spec, number_format)
    if takes is None or has is None or takes * ROOM <= has:
        return None
    needed = takes * ROOM
    named = number_format or spec.number_format
    return (
        f"its weights take {takes:g} GB in {named}, with slots about {needed:.0f}, and "
        f"{device} has {has:.0f} GB"
    )


def export_only(spec: PairSpec, memory: Mapping[str, float] | None = None) -> str | None:
    """Why a pair runs on no device of this machine; None where it runs on one of those that it is
    for.

    Args:
        memory: as in `too_large`.
    """
    memory = device_gigabytes() if memory is None else memory
    here = [device for device in spec.devices if device in memory]
    if not here:
        return f"it is for {' and '.join(spec.devices)}, which is not here"
    reasons = [too_large(spec, device, memory) for device in here]
    return None if None in reasons else "; ".join(reason for reason in reasons if reason)


def check_fits(spec: PairSpec, device: str, number_format: str | None = None) -> None:
    """Refuse to load a pair that cannot fit, before anything is downloaded.

    Raises:
        DraftwellError: its models are larger than the device's memory (`pair_too_large`).
    """
    if why := too_large(spec, device, number_format=number_format):
        raise DraftwellError(
            f"pair {spec.name} is for export only on this machine: {why}; run it where "
            "they fit, or take its settings to "
            f"an engine that splits models (draftwell export --pair {spec.name} --to vllm "
            "--set config=config.json)",
            code="pair_too_large",
        )
