"""Acceptance table of SPIDE: how often the target keeps a draft token, by the draft's confidence.

20 bins of C by a fixed array of edges: ten of width .1 below .9 … .99 in steps of .01, and {1.0}
(SPIDE, section 4.1). {1.0} means C ≥ 1 − 2⁻⁹: the authors' bfloat16 rounds there, in float32 the
bin would stay empty (ours).

A greedy request keeps a draft token that is the target's first choice, a sampled one keeps it with
probability min(1, p/q): other counts. So a table may hold a second one, for sampled requests
(ours). Each has a prior weight of its own: how many judged tokens m_b counts for. Calibration
estimates it (`components/calibrate/prior_weight.py`).

Online state (ours, the paper is silent): a bin that has counted `MOST_JUDGED` tokens halves both
counts, so that α stays what it is, numbers stay small, and what a bin learns next weighs more than
what it learnt long ago. `update` and `copy` may be called from any thread.
"""

from __future__ import annotations

import bisect
import json
import math
import threading
from pathlib import Path
from typing import Any, Self

from draftwell.serving.artifacts.base import Artifact, ArtifactError, Provenance
from draftwell.serving.temperature import class_of

EDGES = (
    0.1,
    0.2,
    0.3,
    0.4,
    0.5,
    0.6,
    0.7,
    0.8,
    0.9,
    0.91,
    0.92,
    0.93,
    0.94,
    0.95,
    0.96,
    0.97,
    0.98,
    0.99,
    1 - 2**-9,
)
"""Lower edge of every bin but the first."""

MIDPOINTS = (
    0.05,
    0.15,
    0.25,
    0.35,
    0.45,
    0.55,
    0.65,
    0.75,
    0.85,
    0.905,
    0.915,
    0.925,
    0.935,
    0.945,
    0.955,
    0.965,
    0.975,
    0.985,
    0.995,
    0.999,
)
PRIOR_WEIGHT = 10
"""Judged tokens that the prior m_b counts for in a table without an estimate, such as an empty
one."""
MOST_JUDGED = 2**15
"""Judged tokens of a bin that are remembered: α is then known to ± .003, and follows traffic that
changes within as many tokens again."""


class AcceptanceTable(Artifact):
    """N_total and N_accepted for each of 20 confidence bins; α_b = (N_acc + w·m_b) / (N_total + w),
    with the bin's midpoint m_b.

    Args:
        prior_weight: w > 0, in judged tokens.
        sampled: the counts for sampled requests, with a provenance of their own: temperature,
            traces and prompts; None without.

    >>> table = AcceptanceTable.empty()
    >>> round(table.alpha(0.95), 3)
    0.955
    """

    kind = "acceptance_table"
    schema_version = 3

    def __init__(
        self,
        total: list[int],
        accepted: list[int],
        provenance: Provenance,
        sampled: AcceptanceTable | None = None,
        *,
        prior_weight: float = PRIOR_WEIGHT,
    ):
        if (
            len(total) != 20
            or len(accepted) != 20
            or any(a > t or a < 0 for a, t in zip(accepted, total, strict=True))
        ):
            raise ArtifactError("an acceptance table needs 20 bins with 0 <= accepted <= total")
        if not 0 < prior_weight < math.inf:
            raise ArtifactError(
                "the prior weight of an acceptance table must be above 0 and finite, not "
                f"{prior_weight}: calibrate again"
            )
        self.total, self.accepted, self.provenance, self.sampled = (
            list(total),
            list(accepted),
            provenance,
            sampled,
        )
        self.prior_weight = prior_weight
        # a bin is two numbers: no copy may hold one of before and one of after an update
        self._lock = threading.Lock()

    @classmethod
    def empty(cls, provenance: Provenance | None = None) -> Self:
        return cls([0] * 20, [0] * 20, provenance or Provenance(pair="", fingerprint=""))

    def at(self, temperature: float) -> AcceptanceTable:
        """The counts for requests of a temperature; where none are for sampled ones, the others
        serve them."""
        return self if self.sampled is None or class_of(temperature) == "greedy" else self.sampled

    @staticmethod
    def bin_of(confidence: float) -> int:
        """Index 0..19 of the bin that holds a confidence in [0, 1]."""
        return bisect.bisect_right(EDGES, confidence)

    def alpha(self, confidence: float) -> float:
        """Estimated probability that a token drafted with this confidence is kept."""
        b = self.bin_of(confidence)
        return (self.accepted[b] + self.prior_weight * MIDPOINTS[b]) / (
            self.total[b] + self.prior_weight
        )

    def update(self, confidence: float, kept: bool) -> None:
        """Count one judged token."""
        b = self.bin_of(confidence)
        with self._lock:
            total, accepted = self.total[b] + 1, self.accepted[b] + int(kept)
            while total > MOST_JUDGED:
                total, accepted = total // 2, accepted // 2
            self.total[b], self.accepted[b] = total, accepted

    def copy(self) -> AcceptanceTable:
        """An independent table with the same counts, those of one moment (deterministic mode works
        on a copy per request)."""
        sampled = None if self.sampled is None else self.sampled.copy()
        with self._lock:
            return self.with_counts(self.total, self.accepted, sampled)

    def with_counts(
        self, total: list[int], accepted: list[int], sampled: AcceptanceTable | None = None
    ) -> AcceptanceTable:
        """Other counts with this table's provenance and prior weight.

        Args:
            sampled: its counts for sampled requests; None without.
        """
        return AcceptanceTable(
            total, accepted, self.provenance, sampled, prior_weight=self.prior_weight
        )

    def write_files(self, folder: Path) -> None:
        now = self.copy()
        rows: dict[str, Any] = {"edges": EDGES, **now.counts()}
        if (sampled := now.sampled) is not None:
            made = sampled.provenance
            rows["sampled"] = {
                **sampled.counts(),
                "temperature": made.parameters["temperature"],
                "trace_digest": made.trace_digest,
                "training_prompts": made.training_prompts,
            }
        (folder / "table.json").write_text(json.dumps(rows, indent=2) + "\n")

    def counts(self) -> dict[str, Any]:
        """What a file holds of one class of temperatures."""
        return {
            "total": self.total,
            "accepted": self.accepted,
            "prior_weight": self.prior_weight,
        }

    @classmethod
    def read_files(cls, folder: Path, provenance: Provenance) -> Self:
        rows = json.loads((folder / "table.json").read_text())
        if tuple(rows["edges"]) != EDGES:
            raise ArtifactError(
                f"{folder}: the acceptance table was made with other bin edges: calibrate again",
                code="bin_edges_differ",
            )
        sampled = None
        if (found := rows.get("sampled")) is not None:
            made = Provenance(
                pair=provenance.pair,
                fingerprint=provenance.fingerprint,
                trace_digest=found["trace_digest"],
                training_prompts=found["training_prompts"],
                parameters={"temperature": found["temperature"]},
            )
            sampled = AcceptanceTable(
                found["total"],
                found["accepted"],
                made,
                prior_weight=found["prior_weight"],
            )
        return cls(
            rows["total"],
            rows["accepted"],
            provenance,
            sampled,
            prior_weight=rows["prior_weight"],
        )
