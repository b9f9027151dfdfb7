"""How well artifacts predict the target's verdicts on a trace: log loss of the acceptance table and
of the verifier.

A worse table or verifier changes the speed by less than its noise; the tokens of a trace show it
exactly. The gate compares a candidate's with the champion's on the same tokens, and a first one
with one that has learnt nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from draftwell.components.gate.predictions.losses import PredictiveLoss
from draftwell.components.gate.predictions.table_loss import table_prediction
from draftwell.components.gate.predictions.verifier_loss import verifier_prediction
from draftwell.components.gate.verdict import Check, GateVerdict, Thresholds
from draftwell.components.report.intervals import paired_bootstrap_ratio
from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.verifier import Verifier
from draftwell.serving.recording.trace import TraceSet

if TYPE_CHECKING:
    from draftwell.serving.artifacts.base import Artifact


def judge_predictions(predictions: Sequence[PredictiveLoss], thresholds: Thresholds) -> GateVerdict:
    """Judge artifacts that predict: fails where even the lower end of the paired bootstrap's
    interval shows that they predict worse.

    An artifact that is the champion's own has a ratio of just 1, with no interval: no clock is
    involved. On a single prompt nothing is judged: resampling it shows no spread. Where the
    champion's has learnt from the prompts and the candidate's has not, a worse prediction is not
    enough evidence.
    """
    limit = thresholds.max_prediction_loss_ratio
    if limit is None:
        return GateVerdict(())
    checks, notes = [], []
    for p in predictions:
        if len(p.tokens) < 2:
            notes.append(f"{p.kind} predicts: not judged, one prompt decides nothing")
            continue
        better, low, high = paired_bootstrap_ratio(p.reference, p.tokens, p.losses, p.tokens)
        detail = (
            f"log loss {sum(p.losses) / sum(p.tokens):.4f} a token, {1 / better:.2f} x {p.against} "
            f"[{1 / high:.2f}, {1 / low:.2f}] (lower end at most {limit:.2f})"
        )
        passed = 1 / high <= limit
        if p.favours_champion and not passed:
            detail += (
                ": not enough evidence, the champion's has learnt from some of these prompts "
                "(collect traces of others)"
            )
        checks.append(
            Check(
                f"{p.kind} predicts",
                1 / high,
                limit,
                passed,
                detail,
                enough=passed or not p.favours_champion,
            )
        )
    return GateVerdict(tuple(checks), tuple(notes))


def predictions(
    candidate: Mapping[str, Artifact], champion: Mapping[str, Artifact], trace: TraceSet
) -> tuple[list[PredictiveLoss], list[str]]:
    """Losses of what a candidate predicts with, and notes on what was left out or could not be
    compared.

    Args:
        candidate, champion: kind → artifact; the champion's may be empty: a table is then compared
            with an empty one, a verifier with a constant.
        trace: of this pair, at a temperature of the class that the candidate's artifacts are for.
    Raises:
        DraftwellError: the trace lacks what a candidate's artifact reads, or none of its prompts is
            new to it.
    """
    found: list[PredictiveLoss] = []
    notes: list[str] = []
    table: Any = candidate.get(AcceptanceTable.kind)
    if table is not None:
        rival_table: Any = champion.get(AcceptanceTable.kind)
        prediction, remarks = table_prediction(table, rival_table, trace)
        found.append(prediction)
        notes += remarks
    verifier: Any = candidate.get(Verifier.kind)
    if verifier is not None:
        rival: Any = champion.get(Verifier.kind)
        prediction, remarks = verifier_prediction(verifier, rival, trace)
        found.append(prediction)
        notes += remarks
    return found, notes
