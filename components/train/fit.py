"""One training loop for everything that is learned by gradient steps: distilled drafts, EAGLE-3
heads, acceptance heads and Medusa's heads.

A budget of minutes ends a run on time on any machine; one of tokens or of updates ends it with the
same weights every time. The learning rate is a cosine over the budget, after a linear warm-up.

A run may keep checkpoints. One that was killed resumes from its last checkpoint,
at the same batch of the same pass. Under a budget of tokens or updates, on the same machine and
number of threads, it ends with the weights and curves of an unbroken run, bit for bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from draftwell.components.train.checkpoint import Checkpoint
from draftwell.serving.errors import DraftwellError

Say = Callable[[str], None]
Batch = TypeVar("Batch")
Parts = Mapping[str, float]
"""The parts of a loss, or figures of a measurement, by name."""


def silent(*_: object) -> None:
    """Say nothing."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """When training ends, and how its updates are made.

    Args:
        minutes: training time of this run and all runs that it resumes; ignored where `tokens` or
            `updates` is given.
        tokens: tokens to train on, each as often as it is seen.
        updates: gradient steps, before `tokens`.
        peak_rate, final_rate: of the cosine of learning rates.
        warmup_steps: steps over which the rate rises from 0.
        betas: of AdamW.
        largest_gradient: norm that gradients are cut to.
        save_seconds: time between two checkpoints.
        measure_steps: steps between two measurements on what is held out.
    """

    minutes: float = 60.0
    tokens: int | None = None
    updates: int | None = None
    peak_rate: float = 1e-3
    final_rate: float = 0.0
    warmup_steps: int = 60
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.98)
    largest_gradient: float = 1.0
    save_seconds: float = 300.0
    measure_steps: int = 200

    def identity(self) -> dict[str, Any]:
        """All settings that weights depend on: not when training ends, as more time continues it,
        nor how often it is saved and measured."""
        others = {"minutes", "tokens", "updates", "save_seconds", "measure_steps"}
        return {name: value for name, value in asdict(self).items() if name not in others}

    def spent(self, progress: Mapping[str, Any]) -> float:
        """Share of the budget that is used up."""
        if self.updates is not None:
            return float(progress["steps"] / self.updates)
        if self.tokens is not None:
            return float(progress["tokens"] / self.tokens)
        return float(progress["minutes"] / self.minutes)

    def rate(self, progress: Mapping[str, Any]) -> float:
        """Learning rate of the next step."""
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, self.spent(progress))))
        warm = min(1.0, (progress["steps"] + 1) / self.warmup_steps)
        return (self.final_rate + (self.peak_rate - self.final_rate) * cosine) * warm


@dataclass(frozen=True)
class Passes(Generic[Batch]):
    """What is learned from.

    Args:
        batches: those of the pass with this number.
        count: tokens of a batch.
    """

    batches: Callable[[int], Sequence[Batch]]
    count: Callable[[Batch], int]


def fit(
    model: nn.Module,
    loss: Callable[[Batch, int], tuple[Tensor, Parts]],
    budget: Budget,
    passes: Passes[Batch],
    *,
    measure: Callable[[], Parts] = dict,
    checkpoint: Checkpoint | None = None,
    say: Say = silent,
) -> dict[str, Any]:
    """Train a model's weights that require gradients until the budget is used; a finished run that
    is resumed returns at once.

    Args:
        loss: of a batch at a step, a scalar with its parts. What it draws depends on the step
            alone, so that a resumed run draws the same.
        measure: figures on what is held out, kept every `measure_steps` with the parts' means.
    Returns:
        steps, tokens, minutes, passes, position in the pass, and `curves`: name → pairs of step
        and value.
    Raises:
        DraftwellError: the checkpoint cannot be read, or training diverged.
    """
    optimizer = optimizer_of(model, budget)
    progress = (checkpoint and checkpoint.restore(model, optimizer)) or begin()
    started = time.monotonic() - 60 * progress["minutes"]
    saved = time.monotonic()
    while budget.spent(progress) < 1:
        for batch in passes.batches(progress["passes"])[progress["position"] :]:
            parts = update(optimizer, loss, batch, budget, progress)
            count_step(progress, parts, passes.count(batch))
            progress["minutes"] = (time.monotonic() - started) / 60
            if progress["steps"] % budget.measure_steps == 0:
                report(progress, budget, measure(), say)
            if checkpoint and time.monotonic() - saved >= budget.save_seconds:
                checkpoint.save(model, optimizer, progress)
                saved = time.monotonic()
            if budget.spent(progress) >= 1:
                break
        else:
            progress["passes"], progress["position"] = progress["passes"] + 1, 0
    if checkpoint:
        checkpoint.save(model, optimizer, progress)
    return {name: value for name, value in progress.items() if name != "sums"}


def optimizer_of(model: nn.Module, budget: Budget) -> torch.optim.Optimizer:
    """AdamW over the weights that require gradients."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    return torch.optim.AdamW(
        weights,
        lr=budget.peak_rate,
        betas=budget.betas,
        weight_decay=budget.weight_decay,
        fused=weights[0].device.type == "cpu",
    )


def begin() -> dict[str, Any]:
    """Progress of a run that has not begun."""
    counts = {"steps": 0, "tokens": 0, "minutes": 0.0, "passes": 0, "position": 0}
    return {**counts, "curves": {}, "sums": {}}


def count_step(progress: dict[str, Any], parts: Parts, tokens: int) -> None:
    """Add a step to the progress, with the parts of its loss to the sums since the last report."""
    progress["position"] += 1
    progress["steps"] += 1
    progress["tokens"] += tokens
    for name, value in parts.items():
        progress["sums"][name] = progress["sums"].get(name, 0.0) + value


def update(
    optimizer: torch.optim.Optimizer,
    loss: Callable[[Batch, int], tuple[Tensor, Parts]],
    batch: Batch,
    budget: Budget,
    progress: Mapping[str, Any],
) -> Parts:
    """One optimizer step on one batch; returns the parts of its loss."""
    (group,) = optimizer.param_groups
    group["lr"] = budget.rate(progress)
    value, parts = loss(batch, progress["steps"])
    if not torch.isfinite(value):
        raise DraftwellError(
            f"training diverged at step {progress['steps']} (the loss is not finite): try "
            "--set dtype=float32, or lower the learning rate; the last checkpoint is sound",
            code="training_diverged",
        )
    optimizer.zero_grad()
    value.backward()
    nn.utils.clip_grad_norm_(group["params"], budget.largest_gradient)
    optimizer.step()
    return parts


def report(progress: dict[str, Any], budget: Budget, figures: Parts, say: Say) -> None:
    """Add the means of the loss's parts since the last report, and figures of what is held out, to
    the curves."""
    step = progress["steps"]
    means = {name: total / budget.measure_steps for name, total in progress["sums"].items()}
    progress["sums"] = {}
    for name, value in {**means, **figures}.items():
        progress["curves"].setdefault(name, []).append([step, value])
    say(
        f"step {step}  {progress['minutes']:.1f} min  {progress['tokens'] / 1e6:.2f} M tokens  "
        + "  ".join(f"{name} {value:.3f}" for name, value in {**means, **figures}.items())
    )


def shuffled_rows(rows: int, batch: int, seed: int) -> Passes[Tensor]:
    """Batches of row numbers, every row once in a pass."""

    def of_pass(number: int) -> Sequence[Tensor]:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
        return torch.randperm(rows, generator=generator).split(batch)

    return Passes(of_pass, len)
