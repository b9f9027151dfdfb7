"""Which positions each token of a row sees: those before it, or in a tree those on its own path."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftwell.serving.runtime.trees import ROOT, depths


def visible(
    start: int,
    count: int,
    window: int | None,
    parents: Sequence[int] | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """`[count, start + count]` bool of a row of `count` tokens after `start` others.

    Args:
        window: positions that a token sees, its own included; None: all.
        parents: of each token of a tree the place of its parent in the row, or `ROOT`; None: each
            follows the one before it.

    >>> visible(1, 3, None, [-1, 0, 0]).int().tolist()
    [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]
    """
    end = start + count
    if parents is None:
        ahead = torch.arange(start, end, device=device)[:, None] - torch.arange(end, device=device)
        return ahead >= 0 if not window else (ahead >= 0) & (ahead < window)
    seen = torch.ones(count, end, dtype=torch.bool)
    seen[:, start:] = ancestry(parents)
    if window:
        levels = torch.tensor(depths(parents)) + start - 1
        seen &= levels[:, None] - torch.cat([torch.arange(start), levels]) < window
    return seen.to(device)


def ancestry(parents: Sequence[int]) -> Tensor:
    """`[tokens, tokens]` bool: row i has the tokens on the path to token i, itself included."""
    on_path = torch.eye(len(parents), dtype=torch.bool)
    for i, parent in enumerate(parents):
        if parent != ROOT:
            on_path[i] |= on_path[parent]
    return on_path
