"""Fitting a linear verifier: logistic regression under an L2 penalty on standardised features, and
Platt's scaling.

The paper's binary cross-entropy with class weights (strategies/PAPERS.md) and a penalty (ours),
minimised by L-BFGS, where the paper stops Adam early: a thousand state dimensions overfit a trace
of few prompts immediately, and Adam's fit ranked test tokens no better than the draft's confidence
alone (docs/log.md).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from draftwell.components.train.examples import Examples, VerifierLabel
from draftwell.components.train.metrics import auc_of, of_one_class, split_soft
from draftwell.serving.artifacts.verifier import SCALARS
from draftwell.serving.errors import DraftwellError, NotFinite

STRENGTHS = (1e-5, 1e-4, 1e-3, 1e-2)
"""Inverse strengths of the L2 penalty against the summed loss, strongest first (scikit-learn's
C)."""
TOLERANCE = 1e-3
"""Largest component of the gradient of the mean loss at which L-BFGS stops."""
FREE_SCALARS = 10.0
"""Scalars are scaled up by this, so that the penalty, meant for hundreds of state dimensions,
hardly affects them (ours)."""


@dataclass(frozen=True)
class Line:
    """A linear function of raw features, z = x·weight + bias.

    Args:
        names: feature groups.
        weight: `[width]` float32.
    """

    names: tuple[str, ...]
    weight: np.ndarray
    bias: float

    def logits(self, examples: Examples) -> np.ndarray:
        """z `[rows]` float64.

        Raises:
            NotFinite: one of them is NaN or infinite.
        """
        z = np.concatenate(
            [
                block.astype(np.float64) @ self.weight + self.bias
                for block in examples.blocks(self.names)
            ]
        )
        if not np.isfinite(z).all():
            raise NotFinite(
                "scores of the verifier are NaN or infinite: collect the trace again, a "
                "model's weights or dtype may be broken"
            )
        return z

    def scaled(self, slope: float, shift: float) -> Line:
        """slope·z + shift."""
        return Line(
            self.names, (self.weight * slope).astype(np.float32), float(self.bias * slope + shift)
        )


@dataclass(frozen=True)
class Validation:
    """Result of a feature set and a penalty on held-out prompts.

    Args:
        auc: mean over folds.
        strength: of `STRENGTHS`.
        logits: `[rows]`, each by the fit that did not see the row's prompt.
    """

    auc: float
    strength: float
    logits: np.ndarray


def fits(
    examples: Examples,
    names: tuple[str, ...],
    label: VerifierLabel,
    strengths: Sequence[float] = STRENGTHS,
) -> Iterator[Line]:
    """A fit for each strength of the penalty, each starting from the previous one.

    Args:
        label: both classes must be present. A target between 0 and 1 counts as both, each weighted
            by its share.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    mean, scale = moments(examples, names)
    if "scalars" in names:  # the last group
        scale[-len(SCALARS) :] /= FREE_SCALARS
    x = examples.features(names)
    x -= mean.astype(np.float32)
    x /= scale.astype(np.float32)
    rows, good, weights = split_soft(label.targets(examples))
    if weights is not None:
        x = x[rows]
        share = float(weights[good].sum() / weights.sum())
        # "balanced", which scikit-learn takes from counts of rows alone
        weights = weights / np.where(good, 2 * share, 2 * (1 - share))
    model = LogisticRegression(
        class_weight="balanced" if weights is None else None,
        warm_start=True,
        max_iter=500,
        tol=TOLERANCE,
    )
    for strength in strengths:
        with warnings.catch_warnings():
            # a fit that did not converge is judged like any other
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.set_params(C=strength).fit(x, good, weights)
        weight = (model.coef_[0] / scale).astype(np.float32)
        yield Line(names, weight, float(model.intercept_[0] - mean @ weight))


def fit(examples: Examples, names: tuple[str, ...], label: VerifierLabel, strength: float) -> Line:
    """The fit of one strength."""
    (line,) = fits(examples, names, label, [strength])
    return line


def moments(examples: Examples, names: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation `[width]` float64 of raw features, the latter at least 1e-6."""
    total = squares = np.zeros(())
    for block in examples.blocks(names):
        values = block.astype(np.float64)
        total, squares = total + values.sum(0), squares + (values * values).sum(0)
    mean = total / len(examples)
    return mean, np.maximum(np.sqrt(np.maximum(squares / len(examples) - mean * mean, 0.0)), 1e-6)


def cross_validate(
    examples: Examples, held_out: Sequence[np.ndarray], names: tuple[str, ...], label: VerifierLabel
) -> Validation:
    """The best strength for a feature set.

    Args:
        held_out: masks `[rows]`, each held out once.
    Raises:
        DraftwellError: the draft tokens of a fold's training prompts, or of all held-out prompts,
            are of one class (`one_class`).
    """
    targets = label.targets(examples)
    logits = np.empty((len(STRENGTHS), len(examples)))
    found: list[list[float]] = [[] for _ in STRENGTHS]
    for held in held_out:
        rest, part = examples.take(~held), examples.take(held)
        check_classes("training", targets[~held])
        for number, line in enumerate(fits(rest, names, label)):
            logits[number, held] = line.logits(part)
            if not of_one_class(targets[held]):
                found[number].append(auc_of(targets[held], logits[number, held]))
    if not found[0]:
        check_classes("validation", targets[held_out[0]])
    means = [float(np.mean(aucs)) for aucs in found]
    best = int(np.argmax(means))
    return Validation(means[best], STRENGTHS[best], logits[best])


def check_classes(name: str, targets: np.ndarray) -> None:
    """Refuse examples in which all draft tokens are acceptable, or none is (`one_class`)."""
    if of_one_class(targets):
        what = "acceptable" if targets.all() else "unacceptable"
        raise DraftwellError(
            f"all {len(targets)} draft tokens of the {name} prompts are {what}, so nothing "
            "can be learnt or "
            "tested: collect more prompts, or change the label or its ratio (lambda)",
            code="one_class",
        )


def platt(z: np.ndarray, target: np.ndarray) -> tuple[float, float]:
    """Slope and shift after which sigmoid(z) is a probability: Platt's scaling with his smoothed
    targets.

    Class weights shift the scores of a fit and the penalty flattens them. Neither changes their
    order, and this corrects both.

    Args:
        z: `[rows]` of prompts that the fit did not see.
        target: `[rows]` in [0, 1].
    Returns:
        (1, 0) where z ranks worse than chance: scaling would reverse the order.
    """
    from sklearn.linear_model import LogisticRegression

    target = target.astype(np.float64)
    good, bad = target.sum(), (1 - target).sum()
    smoothed = target * (good + 1) / (good + 2) + (1 - target) / (bad + 2)
    rows, label, weights = split_soft(smoothed)
    model = LogisticRegression(C=np.inf, tol=1e-8, solver="newton-cholesky")
    model.fit(z[rows, None], label, weights)
    slope, shift = float(model.coef_[0, 0]), float(model.intercept_[0])
    return (slope, shift) if slope > 0 else (1.0, 0.0)
