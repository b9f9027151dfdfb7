"""Some positions of several: one that a judge saw, kept as the distribution that a token was proposed under; or the last ones."""

from __future__ import annotations

from torch import Tensor

from serving.runtime.types import Rows, Stream, TokenFigures


class RowView:
    """`count` rows of other rows from row `at` on (satisfies `Rows`); nothing is copied or computed twice."""

    def __init__(self, rows: Rows, at: int, count: int = 1):
        self.rows, self.at, self.count, self.sampling = rows, at, count, rows.sampling

    def __len__(self) -> int:
        return self.count

    @property
    def top(self) -> list[int]:
        return self.rows.top[self.at : self.at + self.count]

    def probs(self, row: int) -> Tensor:
        return self.rows.probs(self.at + row)

    def raw(self, row: int) -> Tensor:
        return self.rows.raw(self.at + row)

    def raw_logprobs(self, row: int) -> Tensor:
        return self.rows.raw_logprobs(self.at + row)

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
