"""The random streams of a request: draft, test and sample never share a uniform. A request whose
answer shall be the same again draws by races instead, which draft and target share."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwell.serving.runtime.sampling import inverted

RARE = 2.0**-16
"""Tokens of no larger probability race together."""
REST, INSIDE = -1, -2
"""In the place of a token: what the rare ones race with, and what says which of them it is."""


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


@dataclass(frozen=True)
class Race:
    """What a token of the output is drawn with, by every model that is asked for it (`leaders`).

    Args:
        index: of the token in the output.
    """

    seed: int
    index: int

    def uniforms(self, tokens: NDArray[np.int64]) -> NDArray[Any]:
        """In (0, 1), one for each token: SplitMix64's outputs (Steele 2014) at their places."""
        key = hashlib.blake2b(f"{self.seed} {self.index}".encode(), digest_size=8).digest()
        z = (tokens - INSIDE).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z += np.frombuffer(key, np.uint64)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((z ^ (z >> np.uint64(31))) >> np.uint64(12)) * 2.0**-52 + 2.0**-53


def leaders(
    law: NDArray[np.float32], race: Race, count: int = 1, support: NDArray[np.int64] | None = None
) -> list[tuple[int, float]]:
    """Up to `count` columns of the largest p(x)/E(x), largest first, each with its share of their
    sum; E(x) follows Exp(1) and depends on seed, index and token alone.

    The first one follows p: log p − log E is the Gumbel trick. Models that share E agree on it with
    probability Σ_x 1/Σ_y max(p(y)/p(x), q(y)/q(x)) >= (1 − TV)/(1 + TV), though none knows the
    other's distribution (Daliri, Musco and Suresh 2024, 2408.07978, section 3; the race: Kobus and
    Gündüz 2025, 2504.15475). Ours: the rare tokens run as one, which has their mass, and where it
    leads inversion says which: noise for a whole vocabulary takes longer than a softmax.

    Args:
        law: p, `[columns]`; sums to 1.
        support: `[columns]` ids of the tokens; None: column i is token i.
    """
    columns = np.flatnonzero(law > RARE)
    probs = law[columns].astype(float)
    tokens = columns if support is None else support[columns]
    uniforms = race.uniforms(np.append(tokens, (REST, INSIDE)))
    scores = np.append(probs, max(0.0, 1.0 - probs.sum())) / -np.log(uniforms[:-1])
    found = [int(scores.argmax())] if count == 1 else np.argsort(-scores)[:count].tolist()
    if len(columns) in found:
        rest = law.copy()
        rest[columns] = 0.0
        if not rest.any():  # what was missing to 1 is rounding
            scores[-1] = 0.0
            found = np.argsort(-scores)[:count].tolist()
        one = inverted(torch.from_numpy(rest)[None], torch.from_numpy(uniforms[-1:]))
        columns = np.append(columns, int(one))
    return [(int(columns[i]), float(scores[i] / scores.sum())) for i in found if scores[i] > 0.0]


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
