"""The contenders of a bench, and what was measured of them: every generation keeps its tokens and
counters. The median run of each prompt counts (`interleaved` has the protocol).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Protocol

from draftwell.components.bench.interleaved import (
    WARMUP_TOKENS,
    Progress,
    leaving_out,
    take_turns,
)
from draftwell.components.bench.settings import DEFAULTS, BenchSettings
from draftwell.components.calibrate.hardware_profile import synchronise
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

Config = StrategyChoice
"""What is measured: a strategy with its parameters; its name may end in `@1+1`, for equal cores."""
EQUAL_CORES = "1+1"
"""Plan of cores: each model on its own share, also where target and draft run in turn."""


@dataclass(frozen=True)
class Generation:
    """One request, decoded once. `stats.wall_seconds` is the whole request, the prompt's forward
    pass included."""

    tokens: list[int]
    stats: Stats

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
        job = self.pair.engine(split=self.split).generate(ids, sampling, self._strategy)
        return Generation(job.output, job.session.stats)


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

    def __init__(
        self, contender: Contender, prompt_ids: Sequence[str], runs: list[list[Generation]]
    ):
        self.contender, self.prompt_ids, self.runs = contender, list(prompt_ids), runs

    @property
    def label(self) -> str:
        """The contender's."""
        return self.contender.label

    @property
    def ours(self) -> StrategyContender | None:
        """The contender where it is a strategy; None of a peer."""
        return self.contender if isinstance(self.contender, StrategyContender) else None

    @property
    def lossless(self) -> bool:
        """Whether it gives the target's own tokens; peers do."""
        return self.ours is None or self.ours.lossless

    @property
    def split_cores(self) -> bool:
        """Whether each model had its own share of the cores."""
        return self.ours is not None and self.ours.split_cores

    @cached_property
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
    def pace(self) -> float:
        """Seconds per emitted token, over all prompts."""
        return sum(self.seconds) / sum(self.tokens)

    @cached_property
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
    left_out: dict[str, str] | None = None,
    progress: Progress | None = None,
) -> dict[str, Measurement]:
    """Label → measurement of every config, and of the `extra` contenders, all interleaved.

    Args:
        prompts: their first turns are decoded.
        settings: tokens, temperature, seed, runs and warm-up. A sampled request has the same seed
            in each run.
        left_out: see `interleaved.take_turns`; who is in it already is not measured.
    Raises:
        DraftwellError: no prompts, an unknown strategy or parameter, a missing artifact; what
            contenders raise where nobody is left out.
    """
    if not prompts:
        raise DraftwellError(
            "there are no prompts to measure on: name a file that holds some", code="no_prompts"
        )
    entrants: list[Contender] = [*contenders_of(pair, resources, configs), *extra]
    check_labels([contender.label for contender in entrants])
    contenders = {one.label: one for one in entrants if one.label not in (left_out or {})}
    sampling = pair.sampling(
        max_tokens=settings.max_tokens, temperature=settings.temperature, seed=settings.seed
    )
    if settings.warmup:
        short = replace(sampling, max_tokens=min(settings.max_tokens, WARMUP_TOKENS))
        for label, contender in contenders.items():
            with leaving_out(label, left_out):
                contender.generate(ids_of(pair, prompts[0]), short)
    taken = take_turns(
        turns_of(
            pair,
            [one for label, one in contenders.items() if label not in (left_out or {})],
            prompts,
            sampling,
        ),
        len(prompts),
        settings.runs,
        before_round=lambda label: contenders[label].reset(),
        left_out=left_out,
        progress=progress,
    )
    names = [prompt.id for prompt in prompts]
    return {label: Measurement(contenders[label], names, runs) for label, runs in taken.items()}


def interleaved(
    pair: LoadedPair,
    contenders: Sequence[Contender],
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    progress: Progress | None = None,
) -> list[list[Generation]]:
    """One round over the prompts, nobody left out: for each contender its generations in the order
    of the prompts."""
    turns = turns_of(pair, contenders, prompts, sampling)
    taken = take_turns(turns, len(prompts), progress=progress)
    return [[generation for [generation] in taken[one.label]] for one in contenders]


def turns_of(
    pair: LoadedPair, contenders: Sequence[Contender], prompts: Sequence[Prompt], sampling: Sampling
) -> dict[str, Callable[[int], Generation]]:
    """Label → how a contender decodes a prompt, by its place; each prompt has the next seed."""
    encoded = [ids_of(pair, prompt) for prompt in prompts]

    def turn(contender: Contender, place: int) -> Generation:
        with naming(prompts[place]):
            # work that the contender before left on the device is not charged to this one
            synchronise(pair.device)
            seeded = replace(sampling, seed=sampling.seed + place)
            return contender.generate(encoded[place], seeded)

    return {contender.label: partial(turn, contender) for contender in contenders}


@contextmanager
def naming(prompt: Prompt) -> Iterator[None]:
    """Name the prompt in an error that it causes."""
    try:
        yield
    except DraftwellError as error:
        raise type(error)(f"prompt {prompt.id}: {error}", code=error.code) from error
