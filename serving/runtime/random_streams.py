"""The random streams of a request: draft, test and sample never share a uniform."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from draftwell.serving.runtime.sampling import inverted


class RandomStream:
    """A private stream of random decisions, one uniform in [0, 1) each."""

    def __init__(self, seed: int, purpose: int):
        self._generator = np.random.Generator(np.random.Philox(key=[seed & (2**64 - 1), purpose]))

    def uniform(self) -> float:
        return float(self._generator.random())

    def draw(self, probs: Tensor) -> int:
        """Draw a token from `probs` `[vocab]` (need not be normalised) by inversion of one
        uniform."""
        uniform = torch.tensor([self.uniform()], dtype=torch.float64).to(probs.device)
        return int(inverted(probs[None], uniform))

    def accepts(self, target_prob: float, draft_prob: float) -> bool:
        """True with probability min(1, target_prob / draft_prob): r < p/q without the division, so
        p = 0 always rejects."""
        return self.uniform() * draft_prob < target_prob


class Streams:
    """The random streams of one request, one for each purpose.

    Draft, test and sample (residual and bonus) never share a uniform, and each is read by one side
    only, so that the result does not depend on which side runs first (docs/methods.md, condition
    1).
    """

    def __init__(self, seed: int):
        self.draft = RandomStream(seed, 1)
        self.test = RandomStream(seed, 2)
        self.sample = RandomStream(seed, 3)
