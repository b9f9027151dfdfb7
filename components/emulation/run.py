"""Strategies measured on emulated devices: the bench's interleaved turns and its intervals, over
models that wait."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from draftwell.components import formulas
from draftwell.components.bench.interleaved import Progress
from draftwell.components.bench.runner import (
    Config,
    Generation,
    Measurement,
    StrategyContender,
    labels_of,
    measure,
)
from draftwell.components.bench.schema import Machine
from draftwell.components.bench.settings import BenchSettings
from draftwell.components.emulation.curve import Curve
from draftwell.components.emulation.devices import EMULATED, SLACK, Devices, Pass
from draftwell.components.emulation.prediction import profile_of
from draftwell.components.emulation.result import (
    EmulatedRatio,
    EmulatedRow,
    EmulatedRun,
    Placement,
)
from draftwell.components.prompts.prompt import Prompt, ids_of
from draftwell.components.report.intervals import ratio_of
from draftwell.components.report.machine import describe_machine, using_threads
from draftwell.components.report.provenance import provenance
from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.session.stats import Stats
from draftwell.serving.runtime.strategies import (
    StrategyChoice,
    StrategyResources,
    build_strategy,
)

MARGIN = 1.5
"""Times the real time of most passes of a trial that a stretched pass takes."""
MOST = 0.95
"""Of the passes of a model; the others are left to the margin, for one hiccup would stretch all."""
WAKING = 3.0
"""Times the delay of most wake-ups of a trial by which a pass may end behind its deadline."""
TRIALS = 3
"""The first without waiting; in the others, processors have slept between passes, and are slower,
and wake-ups can be timed."""
MOST_LATE = 0.01
"""Share of late passes above which a run is void."""
ATTEMPTS = 3
"""How often a text with late passes is decoded at most: now and then a machine stands still."""
BASES = ("autoregressive", "vanilla_sd", "pearl")
"""What others are compared with; each of them also with those before it."""
OWNER = "emulation"
"""Of all requests: each finds the prompt in its slots."""
SHORT_DRAFT = {"num_speculative_tokens": 1, "draft_first": True}
GUESSED_COST = 0.25
"""A draft pass over a target pass, where the draft has no curve and was not timed yet."""


class EmulatedContender(StrategyContender):
    """A strategy on emulated devices. Its times are in the curve's unit, and begin when both models
    have read the prompt.

    Args:
        real: the pair itself.
    """

    def __init__(
        self,
        devices: Devices,
        real: LoadedPair,
        resources: StrategyResources,
        config: Config,
        label: str,
        placement: Placement,
    ):
        self.devices, self.real, self.passes = devices, real, list[Pass]()
        self.first_kept: list[bool] = []
        self.again, self.attempts = 0, 1
        super().__init__(devices.emulated(real), resources, config, label)
        self.split = self.split_cores = placement == "own"

    def generate(self, ids: Sequence[int], sampling: Sampling) -> Generation:
        for attempt in range(self.attempts):
            first_kept = read_prompt(self.real, ids, sampling)
            before = len(self.devices.passes)
            engine = self.pair.engine(split=self.split)
            job = engine.submit(ids, sampling, self._strategy, owner=OWNER)
            engine.run([job])
            passes = self.devices.passes[before:]
            self.again += attempt > 0
            if late_share(passes) <= MOST_LATE:
                break
        self.first_kept.append(first_kept)
        self.passes += passes
        return Generation(job.output, on_the_curve(job.session.stats, self.devices.stretch or 1.0))


def usual_choices(curve: Curve, alpha: float, taus: Sequence[float] = (0.7,)) -> list[Config]:
    """Vanilla SD at the draft length that formulas find the fastest, SPIDE, PEARL and DuoDecoding.

    Args:
        alpha: about how many of the draft's tokens are accepted.
        taus: SPIDE's thresholds.
    """
    cost = curve.target[1] * (curve.cost or GUESSED_COST)
    gamma = formulas.best_gamma(alpha, cost, curve.target_times())
    return [
        StrategyChoice("vanilla_sd", {"num_speculative_tokens": gamma}),
        *(StrategyChoice("spide", {"tau": tau}) for tau in taus),
        StrategyChoice("pearl"),
        StrategyChoice("duo_decoding"),
    ]


def read_prompt(pair: LoadedPair, ids: Sequence[int], sampling: Sampling) -> bool:
    """Let target and draft read a prompt off the clock: the next request finds it in its slots.

    Returns:
        whether the target keeps the draft's first token.
    """
    engine, strategy = pair.engine(split=False), build_strategy("vanilla_sd", SHORT_DRAFT)
    first = replace(sampling, max_tokens=2)  # one leaves no room for a draft
    job = engine.submit(ids, first, strategy, owner=OWNER)
    engine.run([job])
    return job.session.stats.accepted > 0


def on_the_curve(stats: Stats, stretch: float) -> Stats:
    """Statistics with their seconds as times in the curve's unit; single passes are left out."""
    times: dict[str, Any] = {
        name: value / stretch for name, value in vars(stats).items() if isinstance(value, float)
    }
    return replace(stats, **times, timeline=[], overlap_seconds=[])


def run_emulated(  # noqa: PLR0913
    pair: LoadedPair,
    curve: Curve,
    choices: Sequence[Config],
    prompts: Sequence[Prompt],
    *,
    placement: Placement = "own",
    calibration: Sequence[Prompt] = (),
    source: str = "",
    settings: BenchSettings = BenchSettings(),  # noqa: B008
    progress: Progress | None = None,
) -> EmulatedRun:
    """Measure strategies of a pair on emulated devices.

    Args:
        pair: on the CPU, with a draft, one slot, and no padding: padding would only take time.
        choices: what is measured; vanilla SD, and PEARL where SPIDE is to be compared with it.
        calibration: other prompts, whose drafts fill SPIDE's acceptance table before the clock
            runs; without any it learns from the first prompts that count.
        source: of the prompts, in words.
    Returns:
        the run, which is `void` where more than `MOST_LATE` of a strategy's passes were late.
    Raises:
        DraftwellError: a pair that is not on the CPU, or is padded (`not_emulated`); what the bench
            raises.
    """
    check_pair(pair)
    start = time.monotonic()
    with using_threads(1):
        devices = Devices(curve)
        table = count_acceptance(pair, calibration, settings)
        contenders = settled(devices, pair, table, choices, placement, prompts, settings)
        measured = measure(pair, table, [], prompts, settings, extra=contenders, progress=progress)
        machine = Machine(**describe_machine(pair))
    rows = {one.label: row_of(one, measured[one.label]) for one in contenders}
    void = why_void(rows)
    passes = [each for one in contenders for each in one.passes]
    return EmulatedRun(
        pair=pair.name,
        fingerprint=pair.fingerprint,
        curve=curve,
        placement=placement,
        stretch=devices.stretch or 0.0,
        passes=len(passes),
        late=late_share(passes),
        void=void,
        max_tokens=settings.max_tokens,
        prompts=source or f"{len(prompts)} prompts",
        prompt_ids=tuple(prompt.id for prompt in prompts),
        calibration=len(calibration),
        identical=identical_texts(measured),
        first_kept=tuple(contenders[0].first_kept[-len(prompts) :]),
        seconds=round(time.monotonic() - start, 1),
        machine=machine,
        rows=rows if void is None else {label: without_times(row) for label, row in rows.items()},
        ratios=ratios_of(measured, rows) if void is None else (),
    )


def check_pair(pair: LoadedPair) -> None:
    """Refuse a pair on another device, or with padding."""
    if pair.device != "cpu" or pair.padded_to is not None:
        raise DraftwellError(
            "devices are emulated by a pair on the CPU whose target is not padded: load it with "
            "device cpu, without pad_target",
            code="not_emulated",
        )


def count_acceptance(
    pair: LoadedPair, prompts: Sequence[Prompt], settings: BenchSettings
) -> StrategyResources:
    """An acceptance table of some prompts, which SPIDE drafts for at its default threshold without
    a clock."""
    table = AcceptanceTable.empty(provenance(pair))
    resources = StrategyResources({"acceptance_table": table}, pair.special_tokens)
    strategy = build_strategy("spide", {"parallel": False}, resources)
    sampling = pair.sampling(
        max_tokens=settings.max_tokens, temperature=settings.temperature, seed=settings.seed
    )
    for prompt in prompts:
        pair.engine(split=False).generate(ids_of(pair, prompt), sampling, strategy)
    return resources


def settled(
    devices: Devices,
    pair: LoadedPair,
    resources: StrategyResources,
    choices: Sequence[Config],
    placement: Placement,
    prompts: Sequence[Prompt],
    settings: BenchSettings,
) -> list[EmulatedContender]:
    """The contenders, after trials on the first prompt that settle the stretch."""
    sampling = pair.sampling(max_tokens=settings.max_tokens, temperature=settings.temperature)
    cost = devices.curve.cost or GUESSED_COST
    for _ in range(TRIALS):
        contenders = [
            EmulatedContender(
                devices,
                pair,
                with_profile(resources, pair, devices.curve, cost),
                choice,
                label,
                placement,
            )
            for choice, label in zip(choices, labels_of(choices), strict=True)
        ]
        devices.passes.clear()
        for contender in contenders if prompts else ():
            contender.generate(ids_of(pair, prompts[0]), sampling)
        devices.stretch = max(devices.stretch or 0.0, needed_stretch(devices.passes))
        cost = devices.curve.cost or real_cost(devices)
    for contender in contenders:
        contender.passes.clear()
        contender.first_kept.clear()
        contender.attempts = ATTEMPTS
    return contenders


def needed_stretch(passes: Sequence[Pass]) -> float:
    """Real seconds for each unit of the curve's times, so that nearly all passes end early, and
    those that wait are woken up in time.

    >>> needed_stretch([Pass("target", 2.0, 0.5, 0.5, None), Pass("draft", 1.0, 0.1, 0.1, None)])
    0.375
    """
    needed = []
    for role in EMULATED:
        timed = [each for each in passes if each.role == role and each.time]
        work = [each.worked / each.time for each in timed if each.time]
        delays = [each.delay / (SLACK * each.time) for each in timed if each.time and each.waited]
        needed += [MARGIN * float(np.quantile(work, MOST))] if work else []
        needed += [WAKING * float(np.quantile(delays, MOST))] if delays else []
    return max(needed, default=MARGIN)


def real_cost(devices: Devices) -> float:
    """c of a draft that computes without waiting, beside the stretched target."""
    drafted = [each.worked for each in devices.passes if each.role == "draft"]
    return float(np.median(drafted)) / (devices.stretch or 1.0) / devices.curve.target[1]


def with_profile(
    resources: StrategyResources, pair: LoadedPair, curve: Curve, cost: float
) -> StrategyResources:
    """Artifacts with the curve as hardware profile, by which strategies choose."""
    profile = profile_of(curve, provenance(pair), cost)
    return replace(resources, artifacts={**resources.artifacts, HardwareProfile.kind: profile})


def row_of(contender: EmulatedContender, measured: Measurement) -> EmulatedRow:
    """A strategy's figures."""
    stats = measured.stats
    return EmulatedRow(
        strategy=contender.strategy,
        parameters=contender.parameters,
        speed=1 / measured.pace,
        acceptance=stats.acceptance_rate,
        target_calls=stats.target_calls + stats.prefill_calls,
        outside=stats.overhead_seconds / stats.wall_seconds,
        late=late_share(contender.passes),
        again=contender.again,
        times=tuple(round(seconds, 6) for seconds in measured.seconds),
        tokens=tuple(measured.tokens),
        accepted=tuple(run.stats.accepted for run in measured.typical),
        judged=tuple(run.stats.judged for run in measured.typical),
    )


def late_share(passes: Sequence[Pass]) -> float:
    """Share of the passes that ended behind their deadline."""
    return sum(each.late for each in passes) / max(1, len(passes))


def why_void(rows: Mapping[str, EmulatedRow]) -> str | None:
    """Why a run's times do not count; None: they do."""
    worst, row = max(rows.items(), key=lambda one: one[1].late)
    if row.late <= MOST_LATE:
        return None
    return (
        f"{row.late:.1%} of the passes of {worst} ended behind their deadline, at most "
        f"{MOST_LATE:.0%} may: run it again while nothing else computes here"
    )


def without_times(row: EmulatedRow) -> EmulatedRow:
    """A row of a void run."""
    return row.model_copy(update={"speed": None, "times": ()})


def identical_texts(measured: Mapping[str, Measurement]) -> int:
    """Prompts whose texts are the same from all lossless strategies."""
    texts = [one.typical for one in measured.values() if one.lossless]
    return sum(
        all(run.tokens == runs[0].tokens for run in runs) for runs in zip(*texts, strict=True)
    )


def ratios_of(
    measured: Mapping[str, Measurement], rows: Mapping[str, EmulatedRow]
) -> tuple[EmulatedRatio, ...]:
    """Every strategy over plain decoding, the fastest vanilla SD and PEARL, where those were
    measured."""

    def fastest(strategy: str) -> list[str]:
        labels = [label for label, row in rows.items() if row.strategy == strategy]
        return sorted(labels, key=lambda label: measured[label].pace)[:1]

    return tuple(
        ratio_over(label, base, measured)
        for place, strategy in enumerate(BASES)
        for base in fastest(strategy)
        for label, row in rows.items()
        if row.strategy not in BASES[: place + 1]
    )


def ratio_over(label: str, base: str, measured: Mapping[str, Measurement]) -> EmulatedRatio:
    """The speed of one strategy over another's."""
    ratio, low, high = ratio_of(measured[base], measured[label])
    return EmulatedRatio(contender=label, over=base, ratio=ratio, low=low, high=high)
