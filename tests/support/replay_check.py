"""Replay against reality: what a trace and a profile predict, beside what strategies do and how
long they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from draftwell.components.bench.interleaved import Progress
from draftwell.components.bench.runner import Config, labels_of, measure
from draftwell.components.bench.settings import BenchSettings
from draftwell.components.prompts.prompt import Prompt
from draftwell.components.replay.replay import replay_strategy
from draftwell.components.replay.texts import Texts
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.session.stats import Stats
from draftwell.serving.runtime.strategies import PLAIN, StrategyResources

COUNTED = ("target_calls", "draft_calls", "accepted")


@dataclass(frozen=True)
class Prediction:
    """One config, predicted and measured on the same prompts.

    Args:
        predicted, measured: seconds per token of the whole requests.
        scaled: `predicted` times what plain decoding took over what was predicted for it: the
            machine's pace has left it.
        counts: counter → (replayed, real) totals.
        exact: False where the replay had to guess behind the end of a rollout.
    """

    label: str
    strategy: str
    parameters: dict[str, Any]
    predicted: float
    scaled: float
    measured: float
    counts: dict[str, tuple[int, int]]
    exact: bool

    @property
    def error(self) -> float:
        """(predicted − measured) / measured, on the machine's pace as profiled."""
        return self.predicted / self.measured - 1

    @property
    def scaled_error(self) -> float:
        """The same with the pace of the run itself, so that a machine that slowed down since its
        profile is no error."""
        return self.scaled / self.measured - 1

    @property
    def count_error(self) -> float:
        """The largest difference of a total, as a share of the real one."""
        return max(abs(told - real) / max(1, real) for told, real in self.counts.values())


def check_prediction(
    pair: LoadedPair,
    texts: Texts,
    resources: StrategyResources,
    profile: HardwareProfile,
    configs: Sequence[Config],
    prompts: Sequence[Prompt],
    *,
    max_tokens: int | None = None,
    runs: int = 1,
    progress: Progress | None = None,
) -> list[Prediction]:
    """Replay configs, measure them interleaved with plain decoding, and put both side by side.

    Args:
        texts: of a trace of the same prompts, in the same order, first turns only.
        profile: taken just before, on an idle machine.
        configs: lossless; plain decoding is added where it is missing, and comes first.
        max_tokens: of every request; None takes the trace's number.
    Raises:
        DraftwellError: the prompts are not the trace's, or a config cannot be replayed or measured.
    """
    if [text.name for text in texts.texts] != [prompt.id for prompt in prompts]:
        raise DraftwellError("the prompts are not those of the trace: measure what was replayed")
    budget = max_tokens or texts.max_tokens
    plans = [PLAIN, *(config for config in configs if config != PLAIN)]
    replays = [
        replay_strategy(
            texts,
            plan.name,
            dict(plan.parameters),
            resources,
            profile,
            max_tokens=budget,
            extend=True,
        )
        for plan in plans
    ]
    measured = measure(
        pair,
        resources,
        plans,
        prompts,
        BenchSettings(max_tokens=budget, runs=runs),
        progress=progress,
    )
    paces = [sum(one.seconds) / sum(one.tokens) for one in measured.values()]
    factor = paces[0] / replays[0].predicted_seconds_per_token
    return [
        Prediction(
            label,
            plan.name,
            dict(plan.parameters),
            told.predicted_seconds_per_token,
            told.predicted_seconds_per_token * factor,
            pace,
            counts(told.stats, real.stats),
            told.exact,
        )
        for label, plan, told, real, pace in zip(
            labels_of(plans), plans, replays, measured.values(), paces, strict=True
        )
    ]


def counts(told: Stats, real: Stats) -> dict[str, tuple[int, int]]:
    """Counter → (replayed, real)."""
    return {name: (getattr(told, name), getattr(real, name)) for name in COUNTED}


def median_error(rows: Sequence[Prediction], *, scaled: bool = True) -> float:
    """Median of the absolute errors over strategies, each by the median of its configs.

    Args:
        scaled: by the pace of the run itself; plain decoding, which that fits exactly, is then left
            out.
    """
    by_strategy: dict[str, list[float]] = {}
    for row in rows:
        if row.strategy != PLAIN.name or not scaled:
            by_strategy.setdefault(row.strategy, []).append(
                abs(row.scaled_error if scaled else row.error)
            )
    if not by_strategy:
        raise DraftwellError("nothing but plain decoding was checked: add a strategy")
    return median(median(errors) for errors in by_strategy.values())


def tiled(texts: Texts, positions: int) -> Texts:
    """The texts over and over until they hold at least so many positions; to time replays of long
    traces."""
    count = sum(len(text.output) for text in texts.texts)
    copies = -(-positions // count)
    return replace(
        texts,
        texts=[
            replace(text, name=f"{text.name}#{copy}")
            for copy in range(copies)
            for text in texts.texts
        ],
    )
