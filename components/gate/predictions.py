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
from scipy.special import expit

from draftwell.components.calibrate.judged_tokens import greedy_tokens, sampled_tokens
from draftwell.components.collect.plan import prompt_hashes
from draftwell.components.gate.bench_checks import over_sums
from draftwell.components.gate.evidence import at_most
from draftwell.components.gate.own_prompts import FEWEST
from draftwell.components.train.examples import (
    Examples,
    VerifierLabel,
    read_examples,
    split_by_prompt,
)
from draftwell.components.train.logistic import Line
from draftwell.components.train.settings import LabelKind
from draftwell.serving.artifacts.acceptance_table import EDGES, AcceptanceTable
from draftwell.serving.artifacts.base import Artifact
from draftwell.serving.artifacts.kinds import find_kind, temperature_of
from draftwell.serving.artifacts.verifier import Verifier
from draftwell.serving.bundle.verdict import Check, GateVerdict, Skipped, Thresholds
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
    parts: list[Check | Skipped] = []
    for one in found:
        if len(one.tokens) < 2:
            parts.append(Skipped(f"{one.kind} on a single prompt", "it decides nothing"))
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
        parts.append(check)
    return GateVerdict.of(parts)


def predictions(
    candidate: Mapping[str, Artifact], champion: Mapping[str, Artifact], trace: TraceSet
) -> tuple[list[PredictiveLoss], list[str]]:
    """Losses of what a candidate predicts with, and notes on what was left out or could not be
    compared.

    Args:
        candidate, champion: kind → artifact; the champion's may be empty, or cannot be compared: a
            table is then compared with an empty one, a verifier with a constant.
        trace: of this pair, at a temperature of the class that the candidate's artifacts are for.
    Raises:
        DraftwellError: the trace lacks what a candidate's artifact reads, or none of its prompts is
            new to it.
    """
    found: list[PredictiveLoss] = []
    notes: list[str] = []
    kinds: dict[str, Any] = {AcceptanceTable.kind: Table, Verifier.kind: Scores}
    for kind, predicting in kinds.items():
        if kind in candidate:
            found.append(compare(predicting(candidate[kind], trace), champion.get(kind), notes))
    return found, notes


def compare(mine: Table | Scores, rival: Any, notes: list[str]) -> PredictiveLoss:
    """The candidate's and the champion's artifact on the prompts of a trace that are new to them;
    `notes` says what was left out."""
    artifact: Any = mine.artifact
    kind = artifact.kind
    why = None if rival is None else mine.objection(rival)
    if why is not None:
        notes.append(f"{kind} compared with {mine.nothing}: {why}")
        rival = None
    prompts = list(dict.fromkeys(mine.prompt.tolist()))
    own = mine.learnt(artifact, prompts, notes)
    theirs = None if rival is None else mine.learnt(rival, prompts, notes)
    names, favoured = unseen(kind, prompts, own, theirs or set(), notes)
    groups = [mine.prompt == name for name in names]
    losses, reference = (
        tuple(mine.loss(one, rows) for rows in groups) for one in (artifact, rival)
    )
    return PredictiveLoss(
        kind,
        losses,
        reference,
        tuple(int(rows.sum()) for rows in groups),
        f"{mine.nothing}'s" if rival is None else "the champion's",
        favoured,
    )


class Table:
    """What tables predict of a trace: whether the target keeps the tokens that speculative decoding
    judges in its own texts.

    Args:
        artifact: with greedy counts, or those for sampled requests: then the trace is of their
            temperature.
    """

    nothing = "an empty table"

    def __init__(self, artifact: AcceptanceTable, trace: TraceSet):
        self.artifact, self.trace, self.digest = artifact, trace, trace.digest()
        temperature = temperature_of(artifact) or 0.0
        sampled = class_of(temperature) == "sampled"
        self.tokens = sampled_tokens(trace, temperature) if sampled else greedy_tokens(trace)
        self.prompt = self.tokens.prompt

    def objection(self, rival: AcceptanceTable) -> str | None:
        """Why another table cannot be compared, or None."""
        return for_other_requests(self.artifact, rival)

    def learnt(
        self, table: AcceptanceTable, prompts: list[str], notes: list[str]
    ) -> set[str] | None:
        """Prompts that a table has counted in another trace; None where that is not known. Those of
        this one are left out of its counts (`loss`)."""
        return set() if self.counted(table) else learnt_by_hash(table, prompts, self.trace)

    def counted(self, table: AcceptanceTable) -> bool:
        """Whether a table was counted on this very trace."""
        return table.provenance.trace_digest == self.digest

    def loss(self, table: AcceptanceTable | None, rows: np.ndarray) -> float:
        """Log loss of a table, or of an empty one, on a prompt's tokens, nats."""
        table = table or AcceptanceTable.empty()
        confidence, kept = self.tokens.confidence[rows], self.tokens.accepted[rows]
        used = without(table, confidence, kept) if self.counted(table) else table
        return log_loss(np.array([used.alpha(c) for c in confidence.tolist()]), kept)


class Scores:
    """What verifiers predict of a trace: their own label at every draft token.

    Raises:
        DraftwellError: the trace lacks a feature that the candidate's reads (`feature_missing`).
    """

    nothing = "a constant"
    """The share of the trace's tokens that the target keeps: what a verifier without a feature
    would learn."""

    def __init__(self, artifact: Verifier, trace: TraceSet):
        self.artifact, self.trace, self.examples = artifact, trace, read_examples(trace)
        if missing := absent(artifact, self.examples):
            raise DraftwellError(
                f"the traces lack the feature {missing}, which the verifier reads: collect them "
                "again (`draftwell step collect --set fresh=true`)",
                code="feature_missing",
            )
        self.prompt = self.examples.prompt
        label = VerifierLabel(LabelKind(artifact.label), artifact.ratio)
        self.targets = label.targets(self.examples)

    def objection(self, rival: Verifier) -> str | None:
        """Why another verifier cannot be compared, or None."""
        return incomparable(self.artifact, rival, self.examples)

    def learnt(self, verifier: Verifier, prompts: list[str], notes: list[str]) -> set[str] | None:
        """Prompts that a verifier has learnt from: of its own trace all but those that it was
        tested on, of another trace those whose hashes it records; None where that is not known.

        A candidate that was tested on another trace has learnt from all of its own: it is judged
        on them, with a note.
        """
        made = verifier.provenance
        if made.trace_digest != self.trace.digest():
            return learnt_by_hash(verifier, prompts, self.trace)
        if not made.parameters.get("test_trace"):
            seed = int(made.parameters.get("seed") or 0)
            return set(split_by_prompt(self.examples, seed)[0].prompt.tolist())
        if verifier is not self.artifact:
            return set(prompts)
        notes.append("the verifier has learnt from all of the traces that it is judged on")
        return set()

    def loss(self, verifier: Verifier | None, rows: np.ndarray) -> float:
        """Log loss of a verifier, or of the constant, on a prompt's tokens, nats."""
        if verifier is None:
            given = np.full(int(rows.sum()), self.targets.mean(dtype=np.float64))
        else:
            given = scores_of(verifier, self.examples.take(rows))
        return log_loss(given, self.targets[rows])


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
    return expit(Line(verifier.features, verifier.weight.numpy(), verifier.bias).logits(examples))


def log_loss(probabilities: np.ndarray, targets: np.ndarray) -> float:
    """Sum of the cross-entropy of probabilities and targets in [0, 1]: of −ln of the probability
    that was given to what came, above 0.

    >>> round(log_loss(np.array([0.5, 0.5]), np.array([True, False])), 4)
    1.3863
    """
    given = np.clip(probabilities.astype(np.float64), SMALLEST, 1 - SMALLEST)
    target = targets.astype(np.float64)
    return float(-(target * np.log(given) + (1 - target) * np.log(1 - given)).sum())


def unseen(
    kind: str,
    prompts: Sequence[str],
    mine: Collection[str] | None,
    theirs: Collection[str],
    notes: list[str],
) -> tuple[list[str], bool]:
    """The prompts to judge on, and whether the champion's artifact has learnt from some of them,
    because too few others are left.

    Args:
        prompts: of a trace, each once.
        mine, theirs: those that the candidate's and the champion's artifact learnt from; None where
            that is not known.
    Raises:
        DraftwellError: the candidate's has learnt from all (`no_untouched_prompts`).
    """
    if mine is None:
        notes.append(
            f"whether the {kind} has learnt from prompts that it is judged on is "
            "unknown: it, or the trace, does not record its prompts"
        )
    new = [name for name in prompts if name not in (mine or ())]
    if not new:
        raise DraftwellError(
            f"the {kind} has learnt from every prompt of the traces: make it again from these "
            f"traces (`{find_kind(kind).made_by}`), or collect others (`draftwell step collect "
            "--set fresh=true --prompts FILE`)",
            code="no_untouched_prompts",
        )
    fair = [name for name in new if name not in theirs]
    own, known = len(prompts) - len(new), len(new) - len(fair)
    if own:
        notes.append(f"the {kind} has learnt from {own} of the traces' prompts: left out")
    if len(fair) < min(FEWEST, len(new)):
        notes.append(
            f"the champion's {kind} has learnt from {known} of the {len(new)} prompts, "
            "which favours it: too few others are left"
        )
        return new, True
    if known:
        notes.append(
            f"the champion's {kind} has learnt from {known} of the traces' prompts: left out"
        )
    return fair, False


def learnt_by_hash(artifact: Artifact, names: Sequence[str], trace: TraceSet) -> set[str] | None:
    """Of a trace's prompts those whose hashes an artifact records; None where artifact or trace
    does not record its prompts."""
    learnt, hashes = artifact.provenance.training_prompts, prompt_hashes(trace)
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
