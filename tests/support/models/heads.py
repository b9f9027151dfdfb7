"""Random EAGLE-3 heads of tiny Llamas."""

from __future__ import annotations

from typing import Any

import torch

from draftwell.components.distil.eagle3.network import Eagle3Network, head_config
from draftwell.serving.artifacts.eagle3_head import Eagle3Head
from tests.support.models.resources import ORIGIN

LAYERS = (0, 1, 1)
"""Tiny Llamas have two layers."""


def random_eagle3(module: Any, covered: int, seed: int = 3) -> tuple[Eagle3Network, Eagle3Head]:
    """A head that covers some of a module's tokens, as it is trained and as an artifact."""
    torch.manual_seed(seed)
    network = Eagle3Network(head_config(module.config, covered, LAYERS))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(
                0.3 * torch.randn_like(parameter)
                if parameter.dim() == 1
                else 0.1 * torch.randn_like(parameter)
            )
            parameter.copy_(parameter.bfloat16())  # as an artifact keeps it
    ids = torch.randperm(module.config.vocab_size)[:covered].sort().values
    return network, Eagle3Head(
        dict(network.state_dict()), network.config, ids, LAYERS, "d" * 64, ORIGIN
    )
