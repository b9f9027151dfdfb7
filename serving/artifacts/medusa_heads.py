"""Medusa's heads: what the target will say after its next token, from its last hidden state (Cai
2024, 2401.10774, section 2.1).

Head k is one residual block, h + SiLU(W_k h + b_k), and then an output embedding; the authors train
one for each head. Ours is the target's own, restricted to the tokens that its texts hold most
often: an artifact then holds K matrices of `[hidden, hidden]` and nothing of the vocabulary's size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import silu

from draftwell.serving.artifacts.base import Artifact, ArtifactError, Provenance
from draftwell.serving.artifacts.kinds import KINDS
from draftwell.serving.artifacts.trained import check_state

FILE = "medusa_heads.safetensors"


class MedusaHeads(Artifact):
    """K heads on the target's last hidden state, normalised as its own head reads it.

    Args:
        weight: `[K, hidden, hidden]` float32 of the blocks; head k (from 0) is for the token that
            comes k + 1 after the next one.
        bias: `[K, hidden]` float32.
        tokens: `[n]` ascending ids that the heads may propose.
    """

    kind = "medusa_heads"

    def __init__(self, weight: Tensor, bias: Tensor, tokens: Tensor, provenance: Provenance):
        self.weight, self.bias, self.tokens, self.provenance = (
            weight.float(),
            bias.float(),
            tokens.long(),
            provenance,
        )
        if (
            weight.dim() != 3
            or weight.shape[1] != weight.shape[2]
            or bias.shape != weight.shape[:2]
            or not len(weight)
        ):
            raise ArtifactError(
                "the Medusa heads' layers do not fit together: train them again "
                f"(`{KINDS[self.kind].made_by}`)"
            )
        if not bool(torch.isfinite(self.weight).all() and torch.isfinite(self.bias).all()):
            raise ArtifactError(
                "the Medusa heads' weights are not finite: train them again "
                f"(`{KINDS[self.kind].made_by}`)"
            )
        if (
            tokens.dim() != 1
            or not len(tokens)
            or int(tokens.min()) < 0
            or not bool((self.tokens[1:] > self.tokens[:-1]).all())
        ):
            raise ArtifactError(
                "the Medusa heads' tokens are not ascending ids: train them again "
                f"(`{KINDS[self.kind].made_by}`)"
            )

    def __len__(self) -> int:
        return len(self.weight)

    def states(self, state: Tensor) -> Tensor:
        """The target's last hidden state `[hidden]` → what its output embedding is applied to, `[K,
        hidden]` float32."""
        check_state(self.kind, state.shape, self.weight.shape[2], "target")
        h = state.float().to(self.weight.device)
        return h + silu(self.weight @ h + self.bias)

    def write_files(self, folder: Path) -> None:
        from safetensors.torch import save_file

        tensors = {"weight": self.weight, "bias": self.bias, "tokens": self.tokens}
        save_file(
            {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, folder / FILE
        )

    @classmethod
    def read_files(cls, folder: Path, provenance: Provenance) -> Self:
        from safetensors.torch import load_file

        tensors = load_file(folder / FILE)
        return cls(tensors["weight"], tensors["bias"], tensors["tokens"], provenance)
