"""An estimate of CSD and of lossy SD on a trace, which orders their configurations before any is
measured.

A rescued token stands where the target would have written another, so the text continues
differently from there, and no trace says how. The estimate supposes that it continues as the
recorded text does: wherever the rule would keep the draft's token (CSD, Eq. 3, with the memory as
it is) the draft counts as right, and vanilla SD is replayed over that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from draftwell.components.replay.replay import replay_strategy
from draftwell.components.replay.texts import COLUMNS, Texts, target_rows
from draftwell.components.tune.evidence import Trial
from draftwell.components.tune.search.space import combinations
from draftwell.serving.artifacts.correction_memory import CorrectionMemory
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.runtime.strategies import StrategyChoice, StrategyResources

RESCUING = ("csd", "lossy_sd")
"""Strategies that are vanilla SD but for tokens that they rescue."""
REJECTION_COLUMNS = (*COLUMNS, "draft_token", "draft_raw_p", "correction_p")


@dataclass(frozen=True)
class Rejection:
    """A position at which the target writes another token than the draft.

    Args:
        place: index in the text's continuation, at least 1: the pass over the prompt gives the
            first token.
        drafted, correction: the draft's token and the target's.
        ratio: raw p(drafted) / p(correction), 0..1.
    """

    place: int
    drafted: int
    correction: int
    ratio: float


@dataclass(frozen=True)
class RescueModel:
    """The rejections along a trace's greedy texts, for many estimates.

    Args:
        rejections: of each text, in the order of `texts`.
        resources: with CSD's memory, where there is one; its special tokens are never rescued.
        max_tokens: tokens per text that are replayed.
    """

    texts: Texts
    rejections: list[list[Rejection]]
    resources: StrategyResources
    profile: HardwareProfile
    max_tokens: int

    @classmethod
    def read(
        cls,
        trace: TraceSet,
        texts: Texts,
        resources: StrategyResources,
        profile: HardwareProfile,
        max_tokens: int,
    ) -> RescueModel | None:
        """The model of a trace; None of one whose rows do not say how likely the target finds the
        draft's tokens."""
        columns, parts = target_rows(trace, REJECTION_COLUMNS)
        if any(None in columns[name] for name in REJECTION_COLUMNS[len(COLUMNS) :]):
            return None

        def found(part: slice) -> list[Rejection]:
            rows = zip(
                columns["draft_token"][part],
                columns["token"][part],
                columns["draft_raw_p"][part],
                columns["correction_p"][part],
                strict=True,
            )
            return [
                Rejection(place, drafted, token, p / best)
                for place, (drafted, token, p, best) in enumerate(rows)
                if place and drafted != token
            ]

        return cls(texts, [found(part) for part in parts], resources, profile, max_tokens)

    def estimate(self, choice: StrategyChoice) -> Trial:
        """What is to be expected of one configuration, decoded greedily.

        Its divergence is the share of positions at which a token would be rescued, less those that
        no draft reaches.
        """
        stays = self.rule(choice)
        rescued = [{found.place for found in text if stays(found)} for text in self.rejections]
        texts = [
            replace(
                text,
                tokens=[
                    [text.output[i]] if i in places else row for i, row in enumerate(text.tokens)
                ],
            )
            for text, places in zip(self.texts.texts, rescued, strict=True)
        ]
        result = replay_strategy(
            replace(self.texts, texts=texts),
            "vanilla_sd",
            {"num_speculative_tokens": choice.parameters["num_speculative_tokens"]},
            self.resources,
            self.profile,
            max_tokens=self.max_tokens,
            extend=True,
        )
        positions = right = kept = 0
        for text, places in zip(texts, rescued, strict=True):
            for i in range(1, min(len(text.output), self.max_tokens)):
                positions, right, kept = (
                    positions + 1,
                    right + (text.tokens[i][0] == text.output[i]),
                    kept + (i in places),
                )
        reached = min(1.0, result.stats.accepted / max(1, right))
        return Trial.of(
            choice,
            predicted_seconds_per_token=result.predicted_seconds_per_token,
            exact=False,
            target_calls_per_token=result.stats.calls_per_token,
            divergence=reached * kept / max(1, positions),
            source="estimated",
        )

    def rule(self, choice: StrategyChoice) -> Callable[[Rejection], bool]:
        """Whether a configuration rescues, as `draftwell.serving.runtime.acceptance.rescue`
        does."""
        memory = (
            self.resources.artifacts.get(CorrectionMemory.kind) if choice.name == "csd" else None
        )
        fewest, tau = choice.parameters.get("min_count", 0), choice.parameters["tau"]
        protected = self.texts.stop_token_ids | self.resources.special_tokens

        def stays(found: Rejection) -> bool:
            known = memory is None or memory.count(found.drafted, found.correction) >= fewest  # type: ignore[attr-defined]
            return (
                known and found.ratio >= tau and not {found.drafted, found.correction} & protected
            )

        return stays


def fastest_for_losses(trials: Sequence[Trial], most: float | None, count: int) -> list[Trial]:
    """The fastest of all that lose at most `most`, of all that lose at most a part of it, and so
    on: `count` of them at most, once each.

    Several, because an estimate on few texts may be wrong about the loss, and what loses too much
    is not chosen at all.

    Args:
        most: relative loss of the target's own tokens; None: no limit.
    """
    limits = [None if most is None else most * (count - i) / count for i in range(count)]
    ranked = sorted(trials, key=lambda trial: trial.predicted_seconds_per_token)
    best = [
        next(
            (trial for trial in ranked if limit is None or (trial.divergence or 0.0) <= limit), None
        )
        for limit in limits
    ]
    return list({trial.choice: trial for trial in best if trial is not None}.values())


def estimate_rescues(names: Sequence[str], model: RescueModel | None) -> list[Trial]:
    """Estimates of the whole spaces of those among `names` that rescue; none without a model."""
    return (
        []
        if model is None
        else [
            model.estimate(choice)
            for name in names
            if name in RESCUING
            for choice in combinations(name)
        ]
    )
