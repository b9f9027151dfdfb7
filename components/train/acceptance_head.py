"""Training SpecDec++'s acceptance head: how likely is the target to keep the draft token just read?
(2405.19715, section 4.2)

The recipe is the paper's. The examples are those of `head_examples`. The label is soft, min(1,
p̄(y)/q̄(y)), of the *raw* distributions that follow X: at temperature 0 the warped ones are
one-hot, and a label from them would only say "equal" or "not equal"; the authors' code takes raw
ones too. Binary cross-entropy with weight 6 on rejections, 3 epochs, cosine rate with 3 % warm-up,
no early stopping.

Ours: AdamW at 1e-3 in batches of 16 rows (the authors': 5e-5 in batches of 32 texts, over far more
of them), standardised states, D separate blocks, the best constant as the first prediction, and the
split by prompt.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from draftwell.components.report.machine import using_threads
from draftwell.components.train.examples import Examples, read_train_and_test
from draftwell.components.train.fit import Log, silent
from draftwell.components.train.head_examples import labels_of, read_mixed
from draftwell.components.train.head_network import (
    EPOCHS,
    HeadTrainingSettings,
    best_constant,
    train_network,
    weighted_loss,
)
from draftwell.components.train.metrics import (
    auc_of,
    calibration_error,
    intervals,
    reliability_bins,
    require_sklearn,
)
from draftwell.components.train.reports import HeadMetrics, HeadReport, describe_split
from draftwell.serving.artifacts.acceptance_head import AcceptanceHead
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.runtime.pair import LoadedPair

LOGGED = (
    "loss",
    "constant_loss",
    "kl",
    "correlation",
    "mean_label",
    "mean_prediction",
    "prevalence",
    "auc",
    "constant_auc",
    "confidence_auc",
    "calibration_error",
)


def train_acceptance_head(
    pair: LoadedPair,
    trace: TraceSet,
    provenance: Provenance,
    settings: HeadTrainingSettings | None = None,
    *,
    test: TraceSet | None = None,
    log: Log = silent,
) -> tuple[AcceptanceHead, HeadReport]:
    """Train on most prompts and test on the others, a fifth of them.

    Args:
        pair: its draft model reads the mixed texts.
        provenance: of the head; parameters and metrics are filled in.
        settings: default: `HeadTrainingSettings()`.
        test: a trace of test prompts, without those that `trace` has too; then all of `trace` is
            trained on.
        log: called with the loss of each epoch and with the metrics of the test.
    Raises:
        DraftwellError: a trace without the target's own texts (`no_target_texts`), too few prompts
            (`too_few_prompts`), a pair without draft (`no_draft`) or without hidden states
            (`no_hidden_states`), NaN, scikit-learn is missing (`missing_package`).
    """
    settings = settings or HeadTrainingSettings()
    require_sklearn()
    read = partial(read_mixed, pair, mixing=settings.mixing, seed=settings.seed)
    train, tested, left_out = read_train_and_test(trace, test, settings.seed, read)
    with using_threads(1):
        head = train_network(train, settings, provenance, log)
        found = head_metrics(head, train, tested, settings.mismatch_weight)
    recipe = {**settings.model_dump(exclude={"seed"}), "epochs": EPOCHS}
    report = HeadReport(
        **recipe,
        **describe_split(train, tested, left_out, test),
        metrics=found,
    )
    metrics = {name: getattr(found, name) for name in LOGGED if getattr(found, name) is not None}
    for name, value in metrics.items():
        log(name, value, 0)
    head.provenance = provenance.extended(
        {**recipe, "seed": settings.seed, "test_trace": report.test_trace}, metrics
    )
    return head, report


@torch.no_grad()
def head_metrics(
    head: AcceptanceHead, train: Examples, test: Examples, mismatch_weight: float
) -> HeadMetrics:
    """The head's metrics on unseen prompts, compared with the best constant of the training
    prompts."""
    y = torch.from_numpy(labels_of(test))
    logits = head.logit(torch.from_numpy(test.features(("after",))))
    constant = torch.full_like(y, best_constant(train, mismatch_weight))
    entropy = torch.special.entr(y) + torch.special.entr(1 - y)
    predicted = logits.sigmoid()
    cross = y * nn.functional.softplus(-logits) + (1 - y) * nn.functional.softplus(logits)
    spread = float(predicted.std(correction=0) * y.std(correction=0))
    moment = float(((predicted - predicted.mean()) * (y - y.mean())).mean())
    bins = reliability_bins(y.numpy(), predicted.numpy())
    return HeadMetrics(
        loss=float(weighted_loss(logits, y, mismatch_weight)),
        constant_loss=float(weighted_loss(constant, y, mismatch_weight)),
        kl=float((cross - entropy).mean()),
        correlation=moment / spread if spread > 0 else 0.0,
        mean_label=float(y.mean()),
        mean_prediction=float(predicted.mean()),
        **ranking_of(test, logits.numpy()),
        reliability=bins,
        calibration_error=calibration_error(bins),
    )


def ranking_of(test: Examples, score: np.ndarray) -> dict[str, Any]:
    """How well a score, and the confidence C, rank accepted tokens before rejected ones: those
    fields of `HeadMetrics`.

    At temperature > 0 a token is accepted with some probability: it counts as both, each weighted
    by its probability.
    """
    assert test.accepted is not None
    chance = test.accepted
    known = {"prevalence": float(chance.mean())}
    label = np.repeat([True, False], len(test))
    weight = np.concatenate([chance, 1 - chance])
    kept = weight > 0
    label, weight = label[kept], weight[kept]
    if label.all() or not label.any():
        return {
            **known,
            "auc": None,
            "constant_auc": None,
            "confidence_auc": None,
            "intervals": None,
        }
    scores, confidence = np.tile(score, 2)[kept], np.tile(test.confidence, 2)[kept]
    names, prompt = np.unique(np.tile(test.prompt, 2)[kept], return_inverse=True)
    ends = intervals(label, scores, confidence, prompt, weight=weight) if len(names) > 1 else None
    return {
        **known,
        "auc": auc_of(label, scores, weight),
        "constant_auc": 0.5,
        "confidence_auc": auc_of(label, confidence, weight),
        "intervals": ends
        and {
            "prevalence": ends["prevalence"],
            "auc": ends["auc"],
            "confidence_auc": ends["baseline_auc"],
            "gain": ends["gain"],
        },
    }
