"""The card of a finished loop: the gate's figures of what was chosen, and tuning's of what was
not."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from draftwell.components.bench.categories import ALL, CategoryFigure
from draftwell.components.bench.engines.figures import Figure
from draftwell.components.bench.schema import BenchEntry, BenchReport
from draftwell.components.card.card import FEWEST_CONFIRMING, WIDEST, Card, Speed, Tried
from draftwell.components.report.machine import cpu_model
from draftwell.components.report.tables import beside
from draftwell.components.tune.evidence import Metrics, Trial, TuningEvidence
from draftwell.flows.settings import PipelineSettings
from draftwell.flows.steps.own_pair import words_of
from draftwell.flows.steps.verdict import unmet
from draftwell.flows.workspace import Workspace
from draftwell.registry.pairs import ModelSource
from draftwell.serving.bundle.verdict import FAILED, PASSED, UNDECIDED, Result
from draftwell.serving.device import cuda_available, device_class, usable_cores
from draftwell.serving.runtime.strategies import PLAIN, StrategyChoice, find_strategy

MOST_TRIED = 8
"""Rows of what was not chosen; the tuning's report has all of them."""


@dataclass(frozen=True)
class Asked:
    """What a card says beside an outcome.

    Args:
        fits: as `said_to_fit` says it.
        seconds: that the command ran.
        minutes: that it was given.
        prompts: the file that was named; None: the shipped prompts.
        confirming: `bench_prompts`, on which the gate's prompts depend, and on `minutes` where
            `in_time`; None of an engine at an address, which has neither setting.
    """

    fits: str
    seconds: float
    minutes: float
    prompts: str | None = None
    confirming: int | None = None
    in_time: bool = False


def card_base(space: Workspace, asked: Asked) -> dict[str, Any]:
    """The fields of a card that no measurement decides."""
    spec = space.spec
    return {
        "seconds": asked.seconds,
        "pair": spec.name,
        "target": model_words(spec.target),
        "draft": None if spec.draft is None else model_words(spec.draft),
        "machine": machine_words(space.device),
        "dtype": space.dtype,
        "fits": asked.fits,
    }


def card_of(
    outcome: Mapping[str, Any], settings: PipelineSettings, space: Workspace, asked: Asked
) -> Card:
    """The card of what the flow returned for our own engine."""
    result = with_undecided(outcome)
    choice = StrategyChoice(result["strategy"], result["parameters"])
    report = result["report"] and BenchReport.model_validate(result["report"])
    entry = None if report is None else entry_of(report, choice)
    plain = choice.name == PLAIN.name
    speed = None if entry is None or plain else speed_of(entry)
    lost, evidence = loses(result), evidence_in(space)
    meanwhile = None if result is outcome else "plain decoding serves meanwhile"
    others = report.machine.others if report else None
    disturbed = speed and beside(others) and f"{beside(others)}: measure again without them"
    wants = (meanwhile, needs(speed, asked, result), disturbed)
    return Card(
        **card_base(space, asked),
        version=version("draftwell"),
        made=datetime.now(UTC),
        engine="draftwell",
        memory_bytes=result.get("peak_bytes"),
        strategy=choice.name,
        parameters=result["parameters"],
        speed=speed,
        by_kind=() if entry is None or plain else tuple(kinds_of(entry.categories)),
        by_requests=tuple(by_requests(speed, result.get("loads", ()))),
        exact=lost is None and entry is not None and entry.exact,
        loses=lost,
        tried=tuple(tried(evidence, choice, result)),
        own_device=evidence and evidence.own_device and evidence.own_device.words,
        others=others,
        verdict=verdict_word(result["verdict"]),
        needs="; ".join(part for part in wants if part) or None,
        release=result["release"],
        bundle=result["bundle"] and str(result["bundle"]),
        next_command=next_command(result, settings, space, more_prompts(speed, asked, result)),
    )


def with_undecided(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """The outcome of a choice that the gate had not enough evidence for, where plain decoding
    passed in its place: what was tuned is what there is to say of it."""
    refused = result.get("refused")
    if not refused or refused["verdict"] != UNDECIDED or not result["passed"]:
        return result
    return {**result, **refused, "peak_bytes": None}


def entry_of(report: BenchReport, choice: StrategyChoice) -> BenchEntry | None:
    """What the gate measured of a choice."""
    return next(
        (
            entry
            for entry in report.strategies.values()
            if (entry.strategy, entry.parameters) == (choice.name, dict(choice.parameters))
        ),
        None,
    )


def speed_of(entry: BenchEntry) -> Speed:
    """A strategy's speed over plain decoding."""
    return Speed(
        name=str(entry.strategy),
        ratio=entry.speedup or 1.0,
        low=finite(entry.speedup_low),
        high=finite(entry.speedup_high),
        prompts=len(entry.per_prompt),
        tokens_per_second=entry.tokens_per_second,
    )


def finite(value: float | None) -> float | None:
    """A number that is one; None of infinity, which one prompt gives."""
    return value if value is not None and math.isfinite(value) else None


def kinds_of(categories: Sequence[CategoryFigure]) -> Iterator[Speed]:
    """Speeds by kind of prompt, the fastest first."""
    kinds = [one for one in categories if one.category != ALL]
    for one in sorted(kinds, key=lambda kind: -kind.speedup):
        yield Speed(
            name=one.category,
            ratio=one.speedup,
            low=one.speedup_low,
            high=one.speedup_high,
            prompts=one.prompts,
        )


def by_requests(speed: Speed | None, loads: Sequence[Mapping[str, Any]]) -> Iterator[Speed]:
    """Speeds by the number of requests at once: one, and those that were measured."""
    if speed is not None and loads:
        yield speed.model_copy(update={"name": "1"})
    for load in loads:
        figure = Figure.model_validate_json(json.dumps(load))
        yield load_speed(figure, str(figure.at_once))


def load_speed(figure: Figure, name: str) -> Speed:
    """The speed of a figure."""
    return Speed(
        name=name,
        ratio=figure.ratio,
        low=finite(figure.low),
        high=finite(figure.high),
        prompts=figure.prompts,
        tokens_per_second=figure.tokens_per_second,
    )


def verdict_word(verdict: Result) -> str:
    """A gate's verdict as a card has it."""
    return {PASSED: "passed", FAILED: "failed", UNDECIDED: "undecided"}[verdict]


def loses(result: Mapping[str, Any]) -> str | None:
    """What lossy choices lose, as the gate found it: that for greedy requests, and that for
    sampled ones; None where both are lossless."""
    choices = (
        ("", "quality", result),
        ("sampled requests: ", "sampled quality", result["sampled"]),
    )
    details = {one["name"]: f"it keeps {one['detail']}" for one in result["checks"]}
    found = [
        whom + details.get(check, "what it loses was not measured")
        for whom, check, choice in choices
        if choice and not find_strategy(choice["strategy"]).lossless
    ]
    return "; ".join(found) or None


def evidence_in(space: Workspace) -> TuningEvidence | None:
    """What the last tuning for greedy requests rests on."""
    file = space.device_reports / "tuning.json"
    if not file.is_file():
        return None
    return TuningEvidence.read(json.loads(file.read_text(encoding="utf-8")), str(file))


def tried(
    evidence: TuningEvidence | None, choice: StrategyChoice, result: Mapping[str, Any]
) -> Iterator[Tried]:
    """What tuning measured and did not choose, on the most prompts first, of these the fastest;
    then the best replay of each strategy that was not measured."""
    if evidence is None:
        return
    measured = [one for one in evidence.measured if one.choice not in (PLAIN, choice)]
    refused = result.get("refused")
    tuned = StrategyChoice(refused["strategy"], refused["parameters"]) if refused else choice
    best = next(
        (measured_speed(one) for one in evidence.measured if one.choice == tuned != PLAIN), None
    )
    dropped = {one.choice: one.why for rung in evidence.rungs for one in rung.dropped}
    rows = [
        Tried(
            speed=measured_speed(one),
            parameters=one.parameters,
            why_not=result["reason"]
            if refused and one.choice == tuned
            else one.objection or dropped.get(one.choice) or behind(measured_speed(one), best),
        )
        for one in sorted(measured, key=lambda one: (-one.prompts, -one.speedup))
    ]
    seen = {one.strategy for one in evidence.measured} | {choice.name}
    rows += replayed(evidence, seen)
    yield from rows[:MOST_TRIED]


def measured_speed(one: Metrics) -> Speed:
    """A measured setting's speed on tuning's prompts."""
    return Speed(
        name=one.strategy,
        ratio=one.speedup,
        low=finite(one.speedup_low),
        high=finite(one.speedup_high),
        prompts=one.prompts,
        tokens_per_second=1 / one.seconds_per_token,
    )


def behind(one: Speed, best: Speed | None) -> str:
    """How a setting that stayed to the end compares with the best one; None: plain decoding."""
    if best is not None:
        how = "slower" if one.ratio < best.ratio else "not faster beyond doubt"
        return f"{how} than {best.name}, {best.ratio:.2f} in tuning"
    if one.ratio < 1:
        return "slower than plain decoding"
    low = f": lower end {one.low:.2f}" if one.low is not None and one.low <= 1 else ""
    return f"not faster than plain decoding beyond doubt{low}"


def replayed(evidence: TuningEvidence, seen: set[str]) -> Iterator[Tried]:
    """The best replay of every strategy that was not measured."""
    predicted = (
        one.predicted_seconds_per_token for one in evidence.measured if one.choice == PLAIN
    )
    if not (expected := next(predicted, None)):
        return
    best: dict[str, Trial] = {}
    for trial in sorted(evidence.trials, key=lambda trial: trial.seconds):
        if trial.strategy not in seen:
            best.setdefault(trial.strategy, trial)
    for trial in best.values():
        yield Tried(
            speed=Speed(name=trial.strategy, ratio=expected / trial.seconds, prompts=0),
            parameters=trial.parameters,
            why_not="by replay over collected texts, where others were faster",
        )


def needs(speed: Speed | None, asked: Asked, result: Mapping[str, Any] | None = None) -> str | None:
    """What it would take to be sure of a speed; None where it is."""
    wanted = prompts_wanted(speed, result)
    if wanted is None:
        return None
    found = f"about {wanted} prompts would do"
    if more := more_prompts(speed, asked, result):
        file = asked.prompts or "the shipped one"
        found += f": {more}, with a longer --prompts file where {file} is too short"
    return found


def prompts_wanted(speed: Speed | None, result: Mapping[str, Any] | None) -> int | None:
    """Prompts with which an interval, which narrows with their square root, is narrow enough, and
    the gate decides; None where those that were measured suffice."""
    if speed is None:
        return None
    wanted = [
        one.get("prompts_needed") or 2 * speed.prompts
        for one in unmet(result or {"checks": ()})
        if not one["enough"] and not one["transient"]
    ]
    half = WIDEST * math.sqrt(2)
    if speed.low is not None and speed.high is not None:
        half = (speed.high - speed.low) / 2 / speed.ratio
    wanted.append(math.ceil(speed.prompts * (half / WIDEST) ** 2))
    most = max(FEWEST_CONFIRMING, *wanted)
    return most if most > speed.prompts else None


def more_prompts(speed: Speed | None, asked: Asked, result: Mapping[str, Any] | None) -> str:
    """The options with which as many prompts confirm as it takes; "" where there are none."""
    wanted = prompts_wanted(speed, result)
    if speed is None or wanted is None or asked.confirming is None:
        return ""
    options = []
    if asked.in_time:
        options.append(f"--minutes {math.ceil(asked.minutes * wanted / speed.prompts)}")
    if wanted > asked.confirming:
        options.append(f"--set bench_prompts={wanted}")
    return " ".join(options)


def next_command(
    result: Mapping[str, Any], settings: PipelineSettings, space: Workspace, more: str
) -> str:
    """What a user types now; `more`: options of a longer tuning."""
    named = f"--pair {space.on_command_lines}" + (
        " --set device=cuda" if space.device == "cuda" else ""
    )
    if not result["passed"] and result["champion"] is None:
        longer = more or f"--minutes {2 * (settings.minutes or 10):g}"
        return f"draftwell tune --pair {space.on_command_lines} {longer}"
    if result["passed"] and (settings.promote or space.spec.promote) == "manual":
        return f"draftwell release promote {named} --release {result['release']}"
    return f"draftwell serve --pair {space.on_command_lines}"


def model_words(source: ModelSource) -> str:
    """A model as its pair names it."""
    if source.package is not None:
        return f"{source.package.file} of {source.package.package} {source.package.version}"
    if source.near_copy is not None:
        return "a near copy of the target"
    return words_of(source)


def machine_words(device: str) -> str:
    """The machine in a line, without its name."""
    if device.startswith("cuda"):
        return device_class(device) if cuda_available() else "cuda, of another machine"
    return f"{cpu_model()}, {usable_cores()} cores ({device_class(device)})"
