"""Tuning: which strategy, with which parameters, for this pair, this machine and these prompts.

Replay over a trace predicts many configurations without a model; the best of each strategy, and plain decoding, are then
measured in turn on the same prompts. A configuration is chosen only if it is surely faster than plain decoding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from components.prompts import Prompt
from components.pyramid_model import predict_pyramids
from components.replay import read_texts
from components.search import Log, Progress, Search, Trial, shortlist
from components.search_space import MEASURED, REPLAYED, some_of
from components.statistics import paired_bootstrap_ratio
from serving.runtime.artifacts.base import ArtifactError
from serving.runtime.artifacts.hardware_profile import HardwareProfile
from serving.runtime.pair import LoadedPair
from serving.runtime.strategies import Kit, find_strategy
from serving.runtime.trace import TraceSet
from serving.runtime.types import DraftwellError

REFERENCE = "autoregressive"
MEASURED_CONFIGS = 3

Config = tuple[str, dict[str, Any]]
"""A strategy's name and parameters."""


class Measured(Protocol):
    """What was measured of one config: for every prompt, in order, seconds of the whole request and tokens emitted."""

    @property
    def seconds(self) -> Sequence[float]: ...

    @property
    def tokens(self) -> Sequence[int]: ...


Evaluate = Callable[[Sequence[Config], Sequence[Prompt]], Sequence[Measured]]
"""Measures configs on prompts, interleaved, and returns one `Measured` for each config in order."""
Quality = Callable[[Config], float]
"""Share of a config's emitted tokens, 0..1, that are the target's argmax on the same prefix."""


@dataclass(frozen=True)
class Tuned:
    """The choice, and what it rests on as plain JSON."""

    strategy: str
    parameters: dict[str, Any]
    evidence: dict[str, Any]


def tune(pair: LoadedPair, trace: TraceSet, prompts: Sequence[Prompt], kit: Kit, profile: HardwareProfile, *,
         evaluate: Evaluate, quality: Quality | None = None, strategies: Sequence[str] | None = None, trials: int = 60,
         measure_top: int = 3, max_tokens: int = 64, lossless_only: bool = True, quality_floor: float = 0.9, seed: int = 0,
         overlap: bool = True, study: Path | None = None, log: Log | None = None, progress: Progress | None = None) -> Tuned:
    """Choose a strategy and its parameters.

    Args:
        trace: of this pair, at temperature 0.
        prompts: what the shortlist is measured on; others than the trace's show what the choice is worth on new ones.
        kit: artifacts; a strategy that lacks one is left out, and the evidence says so.
        evaluate: measures the shortlist.
        quality: needed for lossy strategies.
        strategies: names to choose among, None takes all that are allowed and possible.
        trials: replays in all.
        measure_top: replayed configurations that are measured beside plain decoding.
        max_tokens: length of text that is predicted; at most the trace's own counts.
        lossless_only: leave lossy strategies out; otherwise they need `quality` >= `quality_floor`.
        overlap: whether forwards that a strategy overlaps run at once.
        study: SQLite file of trials, so that a run that was cut short goes on; None keeps them in memory.
        log: called with ("predicted_seconds_per_token/<strategy>", value, trial).
    Raises:
        DraftwellError: no prompts, an empty trace or one of another pair, an unknown or unfit strategy.
    """
    if not prompts:
        raise DraftwellError("there are no prompts to measure on: name a file that holds some")
    if min(trials, measure_top) < 1:
        raise DraftwellError(f"trials and measure_top must be at least 1, not {trials} and {measure_top}")
    trace = check_trace(pair, trace, profile)
    names, left_out = choose_strategies(pair, kit, strategies, lossless_only, quality)
    texts, digest = read_texts(trace), trace.digest()
    budget = min(max_tokens, texts.max_tokens)
    search = Search(texts, kit, profile, budget, overlap, seed, study, digest)
    done = search.run([name for name in names if name in REPLAYED], trials, log, progress)
    candidates: list[Config] = [(trial.strategy, trial.parameters) for trial in shortlist(done, measure_top)]
    qualities: list[dict[str, Any]] = []
    estimates = predict_pyramids(pair, names, prompts, profile)
    for config in to_measure(names, estimates, seed):
        if find_strategy(config[0]).lossless:
            candidates.append(config)
            continue
        share = quality(config) if quality else math.nan
        qualities.append(named(config) | {"quality": share if math.isfinite(share) else None})
        if share >= quality_floor:
            candidates.append(config)
    measured = measure_all(evaluate, candidates, prompts)
    figures = compare(measured, seed)
    (strategy, parameters), reason = choose(figures)
    evidence = {
        "choice": {"strategy": strategy, "parameters": parameters}, "reason": reason,
        "measured": [figure | {"predicted_seconds_per_token": predicted([*done, *estimates], figure)} for figure in figures],
        "quality": qualities, "quality_floor": None if lossless_only else quality_floor, "left_out": left_out,
        "trials": [vars(trial) for trial in done], "trace_digest": digest, "fingerprint": pair.fingerprint,
        "device_class": profile.provenance.device_class, "prompts": len(prompts), "max_tokens": budget, "seed": seed}
    return Tuned(strategy, parameters, evidence)


def to_measure(names: Sequence[str], estimates: Sequence[Trial], seed: int) -> list[Config]:
    """Configs that no replay can predict: those of an estimate where there is one, else the defaults and some at random."""
    estimated = {trial.strategy for trial in estimates}
    others = [(name, p) for name in names if name in MEASURED and name not in estimated for p in some_of(name, MEASURED_CONFIGS, seed)]
    return [*others, *((trial.strategy, trial.parameters) for trial in estimates)]


def check_trace(pair: LoadedPair, trace: TraceSet, profile: HardwareProfile) -> TraceSet:
    """The trace, bound to this pair; a trace or profile of another pair is refused."""
    bound = TraceSet(trace.folder, fingerprint=pair.fingerprint)
    _ = bound.header
    owner = profile.provenance
    if owner.fingerprint and owner.fingerprint != pair.fingerprint:
        raise ArtifactError(f"the hardware profile belongs to pair {owner.pair} with fingerprint {owner.fingerprint[:12]}, not "
                            f"{pair.fingerprint[:12]}: calibrate this pair (draftwell calibrate)")
    return bound


def choose_strategies(pair: LoadedPair, kit: Kit, wanted: Sequence[str] | None, lossless_only: bool,
                      quality: Quality | None) -> tuple[list[str], dict[str, str]]:
    """Names to try, and why the others are left out. A name that the user gave and that is unfit is an error."""
    names, left_out = [], {}
    for name in wanted if wanted is not None else [*REPLAYED, *MEASURED]:
        if name == REFERENCE:
            continue  # always measured
        problem = unfit(pair, kit, name, lossless_only, quality)
        if problem is None:
            names.append(name)
        elif wanted is not None:
            raise DraftwellError(f"strategy {name} cannot be tuned here: {problem}")
        else:
            left_out[name] = problem
    return names, left_out


def unfit(pair: LoadedPair, kit: Kit, name: str, lossless_only: bool, quality: Quality | None) -> str | None:
    """Why a strategy cannot be tuned, or None."""
    cls = find_strategy(name)
    if name not in REPLAYED and name not in MEASURED:
        return f"it has no search space, choose from {', '.join([*REPLAYED, *MEASURED])}"
    if not cls.lossless and lossless_only:
        return "it is lossy, and only lossless strategies are allowed"
    if not cls.lossless and quality is None:
        return "it is lossy, and nothing measures its quality"
    lacking = [role for role in cls.roles if role not in pair.models] + [a for a in cls.artifacts if a not in kit.artifacts]
    return f"it needs {lacking[0]}, which is not at hand" if lacking else None


def measure_all(evaluate: Evaluate, candidates: Sequence[Config], prompts: Sequence[Prompt]) -> list[tuple[Config, Measured]]:
    """The measurements of plain decoding and of every candidate, in this order."""
    configs: list[Config] = [(REFERENCE, {}), *candidates]
    results = evaluate(configs, prompts)
    if len(results) != len(configs) or any(len(r.seconds) != len(prompts) for r in results):
        raise DraftwellError(f"the measurement gave {len(results)} results for {len(configs)} configurations: measure them all")
    return list(zip(configs, results, strict=True))


def compare(measured: Sequence[tuple[Config, Measured]], seed: int) -> list[dict[str, Any]]:
    """Figures of every config against the first, which is plain decoding, as plain JSON."""
    figures = []
    base = measured[0][1]
    for config, result in measured:
        ratio, low, high = paired_bootstrap_ratio(base.seconds, base.tokens, result.seconds, result.tokens, seed=seed)
        paces = [s / n for s, n in zip(result.seconds, result.tokens, strict=True)]
        figures.append(named(config) | {
            "median_seconds_per_token": median(paces), "seconds_per_token": sum(result.seconds) / sum(result.tokens),
            "speedup": ratio, "speedup_low": low, "speedup_high": high})
    return figures


def choose(figures: Sequence[Mapping[str, Any]]) -> tuple[Config, str]:
    """The fastest config whose speedup's lower bound is at least 1, else plain decoding; and why, in a sentence.

    Args:
        figures: of `compare`; the first is plain decoding's.
    """
    others = sorted(figures[1:], key=lambda figure: -figure["speedup"])
    sure = [figure for figure in others if figure["speedup_low"] >= 1.0]
    if sure:
        best = sure[0]
        return (best["strategy"], dict(best["parameters"])), (
            f"{describe(best)} is {best['speedup']:.2f} times as fast as {REFERENCE} (at least {best['speedup_low']:.2f} times, "
            "one-sided 95 %)")
    if not others:
        return (REFERENCE, {}), f"{REFERENCE}, because there was nothing to compare it with"
    best = others[0]
    return (REFERENCE, {}), (f"{REFERENCE}, because nothing is surely faster: the best, {describe(best)}, measured "
                             f"{best['speedup']:.2f} times its speed with a lower bound of {best['speedup_low']:.2f}")


def named(config: Config) -> dict[str, Any]:
    return {"strategy": config[0], "parameters": config[1]}


def describe(figure: Mapping[str, Any]) -> str:
    settings = ", ".join(f"{name}={value}" for name, value in figure["parameters"].items())
    return f"{figure['strategy']}({settings})" if settings else str(figure["strategy"])


def predicted(trials: Sequence[Trial], figure: Mapping[str, Any]) -> float | None:
    """What replay said about a measured config."""
    match = [t for t in trials if (t.strategy, t.parameters) == (figure["strategy"], figure["parameters"])]
    return match[0].predicted_seconds_per_token if match else None
