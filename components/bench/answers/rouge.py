"""ROUGE (Lin 2004): how much of a reference an answer says, in words (ROUGE-1), pairs of words
(ROUGE-2), or in order (ROUGE-L).

The words are those of Google's `rouge-score` without its stemmer: runs of a–z and 0–9 in lower
case. That package is not used because its scorer brings a language toolkit along for what are
twenty lines.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from statistics import fmean

WORD = re.compile(r"[a-z0-9]+")


def rouge_l(answer: str, reference: str) -> float:
    """F1 of the longest common subsequence of words, in [0, 1]; 0 where either has no words.

    >>> (
    ...     rouge_l("the cat sat", "The cat sat."),
    ...     rouge_l("the cat", "the big cat ran"),
    ...     rouge_l("", "a"),
    ... )
    (1.0, 0.6666666666666666, 0.0)
    """
    given, wanted = WORD.findall(answer.lower()), WORD.findall(reference.lower())
    common = longest_common_subsequence(given, wanted)
    return 2 * common / (len(given) + len(wanted)) if common else 0.0


def rouge_n(answer: str, reference: str, n: int) -> float:
    """F1 of the runs of n words that both have, each counted as often as both have it, in [0, 1]; 0
    where either has none.

    >>> (
    ...     rouge_n("the cat sat", "The cat sat.", 2),
    ...     rouge_n("the the cat", "the big cat", 1),
    ...     rouge_n("the", "the cat", 2),
    ... )
    (1.0, 0.6666666666666666, 0.0)
    """
    given, wanted = (
        Counter(zip(*(words[i:] for i in range(n)), strict=False))
        for words in (WORD.findall(text.lower()) for text in (answer, reference))
    )
    common = (given & wanted).total()
    return 2 * common / (given.total() + wanted.total()) if common else 0.0


def longest_common_subsequence(a: Sequence[str], b: Sequence[str]) -> int:
    """Its length, in time |a|·|b| and one row of memory."""
    row = [0] * (len(b) + 1)
    for word in a:
        above = 0  # the cell up and to the left
        for j, other in enumerate(b, 1):
            above, row[j] = row[j], above + 1 if word == other else max(row[j], row[j - 1])
    return row[-1]


def mean_rouge_l(answers: Sequence[str], references: Sequence[str | None]) -> float | None:
    """Average over the answers that have a reference; None if none has.

    >>> mean_rouge_l(["a b", "c"], ["a b", None])
    1.0
    """
    scores = [
        rouge_l(answer, reference)
        for answer, reference in zip(answers, references, strict=True)
        if reference
    ]
    return fmean(scores) if scores else None
