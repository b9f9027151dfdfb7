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
    """

    fits: str
    seconds: float
    minutes: float
    prompts: str | None = None


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
    result: Mapping[str, Any], settings: PipelineSettings, space: Workspace, asked: Asked
) -> Card:
    """The card of what the flow returned for our own engine."""
    choice = StrategyChoice(result["strategy"], result["parameters"])
    report = result["report"] and BenchReport.model_validate(result["report"])
    entry = None if report is None else entry_of(report, choice)
    plain = choice.name == PLAIN.name
    speed = None if entry is None or plain else speed_of(entry)
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
        exact=find_strategy(choice.name).lossless,
        loses=loses(result, choice),
        tried=tuple(tried(evidence_in(space), choice, result)),
        verdict=verdict_word(result["verdict"]),
        needs=needs(speed, asked),
        release=result["release"],
        bundle=result["bundle"] and str(result["bundle"]),
        next_command=next_command(result, settings, space),
    )


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


def loses(result: Mapping[str, Any], choice: StrategyChoice) -> str | None:
    """What a lossy choice loses, as the gate found it."""
    if find_strategy(choice.name).lossless:
        return None
    found = (one["detail"] for one in result["checks"] if one.get("name") == "quality")
    return next(found, "not measured")


def evidence_in(space: Workspace) -> TuningEvidence | None:
    """What the last tuning for greedy requests rests on."""
    file = space.device_reports / "tuning.json"
    if not file.is_file():
        return None
    return TuningEvidence.read(json.loads(file.read_text(encoding="utf-8")), str(file))


def tried(
    evidence: TuningEvidence | None, choice: StrategyChoice, result: Mapping[str, Any]
) -> Iterator[Tried]:
    """What was measured and not chosen, the fastest first; then the best replay of each strategy
    that was not measured."""
    if evidence is None:
        return
    measured = [one for one in evidence.measured if one.choice not in (PLAIN, choice)]
    best = next((one.speedup for one in evidence.measured if one.choice == choice), 1.0)
    dropped = {one.choice: one.why for rung in evidence.rungs for one in rung.dropped}
    rows = [
        Tried(
            speed=measured_speed(one),
            parameters=one.parameters,
            why_not=why_not(one, dropped.get(one.choice), best, result),
        )
        for one in sorted(measured, key=lambda one: -one.speedup)
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


def why_not(one: Metrics, dropped: str | None, best: float, result: Mapping[str, Any]) -> str:
    """Why a measured setting was not chosen."""
    if one.objection is not None:
        return one.objection
    if result["strategy"] == PLAIN.name and one.speedup > 1:
        against = "; ".join(check["detail"] for check in unmet(result))
        return against or str(result["reason"])
    if dropped:
        return dropped
    if one.speedup < best:
        return f"the choice was {best:.2f} times as fast as plain decoding in the same run"
    return "not surely faster than the choice"


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
            why_not="replayed over collected texts, and not among the best",
        )


def needs(speed: Speed | None, asked: Asked) -> str | None:
    """What it would take to be sure of a speed: prompts, by how an interval narrows with their
    square root."""
    if speed is None:
        return None
    low, high, wanted = speed.low, speed.high, FEWEST_CONFIRMING
    if low is not None and high is not None:
        half = (high - low) / 2 / speed.ratio
        if half <= WIDEST and speed.prompts >= FEWEST_CONFIRMING:
            return None
        wanted = max(wanted, math.ceil(speed.prompts * (half / WIDEST) ** 2))
    more = f"--minutes {2 * asked.minutes:g}"
    file = "" if asked.prompts is None else f", or more prompts than {asked.prompts} holds"
    return f"about {wanted} confirming prompts, {speed.prompts} were measured: {more}{file}"


def next_command(result: Mapping[str, Any], settings: PipelineSettings, space: Workspace) -> str:
    """What a user types now."""
    named = f"--pair {space.on_command_lines}" + (
        " --set device=cuda" if space.device == "cuda" else ""
    )
    if not result["passed"] and result["champion"] is None:
        return f"draftwell tune --pair {space.on_command_lines} --minutes {2 * (settings.minutes or 10):g}"
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
