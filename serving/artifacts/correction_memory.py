"""Correction memory of CSD: how often the target corrected draft token x to t* (CSD, section 4.2,
Algorithm 1).

Bounded (ours, the paper's limitations ask for it): at most 65,536 pairs. A new pair is on
probation: it stays until an eighth of the memory's size of newer pairs has come, whatever its
count, so that a new pattern can grow up to lambda. When the memory is full, the oldest among the
least counted of the others goes, never the newest. A count stops at `MOST_SEEN`. `update` and
`copy` may be called from any thread.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Self

import numpy as np

from draftwell.serving.artifacts.base import Artifact, Provenance

MAX_PAIRS = 65_536
MOST_SEEN = 1_000_000
"""Largest count, far beyond any lambda: a server that runs for years never leaves the 32 bits that
a count has on disk."""


class CorrectionMemory(Artifact):
    """Counts of (draft token, correction); the order of `counts` is the order of first sight.

    >>> memory = CorrectionMemory.empty()
    >>> memory.update(3, 4)
    >>> memory.count(3, 4)
    1
    """

    kind = "correction_memory"

    def __init__(
        self, counts: dict[tuple[int, int], int], provenance: Provenance, max_pairs: int = MAX_PAIRS
    ):
        self.counts, self.provenance, self.max_pairs = dict(counts), provenance, max_pairs
        # counts and their order are seen before an update or after it
        self._lock = threading.Lock()

    @classmethod
    def empty(cls, provenance: Provenance | None = None, max_pairs: int = MAX_PAIRS) -> Self:
        return cls({}, provenance or Provenance(pair="", fingerprint=""), max_pairs)

    def count(self, drafted: int, correction: int) -> int:
        """How often `drafted` was corrected to `correction`."""
        return self.counts.get((drafted, correction), 0)

    def update(self, drafted: int, correction: int) -> None:
        """Count one rejection."""
        pair = (drafted, correction)
        with self._lock:
            if pair not in self.counts and len(self.counts) >= self.max_pairs:
                self._evict()
            self.counts[pair] = min(MOST_SEEN, self.counts.get(pair, 0) + 1)

    def _evict(self) -> None:
        """Make room: drop the oldest among the least counted that are not on probation.

        A full scan, but a rare one: it drops a 256th of a large memory at once.
        """
        settled = list(self.counts)[: max(1, len(self.counts) - max(1, self.max_pairs // 8))]
        for pair in sorted(settled, key=self.counts.__getitem__)[: max(1, self.max_pairs // 256)]:
            del self.counts[pair]

    def copy(self) -> CorrectionMemory:
        """An independent memory with the same counts, those of one moment (deterministic mode works
        on a copy per request)."""
        with self._lock:
            return CorrectionMemory(self.counts, self.provenance, self.max_pairs)

    def sample(self, share: float, seed: int = 0) -> CorrectionMemory:
        """As a calibration on fewer texts would have made it: each rejection is kept with
        probability `share`, from 0 to 1."""
        counts = self.copy().counts
        kept = np.random.default_rng(seed).binomial(list(counts.values()), share)
        left = {pair: count for pair, count in zip(counts, kept.tolist(), strict=True) if count}
        return CorrectionMemory(left, self.provenance, self.max_pairs)

    def write_files(self, folder: Path) -> None:
        import pyarrow as pa
        import pyarrow.feather as feather

        counts = self.copy().counts
        pairs = list(counts)
        table = pa.table(
            {
                "drafted": pa.array([x for x, _ in pairs], pa.int32()),
                "correction": pa.array([t for _, t in pairs], pa.int32()),
                "count": pa.array(list(counts.values()), pa.int32()),
            }
        )
        feather.write_feather(table, folder / "memory.arrow", compression="uncompressed")

    @classmethod
    def read_files(cls, folder: Path, provenance: Provenance) -> Self:
        import pyarrow.feather as feather

        table = feather.read_table(folder / "memory.arrow").to_pydict()
        pairs = zip(table["drafted"], table["correction"], strict=True)
        return cls(dict(zip(pairs, table["count"], strict=True)), provenance)
