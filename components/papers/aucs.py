"""How well a verifier tells the draft's tokens apart on the prompts of a cell: SPRINTER's Figure
3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from scipy.special import expit as sigmoid

from draftwell.components.collect.collect import collect_traces
from draftwell.components.collect.settings import CollectionSettings
from draftwell.components.prompts.prompt import Prompt
from draftwell.components.train.examples import VerifierLabel, read_examples
from draftwell.components.train.metrics import ranking
from draftwell.components.train.reports import Ranking
from draftwell.components.train.verifier import RATIOS
from draftwell.serving.artifacts.verifier import Verifier
from draftwell.serving.runtime.pair import LoadedPair

TOKENS = 64
"""Of each text that is scored: the more positions, the narrower the intervals."""
Aucs = dict[str, dict[str, tuple[float, float, float]]]
"""Role of a verifier, or `confidence`, which is the draft's → λ → area under the ROC curve of the
label q̄/p̄ ≤ λ, with the ends of its 95 % interval (a bootstrap over prompts)."""


def measured_aucs(
    pair: LoadedPair,
    verifier: Verifier,
    prompts: Sequence[Prompt],
    folder: Path,
    *,
    temperature: float,
    seed: int = 0,
) -> Aucs:
    """Of one verifier on the draft's tokens along texts that the target writes.

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
    return aucs_of(
        "verifier",
        {f"{one:g}": ranking(examples, scores, VerifierLabel(ratio=one)) for one in RATIOS},
    )


def aucs_of(role: str, rankings: Mapping[str, Ranking | None]) -> Aucs:
    """Those of a verifier and of the draft's confidence; a λ by which all tokens are alike is left
    out."""
    found: Aucs = {role: {}, "confidence": {}}
    for ratio, one in rankings.items():
        if one is not None and one.intervals is not None:
            values = {role: ("auc", one.auc), "confidence": ("baseline_auc", one.baseline_auc)}
            for name, (key, auc) in values.items():
                if auc is not None:
                    found[name][ratio] = (auc, *one.intervals[key])
    return found
