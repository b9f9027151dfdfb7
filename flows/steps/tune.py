"""The station that chooses: traces and measurements → strategy and parameters, or plain decoding instead."""

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
    from flows.settings import PipelineSettings
    from flows.workers.task_runners import WorkerPool
    from serving.artifacts.decoding_config import DecodingConfig
    from serving.recording.trace import TraceSet


def run_tune(step: StepContext, traces: TraceSet, prompts: Sequence[Prompt], *, max_tokens: int = 64, trials: int = 60,
         lossless_only: bool = True, max_quality_loss: float = 0.1, max_cost_ratio: float | None = None, study: Path | None = None,
         keep: bool = True, fan: WorkerPool | None = None) -> Any:
    """Choose strategy and parameters by replay and measurement; the choice and its evidence go into the workspace.

    A run that was killed goes on where it stopped when it is started again.

    Args:
        max_quality_loss, max_cost_ratio: as in `components.tune.constraints.Constraints`.
        study: SQLite file of trials; None takes the workspace's, which may hold other searches too.
        keep: False saves nothing but a `study` that was named: for a padded target, whose times nobody is served with.
        fan: how replays are spread over workers (`runners.fan_of`); what is measured is measured here, one at a time.
    """
    from components.collect.trace_checks import greedy_header
    from components.report.provenance import provenance
    from components.tune.constraints import Constraints
    from components.tune.evaluator import Evaluator, QualityReader
    from components.tune.tune import tune_strategy as run
    from flows.workers.task_runners import spread_replays
    from serving.artifacts.decoding_config import DecodingConfig
    from serving.runtime.strategies import STRATEGIES

    space, pair = step.workspace, step.pair
    traced = greedy_header(traces).max_tokens  # before the resources, which may take the time to measure a hardware profile
    if traced < max_tokens:
        space.say(f"predicting texts of {traced} tokens, which is all that the trace has, and measuring {max_tokens}: collect with "
                  f"--max-tokens {max_tokens} to have both of one length")
    constraints = Constraints(lossless_only, max_quality_loss, max_cost_ratio)
    resources = space.resources(pair, STRATEGIES)
    profile: Any = resources.artifacts.get("hardware_profile")
    if profile is None:
        raise DraftwellError(f"pair {space.spec.name} has no draft model, so there is nothing to tune")
    folder = space.root / "tuning"
    rungs = folder / "rungs.json" if keep else None
    tuned = run(pair, traces, prompts, resources, profile, trials=trials, max_tokens=max_tokens, constraints=constraints,
                evaluate=Evaluator(pair, resources, max_tokens=max_tokens, progress=step.bar), quality=QualityReader(pair),
                champion=champion_config(step), study=study or (folder / "study.db" if keep else None),
                named_study=study is not None, rungs=rungs, spread=spread_replays(fan, step, traces.folder) if fan else None)
    if rungs is None:
        return tuned
    made_of = provenance(pair, trace_digest=traces.digest(), device_class=profile.provenance.device_class,
                         parents=step.parents(*READ_BY_STRATEGIES))
    save_choice(step, DecodingConfig(tuned.strategy, tuned.parameters, tuned.evidence, made_of))
    rungs.unlink(missing_ok=True)
    return tuned


def tune_as(settings: PipelineSettings, step: StepContext, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Tune on the workspace's traces as the flows' settings say; returns the choice and why."""
    from flows.loading import worker_pool_of

    tuned = run_tune(step, open_trace(step), prompts, max_tokens=settings.tune_tokens, trials=settings.trials,
                 lossless_only=settings.lossless_only, max_quality_loss=settings.max_quality_loss,
                 max_cost_ratio=settings.max_cost_ratio, fan=worker_pool_of(settings))
    return {"strategy": tuned.strategy, "parameters": tuned.parameters, "reason": str(tuned.evidence.get("reason", ""))}


def save_choice(step: StepContext, config: DecodingConfig) -> None:
    """Put a choice into the workspace, with its evidence as JSON and as an HTML report."""
    from components.tune.report.html import write_tuning_report

    choice = {"strategy": config.strategy, "parameters": config.parameters}
    step.workspace.save(config)
    step.report("tuning", {"pair": step.workspace.spec.name, **choice, "config_digest": config.digest, **config.evidence})
    write_tuning_report(config.evidence, step.workspace.reports, pair=step.workspace.spec.name)


def champion_config(step: StepContext) -> tuple[str, dict[str, Any]] | None:
    """Strategy and parameters that the pair's champion serves on this device; None without one, or where no registry is to be had."""
    from registry.store import Store
    from serving.artifacts.decoding_config import DecodingConfig

    try:
        champion = champion_of(step.workspace, step.pair.device.partition(":")[0])
        if champion is None:
            return None
        store = Store()
        pinned = store.resolve("decoding_config", champion.pair, champion.pins["decoding_config"])
        with tempfile.TemporaryDirectory() as place:
            config = DecodingConfig.load(store.download(pinned, Path(place) / "decoding_config"))
    except DraftwellError as error:
        step.workspace.say(f"tuning without the champion beside: {error}")
        return None
    return config.strategy, dict(config.parameters)


def choose_plain(step: StepContext, reason: str) -> dict[str, Any]:
    """Make plain decoding the workspace's choice, keeping the evidence of the tuning; returns the choice."""
    from components.report.provenance import provenance
    from serving.artifacts.decoding_config import DecodingConfig

    tuned = DecodingConfig.load(step.workspace.artifacts / "decoding_config", fingerprint=step.pair.fingerprint)
    old = tuned.provenance
    made_of = provenance(step.pair, trace_digest=old.trace_digest, device_class=old.device_class, parents=old.parents)
    choice: dict[str, Any] = {"strategy": "autoregressive", "parameters": {}}
    save_choice(step, DecodingConfig("autoregressive", {}, {**tuned.evidence, "choice": choice, "reason": reason}, made_of))
    return {**choice, "reason": reason}
