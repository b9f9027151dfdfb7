"""Whether a pair's models fit a device of this machine. Those that fit none are for export alone: settings for an engine elsewhere need no
weights here.

A pair's YAML file may say how much its weights take (`gigabytes`); one that does not is never refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from registry.pairs.catalogue import PairSpec
from serving.device import cuda_available
from serving.errors import DraftwellError

ROOM = 1.1
"""Memory needed, as a multiple of the weights: slots, activations and the libraries come on top."""


def device_gigabytes() -> dict[str, float]:
    """Memory of this machine's devices, in 10⁹ bytes: cpu is the main memory, cuda the largest single GPU (models are not split)."""
    found = {}
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        found["cpu"] = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    if cuda_available():
        import torch

        found["cuda"] = max(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())) / 1e9
    return found


def too_large(spec: PairSpec, device: str, memory: Mapping[str, float] | None = None) -> str | None:
    """Why a pair's models do not fit a device of this machine, in words; None where they do, or where nothing is known.

    Args:
        device: cpu or cuda.
        memory: device → 10⁹ bytes; None asks this machine.
    """
    has = (device_gigabytes() if memory is None else memory).get(device)
    if spec.gigabytes is None or has is None or spec.gigabytes * ROOM <= has:
        return None
    needed = spec.gigabytes * ROOM
    return f"its weights take {spec.gigabytes:g} GB in {spec.dtype}, with slots about {needed:.0f}, and {device} has {has:.0f} GB"


def export_only(spec: PairSpec, memory: Mapping[str, float] | None = None) -> str | None:
    """Why a pair runs on no device of this machine; None where it runs on one of those that it is for.

    Args:
        memory: as in `too_large`.
    """
    memory = device_gigabytes() if memory is None else memory
    here = [device for device in spec.devices if device in memory]
    if not here:
        return f"it is for {' and '.join(spec.devices)}, which is not here"
    reasons = [too_large(spec, device, memory) for device in here]
    return None if None in reasons else "; ".join(reason for reason in reasons if reason)


def check_fits(spec: PairSpec, device: str) -> None:
    """Refuse to load a pair that cannot fit, before anything is downloaded.

    Raises:
        DraftwellError: its models are larger than the device's memory (`pair_too_large`).
    """
    if why := too_large(spec, device):
        raise DraftwellError(f"pair {spec.name} is for export only on this machine: {why}; run it where they fit, or take its settings to "
                             f"an engine that splits models (draftwell export --pair {spec.name} --to vllm --config config.json)",
                             code="pair_too_large")
