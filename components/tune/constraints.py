"""How far a choice keeps to its constraints: losslessness, quality, cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftwell.components.prompts.prompt import Prompt
from draftwell.components.tune.evaluator import Evaluate, Measured, QualityOf
from draftwell.components.tune.settings import Constraints
from draftwell.serving.runtime.strategies import StrategyChoice, find_strategy


@dataclass(frozen=True)
class ConstraintChecker:
    """Quality and cost of configurations, compared with limits.

    Args:
        quality: judges outputs; None where nothing lossy is measured.
        evaluate: measures the vanilla SD that a choice which was not replayed is compared with,
            where cost is limited.
        vanilla: vanilla SD at its fastest gamma, by replay; None without a draft model.
        replayed: choice → its target calls per token by replay of the same texts, that of `vanilla`
            among them.
    """

    constraints: Constraints
    quality: QualityOf | None
    evaluate: Evaluate | None = None
    vanilla: StrategyChoice | None = None
    replayed: Mapping[StrategyChoice, float] = field(default_factory=dict)

    def metrics(
        self, choice: StrategyChoice, prompts: Sequence[Prompt], measured: Measured, plain: Measured
    ) -> dict[str, Any]:
        """`lossless`, `quality_loss` (0 where lossless), `rouge_l_lost` (None where lossless, or
        without references), `surprisal_shift` (|nats a token|; None where lossless or greedy),
        `cost_ratio` (None without a draft model, and of a choice that was not replayed where cost
        is not limited), and the `objection`: which constraint is broken, or None.

        Args:
            measured, plain: of the choice and of plain decoding on the same prompts.
        """
        found: dict[str, Any] = {
            "lossless": find_strategy(choice.name).lossless,
            "quality_loss": 0.0,
            "rouge_l_lost": None,
            "surprisal_shift": None,
            "cost_ratio": self.cost_ratio(choice, prompts, measured),
        }
        if not found["lossless"]:
            assert self.quality is not None
            found |= losses(self.quality, prompts, measured, plain)
        return {**found, "objection": self.constraints.objection(found)}

    def cost_ratio(
        self, choice: StrategyChoice, prompts: Sequence[Prompt], measured: Measured
    ) -> float | None:
        """Target calls per token over those of vanilla SD on the same texts: of the trace where
        both were replayed, else of `prompts`."""
        if self.vanilla is None:
            return None
        if choice in self.replayed:
            return self.replayed[choice] / self.replayed[self.vanilla]
        if self.constraints.max_cost_ratio is None or self.evaluate is None:
            return None
        [base] = self.evaluate([self.vanilla], prompts, fresh=True)
        return measured.calls_per_token / base.calls_per_token


def losses(
    quality: QualityOf, prompts: Sequence[Prompt], measured: Measured, plain: Measured
) -> dict[str, float | None]:
    """What a lossy choice loses to plain decoding: the share of the target's own tokens, points of
    ROUGE-L, and by how many nats a token its samples are more or less likely."""
    ours, theirs = quality(prompts, measured), quality(prompts, plain)
    lost = shift = None
    if ours.rouge_l is not None and theirs.rouge_l is not None:
        lost = theirs.rouge_l - ours.rouge_l
    if ours.surprisal is not None and theirs.surprisal is not None:
        shift = abs(ours.surprisal - theirs.surprisal)
    loss = max(0.0, 1 - ours.share / theirs.share)
    return {"quality_loss": loss, "rouge_l_lost": lost, "surprisal_shift": shift}
