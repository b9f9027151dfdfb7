"""One position of several: what a judge saw at it, kept as the distribution that a token was proposed under."""

from __future__ import annotations

from torch import Tensor

from serving.runtime.types import Rows, Stream, TokenFigures


class RowView:
    """Row `at` of other rows, as rows of length 1 (satisfies `Rows`); nothing is copied or computed twice."""

    def __init__(self, rows: Rows, at: int):
        self.rows, self.at, self.sampling = rows, at, rows.sampling

    def __len__(self) -> int:
        return 1

    @property
    def top(self) -> list[int]:
        return [self.rows.top[self.at]]

    def probs(self, row: int) -> Tensor:
        return self.rows.probs(self.at + row)

    def raw(self, row: int) -> Tensor:
        return self.rows.raw(self.at + row)

    def raw_prob(self, row: int, token: int) -> float:
        return self.rows.raw_prob(self.at + row, token)

    def raw_logit(self, row: int, token: int) -> float:
        return self.rows.raw_logit(self.at + row, token)

    def confidence(self, row: int) -> float:
        return self.rows.confidence(self.at + row)

    def entropy(self, row: int) -> float:
        return self.rows.entropy(self.at + row)

    def token_figures(self, row: int, token: int) -> TokenFigures:
        return self.rows.token_figures(self.at + row, token)

    def hidden(self, row: int) -> Tensor:
        return self.rows.hidden(self.at + row)

    def sample(self, row: int, stream: Stream) -> int:
        return self.rows.sample(self.at + row, stream)
