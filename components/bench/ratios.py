"""The ratios that a bench is run for, each with a bootstrap interval over prompts, and the curves
over a parameter.

"Best" is the fastest of this very run, so its ratio is a little optimistic: it was chosen by the
noise too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from draftwell.components.bench.metrics import (
    REFERENCE,
    BenchMetrics,
    fastest,
    gamma_of_parameters,
    is_baseline,
    splits_cores,
    strategy_of,
)
from draftwell.components.bench.peers.group import ProcessPeer
from draftwell.components.bench.runner import Measurement, StrategyContender
from draftwell.components.bench.schema import BenchEntry, Curve, CurvePoint, Headline, Largest

GENERATE, ASSISTED = "transformers/autoregressive", "transformers/assisted"


def headlines(
    metrics: BenchMetrics, entries: Mapping[str, BenchEntry], assisted_gamma: int | None = None
) -> list[Headline]:
    """The ratios; one that was not measured is left out.

    Args:
        entries: by label, for the quality floor.
        assisted_gamma: draft length of transformers' assisted generation, where it was measured.
    """
    rows = []
    for name, m, base in comparisons(metrics, entries, assisted_gamma):
        if m is None or base is None or m is base:
            continue
        ratio, low, high = metrics.ratio(m, base)
        counted = (
            isinstance(base.contender, StrategyContender)
            and base is not metrics.reference
            and base.stats.calls_per_token > 0
        )
        rows.append(
            Headline(
                name=name,
                contender=m.contender.label,
                against=base.contender.label,
                ratio=ratio,
                low=low,
                high=high,
                cost_ratio=m.stats.calls_per_token / base.stats.calls_per_token
                if counted
                else None,
            )
        )
    return rows


def comparisons(
    metrics: BenchMetrics, entries: Mapping[str, BenchEntry], assisted_gamma: int | None
) -> Iterator[tuple[str, Measurement | None, Measurement | None]]:
    """(name, contender, base); either is None where it was not measured."""
    measured, plain = metrics.measured, metrics.reference
    ours = [
        m
        for m in measured.values()
        if isinstance(m.contender, StrategyContender) and strategy_of(m) != REFERENCE
    ]
    lossless = [
        m for m in ours if isinstance(m.contender, StrategyContender) and m.contender.lossless
    ]
    yield "autoregressive / transformers generate", plain, measured.get(GENERATE)
    yield (
        "vanilla_sd / transformers assisted, same gamma",
        same_gamma(lossless, assisted_gamma),
        measured.get(ASSISTED),
    )
    yield "best lossless / autoregressive", fastest(lossless), plain
    for peer, theirs in peers_elsewhere(measured).items():
        yield f"autoregressive / {peer}, plain", plain, measured.get(f"{peer}/{REFERENCE}")
        yield f"best lossless / fastest of {peer}", fastest(lossless), fastest(theirs)
    yield (
        "best lossless with the draft model / autoregressive",
        fastest(lossless, lambda m: m.stats.draft_calls > 0),
        plain,
    )
    overlapping = [m for m in lossless if splits_cores(m) and strategy_of(m) != "vanilla_sd"]
    for name in dict.fromkeys(strategy_of(m) for m in overlapping):
        best = fastest(overlapping, lambda m, name=name: strategy_of(m) == name)  # type: ignore[misc]
        yield f"{name} / fastest vanilla_sd, equal cores", best, metrics.vanilla_split
        yield f"{name} / fastest vanilla_sd, unrestricted", best, unrestricted(metrics)
    lossy = [
        m for m in ours if isinstance(m.contender, StrategyContender) and not m.contender.lossless
    ]
    for name in dict.fromkeys(strategy_of(m) for m in lossy):
        named = [m for m in lossy if strategy_of(m) == name]
        holding = fastest(named, lambda m: bool(entries[m.contender.label].holds_floor))
        yield f"{name} at the quality floor / fastest vanilla_sd", holding, unrestricted(metrics)


def peers_elsewhere(measured: Mapping[str, Measurement]) -> dict[str, list[Measurement]]:
    """Peer → its measurements, of those that ran in processes of their own."""
    found: dict[str, list[Measurement]] = {}
    for label, m in measured.items():
        if isinstance(m.contender, ProcessPeer):
            found.setdefault(label.partition("/")[0], []).append(m)
    return found


def same_gamma(measured: Sequence[Measurement], gamma: int | None) -> Measurement | None:
    """Vanilla SD with a draft length, on all cores."""
    return next(
        (
            m
            for m in measured
            if isinstance(m.contender, StrategyContender)
            and not splits_cores(m)
            and is_baseline(m.contender.strategy, m.contender.parameters)
            and gamma_of_parameters(m.contender.parameters) == gamma
        ),
        None,
    )


def unrestricted(metrics: BenchMetrics) -> Measurement | None:
    """The fastest vanilla SD on all cores."""
    return None if metrics.vanilla is metrics.vanilla_split else metrics.vanilla


def largest_overheads(entries: Mapping[str, BenchEntry]) -> dict[str, Largest | None]:
    """`overhead_fraction` and `peak_memory_mb` → the strategy with the largest; None where none was
    measured."""
    found: dict[str, Largest | None] = {}
    for key in ("overhead_fraction", "peak_memory_mb"):
        known = {
            label: float(value)
            for label, entry in entries.items()
            if (value := getattr(entry, key)) is not None
        }
        label = max(known, key=known.__getitem__, default=None)
        found[key] = None if label is None else Largest(label=label, value=known[label])
    return found


def curves(entries: Mapping[str, BenchEntry]) -> dict[str, Curve]:
    """Strategy → its curve, where one numeric parameter took several values on one plan of cores.

    Points are ordered by value. A config that leaves the parameter out is no point.
    """
    found: dict[str, Curve] = {}
    groups: dict[tuple[str, bool], list[tuple[str, BenchEntry]]] = {}
    for label, entry in entries.items():
        if entry.strategy and entry.strategy != REFERENCE:
            groups.setdefault((entry.strategy, "@" in label), []).append((label, entry))
    for (name, split), group in groups.items():
        parameter = varied([entry.parameters for _, entry in group])
        if parameter:
            points = [
                point(float(entry.parameters[parameter]), label, entry)
                for label, entry in group
                if parameter in entry.parameters
                and math.isfinite(float(entry.parameters[parameter]))
            ]
            points.sort(key=lambda p: p.value)
            found[name + ("@1+1" if split else "")] = Curve(
                parameter=parameter, points=tuple(points)
            )
    return found


def varied(settings: Sequence[Mapping[str, Any]]) -> str | None:
    """The only numeric parameter with several values; None if there is none, or more than one."""
    values: dict[str, set[float]] = {}
    for parameters in settings:
        for key, value in parameters.items():
            try:
                number = float(value)
            except (TypeError, ValueError):
                continue
            if math.isfinite(number):  # a limit such as lambda = inf has no place on an axis
                values.setdefault(key, set()).add(number)
    several = [key for key, found in values.items() if len(found) > 1]
    return several[0] if len(several) == 1 else None


def point(value: float, label: str, entry: BenchEntry) -> CurvePoint:
    """One config of a curve."""
    return CurvePoint(
        value=value,
        label=label,
        speedup=entry.speedup,
        over_vanilla=entry.over_vanilla and entry.over_vanilla.ratio,
        target_argmax_share=entry.target_argmax_share,
        rouge_l=entry.rouge_l,
        rescued_share=entry.rescued_share,
        holds_floor=entry.holds_floor,
    )
