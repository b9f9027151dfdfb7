"""Stop policies: how long a draft gets."""

from __future__ import annotations

from serving.runtime.artifacts.acceptance_table import AcceptanceTable
from serving.runtime.types import Rows


class FixedLength:
    """Stop after `num_tokens` tokens."""

    def __init__(self, num_tokens: int):
        self.num_tokens = num_tokens
        self._drafted = 0

    def start(self) -> None:
        self._drafted = 0

    def stop_after(self, row: Rows, token: int) -> bool:
        self._drafted += 1
        return self._drafted >= self.num_tokens


class CumulativeAcceptance:
    """SPIDE: stop when the estimated probability that the whole draft is kept falls to tau (Algorithm 1, lines 4-12).

    Gamma = 1 at the start, Gamma ← Gamma·alpha(C) with every token; stop at Gamma <= tau, or at `cap` tokens (ours: with
    alpha = 1 the paper's loop may never stop).
    """

    def __init__(self, table: AcceptanceTable, tau: float, cap: int = 32):
        self.table, self.tau, self.cap = table, tau, cap
        self._gamma, self._drafted = 1.0, 0

    def start(self) -> None:
        self._gamma, self._drafted = 1.0, 0

    def stop_after(self, row: Rows, token: int) -> bool:
        self._gamma *= self.table.alpha(row.confidence(0))
        self._drafted += 1
        return self._gamma <= self.tau or self._drafted >= self.cap
