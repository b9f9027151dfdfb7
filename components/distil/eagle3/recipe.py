"""Settings of a head's training, and what the head borrows from its target."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from draftwell.components.train.fit import Budget


@dataclass(frozen=True, kw_only=True)
class HeadRecipe(Budget):
    """How to train a head.

    Args:
        layers: the target's layers whose input states the head reads.
        head_tokens: tokens that the head covers at most.
        steps: tokens that the head is unrolled over.
        decay: weight of a step relative to the one before.
        deeper_share: share of a batch's conversations that steps after the first are computed for.
        hard_weight: weight of the cross-entropy with the target's likeliest token.
        prompt_weight: share of the positions in prompts that are learned, at step 0 only; they are
            drawn again each time, which is their weight in the mean.
        noise: of the features in training, uniform up to ± this part of each one's spread.
        measured: held-out conversations that are measured on during training; all of them at the
            end.
    """

    layers: tuple[int, ...]
    head_tokens: int = 8192
    steps: int = 4
    decay: float = 0.8
    deeper_share: float = 1.0
    batch_tokens: int = 1024
    peak_rate: float = 1.5e-3
    final_rate: float = 2e-5
    hard_weight: float = 0.1
    prompt_weight: float = 0.3
    noise: float = 0.1
    seed: int = 0
    measured: int = 64

    def identity(self) -> dict[str, str]:
        """What tells one training from another: all settings but the budget and what is reported
        and kept of it. How many tokens the head covers is not among them: which ones it does is
        known by their digest."""
        others = (
            "minutes",
            "tokens",
            "updates",
            "save_seconds",
            "measure_steps",
            "measured",
            "head_tokens",
            "layers",
        )
        settings = {name: str(value) for name, value in asdict(self).items() if name not in others}
        return {"layers": ",".join(map(str, self.layers)), **settings}


@dataclass(frozen=True)
class Borrowed:
    """What a head reads of its target and does not own.

    Args:
        embeddings: `[vocab, hidden]` of tokens.
        ids: `[head]` tokens that the head covers, ascending.
        rows: `[head, hidden]` float32, their rows of the output embedding.
    """

    embeddings: Tensor
    ids: Tensor
    rows: Tensor

    @classmethod
    def of(cls, target: Any, ids: Tensor) -> Borrowed:
        """From the target's module."""
        output = target.get_output_embeddings().weight.detach()
        return cls(
            target.get_input_embeddings().weight.detach(),
            ids,
            output[ids.to(output.device)].float(),
        )
