"""How far a choice keeps to its constraints: losslessness, quality, cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from draftwell.components.prompts.prompt import Prompt
from draftwell.components.report.intervals import lower_bound
from draftwell.components.tune.evaluator import Evaluate, Measured, Quality, QualityOf, measure_all
from draftwell.components.tune.settings import Constraints
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.strategies import PLAIN, StrategyChoice, find_strategy


@dataclass(frozen=True)
class ConstraintViolation:
    """Why a configuration may not be chosen.

    Args:
        sure: it breaks the limit even at the best end of what its prompts leave possible
            (`ConstraintChecker.least`); else more prompts may clear it.
    """

    why: str
    sure: bool


@dataclass(frozen=True)
class ConstraintChecker:
    """Quality and cost of configurations, compared with limits.

    Args:
        quality: judges outputs; None where nothing lossy is measured.
        vanilla_calls: target calls per token of vanilla SD at its fastest gamma, by replay; None
            without a draft model.
        replayed: choice → its target calls per token by replay of the same texts, which go before
            measured ones.
        vanilla: measures that vanilla SD on the prompts that another choice was measured on; asked
            only where cost is limited.
    """

    constraints: Constraints
    quality: QualityOf | None
    vanilla_calls: float | None = None
    replayed: Mapping[StrategyChoice, float] = field(default_factory=dict)
    vanilla: VanillaBaseline | None = None

    @property
    def baseline(self) -> VanillaBaseline | None:
        """What costs are relative to, where they are limited."""
        return self.vanilla if self.constraints.max_cost_ratio is not None else None

    def metrics(
        self, choice: StrategyChoice, prompts: Sequence[Prompt], measured: Measured, plain: Measured
    ) -> dict[str, Any]:
        """`lossless`, `quality_loss` (0 where lossless), `rouge_l_lost` (None where lossless, or
        without references), `surprisal_shift` (|nats a token|; None where lossless or greedy) and
        `cost_ratio` (None without a draft model, and of a choice that was not replayed where cost
        is not limited).

        Args:
            measured, plain: of the choice and of plain decoding on the same prompts.
        Raises:
            DraftwellError: a quality that is not a number (`quality_not_finite`).
        """
        lossless = find_strategy(choice.name).lossless
        loss, lost, shift = (
            (0.0, None, None) if lossless else self.losses(choice, prompts, measured, plain)
        )
        return {
            "lossless": lossless,
            "quality_loss": loss,
            "rouge_l_lost": lost,
            "surprisal_shift": shift,
            "cost_ratio": self.cost_ratio(choice, measured.calls_per_token, prompts),
        }

    def cost_ratio(
        self,
        choice: StrategyChoice,
        calls: float,
        prompts: Sequence[Prompt],
        max_tokens: int | None = None,
    ) -> float | None:
        """Target calls per token over those of vanilla SD on the same texts: of the trace where
        both were replayed, else of `prompts`.

        Args:
            calls: per token, as measured on `prompts` with this length.
        """
        replayed = self.replayed.get(choice)
        if replayed is not None:
            return replayed / self.vanilla_calls if self.vanilla_calls else None
        return (
            calls / self.baseline(prompts, max_tokens).calls_per_token
            if self.baseline is not None
            else None
        )

    def losses(
        self, choice: StrategyChoice, prompts: Sequence[Prompt], measured: Measured, plain: Measured
    ) -> tuple[float, float | None, float | None]:
        """Share of the target's own tokens, and points of ROUGE-L, that a lossy choice loses to
        plain decoding; and by how many nats a token its samples are more or less likely than plain
        decoding's."""
        assert self.quality is not None
        ours, theirs = self.quality(prompts, measured), self.quality(prompts, plain)
        check_finite(choice, ours)
        check_finite(PLAIN, theirs)
        lost = (
            None
            if ours.rouge_l is None or theirs.rouge_l is None
            else theirs.rouge_l - ours.rouge_l
        )
        shift = (
            None
            if ours.surprisal is None or theirs.surprisal is None
            else abs(ours.surprisal - theirs.surprisal)
        )
        return max(0.0, 1 - ours.share / theirs.share), lost, shift

    def objection(
        self, choice: StrategyChoice, prompts: Sequence[Prompt], measured: Measured, plain: Measured
    ) -> str | None:
        """Why a configuration may not be chosen, or None."""
        return self.constraints.objection(self.metrics(choice, prompts, measured, plain))

    def violation(
        self, choice: StrategyChoice, prompts: Sequence[Prompt], measured: Measured, plain: Measured
    ) -> ConstraintViolation | None:
        """As `objection`, for prompts that may be too few to decide."""
        why = self.objection(choice, prompts, measured, plain)
        if why is None:
            return None
        return ConstraintViolation(
            why,
            self.constraints.objection(self.least(choice, prompts, measured, plain)) is not None,
        )

    def least(
        self, choice: StrategyChoice, prompts: Sequence[Prompt], measured: Measured, plain: Measured
    ) -> dict[str, Any]:
        """`metrics` in which a lossy choice's losses are as small as these prompts leave possible
        (lower bounds, 5 %)."""
        metrics = self.metrics(choice, prompts, measured, plain)
        if not metrics["lossless"]:
            ours, theirs = self.by_prompt(prompts, measured), self.by_prompt(prompts, plain)
            shares = [
                column
                for judged, result in ((ours, measured), (theirs, plain))
                for column in (times_tokens([q.share for q in judged], result), result.tokens)
            ]
            metrics["quality_loss"] = lower_bound(lambda sums: 1 - ratio_of_means(sums), shares)
            if metrics["surprisal_shift"] is not None:
                nats = [
                    column
                    for judged, result in ((ours, measured), (theirs, plain))
                    for column in (
                        times_tokens([q.surprisal or 0.0 for q in judged], result),
                        result.tokens,
                    )
                ]
                turned = [*nats[2:], *nats[:2]]
                metrics["surprisal_shift"] = max(
                    0.0, *(lower_bound(difference_of_means, columns) for columns in (nats, turned))
                )
            lost = [
                b.rouge_l - a.rouge_l
                for a, b in zip(ours, theirs, strict=True)
                if a.rouge_l is not None and b.rouge_l is not None
            ]
            if lost:
                metrics["rouge_l_lost"] = lower_bound(
                    lambda sums: sums[0] / sums[1], [lost, [1.0] * len(lost)]
                )
        if self.baseline is not None and choice not in self.replayed:
            base = self.baseline(prompts)
            metrics["cost_ratio"] = lower_bound(
                ratio_of_means, [measured.calls, measured.tokens, base.calls, base.tokens]
            )
        return metrics

    def by_prompt(self, prompts: Sequence[Prompt], measured: Measured) -> list[Quality]:
        """The quality of every output by itself."""
        assert self.quality is not None
        return [
            self.quality([prompt], Measured([seconds], [output], [calls]))
            for prompt, seconds, output, calls in zip(
                prompts, measured.seconds, measured.outputs, measured.calls, strict=True
            )
        ]


class VanillaBaseline:
    """Vanilla SD on the prompts of other choices; each prompt is measured once.

    Args:
        choice: vanilla SD at its fastest gamma.
    """

    def __init__(self, evaluate: Evaluate, choice: StrategyChoice):
        self.evaluate, self.choice = evaluate, choice
        self._known: dict[tuple[str, int | None], Measured] = {}

    def __call__(self, prompts: Sequence[Prompt], max_tokens: int | None = None) -> Measured:
        """What it took on these prompts, in order."""
        new = [prompt for prompt in prompts if (prompt.id, max_tokens) not in self._known]
        if new:
            [found] = measure_all(
                self.evaluate, [self.choice], new, max_tokens=max_tokens, fresh=True
            )
            for prompt, seconds, output, calls in zip(
                new, found.seconds, found.outputs, found.calls, strict=True
            ):
                self._known[prompt.id, max_tokens] = Measured([seconds], [output], [calls])
        return reduce(add, (self._known[prompt.id, max_tokens] for prompt in prompts))


def times_tokens(values: Sequence[float], measured: Measured) -> list[float]:
    """What is a token's mean in each prompt, summed over its tokens."""
    return [value * tokens for value, tokens in zip(values, measured.tokens, strict=True)]


def ratio_of_means(sums: np.ndarray) -> np.ndarray:
    """Of sums `[4, ...]`: values and tokens of a choice, then of what it is compared with."""
    ratio: np.ndarray = (sums[0] / sums[1]) / (sums[2] / sums[3])
    return ratio


def difference_of_means(sums: np.ndarray) -> np.ndarray:
    """Of the same sums."""
    difference: np.ndarray = sums[0] / sums[1] - sums[2] / sums[3]
    return difference


def check_finite(choice: StrategyChoice, quality: Quality) -> None:
    """Refuse a quality that is not a number: a comparison with NaN would hold or fail for no
    reason."""
    if not all(
        math.isfinite(value)
        for value in (quality.share, quality.rouge_l, quality.surprisal)
        if value is not None
    ):
        raise DraftwellError(
            f"{choice}: its quality is not a number: measure again, or leave lossy strategies out",
            code="quality_not_finite",
        )
