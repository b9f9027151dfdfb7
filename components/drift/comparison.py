"""The checks of a drift report: each compares a figure of two sets of prompts with its limit, and
with chance.

A check fails only if its figure is past its limit (the change matters) and a test by prompt says
that chance alone does not do that (the change is real; `statistics`). The permitted rate of false
alarms is shared among the checks, so it holds for a report as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.special import expit

from draftwell.components.drift.schema import (
    AcceptanceBin,
    DriftCheck,
    DriftLimits,
    NoveltyFigures,
    VerifierFigures,
)
from draftwell.components.drift.statistics import (
    Exchanged,
    Measure,
    calibration_error,
    calibration_rise,
    exchange,
    rate_change,
    rate_rise,
    share,
    stability_index,
    table_error,
)
from draftwell.components.drift.traffic import Traffic
from draftwell.components.report.intervals import bootstrap_of_sums
from draftwell.serving.artifacts.acceptance_table import (
    EDGES,
    MIDPOINTS,
    PRIOR_WEIGHT,
    AcceptanceTable,
)
from draftwell.serving.artifacts.correction_memory import CorrectionMemory
from draftwell.serving.artifacts.verifier import Verifier

BINS = len(EDGES) + 1
SCORE_BINS = 10


class Comparison:
    """Collects checks and figures about two sets of prompts."""

    def __init__(self, reference: Traffic, feedback: Traffic, limits: DriftLimits):
        self.then, self.now, self.limits = reference, feedback, limits
        self.sides = (reference, feedback)
        self.found: list[tuple[str, Exchanged, str]] = []
        self.notes: list[str] = []
        self.verifier_figures: VerifierFigures | None = None
        self.novelty_figures: NoveltyFigures | None = None

    def judged(self) -> tuple[DriftCheck, ...]:
        """All checks; the rate of false alarms is shared among them (Bonferroni)."""
        needed = self.limits.false_alarm_rate / max(1, len(self.found))
        return tuple(
            DriftCheck.of(name, tested, getattr(self.limits, name), needed, words)
            for name, tested, words in self.found
        )

    def add(self, name: str, tested: Exchanged, words: str) -> None:
        """Take a figure into the report."""
        self.found.append((name, tested, words))

    def exchange(self, measure: Measure, then: np.ndarray, now: np.ndarray) -> Exchanged:
        """A figure of the sums of both sets, with its test."""
        return exchange(then, now, measure, resamples=self.limits.resamples)

    def confidence(self) -> None:
        """Population stability index over the table's bins."""
        stability = self.exchange(stability_index, *map(histograms, self.sides))
        then, now = (side.confidence.mean() for side in self.sides)
        self.add(
            "confidence_psi",
            stability,
            "confidence has another distribution: stability index "
            f"{stability.value:.2f} ({stability.chance:.2f} by chance); mean confidence of the "
            f"draft {then:.2f} when calibrated, {now:.2f} now",
        )

    def acceptance(self) -> None:
        """Share of judged tokens that are kept."""
        sums = [side.sums(side.judged * side.kept, side.judged) for side in self.sides]
        moved = self.exchange(rate_change, *sums)
        then, now = (float(share(*part.sum(0))) for part in sums)
        self.add(
            "acceptance",
            moved,
            f"the target keeps {now:.0%} of judged draft tokens, {then:.0%} when calibrated "
            f"(a change of {moved.value:.0%}, {moved.chance:.0%} by chance)",
        )

    def table(self, table: AcceptanceTable | None) -> None:
        """Acceptance at equal confidence. The test is against the reference's rows, the table's own
        where it was made of them.

        What the table says is smoothed by its own prior weight, as in `AcceptanceTable.alpha`. What
        the traffic shows is measured, so only cold bins are smoothed: a heavy prior on both sides
        would hide any change of little traffic.
        """
        if table is None:
            self.notes.append(
                "no acceptance table: acceptance by confidence is compared with the reference alone"
            )
        weight = PRIOR_WEIGHT if table is None else table.prior_weight
        off = self.exchange(
            table_error(np.array(MIDPOINTS), (weight, PRIOR_WEIGHT)), *map(by_bin, self.sides)
        )
        self.add(
            "table",
            off,
            f"at equal confidence acceptance is off by {100 * off.value:.0f} points on average "
            f"({100 * off.chance:.0f} by chance): thresholds rest on a table that no longer holds",
        )

    def verifier(self, verifier: Verifier, untouched: Sequence[str]) -> None:
        """Calibration of the verifier's scores, against prompts that it was not fitted to."""
        held = self.then.take(untouched)
        recorded = all(set(verifier.features) <= set(traffic.parts) for traffic in (held, self.now))
        if not recorded or np.isnan(self.now.ratio).any() or np.isnan(held.ratio).any():
            self.notes.append(
                f"verifier not checked: it reads {' and '.join(verifier.features)}, which "
                "the traces do not all hold"
            )
            return
        if len(held.names) < 2:
            self.notes.append(
                "verifier not checked: the reference holds less than two prompts that it "
                "was not fitted to"
            )
            return
        then, now = (scored(verifier, traffic) for traffic in (held, self.now))
        sums = [reliability(held, *then), reliability(self.now, *now)]
        rise = self.exchange(calibration_rise, *sums)
        errors = [float(calibration_error(part.sum(0))) for part in sums]
        briers = [float(((score - label) ** 2).mean()) for score, label in (then, now)]
        self.verifier_figures = VerifierFigures(
            brier_then=briers[0],
            brier_now=briers[1],
            error_then=errors[0],
            error_now=errors[1],
            prompts_then=len(held.names),
        )
        self.add(
            "verifier",
            rise,
            f"the verifier's scores are off by {100 * errors[1]:.0f} points on average, "
            f"{100 * errors[0]:.0f} when calibrated (Brier score {briers[0]:.3f} then, "
            f"{briers[1]:.3f} now)",
        )

    def novelty(self, memory: CorrectionMemory | None) -> None:
        """Unknown rejection patterns. A memory knows its own prompts too well to be compared with,
        so the reference is halved: what one half has not seen of the other is compared with what it
        has not seen of the feedback."""
        if (self.now.pattern < 0).any():
            self.notes.append(
                "novelty not checked: the spool keeps no tokens (draftwell-serve --feedback-text)"
            )
            return
        names = np.random.default_rng(19).permutation(np.array(self.then.names))
        known, held = (
            self.then.take(part.tolist())
            for part in (names[: len(names) // 2], names[len(names) // 2 :])
        )
        seen = {tuple(pattern) for pattern in known.pattern[known.kept < 1].tolist()}
        if not seen or not (held.kept < 1).any() or not (self.now.kept < 1).any():
            self.notes.append("novelty not checked: too few rejections")
            return
        sums = [
            traffic.sums(unknown(traffic, seen), 1 - traffic.kept) for traffic in (held, self.now)
        ]
        rise = self.exchange(rate_rise, *sums)
        then, now = (float(share(*part.sum(0))) for part in sums)
        in_memory = None
        if memory is not None:
            rejected = float((1 - self.now.kept).sum())
            in_memory = float(unknown(self.now, set(memory.counts)).sum() / rejected)
        else:
            self.notes.append("no correction memory: novelty is compared with the reference alone")
        self.novelty_figures = NoveltyFigures(memory=in_memory, then=then, now=now)
        self.add(
            "novelty",
            rise,
            f"{now:.0%} of rejections have patterns that half of the reference does not know, "
            f"{then:.0%} of its other half's",
        )

    def bins(self, table: AcceptanceTable | None) -> tuple[AcceptanceBin, ...]:
        """Acceptance in every bin of confidence, with intervals."""
        if not len(self.now) or not len(self.then):
            return ()
        sums = [by_bin(side) for side in self.sides]
        low, high = bootstrap_of_sums(
            sums[1], rates_by_bin, resamples=min(2000, self.limits.resamples)
        )
        then, now = (rates_by_bin(part.sum(0)[None])[0] for part in sums)
        positions = sums[1].sum(0)[BINS:].astype(int)  # judged ones
        edges = (0.0, *EDGES, 1.0)
        return tuple(
            AcceptanceBin(
                low=edges[b],
                high=edges[b + 1],
                table=table.accepted[b] / table.total[b] if table and table.total[b] else None,
                then=known(then[b]),
                now=known(now[b]),
                now_low=known(low[b]),
                now_high=known(high[b]),
                positions=int(positions[b]),
            )
            for b in range(BINS)
        )


def histograms(traffic: Traffic) -> np.ndarray:
    """`[prompts, 20]` positions in each of the table's bins of confidence."""
    return traffic.sums(np.ones(len(traffic)), bins=BINS, index=bins_of(traffic))


def by_bin(traffic: Traffic) -> np.ndarray:
    """`[prompts, 40]`: kept in each bin, then judged in each."""
    kept = traffic.judged * traffic.kept
    return traffic.sums(kept, traffic.judged, bins=BINS, index=bins_of(traffic))


def reliability(traffic: Traffic, score: np.ndarray, label: np.ndarray) -> np.ndarray:
    """`[prompts, 30]`: positions, scores and labels in each of ten bins of the score."""
    index = np.minimum((score * SCORE_BINS).astype(int), SCORE_BINS - 1)
    return traffic.sums(np.ones(len(score)), score, label, bins=SCORE_BINS, index=index)


def bins_of(traffic: Traffic) -> np.ndarray:
    """`[rows]` bin of each position's confidence, as `AcceptanceTable.bin_of`."""
    return np.searchsorted(np.array(EDGES), traffic.confidence, side="right")


def rates_by_bin(sums: np.ndarray) -> np.ndarray:
    """Sums `[..., 40]` → shares `[..., 20]`, NaN where nothing was judged."""
    kept, judged = sums[..., :BINS], sums[..., BINS:]
    found: np.ndarray = np.where(judged > 0, share(kept, judged), np.nan)
    return found


def known(value: float) -> float | None:
    """A figure; None where it is NaN, which JSON cannot hold."""
    return None if np.isnan(value) else float(value)


def scored(verifier: Verifier, traffic: Traffic) -> tuple[np.ndarray, np.ndarray]:
    """The verifier's scores `[rows]` and what they predict: whether q̄/p̄ is at most lambda, or by
    another label the chance to be kept."""
    inputs = np.concatenate([traffic.parts[name] for name in verifier.features], axis=1)
    z = inputs.astype(np.float64) @ verifier.weight.numpy() + verifier.bias
    return expit(z), traffic.ratio <= verifier.ratio if verifier.label == "ratio" else traffic.kept


def unknown(traffic: Traffic, seen: set[tuple[int, int]]) -> np.ndarray:
    """`[rows]`: the chance of a rejection where its pattern was not seen, else 0."""
    new = np.array(
        [tuple(pattern) not in seen for pattern in traffic.pattern.tolist()], dtype=float
    )
    found: np.ndarray = new * (1 - traffic.kept)
    return found
