"""How well a verifier tells the draft's tokens apart on the prompts of a cell: SPRINTER's Figure
3."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from scipy.special import expit as sigmoid

from draftwell.components.collect.collect import collect_traces
from draftwell.components.collect.settings import CollectionSettings
from draftwell.components.prompts.prompt import Prompt
from draftwell.components.train.examples import VerifierLabel, read_examples
from draftwell.components.train.metrics import ranking, roc_points
from draftwell.components.train.reports import Ranking, RocCurve
from draftwell.components.train.verifier import RATIOS
from draftwell.serving.artifacts.verifier import Verifier
from draftwell.serving.runtime.pair import LoadedPair

TOKENS = 64
"""Of each text that is scored: the more positions, the narrower the intervals."""


class Roc(NamedTuple):
    """A verifier's scores against one label, on the draft's tokens along texts that the target
    writes.

    Args:
        tokens: that were scored.
        acceptable: share of them.
        auc: area under the ROC curve, with the ends of its 95 % interval (a bootstrap over
            prompts).
        confidence_auc: the same of the draft's confidence.
        fpr, tpr: points of the curve.
        confidence_fpr, confidence_tpr: points of the confidence's.
    """

    tokens: int
    acceptable: float
    auc: tuple[float, float, float]
    confidence_auc: tuple[float, float, float]
    fpr: tuple[float, ...]
    tpr: tuple[float, ...]
    confidence_fpr: tuple[float, ...]
    confidence_tpr: tuple[float, ...]


def measured_roc(
    pair: LoadedPair,
    verifier: Verifier,
    prompts: Sequence[Prompt],
    folder: Path,
    *,
    temperature: float,
    seed: int = 0,
) -> dict[str, Roc]:
    """λ → ROC of the label q̄/p̄ ≤ λ, the verifier being the same; a λ by which all tokens are
    alike is left out.

    Args:
        folder: for the trace, which is not needed afterwards.
        temperature, seed: of the texts and of the draft's tokens along them.
    """
    settings = CollectionSettings(
        max_tokens=TOKENS,
        temperature=temperature,
        seed=seed,
        rollout=1,
        batch=1,
        prefix_kinds=("target",),
    )
    examples = read_examples(collect_traces(pair, prompts, folder, settings))
    scores = sigmoid(examples.features(verifier.features) @ verifier.weight.numpy() + verifier.bias)
    found = {}
    for ratio in RATIOS:
        label = VerifierLabel(ratio=ratio)
        ranked = ranking(examples, scores, label)
        if ranked.auc is not None and ranked.intervals is not None:
            curve, other = (
                roc_points(label.targets(examples), values)
                for values in (scores, examples.confidence)
            )
            found[f"{ratio:g}"] = roc_of(ranked, curve, other)
    return found


def roc_of(ranked: Ranking, curve: RocCurve, confidence: RocCurve) -> Roc:
    """A ranking that is defined, with the curves of the score and of the draft's confidence."""
    assert ranked.auc is not None
    assert ranked.baseline_auc is not None
    assert ranked.intervals is not None
    return Roc(
        ranked.test_rows,
        ranked.prevalence,
        (ranked.auc, *ranked.intervals["auc"]),
        (ranked.baseline_auc, *ranked.intervals["baseline_auc"]),
        tuple(curve.fpr),
        tuple(curve.tpr),
        tuple(confidence.fpr),
        tuple(confidence.tpr),
    )
