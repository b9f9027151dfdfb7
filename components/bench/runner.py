"""Measuring: contenders decode the same prompts in turn, and every generation keeps its tokens and
counters.

The protocol is Spec-Bench's: a warm-up, then every contender on every prompt before the next prompt
comes, so that a slow minute of the machine hits all alike; the order rotates from prompt to prompt,
so that no contender always runs after the same neighbour; the median run counts. A text in which
the machine stood still is decoded once more, and the faster run counts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import process_time
from typing import Protocol, TypeVar

from draftwell.components.bench.settings import DEFAULTS, BenchSettings
from draftwell.components.calibrate.hardware_profile import synchronise
from draftwell.components.calibrate.memory_rate import Patience, memory_rate
from draftwell.components.prompts.prompt import Prompt, ids_of
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.session.stats import Stats
from draftwell.serving.runtime.strategies import (
    StrategyChoice,
    StrategyResources,
    build_strategy,
    find_strategy,
)

log = logging.getLogger(__name__)

Config = StrategyChoice
"""What is measured: a strategy with its parameters; its name may end in `@1+1`, for equal cores."""
Progress = Callable[[int, int, str], None]
"""Called with (done, total, label)."""

WARMUP_TOKENS = 8
STOOD_STILL = 2.0
"""Seconds without computing, over what its computing took twice, from which a text on a CPU was not
measured but interrupted."""
EQUAL_CORES = "1+1"
"""Plan of cores: each model on its own share, also where target and draft run in turn."""


@dataclass(frozen=True)
class Generation:
    """One request, decoded once. `stats.wall_seconds` is the whole request, the prompt's forward
    pass included.

    Args:
        interrupted: the machine stood still meanwhile, so that the time says nothing.
        memory_rate: GB/s at which all threads read memory, the lower of the readings before and
            after it; None where that was not read.
    """

    tokens: list[int]
    stats: Stats
    interrupted: bool = False
    memory_rate: float | None = None

    @property
    def seconds(self) -> float:
        return self.stats.wall_seconds

    @property
    def pace(self) -> float:
        """Seconds per emitted token."""
        return self.seconds / max(1, len(self.tokens))


class Contender(Protocol):
    """Whatever decodes prompts: a strategy of ours, or a peer."""

    label: str

    def reset(self) -> None:
        """Forget what earlier requests taught it."""

    def generate(self, ids: Sequence[int], sampling: Sampling) -> Generation:
        """Decode one prompt."""


C = TypeVar("C", bound=Contender)
T = TypeVar("T")


class StrategyContender:
    """A configured strategy with online state of its own: contenders never learn from each other's
    requests.

    `split_cores` says whether each model had its own share of the cores, by plan or because the
    strategy overlaps them.
    """

    def __init__(self, pair: LoadedPair, resources: StrategyResources, config: Config, label: str):
        self.pair, self.resources, self.label = pair, resources, label
        self.strategy, self.split = core_plan(config.name)
        self.parameters = dict(config.parameters)
        self.lossless = find_strategy(self.strategy).lossless
        self.reset()
        self.split_cores = self.split is True or self._strategy.overlaps

    def reset(self) -> None:
        self._strategy = build_strategy(self.strategy, self.parameters, self.resources.private())

    def generate(self, ids: Sequence[int], sampling: Sampling) -> Generation:
        before = process_time()
        job = self.pair.engine(split=self.split).generate(ids, sampling, self._strategy)
        computed, stats = process_time() - before, job.session.stats
        still = self.pair.device == "cpu" and stats.wall_seconds - 2 * computed > STOOD_STILL
        return Generation(job.output, stats, interrupted=still)


def core_plan(name: str) -> tuple[str, bool | None]:
    """The strategy that a config names, and how its engine splits the cores (`Engine`'s `split`).

    >>> core_plan("vanilla_sd"), core_plan("vanilla_sd@1+1")
    (('vanilla_sd', None), ('vanilla_sd', True))
    """
    strategy, at, plan = name.partition("@")
    if at and plan != EQUAL_CORES:
        raise DraftwellError(
            (
                f"{name}: the only plan of cores is @{EQUAL_CORES}, each model on its own "
                "share of them"
            ),
            code="unknown_core_plan",
        )
    return strategy, True if at else None


class Measurement:
    """What a contender did: for each prompt its runs, and the one that counts."""

    def __init__(self, contender: Contender, prompt_ids: Sequence[str]):
        self.contender, self.prompt_ids = contender, list(prompt_ids)
        self.runs: list[list[Generation]] = [[] for _ in prompt_ids]

    @property
    def typical(self) -> list[Generation]:
        """For each prompt the run of median pace (of an even number the faster of the two)."""
        return [sorted(runs, key=lambda run: run.pace)[(len(runs) - 1) // 2] for runs in self.runs]

    @property
    def seconds(self) -> list[float]:
        return [run.seconds for run in self.typical]

    @property
    def tokens(self) -> list[int]:
        return [len(run.tokens) for run in self.typical]

    @property
    def stats(self) -> Stats:
        """Counters of one pass over all prompts."""
        return Stats.total(run.stats for run in self.typical)


def labels_of(configs: Sequence[Config]) -> list[str]:
    """A label for each choice: the strategy's name, with parameters where two choices have the same
    name.

    >>> labels_of(
    ...     [
    ...         StrategyChoice("spide"),
    ...         StrategyChoice("vanilla_sd", {"num_speculative_tokens": 3}),
    ...         StrategyChoice("vanilla_sd"),
    ...     ]
    ... )
    ['spide', 'vanilla_sd(num_speculative_tokens=3)', 'vanilla_sd']
    """
    names = [config.name for config in configs]
    labels = [str(config) if names.count(config.name) > 1 else config.name for config in configs]
    check_labels(labels)
    return labels


def check_labels(labels: Sequence[str]) -> None:
    """Refuse two contenders of one name."""
    doubled = next((label for label in labels if labels.count(label) > 1), None)
    if doubled:
        raise DraftwellError(
            f"{doubled} is named twice: measure a strategy once, or with different parameters",
            code="named_twice",
        )


def contenders_of(
    pair: LoadedPair, resources: StrategyResources, configs: Sequence[Config]
) -> list[StrategyContender]:
    """The configs, ready to run, under their labels."""
    return [
        StrategyContender(pair, resources, config, label)
        for config, label in zip(configs, labels_of(configs), strict=True)
    ]


def measure(
    pair: LoadedPair,
    resources: StrategyResources,
    configs: Sequence[Config],
    prompts: Sequence[Prompt],
    settings: BenchSettings = DEFAULTS,
    *,
    extra: Sequence[Contender] = (),
    progress: Progress | None = None,
) -> dict[str, Measurement]:
    """Label → measurement of every config, and of the `extra` contenders, all interleaved.

    Args:
        prompts: their first turns are decoded.
        settings: tokens, temperature, seed, runs and warm-up. A sampled request has the same seed
            in each run.
    Raises:
        DraftwellError: no prompts, an unknown strategy or parameter, a missing artifact, a prompt
            that is too long.
    """
    if not prompts:
        raise DraftwellError(
            "there are no prompts to measure on: name a file that holds some", code="no_prompts"
        )
    contenders: list[Contender] = [*contenders_of(pair, resources, configs), *extra]
    check_labels([contender.label for contender in contenders])
    sampling = pair.sampling(
        max_tokens=settings.max_tokens, temperature=settings.temperature, seed=settings.seed
    )
    if settings.warmup:
        for contender in contenders:
            contender.generate(
                ids_of(pair, prompts[0]),
                replace(sampling, max_tokens=min(settings.max_tokens, WARMUP_TOKENS)),
            )
    results = {
        contender.label: Measurement(contender, [p.id for p in prompts]) for contender in contenders
    }
    steps = len(prompts) * len(contenders)
    waits = settings.memory_patience > 0 and pair.device == "cpu"
    patience = Patience(settings.memory_patience, settings.runs * steps) if waits else None
    for run in range(settings.runs):
        for contender in contenders:
            contender.reset()
        report = offset(progress, run * steps, settings.runs * steps)
        passed = interleaved(
            pair,
            contenders,
            prompts,
            sampling,
            first_turn=run * len(prompts),
            progress=report,
            patience=patience,
        )
        for measurement, generations in zip(results.values(), passed, strict=True):
            for i, (runs, generation) in enumerate(zip(measurement.runs, generations, strict=True)):
                runs.append(generation)
                if generation.interrupted:
                    log.warning(
                        (
                            "prompt %s, %s: the machine stood still in a text of %.0f s, which "
                            "is decoded once more"
                        ),
                        prompts[i].id,
                        measurement.contender.label,
                        generation.seconds,
                    )
                    again = replace(sampling, seed=sampling.seed + i)
                    runs.append(
                        waited(measurement.contender, ids_of(pair, prompts[i]), again, patience)
                    )
    return results


def interleaved(
    pair: LoadedPair,
    contenders: Sequence[C],
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    first_turn: int = 0,
    progress: Progress | None = None,
    patience: Patience | None = None,
) -> list[list[Generation]]:
    """One pass: every contender decodes every prompt, prompt by prompt, in an order that rotates.

    Args:
        sampling: of the first prompt; each further prompt has the next seed.
        first_turn: turn of the first prompt, from which the order rotates.
        patience: waits before each text until memory is as fast as at its best, and its rate is
            kept with the text; None does neither.
    Returns:
        for each contender, in their order, its generations in the order of the prompts.
    """
    made: dict[str, list[Generation]] = {contender.label: [] for contender in contenders}
    done, total = 0, len(prompts) * len(contenders)
    for i, ids in enumerate([ids_of(pair, prompt) for prompt in prompts]):
        for contender in rotated(contenders, first_turn + i):
            with naming(prompts[i]):
                # work that the contender before left on the device is not charged to this one
                synchronise(pair.device)
                made[contender.label].append(
                    waited(contender, ids, replace(sampling, seed=sampling.seed + i), patience)
                )
            done += 1
            if progress:
                progress(done, total, contender.label)
    return [made[contender.label] for contender in contenders]


def waited(
    contender: Contender, ids: Sequence[int], sampling: Sampling, patience: Patience | None
) -> Generation:
    """One text, when memory is fast or the wait for it at an end; None waits for nothing."""
    if patience is None:
        return contender.generate(ids, sampling)
    rate = patience.wait()
    generation = contender.generate(ids, sampling)
    return replace(generation, memory_rate=min(rate, memory_rate().read()))


def offset(progress: Progress | None, before: int, total: int) -> Progress | None:
    """Progress of one pass as a part of several."""
    return (
        None if progress is None else lambda done, _, label: progress(before + done, total, label)
    )


def rotated(contenders: Sequence[T], turn: int) -> list[T]:
    """The contenders (or servers) in the order of a turn."""
    start = turn % len(contenders)
    return [*contenders[start:], *contenders[:start]]


@contextmanager
def naming(prompt: Prompt) -> Iterator[None]:
    """Name the prompt in an error that it causes."""
    try:
        yield
    except DraftwellError as error:
        raise type(error)(f"prompt {prompt.id}: {error}", code=error.code) from error
