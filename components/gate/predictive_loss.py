"""How well artifacts predict the target's verdicts on a trace: log loss of the acceptance table and of the verifier.

A worse table or verifier changes the speed by less than its noise; the tokens of a trace show it exactly. The gate compares a
candidate's with the champion's on the same tokens, and a first one with one that has learnt nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from components.calibrate.acceptance_table import greedy_rows, judged_tokens
from components.collect.plan import prompt_hashes
from components.gate.verdict import Check, GateVerdict, Thresholds
from components.report.intervals import paired_bootstrap_ratio
from components.train.examples import Examples, VerifierLabel, read_examples, split_by_prompt
from components.train.logistic import Line, sigmoid
from components.train.settings import LabelKind
from serving.artifacts.acceptance_table import AcceptanceTable
from serving.artifacts.verifier import Verifier
from serving.errors import DraftwellError
from serving.recording.trace import TraceSet

if TYPE_CHECKING:
    from serving.artifacts.base import Artifact

SMALLEST = 1e-6
"""Predictions are clipped to this: a single surprise would outweigh everything else."""


@dataclass(frozen=True)
class PredictiveLoss:
    """How well an artifact predicts the target's verdicts on some traces, prompt by prompt.

    Args:
        losses: log loss of the candidate's, nats, summed over each prompt's tokens.
        reference: that of what it is compared with, on the same tokens.
        tokens: how many each prompt has.
        against: what it is compared with, as text.
    """

    kind: str
    losses: tuple[float, ...]
    reference: tuple[float, ...]
    tokens: tuple[int, ...]
    against: str


def judge_predictions(predictions: Sequence[PredictiveLoss], thresholds: Thresholds) -> GateVerdict:
    """Judge artifacts that predict: fails where even the lower end of the paired bootstrap's interval shows that they predict worse.

    An artifact that is the champion's own has a ratio of just 1, with no interval: no clock is involved. On a single prompt nothing is
    judged: resampling it shows no spread.
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
        checks.append(Check(f"{p.kind} predicts", 1 / high, limit, 1 / high <= limit,
                            f"log loss {sum(p.losses) / sum(p.tokens):.4f} a token, {1 / better:.2f} x {p.against} "
                            f"[{1 / high:.2f}, {1 / low:.2f}] (lower end at most {limit:.2f})"))
    return GateVerdict(tuple(checks), tuple(notes))


def predictions(
    candidate: Mapping[str, Artifact], champion: Mapping[str, Artifact], trace: TraceSet
) -> tuple[list[PredictiveLoss], list[str]]:
    """Losses of what a candidate predicts with, and notes on what could not be compared.

    Args:
        candidate, champion: kind → artifact; the champion's may be empty: a table is then compared with an empty one, a verifier
            with a constant.
        trace: of this pair. A verifier is judged on the prompts that it was tested on; a table, twenty counts, on all.
    Raises:
        DraftwellError: the trace lacks what a candidate's artifact reads.
    """
    found: list[PredictiveLoss] = []
    notes: list[str] = []
    table: Any = candidate.get(AcceptanceTable.kind)
    if table is not None:
        rival: Any = champion.get(AcceptanceTable.kind)
        found.append(table_prediction(table, rival or AcceptanceTable.empty(), trace, "the champion's" if rival else "an empty table's"))
    verifier: Any = candidate.get(Verifier.kind)
    if verifier is not None:
        prediction, remarks = verifier_prediction(verifier, champion.get(Verifier.kind), trace)
        found.append(prediction)
        notes += remarks
    return found, notes


def table_prediction(table: AcceptanceTable, rival: AcceptanceTable, trace: TraceSet, against: str) -> PredictiveLoss:
    """Two tables over the tokens that greedy speculative decoding judges in the target's own texts.

    Raises:
        DraftwellError: as in `greedy_rows`: a sampled trace cannot be used.
    """
    prompts, confidence, kept = judged_tokens(greedy_rows(trace))
    mine, theirs, counts = [], [], []
    for prompt in dict.fromkeys(prompts.tolist()):
        own = prompts == prompt
        mine.append(log_loss(np.array([table.alpha(c) for c in confidence[own].tolist()]), kept[own]))
        theirs.append(log_loss(np.array([rival.alpha(c) for c in confidence[own].tolist()]), kept[own]))
        counts.append(int(own.sum()))
    return PredictiveLoss(table.kind, tuple(mine), tuple(theirs), tuple(counts), against)


def verifier_prediction(verifier: Verifier, rival: Any, trace: TraceSet) -> tuple[PredictiveLoss, list[str]]:
    """A verifier, over draft tokens that it has not learnt from, and another one or a constant; with notes.

    Args:
        rival: the champion's, or None. One that cannot be compared is replaced by the constant: the share of the trace's tokens
            that the target keeps, which is what a verifier without a feature would learn.
    """
    examples = read_examples(trace)
    if missing := absent(verifier, examples):
        raise DraftwellError(f"the traces lack the feature {missing}, which the verifier reads: collect them "
                             "again (`draftwell collect --fresh`)",
                             code="feature_missing")
    tested, notes = untouched(verifier, examples, trace)
    label = label_of(verifier)
    targets = label.targets(tested)
    mine, against = scores_of(verifier, tested), "the champion's"
    why = incomparable(verifier, rival, examples) if rival is not None else None
    if rival is None or why:
        notes += [f"verifier compared with a constant: {why}"] if why else []
        theirs, against = np.full(len(tested), np.mean(label.targets(examples), dtype=np.float64)), "a constant's"
    else:
        theirs = scores_of(rival, tested)
    groups = [tested.prompt == name for name in np.unique(tested.prompt)]
    return PredictiveLoss(verifier.kind, tuple(log_loss(mine[rows], targets[rows]) for rows in groups),
                      tuple(log_loss(theirs[rows], targets[rows]) for rows in groups), tuple(int(rows.sum()) for rows in groups),
                      against), notes


def untouched(verifier: Verifier, examples: Examples, trace: TraceSet) -> tuple[Examples, list[str]]:
    """The examples of prompts that a verifier has not learnt from: of its own trace those that it was tested on, of another trace those
    whose hashes it does not record; with notes.

    Raises:
        DraftwellError: it has learnt from all of another trace's prompts (`no_untouched_prompts`).
    """
    made = verifier.provenance
    if made.trace_digest != trace.digest():
        return of_other_prompts(verifier, examples, prompt_hashes(trace))
    if made.parameters.get("test_trace"):
        return examples, ["the verifier has learnt from all of the traces that it is judged on"]
    return split_by_prompt(examples, int(made.parameters.get("seed") or 0))[1], []


def of_other_prompts(verifier: Verifier, examples: Examples, hashes: Mapping[str, str] | None) -> tuple[Examples, list[str]]:
    """The examples of another trace's prompts that a verifier has not learnt from; with notes.

    Args:
        hashes: prompt id → hash of the trace's prompts; None where the trace does not record them.
    """
    learnt = verifier.provenance.training_prompts
    if learnt is None or hashes is None:
        return examples, [f"whether the verifier has learnt from prompts that it is judged on is unknown: the "
                          f"{'verifier' if learnt is None else 'trace'} does not record its prompts"]
    new = np.array([hashes.get(str(name)) not in set(learnt) for name in examples.prompt], dtype=bool)
    if not new.any():
        raise DraftwellError("the verifier has learnt from every prompt of the traces: collect traces of others (draftwell collect "
                             "--fresh)", code="no_untouched_prompts")
    left_out = len(set(examples.prompt[~new].tolist()))
    return examples.take(new), [f"the verifier has learnt from {left_out} of the traces' prompts: left out"] if left_out else []


def incomparable(verifier: Verifier, rival: Verifier, examples: Examples) -> str | None:
    """Why two verifiers cannot be compared on a trace, or None."""
    if rival.label != verifier.label:
        return f"the champion's label is {rival.label}, this one's {verifier.label}"
    if verifier.label == LabelKind.RATIO and rival.ratio != verifier.ratio:
        return f"the champion's label has lambda {rival.ratio}, this one's {verifier.ratio}"
    missing = absent(rival, examples)
    return f"the traces lack the feature {missing}, which the champion's reads" if missing else None


def label_of(verifier: Verifier) -> VerifierLabel:
    """What a verifier predicts."""
    return VerifierLabel(LabelKind(verifier.label), verifier.ratio)


def absent(verifier: Verifier, examples: Examples) -> str | None:
    """The first feature of a verifier that the examples lack, or None."""
    return next((name for name in verifier.features if name not in examples.parts), None)


def scores_of(verifier: Verifier, examples: Examples) -> np.ndarray:
    """A verifier's probabilities `[rows]` that the target keeps each token of a trace."""
    return sigmoid(Line(verifier.features, verifier.weight.numpy(), verifier.bias).logits(examples))


def log_loss(probabilities: np.ndarray, targets: np.ndarray) -> float:
    """Sum of the cross-entropy of probabilities and targets in [0, 1]: of −ln of the probability that was given to what came, above 0.

    >>> round(log_loss(np.array([0.5, 0.5]), np.array([True, False])), 4)
    1.3863
    """
    given, target = np.clip(probabilities.astype(np.float64), SMALLEST, 1 - SMALLEST), targets.astype(np.float64)
    return float(-(target * np.log(given) + (1 - target) * np.log(1 - given)).sum())
