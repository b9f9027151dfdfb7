"""Divergences between the judge's and the proposer's raw distributions at one position.

All of them read raw probabilities `[vocab]` float32 (temperature 1, bans applied; docs/methods.md,
"Two pairs of distributions"), so that they say the same at every temperature, and use natural
logarithms; 0·log 0 = 0.

Exact zeros: a draft whose head covers a part of the vocabulary gives all other tokens probability 0
(logit −inf). There `tv` and `js` stay finite. `kl` = KL(p‖q) and `fsd_js`, which holds ½KL(m‖q),
are infinite wherever q lacks a token that p has, that is at every position of such a draft: with
them no token would ever be kept (`INFINITE_AT_ZEROS`).
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.model import Model
from draftwell.serving.runtime.sampling import sum_rows

DivergenceName = Literal["tv", "kl", "js", "logit_gap", "fsd_js"]
INFINITE_AT_ZEROS: frozenset[DivergenceName] = frozenset({"kl", "fsd_js"})
"""Divergences that are infinite where the proposer rules out a token that the judge allows."""


def divergence(name: DivergenceName, target_raw: Tensor, draft_raw: Tensor, token: int) -> float:
    """Div(p̄, q̄) at one position, in [0, inf]; arguments as of `divergences`, of one row.

    >>> import torch
    >>> p, q = torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0])
    >>> [round(divergence(name, p, q, 0), 4) for name in ("tv", "kl", "js", "logit_gap", "fsd_js")]
    [0.5, inf, 0.2158, 0.6931, inf]
    """
    return float(divergences(name, target_raw[None], draft_raw[None], torch.tensor([token]))[0])


def divergences(
    name: DivergenceName, target_raw: Tensor, draft_raw: Tensor, tokens: Tensor
) -> Tensor:
    """Div(p̄, q̄) `[n]` float64 at n positions, each in [0, inf].

    Args:
        target_raw: p̄ `[n, vocab]` of the judge.
        draft_raw: q̄ `[n, vocab]` of the proposer.
        tokens: `[n]`, the proposed ones; only `logit_gap` looks at them.
    """
    if name == "logit_gap":
        return logit_gap(target_raw, draft_raw, tokens)
    return {"tv": tv, "kl": kl, "js": js, "fsd_js": fsd_js}[name](target_raw, draft_raw)


def check_support(name: DivergenceName, proposer: Model) -> None:
    """Refuse a divergence that would be infinite everywhere, because the proposer's head covers a
    part of the vocabulary."""
    if name in INFINITE_AT_ZEROS and proposer.head_tokens is not None:
        raise DraftwellError(
            f"divergence {name} is infinite everywhere for a draft whose head covers only "
            "a part of the vocabulary: "
            "use tv or js",
            code="infinite_divergence",
        )


def tv(p: Tensor, q: Tensor) -> Tensor:
    """Total variation ½Σ|p − q|, in [0, 1]."""
    return sum_rows((p - q).abs()).double() / 2


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p‖q) = Σ p·log(p/q), in [0, inf]."""
    # entr(p) = −p·log p and xlogy(p, q) = p·log q are 0 at p = 0, so that no 0·inf turns up.
    total = sum_rows(-torch.special.entr(p) - torch.special.xlogy(p, q))
    return total.double().clamp(min=0.0)


def js(p: Tensor, q: Tensor) -> Tensor:
    """Jensen-Shannon divergence ½KL(p‖m) + ½KL(q‖m) with m = ½(p + q), in [0, ln 2]."""
    m = (p + q) / 2
    return ((kl(p, m) + kl(q, m)) / 2).clamp(max=math.log(2))


def fsd_js(p: Tensor, q: Tensor) -> Tensor:
    """½KL(m‖p) + ½KL(m‖q), in [0, inf]: what the code of fuzzy speculative decoding computes and
    its thresholds mean."""
    m = (p + q) / 2
    return (kl(m, p) + kl(m, q)) / 2


def logit_gap(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    """|log p(x) − log q(x)| on each token x, in [0, inf]: the gap of the two logits, each model's
    own constant taken out."""
    own, other = (side.double().gather(-1, tokens[:, None])[:, 0] for side in (p, q))
    return torch.where(own == other, 0.0, (own.log() - other.log()).abs())
