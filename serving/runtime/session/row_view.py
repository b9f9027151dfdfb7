"""Some positions of several: the one that a token was proposed under, the last ones, or a path of a
tree."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from draftwell.serving.artifacts.verifier import TokenFigures
from draftwell.serving.runtime.types import Rows, Stream


class RowView:
    """Some of other rows (satisfies `Rows`); nothing is copied or computed twice.

    Args:
        at: the first of `count` consecutive rows; or the numbers of all, in order.
    """

    def __init__(self, rows: Rows, at: int | Sequence[int], count: int = 1):
        self.rows, self.sampling = rows, rows.sampling
        self.numbers: Sequence[int] = range(at, at + count) if isinstance(at, int) else at

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def top(self) -> list[int]:
        top = self.rows.top
        return [top[number] for number in self.numbers]

    def probs(self, row: int) -> Tensor:
        return self.rows.probs(self.numbers[row])

    def raw(self, row: int) -> Tensor:
        return self.rows.raw(self.numbers[row])

    def raw_logprobs(self, row: int) -> Tensor:
        return self.rows.raw_logprobs(self.numbers[row])

    def raw_prob(self, row: int, token: int) -> float:
        return self.rows.raw_prob(self.numbers[row], token)

    def likeliest(self, row: int, count: int) -> list[tuple[int, float]]:
        return self.rows.likeliest(self.numbers[row], count)

    def raw_logit(self, row: int, token: int) -> float:
        return self.rows.raw_logit(self.numbers[row], token)

    def confidence(self, row: int) -> float:
        return self.rows.confidence(self.numbers[row])

    def entropy(self, row: int) -> float:
        return self.rows.entropy(self.numbers[row])

    def token_figures(self, row: int, token: int) -> TokenFigures:
        return self.rows.token_figures(self.numbers[row], token)

    def hidden(self, row: int) -> Tensor:
        return self.rows.hidden(self.numbers[row])

    def sample(self, row: int, stream: Stream) -> int:
        return self.rows.sample(self.numbers[row], stream)
