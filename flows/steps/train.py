"""Steps that learn from traces (`run_train`, `run_train_head`, `run_train_medusa`,
`run_train_datastore`) and that calibrate (`run_calibrate`: table, memory and hardware profile)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwell.components.calibrate.acceptance_table import (
    build_acceptance_table,
    build_sampled_table,
    rates,
    with_sampled,
)
from draftwell.components.calibrate.correction_memory import build_correction_memory
from draftwell.components.calibrate.hardware_profile import measure_profile
from draftwell.components.calibrate.plots import acceptance_plot, rejection_tail
from draftwell.components.calibrate.settings import MemorySettings
from draftwell.components.prompts.overlap import hashes_of
from draftwell.components.report.drawing import check_drawing
from draftwell.components.report.provenance import provenance
from draftwell.components.train.acceptance_head import train_acceptance_head
from draftwell.components.train.datastore import build_datastore
from draftwell.components.train.medusa import train_medusa_heads
from draftwell.components.train.report.plots import acceptance_head_plot, verifier_plots
from draftwell.components.train.report.verifier_page import verifier_markdown
from draftwell.components.train.settings import VerifierSettings
from draftwell.components.train.verifier import train_verifier
from draftwell.flows.context import (
    StepContext,
    open_trace,
    prompts_behind,
    take_untouched,
    training_prompts,
)
from draftwell.flows.steps.champion import champion_of
from draftwell.flows.steps.tune import champion_decoding
from draftwell.flows.workspace import in_turn
from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.base import ArtifactError
from draftwell.serving.artifacts.datastore import Datastore
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import write_text
from draftwell.serving.recording.tenants import tenants_of
from draftwell.serving.runtime.strategies import find_strategy, served_choice

if TYPE_CHECKING:
    from draftwell.components.prompts.prompt import Prompt
    from draftwell.components.train.datastore import DatastoreReport
    from draftwell.components.train.medusa import MedusaReport
    from draftwell.components.train.reports import HeadReport, VerifierReport
    from draftwell.flows.settings import PipelineSettings
    from draftwell.serving.artifacts.base import Provenance
    from draftwell.serving.artifacts.correction_memory import CorrectionMemory
    from draftwell.serving.artifacts.hardware_profile import HardwareProfile
    from draftwell.serving.recording.trace import TraceSet


@in_turn("draftwell step train")
def run_train(
    step: StepContext,
    traces: TraceSet,
    settings: VerifierSettings | None = None,
    *,
    test: TraceSet | None = None,
    seed: int = 0,
) -> VerifierReport:
    """Train a SPRINTER verifier, put it into the workspace and return its report. Nothing is
    written before all that can fail.

    Args:
        settings, test, seed: as in `draftwell.components.train.verifier.train_verifier`.
    """

    check_drawing()
    origin = made_from(step, traces)
    verifier, report = train_verifier(traces, origin, settings, test=test, seed=seed)
    step.workspace.save(verifier)
    verifier_plots(report, step.workspace.reports)
    step.stamp(verifier.kind)
    write_text(step.workspace.reports / "verifier.md", verifier_markdown(report))
    step.report("verifier", report.to_json())
    return report


@in_turn("draftwell step train")
def run_train_head(
    step: StepContext, traces: TraceSet, *, test: TraceSet | None = None, seed: int = 0
) -> HeadReport:
    """Train a SpecDec++ acceptance head, put it into the workspace and return its report.

    Args:
        test, seed: as in `draftwell.components.train.acceptance_head.train_acceptance_head`.
    """

    check_drawing()
    head, report = train_acceptance_head(
        step.pair, traces, made_from(step, traces), seed, test=test
    )
    step.workspace.save(head)
    acceptance_head_plot(report, step.workspace.reports / "acceptance_head.png")
    step.stamp(head.kind)
    step.report("acceptance_head", report.to_json())
    return report


@in_turn("draftwell step train")
def run_train_datastore(step: StepContext, traces: TraceSet) -> DatastoreReport:
    """Make a datastore of the target's own texts, put it into the workspace and return its
    report."""

    store, report = build_datastore(traces, made_from(step, traces))
    step.workspace.save(store)
    step.report("datastore", report.model_dump(mode="json"))
    return report


def renew_datastore(step: StepContext, device: str) -> DatastoreReport | None:
    """Make the datastore again of the workspace's traces, where the champion pins one that it
    drafts from: texts of today's traffic.

    One of the workspace that holds more tokens stays: a schedule collects few texts. Nothing is
    loaded or measured.

    Returns:
        the report of the new one; None where nothing was made.
    """

    release = champion_of(step.workspace, device)
    config = (
        champion_decoding(step) if release is not None and Datastore.kind in release.pins else None
    )
    if config is None or not any(
        Datastore.kind in find_strategy(served_choice(config, at).name).reads() for at in (0.0, 1.0)
    ):
        return None
    traces = open_trace(step)
    store, report = build_datastore(traces, made_from(step, traces))
    kept = step.workspace.found(step.pair, Datastore.kind)
    if isinstance(kept, Datastore) and len(kept.order) > len(store.order):
        step.workspace.say(
            f"the datastore stays: it holds {len(kept.order)} tokens, and the traces have "
            f"{len(store.order)}; collect more "
            "prompts (collect_prompts), or make it with `draftwell step train --kind datastore`"
        )
        return None
    step.workspace.save(store)
    step.report("datastore", report.model_dump(mode="json"))
    return report


@in_turn("draftwell step train")
def run_train_medusa(
    step: StepContext, traces: TraceSet, *, test: TraceSet | None = None, seed: int = 0
) -> MedusaReport:
    """Train Medusa's heads on the target's texts of a trace, put them into the workspace and return
    their report.

    Args:
        test, seed: as in `draftwell.components.train.medusa.train_medusa_heads`.
    """

    heads, report = train_medusa_heads(
        step.pair, traces, made_from(step, traces), test=test, seed=seed
    )
    step.workspace.save(heads)
    step.report("medusa_heads", report.model_dump(mode="json"))
    return report


def made_from(step: StepContext, traces: TraceSet) -> Provenance:
    """Provenance of what is made from traces, with their temperature: it is for requests of that
    class."""

    prompts, unknown = prompts_behind(traces, step.pair)
    made = provenance(
        step.pair,
        trace_digest=traces.digest(),
        parameters={"temperature": traces.header.temperature},
        training_prompts=prompts,
        unknown_prompts=unknown,
    )
    return made.model_copy(update={"tenants": tenants_of(traces.prompt_ids())})


@in_turn("draftwell step calibrate")
def run_calibrate(
    step: StepContext,
    traces: TraceSet,
    prompts: Sequence[Prompt] | None,
    memory_settings: MemorySettings | None = None,
    *,
    limit: int | None = None,
    keep_sampled: bool = True,
) -> dict[str, Any]:
    """Make acceptance table, correction memory and hardware profile, put them into the workspace
    and return a summary.

    A run that was killed while it counted rejections resumes: what it had is in the workspace's
    file `rejections.jsonl`.

    Args:
        traces: for the acceptance table.
        prompts: decoded for the correction memory; those of the traces are left out. None makes
            no memory.
        memory_settings: how; default: `MemorySettings()`.
        limit: how many of them; None takes all.
        keep_sampled: the counts of sampled texts that are in the table of before
            (`run_calibrate_sampled`) stay in it.
    """

    table, before = (
        build_acceptance_table(traces, made_from(step, traces)),
        known_table(step) if keep_sampled else None,
    )
    table = with_sampled(table, before.sampled if before else None)
    unfinished = step.workspace.root / "rejections.jsonl"
    memory = None
    if prompts is not None:
        used = training_prompts(step.workspace, traces.folder, pair=step.pair)
        rows = take_untouched(step.workspace, used, prompts, limit)
        memory = memory_of(step, rows, memory_settings, unfinished)
    times = profile_of(step)
    for artifact in (table, times, *([memory] if memory else [])):
        step.workspace.save(artifact)
    unfinished.unlink(missing_ok=True)
    draw_calibration(step, table, memory)
    report = {
        "judged": sum(table.total),
        "accepted": sum(table.accepted),
        "prior_weight": table.prior_weight,
        **({} if memory is None else {"memory_pairs": len(memory.counts)}),
        **milliseconds(times),
    }
    step.report("calibration", report)
    return report


def memory_of(
    step: StepContext,
    prompts: Sequence[Prompt],
    settings: MemorySettings | None,
    unfinished: Path,
) -> CorrectionMemory:
    """The correction memory of prompts that are decoded. It never reads the traces: its provenance
    names these prompts."""
    made = provenance(step.pair, training_prompts=hashes_of(prompts)).model_copy(
        update={"tenants": tenants_of(prompt.id for prompt in prompts)}
    )
    return build_correction_memory(
        step.pair, prompts, made, settings, unfinished=unfinished, progress=step.bar
    )


def draw_calibration(
    step: StepContext, table: AcceptanceTable, memory: CorrectionMemory | None
) -> None:
    """Plots of both, which carry their artifact's digest."""

    acceptance_plot(table, step.workspace.reports / "acceptance_by_confidence.png")
    step.stamp(table.kind)
    if memory is not None:
        rejection_tail(list(memory.counts.values()), step.workspace.reports / "rejections.png")
        step.stamp(memory.kind)


@in_turn("draftwell step calibrate")
def run_profile(step: StepContext) -> dict[str, Any]:
    """Make the hardware profile alone, which is all that can be calibrated without a draft model,
    and return a summary."""

    times = profile_of(step)
    step.workspace.save(times)
    report = milliseconds(times)
    step.report("calibration", report)
    return report


def profile_of(step: StepContext) -> HardwareProfile:
    """Times of the pair's passes, and of the head's that the workspace has."""
    head: Any = step.workspace.found(step.pair, "eagle3_head")
    return measure_profile(step.pair, provenance(step.pair), head=head)


def milliseconds(times: HardwareProfile) -> dict[str, Any]:
    """The passes that a summary names, as far as they were measured."""
    single = {
        name: seconds * 1e3
        for name, seconds in (("t_draft_ms", times.t_draft), ("t_head_ms", times.t_head))
        if seconds is not None
    }
    return {**single, "t_verify_ms": {str(k): v * 1e3 for k, v in times.t_verify.items()}}


@in_turn("draftwell step calibrate")
def run_calibrate_sampled(
    step: StepContext, traces: TraceSet, temperature: float
) -> dict[str, Any]:
    """Count sampled texts into the acceptance table, for sampled requests, and put it into the
    workspace; returns a summary.

    Args:
        traces: of this temperature.

    Raises:
        DraftwellError: there is no table of greedy texts to add them to (`no_greedy_table`), or as
            in `build_sampled_table`.
    """

    table = known_table(step)
    if table is None:
        raise DraftwellError(
            "there is no acceptance table that counts of sampled texts could be added to: "
            "run `draftwell step calibrate "
            f"--pair {step.workspace.name}` first, on greedy texts",
            code="no_greedy_table",
        )
    sampled = build_sampled_table(traces, made_from(step, traces), temperature)
    step.workspace.save(with_sampled(table, sampled))
    report = {"temperature": temperature, **rates(sampled)}
    step.report("calibration_sampled", report)
    return report


@in_turn("draftwell step calibrate")
def calibrate_as(
    settings: PipelineSettings, step: StepContext, prompts: Sequence[Prompt]
) -> dict[str, Any]:
    """Calibrate on the workspace's traces with the flows' settings, for each class of temperatures
    that is tuned, and make the champion's datastore again (`renew_datastore`); returns a
    summary."""
    sampled = settings.temperatures[1:]
    report = run_calibrate(
        step,
        open_trace(step),
        prompts if settings.takes_lossy else None,
        MemorySettings(max_tokens=settings.max_tokens),
        keep_sampled=not sampled,
    )
    for temperature in sampled:
        found = run_calibrate_sampled(step, open_trace(step, temperature=temperature), temperature)
        report |= {f"sampled_{name}": value for name, value in found.items()}
    if (renewed := renew_datastore(step, settings.device)) is not None:
        report["datastore_tokens"] = renewed.tokens
    return report


def known_table(step: StepContext) -> AcceptanceTable | None:
    """The acceptance table that strategies get: the workspace's, else what the pair ships with;
    None where there is neither."""

    for folder in (
        step.workspace.folder(AcceptanceTable.kind),
        step.workspace.shipped / AcceptanceTable.kind,
    ):
        try:
            return AcceptanceTable.load(folder, fingerprint=step.pair.fingerprint)
        except ArtifactError:
            continue  # there is none, or it is of other weights: calibration replaces it
    return None
