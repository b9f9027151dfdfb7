"""Drift: is the traffic still the one that the champion was calibrated on? Trace rows, artifacts
and limits in, a report out.

Five things are compared: how sure the draft is of itself, how many of its tokens the target keeps,
whether the acceptance table predicts that, whether the verifier's scores are still probabilities,
and whether the target's corrections are known ones (`comparison`). Equal inputs give an equal
report, to the last digit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftwell.components.drift.comparison import Comparison, histograms
from draftwell.components.drift.schema import DriftLimits, DriftReport, Side, conclude
from draftwell.components.drift.statistics import share
from draftwell.components.drift.traffic import Traffic
from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.correction_memory import CorrectionMemory
from draftwell.serving.artifacts.verifier import Verifier

MOST_UNDRAFTED = 0.05
"""Share of positions without the draft's view above which what is left is no fair sample of the
traffic."""


@dataclass(frozen=True)
class Subject:
    """What a report is about, as it names it.

    Args:
        kinds: of texts that are compared.
        digests: of reference and feedback.
        baseline: what serves the traffic, such as a release.
    """

    pair: str
    fingerprint: str
    kinds: Sequence[str]
    digests: tuple[str, str]
    baseline: str


@dataclass(frozen=True)
class WatchedArtifacts:
    """The champion's artifacts that traffic is compared with; None for what it lacks.

    Args:
        untouched: prompts of the reference that the verifier neither learnt from nor was chosen on
            (`untouched_prompts`).
    """

    table: AcceptanceTable | None = None
    verifier: Verifier | None = None
    memory: CorrectionMemory | None = None
    untouched: Sequence[str] = ()


def compare_traffic(
    reference: Traffic,
    feedback: Traffic,
    limits: DriftLimits,
    subject: Subject,
    artifacts: WatchedArtifacts | None = None,
    *,
    notes: Sequence[str] = (),
    doubts: Sequence[str] = (),
) -> DriftReport:
    """Compare feedback with the reference.

    Args:
        notes: what was left out before.
        doubts: why the feedback is not what is served now. They do not rule out a drift; but
            nothing is called steady then.
    """
    watched = artifacts or WatchedArtifacts()
    sides = (side(subject.digests[0], reference), side(subject.digests[1], feedback))
    comparison = Comparison(reference, feedback, limits)
    few = [
        *lacking("feedback", sides[1], limits.min_prompts, limits, "wait for more traffic"),
        *chosen(feedback),
    ]
    missing = [
        *lacking("reference", sides[0], limits.min_reference, limits, "calibrate on more prompts"),
        *(few and (doubts or few)),
    ]
    table = watched.table if "target" in subject.kinds else None
    if not missing:
        comparison.confidence()
        comparison.acceptance()
        if "target" in subject.kinds:
            comparison.table(table)
        if watched.verifier is not None:
            comparison.verifier(watched.verifier, watched.untouched)
        comparison.novelty(watched.memory)
    return DriftReport.model_validate(
        {
            "pair": subject.pair,
            "fingerprint": subject.fingerprint,
            "baseline": subject.baseline,
            "kinds": tuple(subject.kinds),
            "reference": sides[0],
            "feedback": sides[1],
            "limits": limits,
            **conclude(missing, comparison.judged(), doubts),
            "bins": comparison.bins(table),
            "confidence_then": shares_of(histograms(reference)),
            "confidence_now": shares_of(histograms(feedback)),
            "verifier": comparison.verifier_figures,
            "novelty": comparison.novelty_figures,
            "notes": (*notes, *comparison.notes),
        }
    )


def side(digest: str, traffic: Traffic) -> Side:
    """The figures of one set."""
    some = len(traffic) > 0
    judged = traffic.judged.sum()
    kept = float((traffic.judged * traffic.kept).sum() / judged) if judged else None
    return Side(
        digest=digest,
        prompts=len(traffic.names),
        positions=len(traffic),
        confidence=float(traffic.confidence.mean()) if some else None,
        acceptance=kept,
    )


def lacking(name: str, side: Side, prompts: int, limits: DriftLimits, fix: str) -> list[str]:
    """What a set has too little of, as sentences."""
    return [
        f"the {name} has {had} {what}, {needed} are needed: {fix}"
        for had, needed, what in (
            (side.prompts, prompts, "different prompts"),
            (side.positions, limits.min_positions, "drafted positions"),
        )
        if had < needed
    ]


def chosen(feedback: Traffic) -> list[str]:
    """A warning where positions were left out by the strategy: it drafts where the draft is sure,
    which is no fair sample."""
    total = len(feedback) + feedback.undrafted
    if feedback.undrafted <= MOST_UNDRAFTED * total:
        return []
    return [
        f"{feedback.undrafted / total:.0%} of the feedback's positions lack the draft's "
        "view, and those that a strategy chose to draft "
        "are no fair sample: let the server record every position of the texts that it spools"
    ]


def shares_of(sums: np.ndarray) -> tuple[float, ...]:
    """Shares of bins `[prompts, bins]`, over all prompts."""
    return tuple(float(x) for x in share(sums.sum(0), sums.sum()))
