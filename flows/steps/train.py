"""Steps that learn from traces (`run_train`, `run_train_head`) and calibrate (`run_calibrate`: table, memory and hardware profile)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from flows.context import StepContext

if TYPE_CHECKING:
    from components.prompts.prompt import Prompt
    from components.train.reports import HeadReport, ScoreCost, VerifierReport
    from serving.artifacts.base import Artifact
    from serving.recording.trace import TraceSet
    from serving.runtime.types import Rows

AT_ONCE = 8
"""Concurrent requests that fill the correction memory, as far as the pair has slots."""


def run_train(step: StepContext, traces: TraceSet, *, test: TraceSet | None = None, ratio: float = 1.2,
              wanted_false_positive: float | None = 0.1, features: Literal["auto"] | Sequence[str] = "auto",
              seed: int = 0) -> VerifierReport:
    """Train a SPRINTER verifier, put it into the workspace and return its report. Nothing is written before all that can fail.

    Args:
        test, ratio, wanted_false_positive, features, seed: as in `components.train.verifier.train_verifier`.
    """
    from components.gate.verdict_report import write_text
    from components.report.drawing import check_drawing
    from components.report.provenance import provenance
    from components.train.plots import verifier_plots
    from components.train.verifier import train_verifier
    from components.train.verifier_page import verifier_markdown

    check_drawing()
    origin = provenance(step.pair, trace_digest=traces.digest())
    verifier, report = train_verifier(traces, origin, test=test, ratio=ratio, wanted_false_positive=wanted_false_positive,
                                      features=features, seed=seed)
    cost = measure_cost(step, verifier, lambda row, token: verifier.score_drafted(row, row, token))
    report = report.model_copy(update={"cost": cost})
    step.workspace.save(verifier)
    verifier_plots(report, step.workspace.reports)
    step.stamp(verifier.kind)
    write_text(step.workspace.reports / "verifier.md", verifier_markdown(report))
    step.report("verifier", report.to_json())
    return report


def run_train_head(step: StepContext, traces: TraceSet, *, test: TraceSet | None = None, seed: int = 0) -> HeadReport:
    """Train a SpecDec++ acceptance head, put it into the workspace and return its report.

    Args:
        test, seed: as in `components.train.acceptance_head.train_acceptance_head`.
    """
    from components.report.drawing import check_drawing
    from components.report.provenance import provenance
    from components.train.acceptance_head import HeadTrainingSettings, train_acceptance_head
    from components.train.plots import acceptance_head_plot

    check_drawing()
    head, report = train_acceptance_head(step.pair, traces, provenance(step.pair, trace_digest=traces.digest()),
                                         HeadTrainingSettings(seed=seed), test=test)
    report = report.model_copy(update={"cost": measure_cost(step, head, lambda row, token: head.acceptance(row.hidden(0)))})
    step.workspace.save(head)
    acceptance_head_plot(report, step.workspace.reports / "acceptance_head.png")
    step.stamp(head.kind)
    step.report("acceptance_head", report.to_json())
    return report


def measure_cost(step: StepContext, trained: Artifact, score: Callable[[Rows, int], float]) -> ScoreCost:
    """Measure the time of a score, and add it to the artifact's metrics."""
    from components.train.score_cost import time_score

    cost = time_score(step.pair, score)
    metrics = {**trained.provenance.metrics, "score_us": cost.score_us, "score_share": cost.share}
    trained.provenance = trained.provenance.model_copy(update={"metrics": metrics})
    return cost


def run_calibrate(step: StepContext, traces: TraceSet, prompts: Sequence[Prompt], *, max_tokens: int = 96) -> dict[str, Any]:
    """Make acceptance table, correction memory and hardware profile, put them into the workspace and return a summary.

    Args:
        traces: for the acceptance table.
        prompts: decoded for the correction memory, at most `max_tokens` tokens each.
    """
    from components.calibrate.acceptance_table import build_acceptance_table
    from components.calibrate.correction_memory import MemorySettings, build_correction_memory
    from components.calibrate.hardware_profile import measure_profile
    from components.calibrate.plots import acceptance_plot, rejection_tail
    from components.report.provenance import provenance

    table = build_acceptance_table(traces, provenance(step.pair, trace_digest=traces.digest()))
    # The memory never reads the traces: its provenance names the prompts that it was decoded from.
    memory = build_correction_memory(step.pair, prompts, provenance(step.pair), MemorySettings(max_tokens=max_tokens, batch=AT_ONCE),
                                     progress=step.bar)
    times = measure_profile(step.pair, provenance(step.pair))
    for artifact in (table, memory, times):
        step.workspace.save(artifact)
    acceptance_plot(table, step.workspace.reports / "acceptance_by_confidence.png")
    rejection_tail(list(memory.counts.values()), step.workspace.reports / "rejections.png")
    for drawn in (table, memory):
        step.stamp(drawn.kind)
    report = {"judged": sum(table.total), "accepted": sum(table.accepted), "memory_pairs": len(memory.counts),
              "t_draft_ms": times.t_draft * 1e3, "t_verify_ms": {str(k): v * 1e3 for k, v in times.t_verify.items()}}
    step.report("calibration", report)
    return report
