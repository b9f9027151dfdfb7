"""The ratios that a bench is run for, each with its interval.

"Best" is the fastest of this very run, so its ratio is a little optimistic: it was chosen by the
noise too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from draftwell.components.bench.interleaved import REFERENCE
from draftwell.components.bench.metrics import (
    BenchMetrics,
    fastest,
    gamma_of_parameters,
    is_vanilla,
)
from draftwell.components.bench.peers.group import ProcessPeer
from draftwell.components.bench.runner import Measurement
from draftwell.components.bench.schema import BenchEntry, Headline
from draftwell.components.report.intervals import ratio_of

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
        ratio, low, high = ratio_of(base, m)
        calls = base.stats.calls_per_token if base.ours and base is not metrics.reference else 0.0
        rows.append(
            Headline(
                name=name,
                contender=m.label,
                against=base.label,
                ratio=ratio,
                low=low,
                high=high,
                cost_ratio=m.stats.calls_per_token / calls if calls > 0 else None,
            )
        )
    return rows


def comparisons(
    metrics: BenchMetrics, entries: Mapping[str, BenchEntry], assisted_gamma: int | None
) -> Iterator[tuple[str, Measurement | None, Measurement | None]]:
    """(name, contender, base); either is None where it was not measured."""
    measured, plain = metrics.measured, metrics.reference
    groups = by_strategy(measured)
    lossless = [m for group in groups.values() for m in group if m.lossless]
    best = fastest(lossless)
    yield "autoregressive / transformers generate", plain, measured.get(GENERATE)
    yield (
        "vanilla_sd / transformers assisted, same gamma",
        same_gamma(lossless, assisted_gamma),
        measured.get(ASSISTED),
    )
    yield "best lossless / autoregressive", best, plain
    for peer, theirs in peers_elsewhere(measured).items():
        yield f"autoregressive / {peer}, plain", plain, measured.get(f"{peer}/{REFERENCE}")
        yield f"best lossless / fastest of {peer}", best, fastest(theirs)
    yield (
        "best lossless with the draft model / autoregressive",
        fastest(m for m in lossless if m.stats.draft_calls > 0),
        plain,
    )
    unrestricted = metrics.vanilla_unsplit
    for name, group in groups.items():
        split = fastest(m for m in group if m.lossless and m.split_cores)
        if name != "vanilla_sd":
            yield f"{name} / fastest vanilla_sd, equal cores", split, metrics.vanilla_split
            yield f"{name} / fastest vanilla_sd, unrestricted", split, unrestricted
        holding = fastest(m for m in group if entries[m.label].holds_floor)
        yield f"{name} at the quality floor / fastest vanilla_sd", holding, unrestricted


def by_strategy(measured: Mapping[str, Measurement]) -> dict[str, list[Measurement]]:
    """Strategy → its measurements, plain decoding's and the peers' left out."""
    found: dict[str, list[Measurement]] = {}
    for m in measured.values():
        if m.ours and m.ours.strategy != REFERENCE:
            found.setdefault(m.ours.strategy, []).append(m)
    return found


def peers_elsewhere(measured: Mapping[str, Measurement]) -> dict[str, list[Measurement]]:
    """Peer → its measurements, of those that ran in processes of their own."""
    found: dict[str, list[Measurement]] = {}
    for label, m in measured.items():
        if isinstance(m.contender, ProcessPeer):
            found.setdefault(label.partition("/")[0], []).append(m)
    return found


def same_gamma(measured: list[Measurement], gamma: int | None) -> Measurement | None:
    """Vanilla SD with a draft length, on all cores."""
    return next(
        (
            m
            for m in measured
            if not m.split_cores
            and is_vanilla(m)
            and m.ours
            and gamma_of_parameters(m.ours.parameters) == gamma
        ),
        None,
    )
