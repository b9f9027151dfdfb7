"""What a tuner's choice must keep to: losslessness, quality, cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from components.contest import Config, Measured, Quality, QualityOf, label_of
from components.prompts import Prompt
from serving.runtime.strategies import find_strategy
from serving.runtime.types import DraftwellError

ROUGE_POINTS = 2.0
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
    max_quality_loss: float = 0.1
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


class Judge:
    """Quality and cost of configs.

    Args:
        quality: judges outputs; None where nothing lossy is measured.
        vanilla_calls: target calls per token of vanilla SD at its fastest gamma; None without a draft model.
        replayed: `contest.label_of` a config → its target calls per token by replay, which go before measured ones.
    """

    def __init__(self, constraints: Constraints, quality: QualityOf | None, vanilla_calls: float | None, replayed: Mapping[str, float]):
        self.constraints, self.quality, self.vanilla_calls, self.replayed = constraints, quality, vanilla_calls, replayed

    def figures(self, config: Config, prompts: Sequence[Prompt], measured: Measured, plain: Measured) -> dict[str, Any]:
        """`lossless`, `quality_loss` (0 where lossless), `rouge_l_lost` (None where lossless, or without references) and
        `cost_ratio` (None without a draft model).

        Args:
            measured, plain: of the config and of plain decoding on the same prompts.
        Raises:
            DraftwellError: a quality that is no number.
        """
        lossless = find_strategy(config[0]).lossless
        loss, lost = (0.0, None) if lossless else self.losses(config, prompts, measured, plain)
        calls = self.replayed.get(label_of(config), measured.calls_per_token)
        return {"lossless": lossless, "quality_loss": loss, "rouge_l_lost": lost,
                "cost_ratio": calls / self.vanilla_calls if self.vanilla_calls else None}

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


def check(config: Config, quality: Quality) -> None:
    """Refuse a quality that is no number: a comparison with NaN would hold or fail for no reason."""
    if not math.isfinite(quality.share) or (quality.rouge_l is not None and not math.isfinite(quality.rouge_l)):
        raise DraftwellError(f"{label_of(config)}: its quality is not a number: measure again, or leave lossy strategies out")
