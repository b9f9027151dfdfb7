"""How far a head's drafts reach on conversations that it was not trained on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from draftwell.components.distil.corpus import Conversation, batches
from draftwell.components.distil.eagle3.network import Eagle3Network
from draftwell.components.distil.eagle3.unroll import Batch, Starts, unroll
from draftwell.components.distil.family import Head


@dataclass(frozen=True)
class Reach:
    """Acceptance of greedy drafts.

    Args:
        depths: for each depth from 1 on, the share of drafted tokens that are the target's, where
            all before them were.
        positions: output positions that a draft started from.
    """

    depths: tuple[float, ...]
    positions: int

    @property
    def length(self) -> float:
        """Expected number of accepted tokens of a draft that goes as deep."""
        total, reached = 0.0, 1.0
        for share in self.depths:
            total += (reached := reached * share)
        return total

    def figures(self, prefix: str = "") -> dict[str, float]:
        """Acceptance by depth, its mean and the length, by name."""
        depths = {
            f"{prefix}acceptance_depth_{depth}": share for depth, share in enumerate(self.depths, 1)
        }
        mean = sum(self.depths) / len(self.depths)
        return {
            **depths,
            f"{prefix}acceptance": mean,
            f"{prefix}accepted_length": self.length,
        }


@torch.no_grad()
def reach(
    network: Eagle3Network,
    held: Sequence[Conversation],
    head: Head,
    steps: int,
    batch_tokens: int = 2048,
) -> Reach:
    """Acceptance along the target's own texts, which are greedy, so that each next token is the
    target's choice.

    Drafts start behind each token that the target wrote. A wrong token ends its draft, so that the
    text itself is what a draft has read so far.

    Args:
        head: the target's; logits are computed in full precision: rounded ones would
            tie many tokens.
    """
    right, tried = [0] * steps, [0] * steps
    rows, device = head.weight.float(), head.weight.device
    for group in batches(held, batch_tokens, random.Random(0)):
        batch = Batch.of(group, device)
        starts = Starts.of(batch, batch.prompt[:, None] - 1)
        going = torch.ones_like(starts.index, dtype=torch.bool)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            for step, output in enumerate(unroll(network, batch, batch.features, starts, steps)):
                going = going & starts.real(step)
                at = going.nonzero(as_tuple=True)
                index = starts.index[at]
                states = network.norm(output[at[0], index] if step == 0 else output[at])
                with torch.autocast(device.type, enabled=False):
                    best = F.linear(states.float(), rows).argmax(-1)
                hit = head.ids[best] == batch.ids[at[0], index + 2 + step]
                right[step] += int(hit.sum())
                tried[step] += len(hit)
                going = going.clone()
                going[at] = hit
    return Reach(tuple(r / max(1, t) for r, t in zip(right, tried, strict=True)), tried[0])
