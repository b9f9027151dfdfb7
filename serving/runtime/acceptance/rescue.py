"""CSD's rescue: a rejected token stays if its correction is a known habit and the target finds it
likely enough.

CSD, Algorithm 1: on a rejection draw t* once from the residual; rescue iff memory[(x, t*)] >=
lambda, read before the update, and z(x) − z(t*) >= log tau on raw target logits (Eq. 3); every
rejection updates the memory. A rescued token is kept and judging continues after it. Ours: no
rescue of or against a stop or special token, a banned token, or a token that top-k or top-p
removed. A request that penalises or biases tokens is judged exactly, and teaches the memory
nothing: the gate and the memory are about what the target says by itself, and a token that the
client made unlikely would be kept.
"""

from __future__ import annotations

import math
from typing import ClassVar

from draftwell.serving.artifacts.correction_memory import CorrectionMemory
from draftwell.serving.runtime.acceptance.exact import keeps, recover
from draftwell.serving.runtime.acceptance.in_order import KEPT, RESCUED, InOrder, TokenDecision
from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.logits import Span
from draftwell.serving.runtime.random_streams import Streams
from draftwell.serving.runtime.types import Draft


class Rescue(InOrder):
    """Exact acceptance with rescue.

    Args:
        memory: read and updated at every rejection; None: the gate alone decides (lossy_sd).
        min_count: lambda; `math.inf` never rescues.
        tau: in (0, 1], smallest p̄(x)/p̄(t*) that is rescued.
        special_tokens: tokens that are never rescued nor rescued against.
        use_memory, use_gate: the paper's ablations (memory only, gate only).
    """

    lossless: ClassVar[bool] = False

    def __init__(
        self,
        memory: CorrectionMemory | None,
        min_count: float,
        tau: float,
        special_tokens: frozenset[int] = frozenset(),
        *,
        use_memory: bool = True,
        use_gate: bool = True,
    ):
        self.memory, self.min_count, self.log_tau = memory, min_count, math.log(tau)
        self.special_tokens, self.use_memory, self.use_gate = special_tokens, use_memory, use_gate

    def look(self, draft: Draft, i: int, target: Span, rng: Streams) -> Step[TokenDecision]:
        if (yield from keeps(draft, i, target, rng)):
            return KEPT
        token = draft.tokens[i]
        correction = yield from recover(draft, i, target, rng)
        if target.sampling.penalises or target.sampling.biases:
            return TokenDecision(correction)
        rescue = yield from self.rescues(i, token, correction, target)
        if self.memory is not None:
            self.memory.update(token, correction)
        return RESCUED if rescue else TokenDecision(correction)

    def rescues(self, row: int, token: int, correction: int, target: Span) -> Step[bool]:
        """Whether a rejected token stays."""
        protected = target.sampling.stop_token_ids | self.special_tokens
        if (
            token == correction
            or token in protected
            or correction in protected
            or not (yield from allowed(token, row, target))
        ):
            return False
        frequent = (
            not self.use_memory
            or self.memory is None
            or self.memory.count(token, correction) >= self.min_count
        )
        if not frequent or not self.use_gate:
            return frequent
        return target.raw_logit(row, token) - target.raw_logit(row, correction) >= self.log_tau


def allowed(token: int, row: int, target: Span) -> Step[bool]:
    """Whether bans, top-k and top-p leave the token any probability."""
    if token in target.sampling.banned_token_ids:
        return False
    return target.sampling.greedy or (yield from target.chance(row, token)) > 0.0
