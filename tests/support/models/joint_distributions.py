"""Joint laws of lossy strategies, written down from the rule of a single position."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from draftwell.serving.runtime.requests import Sampling
from tests.support.models.spans import span_of

Law = dict[tuple[int, ...], float]


class Context:
    """What both models say behind one prefix: warped p, q and raw P, Q as float64 `[vocab]`, and
    the target's logits z."""

    def __init__(self, models: dict, ids: list[int], sampling: Sampling):
        target, draft = (
            span_of(models[role].next_logits(ids)[None], sampling) for role in ("target", "draft")
        )
        self.p, self.q = target.probs(0).double(), draft.probs(0).double()
        self.P, self.Q = target.raw(0), draft.raw(0)
        self.z = models["target"].next_logits(ids)


def law_of_four(
    models: dict, prompt: list[int], sampling: Sampling, judged: Callable[[Context], torch.Tensor]
) -> Law:
    """Law of four tokens of a serial strategy with at least two draft tokens a round.

    Token 1 comes from the target (prefill) and so does token 4, whichever way the rounds end: with
    one token left nothing is drafted. Tokens 2 and 3 are always drafted and judged behind the true
    prefix: `judged` says how they fall.
    """
    law: Law = {(): 1.0}
    for place in range(4):
        longer: Any = defaultdict(float)
        for text, mass in law.items():
            context = Context(models, [*prompt, *text], sampling)
            for token, share in enumerate(
                (judged(context) if place in (1, 2) else context.p).tolist()
            ):
                if share > 0:
                    longer[(*text, token)] += mass * share
        law = dict(longer)
    return law


def furthest(law: Law, other: Law) -> float:
    """Largest difference of two laws at any output."""
    return max(abs(law.get(k, 0.0) - other.get(k, 0.0)) for k in set(law) | set(other))
