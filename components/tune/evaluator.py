"""What a tuner measures: configs that decode the same prompts in turn and keep what they have learnt from one rung to the next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from components.bench.answers.rouge import mean_rouge_l
from components.bench.runner import WARMUP_TOKENS, Generation, Progress, StrategyContender, interleaved
from components.bench.target_agreement import argmax_matches
from components.prompts.prompt import Prompt, ids_of
from components.tune.search.space import key
from serving.errors import DraftwellError
from serving.runtime.pair import LoadedPair
from serving.runtime.strategies import StrategyResources

Config = tuple[str, dict[str, Any]]
"""A strategy's name and parameters."""


@dataclass(frozen=True)
class Measured:
    """What was measured of one config: for every prompt, in order, seconds of the whole request, the output, and target calls."""

    seconds: list[float]
    outputs: list[list[int]]
    calls: list[int]

    @property
    def tokens(self) -> list[int]:
        """Emitted tokens of every prompt."""
        return [len(output) for output in self.outputs]

    @property
    def pace(self) -> float:
        """Seconds per emitted token, over all prompts."""
        return sum(self.seconds) / sum(self.tokens)

    @property
    def calls_per_token(self) -> float:
        """Target calls per emitted token, over all prompts."""
        return sum(self.calls) / sum(self.tokens)

    def __add__(self, more: Measured) -> Measured:
        """The same config on further prompts."""
        return Measured(self.seconds + more.seconds, self.outputs + more.outputs, self.calls + more.calls)


class Evaluate(Protocol):
    """Measures configs on prompts, interleaved, and returns one `Measured` for each config in order.

    `fresh` contenders have learnt nothing from earlier calls; the others go on from where they were.
    """

    def __call__(self, configs: Sequence[Config], prompts: Sequence[Prompt], *, max_tokens: int | None = None,
                 fresh: bool = False) -> Sequence[Measured]: ...


@dataclass(frozen=True)
class Quality:
    """How good outputs are.

    Args:
        share: of emitted tokens, those that are the target's argmax behind the same prefix, 0..1.
        rouge_l: mean ROUGE-L against the prompts' references, 0 to 100; None where no prompt has one.
    """

    share: float
    rouge_l: float | None = None


class QualityOf(Protocol):
    """Judges what a config wrote."""

    def __call__(self, prompts: Sequence[Prompt], measured: Measured) -> Quality: ...


class Evaluator:
    """Measures strategies of a pair; every config has online state of its own, which lives as long as the contest.

    Args:
        kit: artifacts; each contender works on copies.
        max_tokens: tokens to emit per prompt at most, where a call names no other number.
        progress: called with (done, total, strategy) within each call.
    """

    def __init__(self, pair: LoadedPair, kit: StrategyResources, *, max_tokens: int = 64, seed: int = 0, progress: Progress | None = None):
        self.pair, self.kit, self.max_tokens, self.seed, self.progress = pair, kit, max_tokens, seed, progress
        self._contenders: dict[str, StrategyContender] = {}

    def __call__(self, configs: Sequence[Config], prompts: Sequence[Prompt], *, max_tokens: int | None = None,
                 fresh: bool = False) -> list[Measured]:
        base = self.pair.sampling(max_tokens=max_tokens or self.max_tokens)
        contenders = [self._contender(config, ids_of(self.pair, prompts[0]), fresh) for config in configs]
        runs = interleaved(self.pair, contenders, prompts, replace(base, seed=self.seed), progress=self.report)
        return [as_measured(generations) for generations in runs]

    def report(self, done: int, total: int, label: str) -> None:
        """Pass progress on, with the strategy's name alone."""
        if self.progress:
            self.progress(done, total, label.partition(" ")[0])

    def _contender(self, config: Config, ids: Sequence[int], fresh: bool) -> StrategyContender:
        """A config's contender, warmed up when it is new."""
        label = label_of(config)
        known = self._contenders.get(label)
        if known is None:
            known = self._contenders[label] = StrategyContender(self.pair, self.kit, config, label)
            known.generate(ids, self.pair.sampling(max_tokens=WARMUP_TOKENS))
            known.reset()
        elif fresh:
            known.reset()
        return known


def as_measured(runs: Sequence[Generation]) -> Measured:
    """Generations of one config as plain lists."""
    return Measured([run.seconds for run in runs], [list(run.tokens) for run in runs], [run.stats.target_calls for run in runs])


class QualityReader:
    """Judges outputs by the target's own pass over them; a prompt's output is read once."""

    def __init__(self, pair: LoadedPair):
        self.pair = pair
        self._matches: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}

    def __call__(self, prompts: Sequence[Prompt], measured: Measured) -> Quality:
        matches = sum(self._read(prompt, output) for prompt, output in zip(prompts, measured.outputs, strict=True))
        points = mean_rouge_l([self.pair.decode(output) for output in measured.outputs], [prompt.reference for prompt in prompts])
        return Quality(matches / sum(measured.tokens), None if points is None else 100 * points)

    def _read(self, prompt: Prompt, output: Sequence[int]) -> int:
        ids = ids_of(self.pair, prompt)
        what = (tuple(ids), tuple(output))
        if what not in self._matches:
            self._matches[what] = argmax_matches(self.pair, ids, output)
        return self._matches[what]


def label_of(config: Config) -> str:
    """A config as text.

    >>> label_of(("vanilla_sd", {"num_speculative_tokens": 3}))
    'vanilla_sd {"num_speculative_tokens": 3}'
    """
    return f"{config[0]} {key(config[1])}"


def measure_all(evaluate: Evaluate, configs: Sequence[Config], prompts: Sequence[Prompt], *, max_tokens: int | None = None,
                fresh: bool = False) -> list[Measured]:
    """What `evaluate` says, checked.

    Raises:
        DraftwellError: a result too few, a prompt without tokens, or seconds that are no positive number.
    """
    results = list(evaluate(configs, prompts, max_tokens=max_tokens, fresh=fresh))
    if len(results) != len(configs) or any(len(part) != len(prompts) for r in results for part in (r.seconds, r.outputs, r.calls)):
        raise DraftwellError(f"the measurement gave {len(results)} results for {len(configs)} configurations on {len(prompts)} prompts: "
                             "measure them all")
    for config, result in zip(configs, results, strict=True):
        if not all(math.isfinite(seconds) and seconds > 0 for seconds in result.seconds) or not all(result.tokens):
            raise DraftwellError(f"{label_of(config)}: every measured prompt needs positive seconds and at least one token: measure again")
    return results
