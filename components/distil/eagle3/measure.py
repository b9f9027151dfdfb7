"""How far a head's drafts reach on conversations that it was not trained on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwell.components.distil.corpus import Conversation, batches
from draftwell.components.distil.eagle3.network import Eagle3Network
from draftwell.components.distil.eagle3.recipe import Borrowed
from draftwell.components.distil.eagle3.unroll import Batch, Starts, unroll


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
    def mean(self) -> float:
        """Mean over the depths."""
        return sum(self.depths) / len(self.depths)

    @property
    def length(self) -> float:
        """Expected number of accepted tokens of a draft that goes as deep."""
        total, reached = 0.0, 1.0
        for share in self.depths:
            total += (reached := reached * share)
        return total


@torch.no_grad()
def reach(
    network: Eagle3Network,
    held: Sequence[Conversation],
    borrowed: Borrowed,
    steps: int,
    batch_tokens: int = 2048,
) -> Reach:
    """Acceptance along the target's own texts, which are greedy, so that each next token is the
    target's choice.

    Drafts start behind each token that the target wrote. A wrong token ends its draft, so that the
    text itself is what a draft has read so far.

    Args:
        borrowed: its float32 rows are read as they are: rounded ones would tie many tokens.
    """
    right, tried = [0] * steps, [0] * steps
    rows, device = borrowed.rows, borrowed.rows.device
    for group in batches(held, batch_tokens, random.Random(0)):
        batch = Batch.of(group, device)
        starts = Starts.of(batch, torch.arange(len(group), device=device), batch.prompt - 1)
        going = torch.ones_like(starts.index, dtype=torch.bool)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            for step, output in enumerate(
                unroll(network, batch, batch.features, borrowed.embeddings, starts, steps)
            ):
                going = going & starts.real(step)
                at = going.nonzero(as_tuple=True)
                index = starts.index[at]
                states = network.norm(
                    output[starts.rows[at[0]], index] if step == 0 else output[at]
                )
                said = borrowed.ids[best(states, rows)]
                hit = said == batch.ids[starts.rows[at[0]], index + 2 + step]
                right[step] += int(hit.sum())
                tried[step] += len(hit)
                going = going.clone()
                going[at] = hit
    return Reach(tuple(r / max(1, t) for r, t in zip(right, tried, strict=True)), tried[0])


def best(states: Tensor, rows: Tensor) -> Tensor:
    """`[n]` index of the likeliest row of each state `[n, hidden]`, in full precision."""
    with torch.autocast(states.device.type, enabled=False):
        found = [F.linear(piece.float(), rows).argmax(-1) for piece in states.split(128)]
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.long, device=states.device)
