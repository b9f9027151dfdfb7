"""vLLM's n-gram speculation, replayed on texts: exact for greedy requests, because their text is
the target's own whatever is drafted.

The rule is that of `vllm/v1/spec_decode/ngram_proposer.py` (0.32): of the longest n-gram that ends
the text and occurs before, the earliest occurrence; the draft is what followed it.
"""

from __future__ import annotations

from collections.abc import Sequence

Text = tuple[Sequence[int], Sequence[int]]
"""Token ids of a prompt and of its answer."""


def propose(context: Sequence[int], k: int, n: int) -> list[int]:
    """Draft of at most `k` tokens after `context`, from n-grams of 1 to `n` tokens.

    >>> propose([1, 2, 3, 9, 2, 3, 7, 2, 3], 2, 2), propose([1, 2, 3], 2, 2)
    ([9, 2], [])
    """
    ids = list(context)
    for length in range(min(n, len(ids) - 1), 0, -1):
        suffix = ids[-length:]
        for start in range(len(ids) - length):
            if ids[start : start + length] == suffix:
                return ids[start + length : start + length + k]
    return []


def passes(text: Text, k: int, n: int) -> int:
    """Forward passes of the target for an answer, the one over the prompt included.

    >>> passes(([1, 2, 1], [2, 1, 2, 1]), k=2, n=1)
    2
    """
    prompt, answer = text
    ids, done, count = [*prompt, *answer], 1, 1
    while done < len(answer):
        draft = propose(ids[: len(prompt) + done], k, n)
        rest = answer[done:]
        accepted = next(
            (i for i, token in enumerate(draft) if i >= len(rest) or token != rest[i]), len(draft)
        )
        done += accepted + 1
        count += 1
    return count


def best_n(texts: Sequence[Text], k: int, choices: Sequence[int]) -> int:
    """The longest n-gram with the fewest passes at this draft length: a pass costs the same
    whichever it is. Of equals the smallest."""
    return min(sorted(choices), key=lambda n: sum(passes(text, k, n) for text in texts))
