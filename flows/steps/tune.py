"""The pipeline step that chooses: traces and measurements → strategy and parameters, or plain decoding instead."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.context import StepContext, open_trace
from flows.steps.champion import champion_of
from serving.artifacts.kinds import READ_BY_STRATEGIES
from serving.errors import DraftwellError

if TYPE_CHECKING:
    from components.prompts.prompt import Prompt
    from components.tune.evidence import TuningEvidence
    from components.tune.settings import TuneSettings
    from components.tune.tune import TuneInputs
    from flows.settings import PipelineSettings
    from flows.workers.task_runners import WorkerPool
    from serving.artifacts.decoding_config import DecodingConfig
    from serving.recording.trace import TraceSet
    from serving.runtime.strategies import StrategyChoice


def run_tune(step: StepContext, traces: TraceSet, prompts: Sequence[Prompt], settings: TuneSettings, *, study: Path | None = None,
             keep: bool = True, workers: WorkerPool | None = None) -> TuningEvidence:
    """Choose strategy and parameters by replay and measurement; the choice and its evidence go into the workspace.

    A run that was killed resumes where it stopped when it is started again.

    Args:
        study: SQLite file of trials; None takes the workspace's, which may hold other searches too.
        keep: False saves nothing but a `study` that was named: for a padded target, whose times nobody is served with.
        workers: who makes the replays; what is measured is measured here, one at a time.
    """
    from components.report.provenance import provenance
    from components.tune.evaluator import Evaluator, QualityReader
    from components.tune.tune import TuneFiles, TuneHooks, tune_strategy
    from flows.workers.task_runners import spread_replays
    from serving.artifacts.decoding_config import DecodingConfig

    inputs = inputs_of(step, traces, prompts, settings)
    folder = step.workspace.root / "tuning"
    rungs = folder / "rungs.json" if keep else None
    evidence = tune_strategy(
        inputs, settings, Evaluator(step.pair, inputs.resources, max_tokens=settings.max_tokens, progress=step.bar),
        QualityReader(step.pair),
        TuneFiles(study or (folder / "study.db" if keep else None), named=study is not None, rungs=rungs),
        TuneHooks(spread=spread_replays(workers, step, traces.folder) if workers else None))
    if rungs is None:
        return evidence
    made_of = provenance(step.pair, trace_digest=traces.digest(), device_class=inputs.profile.provenance.device_class,
                         parents=step.parents(*READ_BY_STRATEGIES))
    choice = evidence.choice
    save_choice(step, DecodingConfig(choice.name, dict(choice.parameters), evidence.to_json(), made_of), evidence)
    rungs.unlink(missing_ok=True)
    return evidence


def inputs_of(step: StepContext, traces: TraceSet, prompts: Sequence[Prompt], settings: TuneSettings) -> TuneInputs:
    """What is tuned: the pair with the workspace's artifacts, and the champion."""
    from components.collect.trace_checks import greedy_header
    from components.tune.tune import TuneInputs
    from serving.runtime.strategies import STRATEGIES

    space, pair = step.workspace, step.pair
    traced = greedy_header(traces).max_tokens  # before the artifacts: it may take time to measure a hardware profile
    if traced < settings.max_tokens:
        space.say(f"predicting texts of {traced} tokens, which is all that the trace has, and measuring {settings.max_tokens}: collect "
                  f"with --max-tokens {settings.max_tokens} to have both of one length")
    resources = space.resources(pair, STRATEGIES)
    profile: Any = resources.artifacts.get("hardware_profile")
    if profile is None:
        raise DraftwellError(f"pair {space.spec.name} has no draft model, so there is nothing to tune", code="no_draft_model")
    return TuneInputs(pair, traces, prompts, resources, profile, champion_config(step))


def tune_as(settings: PipelineSettings, step: StepContext, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Tune on the workspace's traces with the flows' settings; returns the choice and why."""
    from flows.loading import worker_pool_of

    evidence = run_tune(step, open_trace(step), prompts, tune_settings_of(settings), workers=worker_pool_of(settings))
    return {**evidence.choice.to_json(), "reason": evidence.reason}


def tune_settings_of(settings: PipelineSettings) -> TuneSettings:
    """The part of the flows' settings that tuning goes by."""
    from components.tune.settings import Constraints, TuneSettings

    constraints = Constraints(lossless_only=settings.lossless_only, max_quality_loss=settings.max_quality_loss,
                              max_cost_ratio=settings.max_cost_ratio)
    return TuneSettings(constraints=constraints, trials=settings.trials, max_tokens=settings.tune_tokens)


def save_choice(step: StepContext, config: DecodingConfig, evidence: TuningEvidence) -> None:
    """Put a choice into the workspace, with its evidence as JSON and as an HTML report."""
    from components.tune.report.html import write_tuning_report

    choice = {"strategy": config.strategy, "parameters": config.parameters}
    step.workspace.save(config)
    step.report("tuning", {"pair": step.workspace.spec.name, **choice, "config_digest": config.digest, **config.evidence})
    write_tuning_report(evidence, step.workspace.reports, pair=step.workspace.spec.name)


def champion_config(step: StepContext) -> StrategyChoice | None:
    """What the pair's champion serves on this device; None without a champion, or where no registry can be reached."""
    from registry.store import Store
    from serving.artifacts.decoding_config import DecodingConfig
    from serving.runtime.strategies import StrategyChoice

    try:
        champion = champion_of(step.workspace, step.pair.device.partition(":")[0])
        if champion is None:
            return None
        store = Store()
        pinned = store.resolve("decoding_config", champion.pair, champion.pins["decoding_config"])
        with tempfile.TemporaryDirectory() as place:
            config = DecodingConfig.load(store.download(pinned, Path(place) / "decoding_config"))
    except DraftwellError as error:
        step.workspace.say(f"tuning without the champion: {error}")
        return None
    return StrategyChoice(config.strategy, config.parameters)


def choose_plain(step: StepContext, reason: str) -> dict[str, Any]:
    """Make plain decoding the workspace's choice, keeping the evidence of the tuning; returns the choice."""
    from components.report.provenance import provenance
    from components.tune.evidence import TuningEvidence
    from serving.artifacts.decoding_config import DecodingConfig
    from serving.runtime.strategies import PLAIN

    folder = step.workspace.artifacts / "decoding_config"
    tuned = DecodingConfig.load(folder, fingerprint=step.pair.fingerprint)
    made = {"strategy": tuned.strategy, "parameters": tuned.parameters, **tuned.evidence}
    evidence = TuningEvidence.read(made, f"the evidence in {folder}").with_choice(PLAIN, reason)
    old = tuned.provenance
    made_of = provenance(step.pair, trace_digest=old.trace_digest, device_class=old.device_class, parents=old.parents)
    save_choice(step, DecodingConfig(PLAIN.name, {}, evidence.to_json(), made_of), evidence)
    return {**PLAIN.to_json(), "reason": reason}
