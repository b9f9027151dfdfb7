"""Training-time test: the head is trained on its own outputs, as it will draft (arXiv 2503.01840,
section 3).

At step 0 every index reads the target's states. At step j > 0 index i stands for position i + j: it
takes the head's output at the same index of the step before, the embedding of the token one further
on, and rotary position i + j. It attends to what a draft from index i has in its cache: the keys of
step 0 up to index i, and its own keys of steps 1 to j (the diagonal).

Steps after the first have queries only where drafts start, in the target's own text: nobody drafts
inside a prompt. That leaves out more than half of the work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwell.components.distil.corpus import Conversation, padded, rounded_up
from draftwell.components.distil.eagle3.network import Eagle3Network, Projected, lowered


@dataclass(frozen=True)
class Batch:
    """Conversations of similar length, padded at the end.

    Args:
        ids: `[batch, width]`.
        prompt: `[batch]` tokens that were given.
        total: `[batch]` tokens.
        features: `[batch, width - 1, 3 * hidden]`, states that enter the three layers.
        final: `[batch, width - 1, hidden]`, the target's normalised last states.
    """

    ids: Tensor
    prompt: Tensor
    total: Tensor
    features: Tensor
    final: Tensor

    @classmethod
    def of(cls, group: Sequence[Conversation], device: torch.device | str = "cpu") -> Batch:
        """From a corpus written with features."""
        states = padded([s.hidden for s in group], beyond=1).to(device)
        hidden = states.shape[-1] // 4
        return cls(
            padded([s.ids for s in group], beyond=2).to(device),
            torch.tensor([s.prompt for s in group], device=device),
            torch.tensor([len(s.ids) for s in group], device=device),
            states[..., : 3 * hidden],
            states[..., 3 * hidden :],
        )

    @property
    def indices(self) -> int:
        """Indices that predict a token of the longest conversation, where the last one predicts
        the last token, and those behind it that are padding."""
        return self.ids.shape[1] - 2


@dataclass(frozen=True)
class Starts:
    """Indices that drafts start from.

    Args:
        index: `[batch, starts]`.
        last: `[batch, 1]` the last index of each row that predicts a token; what lies behind it is
            padding.
    """

    index: Tensor
    last: Tensor

    @classmethod
    def of(cls, batch: Batch, first: Tensor) -> Starts:
        """From index `first` `[batch, 1]` to the end of each row."""
        last = batch.total[:, None] - 3
        count = rounded_up(max(1, int((last - first).max()) + 1))
        return cls(first + torch.arange(count, device=first.device), last)

    def real(self, step: int) -> Tensor:
        """`[batch, starts]`, where the token that a step predicts exists."""
        return self.index <= self.last - step


def unroll(
    network: Eagle3Network,
    batch: Batch,
    features: Tensor,
    starts: Starts,
    steps: int,
) -> Iterator[Tensor]:
    """The head's outputs before its norm, step by step.

    Args:
        features: the batch's, possibly with noise, `[batch, ≥ indices, 3 * hidden]`.
    Yields:
        at step 0 `[batch, indices, hidden]`, then `[batch, starts, hidden]`; what lies behind
        `starts.last` means nothing.
    """
    count = batch.indices
    assert int(batch.total.max()) - 2 <= len(network.cos), "a text beyond the head's positions"
    # residuals are added up in full precision
    hidden = network.fc(lowered(features[:, :count])).float()
    everywhere = torch.arange(count, device=hidden.device)
    first = network.project(
        hidden, F.embedding(batch.ids[:, 1 : count + 1], network.embeddings), everywhere
    )
    output = network.finish(F.scaled_dot_product_attention(*first, is_causal=True), hidden)
    yield output
    index = starts.index.clamp(max=count - 1)
    visible = (everywhere <= index[..., None])[:, None]  # [batch, 1, starts, indices]
    ids = batch.ids
    hidden = output[torch.arange(len(ids))[:, None], index]
    own: list[Projected] = []
    for step in range(1, steps):
        following = ids.gather(1, (index + step + 1).clamp(max=ids.shape[1] - 1))
        embedded = F.embedding(following, network.embeddings)
        own.append(network.project(hidden, embedded, index + step))
        hidden = network.finish(attend(own, first.key, first.value, visible), hidden)
        yield hidden


def attend(own: Sequence[Projected], keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Attention of the newest step: to visible keys of step 0, and to the keys of later steps at
    its own index.

    Args:
        own: projections of the steps from 1 on, `[batch, heads, starts, head_dim]` each; the query
            is the last one's.
        keys, values: of step 0, `[batch, heads, indices, head_dim]`.
        visible: `[batch, 1, starts, indices]` bool.
    """
    query = own[-1].query * keys.shape[-1] ** -0.5
    before = (query @ keys.transpose(2, 3)).masked_fill(~visible, -torch.inf)
    diagonal = [(query * one.key).sum(-1, keepdim=True) for one in own]
    shares = (
        torch.cat([before, *diagonal], dim=-1).softmax(-1, dtype=torch.float32).to(values.dtype)
    )
    first, *later = shares.split([keys.shape[2], *[1] * len(own)], dim=-1)
    attended = first @ values
    for share, one in zip(later, own, strict=True):
        attended = attended + share * one.value
    return attended
