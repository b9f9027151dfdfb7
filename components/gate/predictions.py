"""How well artifacts predict the target's verdicts on a trace: log loss of the acceptance table and
of the verifier, on prompts that they have not learnt from.

A worse table or verifier changes the speed by less than its noise; the tokens of a trace show it
exactly. The gate compares a candidate's with the champion's on the same tokens, and a first one
with one that has learnt nothing. A table that was counted on the very trace is judged by leaving
out one prompt at a time: each is predicted by the counts of the others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from draftwell.components.calibrate.judged_tokens import greedy_tokens, sampled_tokens
from draftwell.components.collect.plan import prompt_hashes
from draftwell.components.gate.bench_checks import over_sums
from draftwell.components.gate.evidence import at_most
from draftwell.components.gate.own_prompts import FEWEST
from draftwell.components.gate.verdict import GateVerdict, Thresholds
from draftwell.components.train.examples import (
    Examples,
    VerifierLabel,
    read_examples,
    split_by_prompt,
)
from draftwell.components.train.logistic import Line, sigmoid
from draftwell.components.train.settings import LabelKind
from draftwell.serving.artifacts.acceptance_table import EDGES, AcceptanceTable
from draftwell.serving.artifacts.base import Artifact
from draftwell.serving.artifacts.kinds import find_kind, temperature_of
from draftwell.serving.artifacts.verifier import Verifier
from draftwell.serving.errors import DraftwellError
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.temperature import class_of

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
        favours_champion: the champion's has learnt from some of the prompts and the candidate's has
            not.
    """

    kind: str
    losses: tuple[float, ...]
    reference: tuple[float, ...]
    tokens: tuple[int, ...]
    against: str
    favours_champion: bool = False


def judge_predictions(found: Sequence[PredictiveLoss], thresholds: Thresholds) -> GateVerdict:
    """Judge artifacts that predict by the worse end of the loss ratio's interval over prompts.

    An artifact that is the champion's own has a ratio of just 1, with no interval: no clock is
    involved. On a single prompt nothing is judged: resampling it shows no spread. Where the
    champion's has learnt from the prompts and the candidate's has not, a worse prediction is not
    enough evidence.
    """
    limit = thresholds.max_prediction_loss_ratio
    if limit is None:
        return GateVerdict(())
    checks, notes = [], []
    for one in found:
        if len(one.tokens) < 2:
            notes.append(f"{one.kind} predicts: not judged, one prompt decides nothing")
            continue
        ratio = over_sums(
            list(zip(one.losses, one.reference, strict=True)), lambda s: s[..., 0] / s[..., 1]
        )
        detail = (
            f"log loss {sum(one.losses) / sum(one.tokens):.4f} a token, {ratio.value:.2f} x "
            f"{one.against} {ratio} (upper end at most {limit:.2f})"
        )
        check = at_most(f"{one.kind} predicts", ratio, limit, detail)
        if one.favours_champion and not check.passed:
            why = (
                ": not enough evidence, the champion's has learnt from some of these prompts "
                "(collect traces of others)"
            )
            check = replace(check, enough=False, detail=detail + why)
        checks.append(check)
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
    kinds: dict[str, Any] = {
        AcceptanceTable.kind: table_prediction,
        Verifier.kind: verifier_prediction,
    }
    for kind, predict in kinds.items():
        if kind in candidate:
            prediction, remarks = predict(candidate[kind], champion.get(kind), trace)
            found.append(prediction)
            notes += remarks
    return found, notes


def table_prediction(
    table: AcceptanceTable, rival: AcceptanceTable | None, trace: TraceSet
) -> tuple[PredictiveLoss, list[str]]:
    """Two tables over the tokens that speculative decoding judges in the target's own texts; with
    notes.

    Args:
        table: greedy counts, or those for sampled requests: then the trace is of their temperature.
        rival: the champion's; None, or one that is for other temperatures, gives way to an empty
            one.
    """
    temperature = temperature_of(table) or 0.0
    sampled = class_of(temperature) == "sampled"
    tokens = sampled_tokens(trace, temperature) if sampled else greedy_tokens(trace)
    why = None if rival is None else for_other_requests(table, rival)
    other = AcceptanceTable.empty() if rival is None or why else rival
    names = list(dict.fromkeys(tokens.prompt.tolist()))
    hashes, digest = prompt_hashes(trace), trace.digest()
    mine, theirs = (
        set[str]() if one.provenance.trace_digest == digest else learnt_by_hash(one, names, hashes)
        for one in (table, other)
    )
    chosen = UnseenPrompts.choose(table.kind, names, mine, theirs or ())
    rows = [
        (tokens.confidence[tokens.prompt == name], tokens.accepted[tokens.prompt == name])
        for name in chosen.names
    ]
    found = PredictiveLoss(
        table.kind,
        table_losses(table, rows, digest),
        table_losses(other, rows, digest),
        tuple(len(accepted) for _, accepted in rows),
        "the champion's" if other is rival else "an empty table's",
        chosen.favours_champion,
    )
    remarks = [f"acceptance_table compared with an empty one: {why}"] if why else []
    return found, [*remarks, *chosen.notes]


def table_losses(
    table: AcceptanceTable, rows: Sequence[tuple[np.ndarray, np.ndarray]], digest: str
) -> tuple[float, ...]:
    """A table's log loss on every prompt, nats; one that was counted on this very trace predicts
    each prompt without the prompt's own counts.

    Args:
        rows: of every prompt the confidences and how likely the target kept the tokens, `[tokens]`
            each.
        digest: of the trace.
    """
    found = []
    for confidence, kept in rows:
        counted = table.provenance.trace_digest == digest
        used = without(table, confidence, kept) if counted else table
        found.append(log_loss(np.array([used.alpha(c) for c in confidence.tolist()]), kept))
    return tuple(found)


def without(table: AcceptanceTable, confidence: np.ndarray, kept: np.ndarray) -> AcceptanceTable:
    """A table less some tokens that it has counted; no count falls below 0, whatever a table says
    that it was counted on.

    >>> left = without(
    ...     AcceptanceTable(
    ...         [0, 3] + [0] * 18, [0, 2] + [0] * 18, AcceptanceTable.empty().provenance
    ...     ),
    ...     np.array([0.15, 0.15]),
    ...     np.array([True, False]),
    ... )
    >>> left.total[1], left.accepted[1]
    (1, 1)
    """
    bins = np.searchsorted(np.array(EDGES), confidence, side="right")  # as `AcceptanceTable.bin_of`
    own, own_kept = (
        np.bincount(bins, weights=some, minlength=len(EDGES) + 1)
        for some in (np.ones(len(bins)), kept)
    )
    total = np.maximum(np.array(table.total) - own.astype(int), 0)
    accepted = np.clip(np.array(table.accepted) - own_kept.round().astype(int), 0, total)
    return table.with_counts(total.tolist(), accepted.tolist())


def verifier_prediction(
    verifier: Verifier, rival: Verifier | None, trace: TraceSet
) -> tuple[PredictiveLoss, list[str]]:
    """A verifier, over draft tokens that it has not learnt from, and another one or a constant;
    with notes.

    Args:
        rival: the champion's, or None. One that cannot be compared is replaced by the constant: the
            share of the trace's tokens that the target keeps, which is what a verifier without a
            feature would learn.
    """
    examples = read_examples(trace)
    if missing := absent(verifier, examples):
        raise DraftwellError(
            f"the traces lack the feature {missing}, which the verifier reads: collect them "
            "again (`draftwell collect --fresh`)",
            code="feature_missing",
        )
    why = None if rival is None else incomparable(verifier, rival, examples)
    other = None if why else rival
    notes = [f"verifier compared with a constant: {why}"] if why else []
    names = np.unique(examples.prompt).tolist()
    mine = learnt_from(verifier, examples, names, trace)
    if tested_elsewhere(verifier, trace):
        notes.append("the verifier has learnt from all of the traces that it is judged on")
        mine = set()
    theirs = set[str]() if other is None else learnt_from(other, examples, names, trace)
    chosen = UnseenPrompts.choose(verifier.kind, names, mine, theirs or ())
    tested = examples.take(np.isin(examples.prompt, chosen.names))
    label = VerifierLabel(LabelKind(verifier.label), verifier.ratio)
    targets = label.targets(tested)
    constant = np.full(len(tested), np.mean(label.targets(examples), dtype=np.float64))
    groups = [tested.prompt == name for name in chosen.names]
    mine_losses, their_losses = (
        tuple(log_loss(scores[rows], targets[rows]) for rows in groups)
        for scores in (
            scores_of(verifier, tested),
            constant if other is None else scores_of(other, tested),
        )
    )
    found = PredictiveLoss(
        verifier.kind,
        mine_losses,
        their_losses,
        tuple(int(rows.sum()) for rows in groups),
        "a constant's" if other is None else "the champion's",
        chosen.favours_champion,
    )
    return found, [*notes, *chosen.notes]


def learnt_from(
    verifier: Verifier, examples: Examples, names: list[str], trace: TraceSet
) -> set[str] | None:
    """Of a trace's prompts those that a verifier has learnt from: of its own trace all but those
    that it was tested on, of another trace those whose hashes it records; None where that is not
    known."""
    made = verifier.provenance
    if made.trace_digest != trace.digest():
        return learnt_by_hash(verifier, names, prompt_hashes(trace))
    if tested_elsewhere(verifier, trace):
        return set(names)
    return set(split_by_prompt(examples, int(made.parameters.get("seed") or 0))[0].prompt.tolist())


def tested_elsewhere(verifier: Verifier, trace: TraceSet) -> bool:
    """Whether a verifier has learnt from all of this trace, because it was tested on another
    one."""
    made = verifier.provenance
    return made.trace_digest == trace.digest() and bool(made.parameters.get("test_trace"))


def incomparable(verifier: Verifier, rival: Verifier, examples: Examples) -> str | None:
    """Why two verifiers cannot be compared on a trace, or None."""
    if rival.label != verifier.label:
        return f"the champion's label is {rival.label}, this one's {verifier.label}"
    if verifier.label == LabelKind.RATIO and rival.ratio != verifier.ratio:
        return f"the champion's label has lambda {rival.ratio}, this one's {verifier.ratio}"
    if why := for_other_requests(verifier, rival):
        return why
    missing = absent(rival, examples)
    return f"the traces lack the feature {missing}, which the champion's reads" if missing else None


def absent(verifier: Verifier, examples: Examples) -> str | None:
    """The first feature of a verifier that the examples lack, or None."""
    return next((name for name in verifier.features if name not in examples.parts), None)


def scores_of(verifier: Verifier, examples: Examples) -> np.ndarray:
    """A verifier's probabilities `[rows]` that the target keeps each token of a trace."""
    return sigmoid(Line(verifier.features, verifier.weight.numpy(), verifier.bias).logits(examples))


def log_loss(probabilities: np.ndarray, targets: np.ndarray) -> float:
    """Sum of the cross-entropy of probabilities and targets in [0, 1]: of −ln of the probability
    that was given to what came, above 0.

    >>> round(log_loss(np.array([0.5, 0.5]), np.array([True, False])), 4)
    1.3863
    """
    given = np.clip(probabilities.astype(np.float64), SMALLEST, 1 - SMALLEST)
    target = targets.astype(np.float64)
    return float(-(target * np.log(given) + (1 - target) * np.log(1 - given)).sum())


@dataclass(frozen=True)
class UnseenPrompts:
    """Prompts of a trace to judge on.

    Args:
        names: ids, in the trace's order.
        notes: what was left out, and what is not known.
        favours_champion: the champion's artifact has learnt from some of them, because too few
            others are left.
    """

    names: tuple[str, ...]
    notes: tuple[str, ...] = ()
    favours_champion: bool = False

    @classmethod
    def choose(
        cls,
        kind: str,
        names: Sequence[str],
        mine: Collection[str] | None,
        theirs: Collection[str] = (),
    ) -> UnseenPrompts:
        """Choose among a trace's prompts.

        Args:
            names: ids, each once.
            mine, theirs: those that the candidate's and the champion's artifact learnt from; None
                where that is not known.
        Raises:
            DraftwellError: the candidate's has learnt from all (`no_untouched_prompts`).
        """
        notes: list[str] = []
        if mine is None:
            notes.append(
                f"whether the {kind} has learnt from prompts that it is judged on is "
                "unknown: it, or the trace, does not record its prompts"
            )
        new = [name for name in names if name not in (mine or ())]
        if not new:
            raise DraftwellError(
                f"the {kind} has learnt from every prompt of the traces: make it again from these "
                f"traces (`{find_kind(kind).made_by}`), or collect others (`draftwell collect "
                "--fresh --prompts FILE`)",
                code="no_untouched_prompts",
            )
        fair = [name for name in new if name not in theirs]
        own, known = len(names) - len(new), len(new) - len(fair)
        if own:
            notes.append(f"the {kind} has learnt from {own} of the traces' prompts: left out")
        if len(fair) < min(FEWEST, len(new)):
            notes.append(
                f"the champion's {kind} has learnt from {known} of the {len(new)} prompts, "
                "which favours it: too few others are left"
            )
            return cls(tuple(new), tuple(notes), True)
        if known:
            notes.append(
                f"the champion's {kind} has learnt from {known} of the traces' prompts: left out"
            )
        return cls(tuple(fair), tuple(notes))


def learnt_by_hash(
    artifact: Artifact, names: Sequence[str], hashes: Mapping[str, str] | None
) -> set[str] | None:
    """Of a trace's prompts those whose hashes an artifact records; None where artifact or trace
    does not record its prompts.

    Args:
        hashes: prompt id → hash (`draftwell.components.collect.plan.prompt_hashes`).
    """
    learnt = artifact.provenance.training_prompts
    if learnt is None or hashes is None:
        return None
    known = set(learnt)
    return {name for name in names if hashes.get(name) in known}


def for_other_requests(mine: Artifact, rival: Artifact) -> str | None:
    """Why two artifacts cannot be compared: they are for different classes of temperatures. None
    where they can, or it is not known."""
    ours, theirs = temperature_of(mine), temperature_of(rival)
    if ours is None or theirs is None or class_of(ours) == class_of(theirs):
        return None
    return f"the champion's is for temperature {theirs:g}, this one for {ours:g}"
