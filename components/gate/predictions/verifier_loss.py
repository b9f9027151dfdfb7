"""How well a verifier predicts its label on draft tokens of prompts that it has not learnt from."""

from __future__ import annotations

import numpy as np

from draftwell.components.collect.plan import prompt_hashes
from draftwell.components.gate.predictions.learnt_prompts import (
    UnseenPrompts,
    for_other_requests,
    learnt_by_hash,
)
from draftwell.components.gate.predictions.losses import PredictiveLoss, log_loss
from draftwell.components.train.examples import (
    Examples,
    VerifierLabel,
    read_examples,
    split_by_prompt,
)
from draftwell.components.train.logistic import Line, sigmoid
from draftwell.components.train.settings import LabelKind
from draftwell.serving.artifacts.verifier import Verifier
from draftwell.serving.errors import DraftwellError
from draftwell.serving.recording.trace import TraceSet


def verifier_prediction(
    verifier: Verifier, rival: Verifier | None, trace: TraceSet
) -> tuple[PredictiveLoss, list[str]]:
    """A verifier, over draft tokens that it has not learnt from, and another one or a constant;
    with notes.

    Args:
        rival: the champion's, or None. One that cannot be compared is replaced by the constant: the
            share of the trace's tokens that the target keeps, which is what a verifier without a
            feature would learn.
    Raises:
        DraftwellError: the trace lacks what the verifier reads (`feature_missing`), or it has
            learnt from all prompts of a trace that it was not trained on (`no_untouched_prompts`).
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
    label = label_of(verifier)
    targets, scores = label.targets(tested), scores_of(verifier, tested)
    constant = np.full(len(tested), np.mean(label.targets(examples), dtype=np.float64))
    reference = constant if other is None else scores_of(other, tested)
    groups = [tested.prompt == name for name in chosen.names]
    return PredictiveLoss(
        verifier.kind,
        tuple(log_loss(scores[rows], targets[rows]) for rows in groups),
        tuple(log_loss(reference[rows], targets[rows]) for rows in groups),
        tuple(int(rows.sum()) for rows in groups),
        "a constant's" if other is None else "the champion's",
        chosen.favours_champion,
    ), [*notes, *chosen.notes]


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


def label_of(verifier: Verifier) -> VerifierLabel:
    """What a verifier predicts."""
    return VerifierLabel(LabelKind(verifier.label), verifier.ratio)


def absent(verifier: Verifier, examples: Examples) -> str | None:
    """The first feature of a verifier that the examples lack, or None."""
    return next((name for name in verifier.features if name not in examples.parts), None)


def scores_of(verifier: Verifier, examples: Examples) -> np.ndarray:
    """A verifier's probabilities `[rows]` that the target keeps each token of a trace."""
    return sigmoid(Line(verifier.features, verifier.weight.numpy(), verifier.bias).logits(examples))
