"""How often the target keeps a draft token, by the draft's confidence: SPIDE's Figures 3 to 5.

Counted at every position of the texts that a cell replays: the draft's first choice there, and
whether the target wrote the same token. SPIDE's own table has only the tokens that were drafted and
judged, of which more are certain.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from draftwell.components.papers.estimates import Estimate
from draftwell.components.replay.traced_text import TracedText
from draftwell.components.report.intervals import TAIL, bootstrap_of_sums, resamples_for
from draftwell.serving.artifacts.acceptance_table import EDGES, AcceptanceTable

BINS = len(EDGES) + 1
Counts = tuple[tuple[int, int], ...]
"""Of one text, for each bin of `AcceptanceTable`: positions, and those where the draft's first
choice was kept."""


def counts_of(text: TracedText) -> Counts:
    """Of one text; a position without a rollout is left out."""
    found = [[0, 0] for _ in range(BINS)]
    for token, tokens, confidence in zip(text.output, text.tokens, text.confidence, strict=False):
        if tokens:
            count = found[AcceptanceTable.bin_of(confidence[0])]
            count[0] += 1
            count[1] += tokens[0] == token
    return tuple((positions, kept) for positions, kept in found)


def share_kept(texts: Sequence[Counts], confidence_bin: int) -> Estimate | None:
    """The share of a bin that was kept, its interval over texts; None where nothing fell into
    it."""
    table = np.array([counts[confidence_bin] for counts in texts], dtype=np.float64)
    if not table[:, 0].sum():
        return None

    def share(sums: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            return np.asarray(sums[..., 1] / sums[..., 0])[..., None]

    low, high = bootstrap_of_sums(
        table, share, resamples=resamples_for(TAIL, len(table)), tail=TAIL
    )
    return Estimate(float(share(table.sum(0)[None])[0, 0]), float(low[0]), float(high[0]))
