"""DuoDecoding as in KaiLv69/DuoDecoding, `src/engine.py` (`duodecoding`) and `src/model_cpu.py`
(`generate_k_seq`): greedy only.

Rejected tokens are replaced by the place where p is 1, which a distribution of any other
temperature lacks.
"""

from __future__ import annotations

from tests.support.published.decoding import Decoded, Reader, Round

SHARES = {12: (1, 2, 3, 4, 6), 16: (1, 2, 4, 8), 24: (1, 2, 3, 4, 6, 8)}
"""Gamma → numbers of sequences that share it; every other gamma is that of one sequence."""


def draft_sequences(drafter: Reader, ids: list[int], gamma: int) -> list[list[int]]:
    """One greedy sequence, and further ones from the draft's next best first tokens that are
    likelier than the first two together."""
    first = drafter.read(ids)[0].softmax(-1).sort(descending=True, stable=True)
    second = drafter.read([*ids, int(first.indices[0])])[0].softmax(-1)
    both = float(first.values[0] * second.max())
    count = 1
    if gamma in SHARES:
        most = 7 if gamma == 12 else 8
        likelier = sum(float(chance) > both for chance in first.values[1:most])
        count = max(share for share in SHARES[gamma] if share <= 1 + likelier)
    sequences = [[int(token)] for token in first.indices[:count]]
    for sequence in sequences:
        while len(sequence) < gamma // count:
            sequence.append(drafter.best(ids + sequence))
    return sequences


def duo_decoding(
    target: Reader, drafter: Reader, prompt: list[int], max_tokens: int, gamma: int
) -> Decoded:
    """Each round the target judges what the last round's sequence left, then the first tokens of
    this round's sequences in order.

    The prompt's round drafts one token. The sequence whose first token is kept joins the text as a
    whole.
    """
    ids, rounds = list(prompt), []
    left = 0  # unverified tokens at the end of the text
    while len(ids) < len(prompt) + max_tokens:
        sequences = draft_sequences(drafter, ids, gamma if rounds else 1)
        drafted = sum(map(len, sequences))
        verified = len(ids) - left
        kept = 0
        while kept < left and ids[verified + kept] == target.best(ids[: verified + kept]):
            kept += 1
        if kept < left:
            rounds.append(Round(drafted, kept + 1, kept))
            ids, left = [*ids[: verified + kept], target.best(ids[: verified + kept])], 0
            continue
        best = target.best(ids)
        rank = next((i for i, sequence in enumerate(sequences) if sequence[0] == best), None)
        tested = len(sequences) if rank is None else rank + 1
        rounds.append(Round(drafted, left + tested, left + (rank is not None)))
        ids += [best] if rank is None else sequences[rank]
        left = 0 if rank is None else len(sequences[rank]) - 1
    return Decoded(ids[len(prompt) :], rounds, left)
