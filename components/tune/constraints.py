"""What a tuner's choice must keep to: losslessness, quality, cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from components.bench.settings import QUALITY_FLOOR
from components.prompts.prompt import Prompt
from components.report.intervals import lower_bound
from components.tune.evaluator import Config, Evaluate, Measured, Quality, QualityOf, label_of, measure_all
from serving.errors import DraftwellError
from serving.runtime.strategies import find_strategy

ROUGE_POINTS = QUALITY_FLOOR.max_rouge_l_loss
"""ROUGE-L points that a lossy choice may lose to plain decoding, where prompts have references (docs/benchmarks.md)."""


@dataclass(frozen=True)
class Constraints:
    """Limits of a choice.

    Args:
        lossless_only: leave lossy strategies out.
        max_quality_loss: of a lossy one, 0..1: by how much its share of tokens that are the target's argmax may lie below plain
            decoding's, as a part of that.
        max_cost_ratio: target calls per token over those of vanilla SD at its fastest gamma; None sets no limit.
    """

    lossless_only: bool = True
    max_quality_loss: float = round(1 - QUALITY_FLOOR.min_argmax_share, 9)
    max_cost_ratio: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.max_quality_loss <= 1:
            raise DraftwellError(f"the quality that may be lost is a share from 0 to 1, not {self.max_quality_loss}")
        if self.max_cost_ratio is not None and not 0 < self.max_cost_ratio < math.inf:
            raise DraftwellError(f"a cost ratio is a positive number, not {self.max_cost_ratio}")

    def objection(self, figures: Mapping[str, Any]) -> str | None:
        """Why figures of `Judge.figures` break a limit, or None."""
        if not figures["lossless"] and self.lossless_only:
            return "it is lossy, and only lossless strategies are allowed"
        loss, lost, cost = figures["quality_loss"], figures["rouge_l_lost"], figures["cost_ratio"]
        if loss > self.max_quality_loss:
            return f"it loses {loss:.3f} of the target's own tokens, and at most {self.max_quality_loss:g} is allowed"
        if lost is not None and lost > ROUGE_POINTS:
            return f"it loses {lost:.1f} points of ROUGE-L, and at most {ROUGE_POINTS:g} are allowed"
        if self.max_cost_ratio is not None and cost is not None and cost > self.max_cost_ratio:
            return f"it costs {cost:.2f} times the target calls of vanilla SD, and at most {self.max_cost_ratio:g} times is allowed"
        return None


@dataclass(frozen=True)
class ConstraintViolation:
    """Why a config may not be chosen.

    Args:
        sure: it would not be allowed if it were as good as its prompts leave possible (`Judge.least`); else more of them may clear it.
    """

    why: str
    sure: bool


class ConstraintChecker:
    """Quality and cost of configs.

    Args:
        quality: judges outputs; None where nothing lossy is measured.
        vanilla_calls: target calls per token of vanilla SD at its fastest gamma, by replay; None without a draft model.
        replayed: `contest.label_of` a config → its target calls per token by replay of the same texts, which go before measured ones.
        beside: measures that vanilla SD on the prompts that another config was measured on; asked only where cost is limited.
    """

    def __init__(self, constraints: Constraints, quality: QualityOf | None, vanilla_calls: float | None, replayed: Mapping[str, float],
                 beside: VanillaBaseline | None = None):
        self.constraints, self.quality, self.vanilla_calls, self.replayed = constraints, quality, vanilla_calls, replayed
        self.beside = beside if constraints.max_cost_ratio is not None else None

    def figures(self, config: Config, prompts: Sequence[Prompt], measured: Measured, plain: Measured) -> dict[str, Any]:
        """`lossless`, `quality_loss` (0 where lossless), `rouge_l_lost` (None where lossless, or without references) and
        `cost_ratio` (None without a draft model, and of a config that was not replayed where cost is not limited).

        Args:
            measured, plain: of the config and of plain decoding on the same prompts.
        Raises:
            DraftwellError: a quality that is no number.
        """
        lossless = find_strategy(config[0]).lossless
        loss, lost = (0.0, None) if lossless else self.losses(config, prompts, measured, plain)
        return {"lossless": lossless, "quality_loss": loss, "rouge_l_lost": lost,
                "cost_ratio": self.cost_ratio(config, measured.calls_per_token, prompts)}

    def cost_ratio(self, config: Config, calls: float, prompts: Sequence[Prompt], max_tokens: int | None = None) -> float | None:
        """Target calls per token over those of vanilla SD on the same texts: of the trace where both were replayed, else of `prompts`.

        Args:
            calls: per token, as measured on `prompts` with this length.
        """
        replayed = self.replayed.get(label_of(config))
        if replayed is not None:
            return replayed / self.vanilla_calls if self.vanilla_calls else None
        return calls / self.beside(prompts, max_tokens).calls_per_token if self.beside is not None else None

    def losses(self, config: Config, prompts: Sequence[Prompt], measured: Measured, plain: Measured) -> tuple[float, float | None]:
        """Share of the target's own tokens, and points of ROUGE-L, that a lossy config loses to plain decoding."""
        assert self.quality is not None
        ours, theirs = self.quality(prompts, measured), self.quality(prompts, plain)
        check(config, ours)
        check(("autoregressive", {}), theirs)
        lost = None if ours.rouge_l is None or theirs.rouge_l is None else theirs.rouge_l - ours.rouge_l
        return max(0.0, 1 - ours.share / theirs.share), lost

    def objection(self, config: Config, prompts: Sequence[Prompt], measured: Measured, plain: Measured) -> str | None:
        """Why a config may not be chosen, or None."""
        return self.constraints.objection(self.figures(config, prompts, measured, plain))

    def fit(self, config: Config, prompts: Sequence[Prompt], measured: Measured, plain: Measured) -> ConstraintViolation | None:
        """As `objection`, for prompts that may be too few to tell."""
        why = self.objection(config, prompts, measured, plain)
        if why is None:
            return None
        return ConstraintViolation(why, self.constraints.objection(self.least(config, prompts, measured, plain)) is not None)

    def least(self, config: Config, prompts: Sequence[Prompt], measured: Measured, plain: Measured) -> dict[str, Any]:
        """`figures` in which a lossy config's losses are as small as these prompts leave possible (lower bounds, 5 %)."""
        figures = self.figures(config, prompts, measured, plain)
        if not figures["lossless"]:
            ours, theirs = self.by_prompt(prompts, measured), self.by_prompt(prompts, plain)
            figures["quality_loss"] = lower_bound(
                share_lost, [tokens_matching_target(ours, measured), measured.tokens, tokens_matching_target(theirs, plain), plain.tokens]
            )
            lost = [b.rouge_l - a.rouge_l for a, b in zip(ours, theirs, strict=True) if a.rouge_l is not None and b.rouge_l is not None]
            if lost:
                figures["rouge_l_lost"] = lower_bound(lambda sums: sums[0] / sums[1], [lost, [1.0] * len(lost)])
        if self.beside is not None and label_of(config) not in self.replayed:
            base = self.beside(prompts)
            figures["cost_ratio"] = lower_bound(calls_over, [measured.calls, measured.tokens, base.calls, base.tokens])
        return figures

    def by_prompt(self, prompts: Sequence[Prompt], measured: Measured) -> list[Quality]:
        """The quality of every output alone."""
        assert self.quality is not None
        return [self.quality([prompt], Measured([seconds], [output], [calls])) for prompt, seconds, output, calls in
                zip(prompts, measured.seconds, measured.outputs, measured.calls, strict=True)]


class VanillaBaseline:
    """Vanilla SD on the prompts of others; each prompt is measured once.

    Args:
        config: vanilla SD at its fastest gamma.
    """

    def __init__(self, evaluate: Evaluate, config: Config):
        self.evaluate, self.config = evaluate, config
        self._known: dict[tuple[str, int | None], Measured] = {}

    def __call__(self, prompts: Sequence[Prompt], max_tokens: int | None = None) -> Measured:
        """Its figures on these prompts, in order."""
        new = [prompt for prompt in prompts if (prompt.id, max_tokens) not in self._known]
        if new:
            [found] = measure_all(self.evaluate, [self.config], new, max_tokens=max_tokens, fresh=True)
            for prompt, seconds, output, calls in zip(new, found.seconds, found.outputs, found.calls, strict=True):
                self._known[prompt.id, max_tokens] = Measured([seconds], [output], [calls])
        return reduce(add, (self._known[prompt.id, max_tokens] for prompt in prompts))


def tokens_matching_target(qualities: Sequence[Quality], measured: Measured) -> list[float]:
    """Of every prompt's tokens those that are the target's argmax."""
    return [quality.share * tokens for quality, tokens in zip(qualities, measured.tokens, strict=True)]


def calls_over(sums: np.ndarray) -> np.ndarray:
    """Cost ratio of sums: target calls and tokens of a config, then of vanilla SD."""
    ratio: np.ndarray = (sums[0] / sums[1]) / (sums[2] / sums[3])
    return ratio


def share_lost(sums: np.ndarray) -> np.ndarray:
    """`Judge.losses`' share of sums: kept tokens and tokens of a config, then of plain decoding."""
    lost: np.ndarray = 1 - (sums[0] / sums[1]) / (sums[2] / sums[3])
    return lost


def check(config: Config, quality: Quality) -> None:
    """Refuse a quality that is no number: a comparison with NaN would hold or fail for no reason."""
    if not math.isfinite(quality.share) or (quality.rouge_l is not None and not math.isfinite(quality.rouge_l)):
        raise DraftwellError(f"{label_of(config)}: its quality is not a number: measure again, or leave lossy strategies out")
