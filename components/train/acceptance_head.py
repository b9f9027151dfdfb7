"""Training SpecDec++'s acceptance head: how likely is the target to keep the draft token just read? (2405.19715, section 4.2)

The recipe is the paper's: along the target's own text X the draft's tokens Y are known (one behind each prefix of X); in the
text that the draft reads, each token is X's with probability `mixing` (.15) and else Y's, so that it sees drafts as it will
when it drafts; the state that has read a Y is an example, that of an X is none. The label is soft, min(1, p̄(y)/q̄(y)), of
the *raw* distributions behind X: at temperature 0 the warped ones are one-hot and a label from them would say only "equal"
or "not equal"; the authors' code takes raw ones too. Binary cross-entropy, rejections weighing 6, 3 epochs, cosine rate with
3 % warm-up, no early stopping.

Ours: AdamW at 1e-3 in batches of 16 rows (the authors': 5e-5 in batches of 32 texts, over far more of them), standardised
states, D separate blocks, the best constant as the first prediction, and the split by prompt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from components.collect.trace_columns import column
from components.report.machine import using_threads
from components.train.examples import Examples, prompts_in_both, split_by_prompt
from components.train.metrics import auc_of, calibration_error, intervals, reliability_bins, require_sklearn
from serving.artifacts.acceptance_head import AcceptanceHead
from serving.artifacts.base import Provenance
from serving.errors import DraftwellError
from serving.recording.trace import TraceSet
from serving.runtime.commands import Forward
from serving.runtime.pair import LoadedPair

if TYPE_CHECKING:
    import pyarrow as pa

Log = Callable[[str, float, int], None]

COLUMNS = ("prompt_id", "kind", "position", "prompt_tokens", "token", "draft_token", "draft_q", "draft_p", "ratio", "confidence")
FIGURES = ("loss", "constant_loss", "kl", "correlation", "mean_label", "mean_prediction", "prevalence", "auc", "constant_auc",
           "confidence_auc", "calibration_error")
MIXING, MISMATCH, EPOCHS = 0.15, 6.0, 3
RATE, BATCH, WARMUP = 1e-3, 16, 0.03


def train_acceptance_head(pair: LoadedPair, trace: TraceSet, provenance: Provenance, *, test: TraceSet | None = None, blocks: int = 1,
                          mixing: float = MIXING, mismatch_weight: float = MISMATCH, seed: int = 0,
                          log: Log | None = None) -> tuple[AcceptanceHead, dict[str, Any]]:
    """Train on most prompts and test on the others, a fifth of them.

    Args:
        pair: whose draft reads the mixed texts.
        provenance: of the head; parameters and metrics are filled in.
        test: a trace of prompts to test on, of which those that `trace` holds too are left out; all of `trace` is learnt from then.
        blocks: D, residual blocks; 1 as in the authors' script (their best figures are of 3, which are slower on a CPU).
        mixing: share of target tokens in what the draft reads, in [0, 1).
        mismatch_weight: weight of 1 − label, positive.
        log: called with ("loss", value, epoch) and with the figures of the test.
    Returns:
        the head and a report: rows and prompts of each split, `left_out` test prompts, and of the test prompts `loss` (weighted
        cross-entropy), `constant_loss` (of the best constant), `kl` (unweighted, in nats), `correlation` of prediction and label,
        `mean_label`, `mean_prediction`; `prevalence` of "the target accepts", at the trace's temperature, its `auc`, beside
        `constant_auc` (a constant ranks nothing: .5) and `confidence_auc` (of the score C), and `intervals` of prevalence, `auc`,
        `confidence_auc` and the AUCs' difference, by a bootstrap over prompts (AUCs and intervals are None where all are accepted, or
        none); `reliability` of the predictions against the soft label, and its `calibration_error`.
    Raises:
        DraftwellError: a trace without the target's own texts, too few prompts, a draft without hidden states, NaN.
    """
    if blocks < 0 or not 0 <= mixing < 1 or mismatch_weight <= 0:
        raise DraftwellError(f"an acceptance head needs blocks >= 0, mixing in [0, 1) and a positive weight, not {blocks}, {mixing} and "
                             f"{mismatch_weight}")
    require_sklearn()
    train, tested, left_out = examples_of(pair, trace, test, mixing, seed)
    with using_threads(1):
        head = fit(train, blocks, mismatch_weight, seed, provenance, log)
        figures = figures_of(head, train, tested, mismatch_weight)
    test_trace = None if test is None else test.digest()
    report = {"blocks": blocks, "mixing": mixing, "mismatch_weight": mismatch_weight, "epochs": EPOCHS,
              "rows": {"train": len(train), "test": len(tested)},
              "prompts": {"train": np.unique(train.prompt).tolist(), "test": np.unique(tested.prompt).tolist()},
              "left_out": left_out, "test_trace": test_trace, **figures}
    metrics = {name: figures[name] for name in FIGURES if figures[name] is not None}
    if log:
        for name, value in metrics.items():
            log(name, value, 0)
    head.provenance = provenance.model_copy(update={
        "parameters": {**provenance.parameters, "blocks": blocks, "mixing": mixing, "mismatch_weight": mismatch_weight, "epochs": EPOCHS,
                       "seed": seed, "test_trace": test_trace},
        "metrics": {**provenance.metrics, **metrics}})
    return head, report


def examples_of(pair: LoadedPair, trace: TraceSet, test: TraceSet | None, mixing: float,
                seed: int) -> tuple[Examples, Examples, list[str]]:
    """Examples to learn from, examples to test on, and ids of test prompts that are left out since they are learnt from."""
    if test is None:
        return *split_by_prompt(read_mixed(pair, trace, mixing, seed), seed), []
    known = sorted(prompts_in_both(trace, test))
    tested = read_mixed(pair, test, mixing, seed)
    tested = tested.take(~np.isin(tested.prompt, known))
    if not len(tested):
        raise DraftwellError("the head would be trained on every prompt of the test trace: collect a test trace of other prompts")
    return read_mixed(pair, trace, mixing, seed), tested, known


def labels_of(examples: Examples) -> np.ndarray:
    """Soft labels `[rows]` float32 in [0, 1]: min(1, p̄/q̄); 0 where the target gives the token nothing."""
    with np.errstate(divide="ignore"):
        label: np.ndarray = np.minimum(1.0, 1.0 / examples.ratio).astype(np.float32)
    return label


def read_mixed(pair: LoadedPair, trace: TraceSet, mixing: float, seed: int) -> Examples:
    """An example for every draft token of the mixed texts; the feature group `after` is the draft's state having read it.

    `accepted` is the chance min(1, p/q) of the warped distributions: at temperature 0, whether it is the target's choice.
    """
    if "draft" not in pair.models:
        raise DraftwellError(f"pair {pair.name} has no draft model, so there is nothing to train a head on: choose a pair with one")
    rng = np.random.default_rng(seed)
    parts = [mixed_text(pair, rows, mixing, rng) for rows in target_texts(trace.read(COLUMNS))]
    if not parts:
        raise DraftwellError(f"{trace.folder} holds no text written by the target: collect with the prefix kind target")
    states, ratio, confidence, accepted, prompt = (np.concatenate(values) for values in zip(*parts, strict=True))
    for name, values in (("hidden states", states), ("ratio", ratio), ("confidence", confidence), ("chance of acceptance", accepted)):
        if np.isnan(values).any():
            raise DraftwellError(f"there is NaN in the {name}: a model's weights or dtype may be broken")
    return Examples({"after": states}, ratio, confidence, prompt, accepted=accepted)


def target_texts(table: pa.Table) -> Iterator[pa.Table]:
    """The rows of each text that the target wrote."""
    kinds, positions = table.column("kind").to_pylist(), table.column("position").to_pylist()
    starts = [i for i, position in enumerate(positions) if position == 0]
    for start, end in zip(starts, [*starts[1:], len(positions)], strict=True):
        if kinds[start] == "target":
            yield table.slice(start, end - start)


def mixed_text(pair: LoadedPair, rows: pa.Table, mixing: float,
               rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Of one text the states `[n, hidden]`, ratios, confidences, chances of acceptance and prompt ids of its n draft tokens."""
    own, drafted = (rows.column(name).to_numpy() for name in ("token", "draft_token"))
    from_draft = rng.random(len(own)) >= mixing
    prompt = rows.column("prompt_tokens")[0].as_py()
    read = (*prompt, *np.where(from_draft, drafted, own).tolist())
    model = pair.models["draft"]
    slot = model.open()
    try:
        output = model.forward([Forward("draft", slot, read, keep=len(own), prefill=True)])[0]
    finally:
        model.close(slot)
    if output.hidden is None:
        raise DraftwellError("this draft model returns no hidden states, which an acceptance head reads")
    names = np.array(rows.column("prompt_id").to_pylist())
    accepted = np.minimum(1.0, column(rows, "draft_p") / column(rows, "draft_q"))  # q of what was drafted is above 0
    columns = (output.hidden.float().cpu().numpy(), column(rows, "ratio"), column(rows, "confidence"), accepted, names)
    return tuple(values[from_draft] for values in columns)


class Network(nn.Module):
    """The head while it learns: D blocks x + SiLU(W x + b) and a linear layer, on standardised states.

    Args:
        first_logit: what it predicts before it has learnt anything.
    """

    def __init__(self, width: int, blocks: int, first_logit: float):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.last = nn.Linear(width, 1)
        nn.init.zeros_(self.last.weight)
        nn.init.constant_(self.last.bias, first_logit)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + nn.functional.silu(block(x))
        logits: Tensor = self.last(x).squeeze(-1)
        return logits


def fit(train: Examples, blocks: int, mismatch_weight: float, seed: int, provenance: Provenance, log: Log | None = None) -> AcceptanceHead:
    """Train for `EPOCHS` epochs."""
    x = torch.from_numpy(train.features(("after",)))
    y = torch.from_numpy(labels_of(train))
    mean, scale = x.mean(0), x.std(0, correction=0).clamp(min=1e-6)
    x = (x - mean) / scale
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = Network(x.shape[1], blocks, best_constant(train, mismatch_weight))
    optimiser = torch.optim.AdamW(network.parameters(), lr=RATE, weight_decay=0.0)
    steps = EPOCHS * math.ceil(len(x) / BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: rate_at(step, steps))
    for epoch in range(EPOCHS):
        total = 0.0
        for rows in torch.randperm(len(x), generator=generator).split(BATCH):
            optimiser.zero_grad()
            loss = weighted_loss(network(x[rows]), y[rows], mismatch_weight)
            loss.backward()
            optimiser.step()
            schedule.step()
            total += float(loss.detach()) * len(rows)
        if log:
            log("loss", total / len(x), epoch)
    blocks_made: list[Any] = list(network.blocks)
    layers = [(block.weight.detach(), block.bias.detach()) for block in blocks_made]
    return AcceptanceHead(mean, scale, layers, network.last.weight.detach()[0], float(network.last.bias.detach()), provenance)


def best_constant(examples: Examples, mismatch_weight: float) -> float:
    """The logit that has the least loss where all get the same."""
    mean = float(labels_of(examples).mean())
    return math.log(max(mean, 1e-6) / max(mismatch_weight * (1 - mean), 1e-6))


def rate_at(step: int, steps: int) -> float:
    """Share of the learning rate: linear warm-up over the first steps, then a cosine to 0."""
    warmup = max(1, round(WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def weighted_loss(logits: Tensor, labels: Tensor, mismatch_weight: float) -> Tensor:
    """−Σ[y·log f + w·(1 − y)·log(1 − f)] / Σ[y + w·(1 − y)], f = sigmoid(logits) (the authors' normalisation).

    Args:
        logits, labels: `[rows]` float32, labels in [0, 1].
    """
    rejected = mismatch_weight * (1 - labels)
    total = (labels * nn.functional.softplus(-logits) + rejected * nn.functional.softplus(logits)).sum()
    return total / (labels + rejected).sum()


@torch.no_grad()
def figures_of(head: AcceptanceHead, train: Examples, test: Examples, mismatch_weight: float) -> dict[str, Any]:
    """What the head is worth on prompts that it never saw, against the best constant of the training prompts."""
    y = torch.from_numpy(labels_of(test))
    logits = head.logit(torch.from_numpy(test.features(("after",))))
    constant = torch.full_like(y, best_constant(train, mismatch_weight))
    entropy = torch.special.entr(y) + torch.special.entr(1 - y)
    predicted = logits.sigmoid()
    cross = y * nn.functional.softplus(-logits) + (1 - y) * nn.functional.softplus(logits)
    spread = float(predicted.std(correction=0) * y.std(correction=0))
    moment = float(((predicted - predicted.mean()) * (y - y.mean())).mean())
    bins = reliability_bins(y.numpy(), predicted.numpy())
    return {"loss": float(weighted_loss(logits, y, mismatch_weight)), "constant_loss": float(weighted_loss(constant, y, mismatch_weight)),
            "kl": float((cross - entropy).mean()), "correlation": moment / spread if spread > 0 else 0.0,
            "mean_label": float(y.mean()), "mean_prediction": float(predicted.mean()), **ranking_of(test, logits.numpy()),
            "reliability": bins, "calibration_error": calibration_error(bins)}


def ranking_of(test: Examples, score: np.ndarray) -> dict[str, Any]:
    """How well a score, and C beside it, rank accepted tokens before rejected ones.

    At temperature > 0 a token is accepted with some chance: it counts as both, each weighing its chance.
    """
    assert test.accepted is not None
    chance = test.accepted
    known = {"prevalence": float(chance.mean())}
    label = np.repeat([True, False], len(test))
    weight = np.concatenate([chance, 1 - chance])
    kept = weight > 0
    label, weight = label[kept], weight[kept]
    if label.all() or not label.any():
        return {**known, "auc": None, "constant_auc": None, "confidence_auc": None, "intervals": None}
    scores, confidence = np.tile(score, 2)[kept], np.tile(test.confidence, 2)[kept]
    names, prompt = np.unique(np.tile(test.prompt, 2)[kept], return_inverse=True)
    ends = intervals(label, scores, confidence, prompt, weight=weight) if len(names) > 1 else None
    return {**known, "auc": auc_of(label, scores, weight), "constant_auc": 0.5, "confidence_auc": auc_of(label, confidence, weight),
            "intervals": ends and {"prevalence": ends["prevalence"], "auc": ends["auc"], "confidence_auc": ends["baseline_auc"],
                                   "gain": ends["gain"]}}
