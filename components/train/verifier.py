"""Training SPRINTER's verifier: will the target find this draft token acceptable? (SPRINTER, section 3.2)

Label 1 iff q̄(x)/p̄(x) <= lambda. The score is linear (`logistic`); its features, penalty, scaling and threshold are chosen by
cross-validation over prompts. Then it is fitted to all training prompts. Every metric of the report is measured on the test prompts,
on which nothing was chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from components.train.examples import Examples, folds, read_examples, read_train_and_test
from components.train.logistic import Line, Validation, check_classes, cross_validate, fit, platt, sigmoid
from components.train.metrics import ranking, require_sklearn, roc_points, verifier_metrics
from components.train.reports import RankingWithRoc, VerifierReport
from components.train.transfer import transfer_table
from serving.artifacts.base import Provenance
from serving.artifacts.verifier import Verifier
from serving.errors import DraftwellError
from serving.recording.trace import TraceSet

if TYPE_CHECKING:
    import pyarrow as pa

Log = Callable[[str, float, int], None]

RATIOS = (1.0, 1.2, 1.5)
"""SPRINTER's lambdas (section A.10)."""
CANDIDATES = (("scalars",), ("before",), ("after",), ("before", "scalars"), ("after", "scalars"), ("before", "after"),
              ("before", "after", "scalars"))
SELECTION_ROWS = 40_000
"""Features are compared on at most about this many rows, evenly spread: neighbouring positions are very similar."""
LOGGED = ("auc", "baseline_auc", "gain", "prevalence", "brier", "calibration_error", "eta_tp", "eta_fp")


def train_verifier(trace: TraceSet | pa.Table, provenance: Provenance, *, test: TraceSet | pa.Table | None = None, ratio: float = 1.2,
                   features: Literal["auto"] | Sequence[str] = "auto", wanted_false_positive: float | None = 0.1,
                   seed: int = 0, log: Log | None = None) -> tuple[Verifier, VerifierReport]:
    """Choose features and threshold, train, and test.

    Args:
        provenance: of the verifier; parameters and metrics are filled in.
        test: a trace of test prompts, without those that `trace` has too; None holds out a fifth of the prompts.
        ratio: lambda of the label, positive.
        features: groups to read ("before", "after", "scalars"), or "auto": the best by cross-validation.
        wanted_false_positive: eta_FP in [0, 1] that the threshold tau may reach on held-out prompts; None sets tau = .5.
        log: called with ("validation_auc", value, number of the candidate) and with the metrics of the test.
    Raises:
        DraftwellError: a parameter out of range (`out_of_range`), an empty trace or one of a single class (`one_class`), values that
            are not finite, too few prompts (`too_few_prompts`), unknown features or ones that the trace lacks (`unknown_features`,
            `no_hidden_states`), scikit-learn is missing (`missing_package`).
    """
    if ratio <= 0:
        raise DraftwellError(f"ratio (lambda) must be positive, not {ratio}", code="out_of_range")
    if wanted_false_positive is not None and not 0 <= wanted_false_positive <= 1:
        raise DraftwellError(f"wanted_false_positive must be in [0, 1], not {wanted_false_positive}", code="out_of_range")
    require_sklearn()
    train, tested, left_out = read_train_and_test(trace, test, seed, read_examples)
    for name, part in (("training", train), ("test", tested)):
        check_classes(name, part.ratio <= ratio)
    names, aucs, validation = choose(train, ratio, features, seed, log)
    slope, shift = platt(validation.logits, train.ratio <= ratio)
    line = fit(train, names, ratio, validation.strength).scaled(slope, shift)
    threshold = choose_threshold(train.ratio, sigmoid(validation.logits * slope + shift), wanted_false_positive)
    report = VerifierReport(
        features=list(names), ratio=ratio, strength=validation.strength, threshold=threshold, validation_auc=validation.auc,
        candidates={"+".join(tried): auc for tried, auc in aucs.items()}, rows={"train": len(train), "test": len(tested)},
        prompts={"train": np.unique(train.prompt).tolist(), "test": np.unique(tested.prompt).tolist()}, left_out=left_out,
        test_trace=test.digest() if isinstance(test, TraceSet) else None,
        metrics=verifier_metrics(tested, sigmoid(line.logits(tested)), ratio, threshold),
        lambda_grid=lambda_grid(train, tested, line, ratio, validation.strength),
        transfer=transfer_table(train, tested, line, ratio, validation.strength))
    metrics = logged_metrics(report)
    if log:
        for name, value in metrics.items():
            log(name, value, 0)
    made = provenance.model_copy(update={
        "parameters": {**provenance.parameters, "ratio": ratio, "features": "+".join(names), "seed": seed, "strength": validation.strength,
                       "wanted_false_positive": wanted_false_positive, "test_trace": report.test_trace},
        "metrics": {**provenance.metrics, **metrics}})
    return Verifier(torch.from_numpy(line.weight), line.bias, names, threshold, ratio, made), report


def logged_metrics(report: VerifierReport) -> dict[str, float]:
    """The metrics of a report that its artifact carries; undefined ones are left out."""
    found = {name: getattr(report.metrics, name) for name in LOGGED}
    if report.transfer:
        found |= {f"transfer_{name}_auc": value for name, value in report.transfer.means.items()}
    return {name: value for name, value in found.items() if value is not None}


def candidates(examples: Examples, features: Literal["auto"] | Sequence[str]) -> list[tuple[str, ...]]:
    """The feature sets to try; the trace must have a named set."""
    if features == "auto":
        return [names for names in CANDIDATES if all(name in examples.parts for name in names)]
    unknown = [name for name in features if name not in Verifier.parts]
    if unknown or not features:
        raise DraftwellError(f"verifier features must be some of {', '.join(Verifier.parts)}, not {', '.join(features) or 'none'}",
                             code="unknown_features")
    absent = [name for name in features if name not in examples.parts]
    if absent:
        raise DraftwellError(f"the trace holds no hidden states for the feature {absent[0]!r}: collect it again with them",
                             code="no_hidden_states")
    return [tuple(name for name in Verifier.parts if name in features)]


def choose(train: Examples, ratio: float, features: Literal["auto"] | Sequence[str], seed: int,
           log: Log | None) -> tuple[tuple[str, ...], dict[tuple[str, ...], float], Validation]:
    """The best feature set, the validation AUC of each that was tried, and the cross-validation of the best on all rows."""
    step = -(-len(train) // SELECTION_ROWS)
    few = train if step == 1 else train.take(np.arange(0, len(train), step))
    held_out = folds(few, seed)
    tried: dict[tuple[str, ...], Validation] = {}
    for number, names in enumerate(candidates(train, features)):
        tried[names] = cross_validate(few, held_out, names, ratio)
        if log:
            log("validation_auc", tried[names].auc, number)
    best = max(tried, key=lambda names: tried[names].auc)
    validation = tried[best] if step == 1 else cross_validate(train, folds(train, seed), best, ratio)
    return best, {names: found.auc for names, found in tried.items()}, validation


def lambda_grid(train: Examples, test: Examples, line: Line, ratio: float, strength: float) -> dict[str, RankingWithRoc | None]:
    """lambda → ranking and ROC of a verifier for it; None where all tokens are of one class.

    Args:
        line: the verifier for `ratio`, which is part of the grid.
    """
    grid: dict[str, RankingWithRoc | None] = {}
    for wanted in sorted({*RATIOS, ratio}):
        if any(label.all() or not label.any() for label in (train.ratio <= wanted, test.ratio <= wanted)):
            grid[f"{wanted:g}"] = None
            continue
        score = sigmoid((line if wanted == ratio else fit(train, line.names, wanted, strength)).logits(test))
        grid[f"{wanted:g}"] = RankingWithRoc(**dict(ranking(test, score, wanted)), roc=roc_points(test.ratio <= wanted, score))
    return grid


def choose_threshold(ratio: np.ndarray, score: np.ndarray, wanted_false_positive: float | None) -> float:
    """The smallest tau in (0, 1) whose eta_FP, the share of tokens with q̄/p̄ > 1 scored at least tau, is at most as wanted."""
    unacceptable = np.sort(score[ratio > 1])[::-1]
    if wanted_false_positive is None or not len(unacceptable):
        return 0.5
    allowed = int(wanted_false_positive * len(unacceptable))
    tau = np.nextafter(unacceptable[allowed], 1.0) if allowed < len(unacceptable) else 0.0
    return float(np.clip(tau, 1e-6, 1 - 1e-6))
