"""Training SPRINTER's verifier: will the target find this draft token acceptable? (SPRINTER, section 3.2)

Label 1 iff q̄(x)/p̄(x) <= lambda. A linear score (`verifier_fit`) whose features, penalty, scaling and threshold are chosen by
cross-validation over prompts; then it is fitted to all prompts but those of the test, which nothing was chosen on and which every
figure of the report is of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from components.train.examples import Examples, folds, prompts_in_both, read_examples, split_by_prompt
from components.train.logistic import Line, Validation, check_classes, cross_validate, fit, platt, sigmoid
from components.train.metrics import figures_of, ranking, require_sklearn, roc_points
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
"""Features are compared on at most about so many rows, evenly spread: neighbouring positions are much alike."""
FIGURES = ("auc", "baseline_auc", "gain", "prevalence", "brier", "calibration_error", "eta_tp", "eta_fp")


def train_verifier(trace: TraceSet | pa.Table, provenance: Provenance, *, test: TraceSet | pa.Table | None = None, ratio: float = 1.2,
                   features: Literal["auto"] | Sequence[str] = "auto", wanted_false_positive: float | None = 0.1,
                   seed: int = 0, log: Log | None = None) -> tuple[Verifier, dict[str, Any]]:
    """Train, choose features and threshold, and test.

    Args:
        provenance: of the verifier; parameters and metrics are filled in.
        test: a trace of prompts to test on, of which those that `trace` holds too are left out; None holds out a fifth of the prompts.
        ratio: lambda of the label.
        features: groups to read ("before", "after", "scalars"), or "auto": the best by cross-validation.
        wanted_false_positive: eta_FP that the threshold tau shall keep to on held-out prompts; None takes tau = .5.
        log: called with ("validation_auc", value, number of the candidate) and with the figures of the test.
    Returns:
        the verifier and a report, plain JSON: chosen `features` and penalty (`strength`), `candidates` with their validation AUC,
        `rows` and `prompts` of training and test, `left_out` test prompts, `threshold`, the figures of `verifier_report.figures_of`,
        `lambda_grid` (lambda → ranking with the same features and penalty) and `transfer` (`verifier_transfer`; None where no two
        tasks have prompts enough).
    Raises:
        DraftwellError: an empty or single-class trace, NaN, too few prompts, features that the trace lacks.
    """
    if ratio <= 0:
        raise DraftwellError(f"ratio (lambda) must be positive, not {ratio}")
    if wanted_false_positive is not None and not 0 <= wanted_false_positive <= 1:
        raise DraftwellError(f"wanted_false_positive must be in [0, 1], not {wanted_false_positive}")
    require_sklearn()
    train, tested, left_out = examples_of(trace, test, seed)
    for name, part in (("training", train), ("test", tested)):
        check_classes(name, part.ratio <= ratio)
    names, aucs, validation = choose(train, ratio, features, seed, log)
    slope, shift = platt(validation.logits, train.ratio <= ratio)
    line = fit(train, names, ratio, validation.strength).scaled(slope, shift)
    threshold = choose_threshold(train.ratio, sigmoid(validation.logits * slope + shift), wanted_false_positive)
    score = sigmoid(line.logits(tested))
    report = {
        "features": list(names), "ratio": ratio, "strength": validation.strength, "threshold": threshold, "validation_auc": validation.auc,
        "candidates": {"+".join(tried): auc for tried, auc in aucs.items()},
        "rows": {"train": len(train), "test": len(tested)},
        "prompts": {"train": np.unique(train.prompt).tolist(), "test": np.unique(tested.prompt).tolist()},
        "left_out": left_out, "test_trace": test.digest() if isinstance(test, TraceSet) else None,
        **figures_of(tested, score, ratio, threshold),
        "lambda_grid": lambda_grid(train, tested, line, ratio, validation.strength),
        "transfer": transfer_table(train, tested, line, ratio, validation.strength)}
    metrics = {name: report[name] for name in FIGURES if report[name] is not None}
    if report["transfer"]:
        metrics |= {f"transfer_{name}_auc": value for name, value in report["transfer"]["means"].items() if value is not None}
    if log:
        for name, value in metrics.items():
            log(name, value, 0)
    made = provenance.model_copy(update={
        "parameters": {**provenance.parameters, "ratio": ratio, "features": "+".join(names), "seed": seed, "strength": validation.strength,
                       "wanted_false_positive": wanted_false_positive, "test_trace": report["test_trace"]},
        "metrics": {**provenance.metrics, **metrics}})
    return Verifier(torch.from_numpy(line.weight), line.bias, names, threshold, ratio, made), report


def examples_of(trace: TraceSet | pa.Table, test: TraceSet | pa.Table | None, seed: int) -> tuple[Examples, Examples, list[str]]:
    """Examples to learn from, examples to test on, and ids of test prompts that are left out since they are learnt from."""
    if test is None:
        return *split_by_prompt(read_examples(trace), seed), []
    known = sorted(prompts_in_both(trace, test))
    tested = read_examples(test)
    untouched = tested.take(~np.isin(tested.prompt, known))
    if not len(untouched):
        raise DraftwellError("the verifier would be trained on every prompt of the test trace: collect a test trace of other prompts")
    return read_examples(trace), untouched, known


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


def lambda_grid(train: Examples, test: Examples, line: Line, ratio: float, strength: float) -> dict[str, dict[str, Any] | None]:
    """lambda → `verifier_report.ranking` and ROC of a verifier for it; None where there is one class only.

    Args:
        line: the verifier for `ratio`, which is in the grid too.
    """
    grid: dict[str, dict[str, Any] | None] = {}
    for wanted in sorted({*RATIOS, ratio}):
        if any(label.all() or not label.any() for label in (train.ratio <= wanted, test.ratio <= wanted)):
            grid[f"{wanted:g}"] = None
            continue
        score = sigmoid((line if wanted == ratio else fit(train, line.names, wanted, strength)).logits(test))
        grid[f"{wanted:g}"] = {**ranking(test, score, wanted), "roc": roc_points(test.ratio <= wanted, score)}
    return grid


def choose_threshold(ratio: np.ndarray, score: np.ndarray, wanted_false_positive: float | None) -> float:
    """The smallest tau in (0, 1) whose eta_FP, the share of tokens with q̄/p̄ > 1 scored at least tau, is as wanted."""
    unacceptable = np.sort(score[ratio > 1])[::-1]
    if wanted_false_positive is None or not len(unacceptable):
        return 0.5
    allowed = int(wanted_false_positive * len(unacceptable))
    tau = np.nextafter(unacceptable[allowed], 1.0) if allowed < len(unacceptable) else 0.0
    return float(np.clip(tau, 1e-6, 1 - 1e-6))
