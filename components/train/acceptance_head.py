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

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from draftwell.components.report.machine import using_threads
from draftwell.components.train.examples import Examples, VerifierLabel, read_train_and_test
from draftwell.components.train.head_examples import labels_of, read_mixed
from draftwell.components.train.head_network import (
    BLOCKS,
    EPOCHS,
    MISMATCH_WEIGHT,
    best_constant,
    train_network,
    weighted_loss,
)
from draftwell.components.train.metrics import (
    calibration_error,
    ranking,
    reliability_bins,
    require_sklearn,
)
from draftwell.components.train.reports import HeadMetrics, HeadReport, describe_split
from draftwell.components.train.settings import LabelKind
from draftwell.serving.artifacts.acceptance_head import AcceptanceHead
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.runtime.pair import LoadedPair

MIXING = 0.15
"""Share of target tokens in what the draft reads."""


def train_acceptance_head(
    pair: LoadedPair,
    trace: TraceSet,
    provenance: Provenance,
    seed: int = 0,
    *,
    test: TraceSet | None = None,
) -> tuple[AcceptanceHead, HeadReport]:
    """Train on most prompts and test on the others, a fifth of them.

    Args:
        pair: its draft model reads the mixed texts.
        provenance: of the head; parameters and metrics are filled in.
        seed: of the split by prompt, the mixture and the training.
        test: a trace of test prompts, without those that `trace` has too; then all of `trace` is
            trained on.
    Raises:
        DraftwellError: a trace without the target's own texts (`no_target_texts`), too few prompts
            (`too_few_prompts`), a pair without draft (`no_draft`) or without hidden states
            (`no_hidden_states`), NaN, scikit-learn is missing (`missing_package`).
    """
    require_sklearn()
    read = partial(read_mixed, pair, mixing=MIXING, seed=seed)
    train, tested, left_out = read_train_and_test(trace, test, seed, read)
    with using_threads(1):
        head = train_network(train, provenance, seed)
        found = head_metrics(head, train, tested)
    recipe = {
        "blocks": BLOCKS,
        "mixing": MIXING,
        "mismatch_weight": MISMATCH_WEIGHT,
        "epochs": EPOCHS,
    }
    report = HeadReport(
        **recipe,
        **describe_split(train, tested, left_out, test),
        metrics=found,
    )
    head.provenance = provenance.extended(
        {**recipe, "seed": seed, "test_trace": report.test_trace}, found.numbers()
    )
    return head, report


@torch.no_grad()
def head_metrics(head: AcceptanceHead, train: Examples, test: Examples) -> HeadMetrics:
    """The head's metrics on unseen prompts, compared with the best constant of the training
    prompts."""
    y = torch.from_numpy(labels_of(test))
    logits = head.logit(torch.from_numpy(test.features(("after",))))
    constant = torch.full_like(y, best_constant(train))
    entropy = torch.special.entr(y) + torch.special.entr(1 - y)
    predicted = logits.sigmoid()
    cross = binary_cross_entropy_with_logits(logits, y, reduction="none")
    correlation = torch.corrcoef(torch.stack([predicted, y]))[0, 1]
    bins = reliability_bins(y.numpy(), predicted.numpy())
    return HeadMetrics(
        **dict(ranking(test, logits.numpy(), VerifierLabel(LabelKind.SOFT))),
        loss=float(weighted_loss(logits, y)),
        constant_loss=float(weighted_loss(constant, y)),
        kl=float((cross - entropy).mean()),
        correlation=float(correlation.nan_to_num()),  # 0 where all predictions are alike
        mean_label=float(y.mean()),
        mean_prediction=float(predicted.mean()),
        reliability=bins,
        calibration_error=calibration_error(bins),
    )
