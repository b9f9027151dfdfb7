"""The card that is measured, and how fast its memory copies: the bound of decoding on it."""

from __future__ import annotations

import time

import torch

from draftwell.components.bench.schema import Frozen
from draftwell.components.calibrate.hardware_profile import synchronise
from draftwell.serving.device import device_class

COPIED, COPIES = 1 << 30, 10
"""Bytes of a copy, and how many are made: the fastest counts."""


class Card(Frozen):
    """One GPU."""

    name: str
    device_class: str
    gigabytes: float
    """Its memory, 10^9 bytes."""
    bandwidth: float
    """Of a copy on the device, 10^9 bytes a second, read and written ones together."""
    cuda: str | None
    """That torch was built for."""
    torch: str


def describe_card(device: str = "cuda") -> Card:
    """The card of a torch device, its bandwidth measured."""
    about = torch.cuda.get_device_properties(torch.device(device))
    return Card(
        name=about.name,
        device_class=device_class(device),
        gigabytes=about.total_memory / 1e9,
        bandwidth=copy_bandwidth(device),
        cuda=torch.version.cuda,
        torch=torch.__version__,
    )


def copy_bandwidth(device: str, size: int = COPIED) -> float:
    """10^9 bytes a second, read and written ones together, of the fastest copy of `size` bytes."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(COPIES):
        synchronise(device)
        start = time.perf_counter()
        target.copy_(source)
        synchronise(device)
        seconds.append(time.perf_counter() - start)
    return 2 * size / min(seconds) / 1e9
