"""A strategy as other engines know it: drafts of a model or of n-grams, kept by the exact rule.
Each class gives its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from draftwell.serving.errors import DraftwellError


class SuffixSettings(NamedTuple):
    """SuffixDecoding's own: longest draft for each token of the match, and smallest probability of
    what is drafted."""

    factor: float
    least: float


@dataclass(frozen=True)
class Speculation:
    """What remains of a strategy in another engine.

    Args:
        source: where drafts come from.
        length: tokens that a draft has, or with `threshold` has at most; None: a rule decides that
            no engine has.
        threshold: a draft ends at a token whose draft probability is lower.
        heuristic: `length` grows by two after a draft that was accepted completely, else shrinks by
            one.
        ngram: longest n-gram looked up.
        suffix: for an engine that has SuffixDecoding, which the n-grams then stand for elsewhere.
        notes: what was left out, for people to read.
    """

    source: Literal["none", "draft", "ngram", "eagle3"]
    length: int | None = None
    threshold: float | None = None
    heuristic: bool = False
    ngram: int | None = None
    notes: tuple[str, ...] = ()
    suffix: SuffixSettings | None = None

    def constant(self, engine: str) -> int:
        """The length of every draft, for an engine that knows nothing else.

        Raises:
            DraftwellError: drafts have no constant length, and nobody named one
                (`no_constant_length`).
        """
        if self.length is None or self.threshold is not None:
            raise DraftwellError(
                f"{engine} cannot express how this config ends a draft: name a constant "
                "length with --draft-tokens, such "
                "as the num_speculative_tokens of the fastest vanilla_sd in the tuning's report",
                code="no_constant_length",
            )
        return self.length
