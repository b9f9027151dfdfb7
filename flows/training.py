"""Stations that learn from traces (`train`, `train_head`) and from runs (`calibrate`: table, memory and hardware profile)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flows.stations import Station

if TYPE_CHECKING:
    from components.prompts import Prompt
    from serving.runtime.trace import TraceSet

AT_ONCE = 8
"""Requests that fill the correction memory together, as far as the pair has slots."""


def train(station: Station, traces: TraceSet) -> dict[str, Any]:
    """Train a SPRINTER verifier, put it into the workspace and return its report."""
    from components.plots import verifier_plots
    from components.provenance import provenance
    from components.verifier_training import train_verifier

    verifier, report = train_verifier(traces, provenance(station.pair, trace_digest=traces.digest()))
    station.workspace.save(verifier)
    verifier_plots(report, station.workspace.reports)
    station.report("verifier", report)
    return report


def train_head(station: Station, traces: TraceSet) -> dict[str, Any]:
    """Train a SpecDec++ acceptance head, put it into the workspace and return its report."""
    from components.acceptance_head_training import train_acceptance_head
    from components.provenance import provenance

    head, report = train_acceptance_head(station.pair, traces, provenance(station.pair, trace_digest=traces.digest()))
    station.workspace.save(head)
    station.report("acceptance_head", report)
    return report


def calibrate(station: Station, traces: TraceSet, prompts: Sequence[Prompt], *, max_tokens: int = 96) -> dict[str, Any]:
    """Make acceptance table, correction memory and hardware profile, put them into the workspace and say what is in them."""
    from components.calibration import build_acceptance_table, build_correction_memory
    from components.plots import acceptance_plot, rejection_tail
    from components.profiling import profile
    from components.provenance import provenance

    made_of = provenance(station.pair, trace_digest=traces.digest())
    table = build_acceptance_table(traces, made_of)
    memory = build_correction_memory(station.pair, prompts, made_of, max_tokens=max_tokens, batch=AT_ONCE, progress=station.bar)
    times = profile(station.pair, provenance(station.pair))
    for artifact in (table, memory, times):
        station.workspace.save(artifact)
    acceptance_plot(table, station.workspace.reports / "acceptance_by_confidence.png")
    rejection_tail(list(memory.counts.values()), station.workspace.reports / "rejections.png")
    report = {"judged": sum(table.total), "accepted": sum(table.accepted), "memory_pairs": len(memory.counts),
              "t_draft_ms": times.t_draft * 1e3, "t_verify_ms": {str(k): v * 1e3 for k, v in times.t_verify.items()}}
    station.report("calibration", report)
    return report
