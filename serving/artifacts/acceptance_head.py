"""SpecDec++'s acceptance head: how likely is the target to keep the draft token that was just read?
(2405.19715, section 4.2)

Residual blocks x + SiLU(W x + b) over the draft's last hidden state, then a linear layer and a
sigmoid. The authors' two logits under a softmax are this sigmoid of their difference. Their code
repeats one block D times; ours are D blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import silu

from draftwell.serving.artifacts.base import Artifact, ArtifactError, Provenance
from draftwell.serving.artifacts.trained import check_state

FILE = "acceptance_head.safetensors"


class AcceptanceHead(Artifact):
    """A small network on the draft's last hidden state.

    Args:
        mean, scale: `[hidden]` float32, standardisation of the state: (h − mean)/scale (ours; the
            authors take h as it is).
        blocks: weight `[hidden, hidden]` and bias `[hidden]` float32 of each residual block.
        weight: `[hidden]` float32 of the last layer.
        bias: scalar of the last layer.
    """

    kind = "acceptance_head"

    def __init__(
        self,
        mean: Tensor,
        scale: Tensor,
        blocks: Sequence[tuple[Tensor, Tensor]],
        weight: Tensor,
        bias: float,
        provenance: Provenance,
    ):
        self.mean, self.scale, self.weight, self.bias = (
            mean.float(),
            scale.float(),
            weight.float(),
            float(bias),
        )
        self.blocks = [(matrix.float(), vector.float()) for matrix, vector in blocks]
        self.provenance = provenance
        width = self.weight.numel()
        shapes = [self.mean, self.scale, *(vector for _, vector in self.blocks)]
        if any(t.shape != (width,) for t in shapes) or any(
            m.shape != (width, width) for m, _ in self.blocks
        ):
            raise ArtifactError(
                "the acceptance head's layers do not fit together (last layer of "
                f"{width}): train it again"
            )
        parts = [
            self.mean,
            self.scale,
            self.weight,
            torch.tensor(self.bias),
            *(t for block in self.blocks for t in block),
        ]
        if not all(bool(torch.isfinite(part).all()) for part in parts) or not bool(
            (self.scale > 0).all()
        ):
            raise ArtifactError("the acceptance head's weights are not finite: train it again")

    def acceptance(self, state: Tensor) -> float:
        """Predicted probability in [0, 1] that the target accepts the last token read.

        Args:
            state: `[hidden]`, the draft's last hidden state having read the token.
        """
        check_state(self.kind, state.shape, self.weight.numel())
        return float(torch.sigmoid(self.logit(state.float().cpu())))

    def logit(self, states: Tensor) -> Tensor:
        """Logits `[...]` of states `[..., hidden]` float32."""
        x = (states - self.mean) / self.scale
        for matrix, vector in self.blocks:
            x = x + silu(x @ matrix.T + vector)
        return x @ self.weight + self.bias

    def write_files(self, folder: Path) -> None:
        from safetensors.torch import save_file

        tensors = {
            "mean": self.mean,
            "scale": self.scale,
            "weight": self.weight,
            "bias": torch.tensor([self.bias]),
        }
        for i, (matrix, vector) in enumerate(self.blocks):
            tensors |= {f"blocks.{i}.weight": matrix, f"blocks.{i}.bias": vector}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / FILE)

    @classmethod
    def read_files(cls, folder: Path, provenance: Provenance) -> Self:
        from safetensors.torch import load_file

        tensors = load_file(folder / FILE)
        count = sum(name.startswith("blocks.") and name.endswith(".weight") for name in tensors)
        blocks = [
            (tensors[f"blocks.{i}.weight"], tensors[f"blocks.{i}.bias"]) for i in range(count)
        ]
        return cls(
            tensors["mean"],
            tensors["scale"],
            blocks,
            tensors["weight"],
            float(tensors["bias"]),
            provenance,
        )
