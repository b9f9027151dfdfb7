"""Training SPRINTER's verifier: will the target find this draft token acceptable? (SPRINTER, section 3.2)

Label 1 iff q̄(x)/p̄(x) <= lambda. Logistic regression: the paper's BCE with class weights and an L2 penalty (ours), minimised
by L-BFGS where the paper stops Adam early: a thousand state dimensions overfit a trace of some prompts at once, and
Adam's fit ranked test tokens no better than the draft's confidence alone (docs/log.md). Then Platt's scaling on validation
prompts, so that a score is a probability. Penalty and features are chosen by validation AUC; every figure of the report is
of test prompts that nothing was chosen on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from components.verifier_data import Examples, read_examples, split_by_prompt
from components.verifier_report import auc_of, require_sklearn, test_report
from serving.runtime.artifacts.base import Provenance
from serving.runtime.artifacts.verifier import SCALARS, Verifier
from serving.runtime.trace import TraceSet
from serving.runtime.types import DraftwellError

if TYPE_CHECKING:
    import pyarrow as pa

Log = Callable[[str, float, int], None]

CANDIDATES = (("scalars",), ("before",), ("after",), ("before", "scalars"), ("after", "scalars"), ("before", "after"),
              ("before", "after", "scalars"))
STRENGTHS = (1e-5, 1e-4, 1e-3, 1e-2)
"""Inverse strengths of the L2 penalty against the summed loss, strongest first (scikit-learn's C)."""
TOLERANCE = 1e-3
"""Largest component of the gradient of the mean loss at which L-BFGS stops."""
FREE_SCALARS = 10.0
"""Scalars are scaled up by this, so that the penalty, meant for hundreds of state dimensions, hardly holds them back (ours)."""


def train_verifier(trace: TraceSet | pa.Table, provenance: Provenance, *, ratio: float = 1.2,
                   features: Literal["auto"] | Sequence[str] = "auto", wanted_false_positive: float | None = 0.1,
                   seed: int = 0, log: Log | None = None) -> tuple[Verifier, dict[str, Any]]:
    """Train, choose features and threshold, and test.

    Args:
        provenance: of the verifier; parameters and metrics are filled in.
        ratio: lambda of the label.
        features: groups to read ("before", "after", "scalars"), or "auto": the best on validation prompts.
        wanted_false_positive: eta_FP that the threshold tau shall keep to on validation prompts; None takes tau = .5.
        log: called with ("validation_auc", value, number of the candidate) and with the figures of the test.
    Returns:
        the verifier and a report: chosen features, candidates with their validation AUC, rows and prompts of each split,
        threshold, and the figures of `verifier_report.test_report`.
    Raises:
        DraftwellError: an empty or single-class trace, NaN, too few prompts, features that the trace lacks.
    """
    if ratio <= 0:
        raise DraftwellError(f"ratio (lambda) must be positive, not {ratio}")
    if wanted_false_positive is not None and not 0 <= wanted_false_positive <= 1:
        raise DraftwellError(f"wanted_false_positive must be in [0, 1], not {wanted_false_positive}")
    require_sklearn()
    splits = split_by_prompt(read_examples(trace), seed)
    for name, part in splits.items():
        check_classes(name, part.ratio <= ratio)
    tried = {}
    for number, names in enumerate(candidates(splits["train"], features)):
        tried[names] = fit(splits["train"], splits["validation"], names, ratio)
        if log:
            log("validation_auc", tried[names][0], number)
    chosen = max(tried, key=lambda names: tried[names][0])
    weight, bias = calibrated(splits["validation"], chosen, ratio, *tried[chosen][1:])
    validation, test = ((part.ratio, scores(part.features(chosen), weight, bias)) for part in
                        (splits["validation"], splits["test"]))
    threshold = choose_threshold(*validation, wanted_false_positive)
    report = {
        "features": list(chosen), "ratio": ratio, "threshold": threshold,
        "candidates": {"+".join(names): auc for names, (auc, _, _) in tried.items()},
        "rows": {name: len(part) for name, part in splits.items()},
        "prompts": {name: sorted(set(part.prompt.tolist())) for name, part in splits.items()},
        **test_report(*test, splits["test"].confidence, ratio, threshold)}
    metrics = {name: report[name] for name in ("auc", "baseline_auc", "prevalence", "brier", "calibration_error", "eta_tp", "eta_fp")
               if report[name] is not None}
    if log:
        for name, value in metrics.items():
            log(name, value, 0)
    made = provenance.model_copy(update={
        "parameters": {**provenance.parameters, "ratio": ratio, "features": "+".join(chosen), "seed": seed,
                       "wanted_false_positive": wanted_false_positive},
        "metrics": {**provenance.metrics, **metrics}})
    return Verifier(torch.from_numpy(weight), bias, chosen, threshold, ratio, made), report


def candidates(examples: Examples, features: Literal["auto"] | Sequence[str]) -> list[tuple[str, ...]]:
    """The feature sets to try; a named set must be there."""
    if features == "auto":
        return [names for names in CANDIDATES if all(name in examples.parts for name in names)]
    unknown = [name for name in features if name not in Verifier.parts]
    if unknown or not features:
        raise DraftwellError(f"verifier features must be some of {', '.join(Verifier.parts)}, not {', '.join(features) or 'none'}")
    absent = [name for name in features if name not in examples.parts]
    if absent:
        raise DraftwellError(f"the trace holds no hidden states for the feature {absent[0]!r}: collect it again with them")
    return [tuple(name for name in Verifier.parts if name in features)]


def check_classes(name: str, labels: np.ndarray) -> None:
    """Refuse a split in which all draft tokens are acceptable, or none is."""
    if labels.all() or not labels.any():
        what = "acceptable" if labels.all() else "unacceptable"
        raise DraftwellError(f"all {len(labels)} draft tokens of the {name} prompts are {what}, so nothing can be learnt or "
                             "tested: collect more prompts, or change the ratio (lambda)")


def fit(train: Examples, validation: Examples, names: tuple[str, ...], ratio: float) -> tuple[float, np.ndarray, float]:
    """The best of some penalties: validation AUC, weight `[width]` float32 and bias, acting on raw features."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    x, y = train.features(names), train.ratio <= ratio
    mean, scale = x.mean(0), np.maximum(x.std(0), 1e-6)
    if "scalars" in names:  # the last group
        scale[-len(SCALARS) :] /= FREE_SCALARS
    inputs, held, held_labels = (x - mean) / scale, validation.features(names), validation.ratio <= ratio
    model = LogisticRegression(class_weight="balanced", warm_start=True, max_iter=500, tol=TOLERANCE)
    found = []
    for strength in STRENGTHS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # a fit that was cut short is judged like any other
            model.set_params(C=strength).fit(inputs, y)
        weight = (model.coef_[0] / scale).astype(np.float32)
        bias = float(model.intercept_[0] - mean @ weight)
        found.append((auc_of(held_labels, scores(held, weight, bias)), weight, bias))
    return max(found, key=lambda tried: tried[0])


def calibrated(held: Examples, names: tuple[str, ...], ratio: float, weight: np.ndarray, bias: float) -> tuple[np.ndarray, float]:
    """Weight and bias whose scores are probabilities on `held`: Platt's scaling a·z + c with his smoothed targets.

    Class weights shift the scores of `fit` and its penalty flattens them; neither changes their order, and this corrects both.
    """
    y = held.ratio <= ratio
    z = held.features(names).astype(np.float64) @ weight + bias
    targets = np.where(y, (y.sum() + 1) / (y.sum() + 2), 1 / ((~y).sum() + 2))
    design = np.stack([z, np.ones_like(z)], axis=1)
    scale = np.array([1.0, 0.0])
    for _ in range(50):  # Newton's method with a trace of ridge: two unknowns, a convex loss
        p = 1 / (1 + np.exp(-np.clip(design @ scale, -60, 60)))
        hessian = design.T @ (design * (p * (1 - p))[:, None]) + 1e-6 * np.eye(2)
        step = np.linalg.solve(hessian, design.T @ (p - targets))
        scale -= step * min(1.0, 5.0 / max(1e-12, float(np.abs(step).max())))
        if np.abs(step).max() < 1e-8:
            break
    if scale[0] <= 0:  # worse than chance on these prompts: scaling would turn the order round
        return weight, bias
    return (weight * scale[0]).astype(np.float32), float(bias * scale[0] + scale[1])


def scores(x: np.ndarray, weight: np.ndarray, bias: float) -> np.ndarray:
    """`[rows]` probabilities of features `[rows, width]`."""
    found: np.ndarray = 1.0 / (1.0 + np.exp(-np.clip(x.astype(np.float64) @ weight + bias, -60, 60)))
    return found


def choose_threshold(ratio: np.ndarray, score: np.ndarray, wanted_false_positive: float | None) -> float:
    """The smallest tau in (0, 1) whose eta_FP, the share of tokens with q̄/p̄ > 1 scored at least tau, is as wanted."""
    unacceptable = np.sort(score[ratio > 1])[::-1]
    if wanted_false_positive is None or not len(unacceptable):
        return 0.5
    allowed = int(wanted_false_positive * len(unacceptable))
    tau = np.nextafter(unacceptable[allowed], 1.0) if allowed < len(unacceptable) else 0.0
    return float(np.clip(tau, 1e-6, 1 - 1e-6))
