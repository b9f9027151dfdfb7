"""Training SPRINTER's verifier: will the target find this draft token acceptable? (SPRINTER,
section 3.2)

What it predicts is a setting (`VerifierLabel`). The score is linear (`logistic`); its features,
penalty, scaling and threshold are chosen by cross-validation over prompts. Then it is fitted to all
training prompts. Every metric of the report is measured on the test prompts, on which nothing was
chosen. (The published code splits rows, selects the epoch on its test rows and reads features at
padding: its figures are not comparable.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from scipy.special import expit

from draftwell.components.collect.repeated_prompts import prompts_of
from draftwell.components.train.examples import (
    Examples,
    VerifierLabel,
    folds,
    read_examples,
    read_train_and_test,
)
from draftwell.components.train.logistic import (
    Line,
    Validation,
    check_classes,
    cross_validate,
    fit,
    platt,
)
from draftwell.components.train.metrics import (
    of_one_class,
    ranking,
    require_sklearn,
    roc_points,
    verifier_metrics,
)
from draftwell.components.train.reports import RankingWithRoc, VerifierReport, describe_split
from draftwell.components.train.settings import LabelKind, VerifierSettings
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.verifier import Verifier
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import json_digest
from draftwell.serving.recording.trace import TraceSet

if TYPE_CHECKING:
    import pyarrow as pa

RATIOS = (1.0, 1.2, 1.5)
"""SPRINTER's lambdas (section A.10)."""
CANDIDATES = (
    ("scalars",),
    ("before",),
    ("after",),
    ("before", "scalars"),
    ("after", "scalars"),
    ("before", "after"),
    ("before", "after", "scalars"),
)
SELECTION_ROWS = 40_000
"""Features are compared on at most about this many rows, evenly spread: neighbouring positions are
very similar."""


def train_verifier(
    trace: TraceSet | pa.Table,
    provenance: Provenance,
    settings: VerifierSettings | None = None,
    *,
    test: TraceSet | pa.Table | None = None,
    seed: int = 0,
) -> tuple[Verifier, VerifierReport]:
    """Choose features and threshold, train, and test.

    Args:
        provenance: of the verifier; parameters and metrics are filled in.
        settings: default: `VerifierSettings()`.
        test: a trace of test prompts, without those that `trace` has too; None holds out a fifth of
            the prompts.
        seed: of the split into prompts to train on and to test on, and of the folds.
    Raises:
        DraftwellError: an empty trace or one of a single class (`one_class`), values that are not
            finite, labels that the trace does not give (`VerifierLabel.targets`), too few prompts
            (`too_few_prompts`), unknown features or ones that the trace lacks (`unknown_features`,
            `no_hidden_states`), scikit-learn is missing (`missing_package`).
    """
    settings = settings or VerifierSettings()
    label = VerifierLabel(settings.label, settings.ratio)
    require_sklearn()
    train, tested, left_out = read_train_and_test(trace, test, seed, read_examples)
    check_classes("training", label.targets(train))
    check_classes("test", label.targets(tested))
    names, aucs, validation = choose(train, label, settings.features, seed)
    scaling = platt(validation.logits, label.targets(train))
    line = fit(train, names, label, validation.strength).scaled(*scaling)
    score = expit(validation.logits * scaling[0] + scaling[1])
    threshold = choose_threshold(label.rejected(train), score, settings.eta_fp)
    report = VerifierReport(
        features=list(names),
        label=settings.label.value,
        ratio=settings.ratio,
        temperature=train.temperature,
        strength=validation.strength,
        threshold=threshold,
        validation_auc=validation.auc,
        candidates={"+".join(tried): auc for tried, auc in aucs.items()},
        **describe_split(train, tested, left_out, test),
        metrics=verifier_metrics(tested, expit(line.logits(tested)), label, threshold),
        lambda_grid=lambda_grid(train, tested, line, label, validation.strength),
    )
    used = {**settings.model_dump(mode="json", exclude={"features"}), "seed": seed}
    parameters = {**used, **recorded(trace, train, report)}
    made = provenance.extended(parameters, report.metrics.numbers())
    weight, kind = torch.from_numpy(line.weight), settings.label.value
    return Verifier(weight, line.bias, names, threshold, settings.ratio, made, kind), report


def recorded(
    trace: TraceSet | pa.Table, train: Examples, report: VerifierReport
) -> dict[str, str | int | float | None]:
    """What a verifier's provenance says about its training, besides settings."""
    return {
        "features": "+".join(report.features),
        "strength": report.strength,
        "temperature": report.temperature,
        "kinds": "+".join([] if train.kind is None else np.unique(train.kind).tolist()),
        "train_prompts": len(report.prompts["train"]),
        "test_prompts": len(report.prompts["test"]),
        "prompts_digest": json_digest(sorted({tokens for _, tokens in prompts_of(trace)})),
        "test_trace": report.test_trace,
    }


def candidates(
    examples: Examples, features: Literal["auto"] | Sequence[str]
) -> list[tuple[str, ...]]:
    """The feature sets to try; the trace must have a named set."""
    if features == "auto":
        return [names for names in CANDIDATES if all(name in examples.parts for name in names)]
    unknown = [name for name in features if name not in Verifier.parts]
    if unknown or not features:
        raise DraftwellError(
            (
                f"verifier features must be some of {', '.join(Verifier.parts)}, not "
                f"{', '.join(features) or 'none'}"
            ),
            code="unknown_features",
        )
    absent = [name for name in features if name not in examples.parts]
    if absent:
        raise DraftwellError(
            (
                f"the trace holds no hidden states for the feature {absent[0]!r}: collect it "
                "again with them"
            ),
            code="no_hidden_states",
        )
    return [tuple(name for name in Verifier.parts if name in features)]


def choose(
    train: Examples,
    label: VerifierLabel,
    features: Literal["auto"] | Sequence[str],
    seed: int,
) -> tuple[tuple[str, ...], dict[tuple[str, ...], float], Validation]:
    """The best feature set, the validation AUC of each that was tried, and the cross-validation of
    the best on all rows."""
    step = -(-len(train) // SELECTION_ROWS)
    few = train if step == 1 else train.take(np.arange(0, len(train), step))
    held_out = folds(few, seed)
    tried = {
        names: cross_validate(few, held_out, names, label) for names in candidates(train, features)
    }
    best = max(tried, key=lambda names: tried[names].auc)
    validation = (
        tried[best] if step == 1 else cross_validate(train, folds(train, seed), best, label)
    )
    return best, {names: found.auc for names, found in tried.items()}, validation


def lambda_grid(
    train: Examples, test: Examples, line: Line, label: VerifierLabel, strength: float
) -> dict[str, RankingWithRoc | None]:
    """lambda → ranking and ROC of a verifier for it; None where all tokens are of one class.

    Args:
        line: the verifier for `label`, which is part of the grid where it is a ratio.
    """
    grid: dict[str, RankingWithRoc | None] = {}
    for ratio in sorted({*RATIOS, label.ratio} if label.kind is LabelKind.RATIO else RATIOS):
        wanted = VerifierLabel(LabelKind.RATIO, ratio)
        if any(of_one_class(wanted.targets(part)) for part in (train, test)):
            grid[f"{ratio:g}"] = None
            continue
        score = expit(
            (line if wanted == label else fit(train, line.names, wanted, strength)).logits(test)
        )
        grid[f"{ratio:g}"] = RankingWithRoc(
            **dict(ranking(test, score, wanted)), roc=roc_points(wanted.targets(test), score)
        )
    return grid


def choose_threshold(rejected: np.ndarray, score: np.ndarray, eta_fp: float | None) -> float:
    """The smallest tau in (0, 1) whose eta_FP is at most as wanted: the share of tokens to be
    rejected that score at least tau.

    Args:
        rejected: `[rows]` how much each token counts as one to be rejected
            (`VerifierLabel.rejected`).
    """
    bad = np.flatnonzero(rejected > 0)
    if eta_fp is None or not len(bad):
        return 0.5
    bad = bad[np.argsort(-score[bad], kind="stable")]
    kept = rejected[bad].cumsum()
    over = np.flatnonzero(kept > eta_fp * kept[-1])
    tau = np.nextafter(score[bad[over[0]]], 1.0) if len(over) else 0.0
    return float(np.clip(tau, 1e-6, 1 - 1e-6))
