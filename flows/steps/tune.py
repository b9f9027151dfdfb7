"""The pipeline step that chooses: traces and measurements → strategy and parameters, or plain
decoding instead."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwell.components.collect.trace_checks import check_temperature
from draftwell.components.prompts.overlap import hashes_of
from draftwell.components.regimes.own_device import own_device
from draftwell.components.report.machine import draft_device_of
from draftwell.components.report.provenance import provenance
from draftwell.components.report.tables import plural
from draftwell.components.tune.by_batch import measure_levels
from draftwell.components.tune.evaluator import Evaluate, Evaluator, Measured, QualityReader
from draftwell.components.tune.evidence import TuningEvidence
from draftwell.components.tune.report.html import write_tuning_report
from draftwell.components.tune.settings import Constraints, TuneSettings
from draftwell.components.tune.tune import TuneInputs, tune_strategy
from draftwell.components.tune.without_draft import tune_without_draft
from draftwell.flows.context import (
    StepContext,
    open_trace,
    prompts_behind,
    take_untouched,
    training_prompts,
)
from draftwell.flows.loading import worker_pool_of
from draftwell.flows.progress import tell_best
from draftwell.flows.settings import PipelineSettings, quality_floor
from draftwell.flows.steps.champion import champion_of
from draftwell.flows.steps.picked import say_if_only_lossy, take_marked
from draftwell.flows.steps.profile import find_or_measure_profile
from draftwell.flows.workers.task_runners import WorkerPool, spread_replays
from draftwell.flows.workspace import in_turn
from draftwell.registry.releases import standing_record
from draftwell.registry.store import Store
from draftwell.serving.artifacts.base import ArtifactError
from draftwell.serving.artifacts.decoding_config import DecodingConfig, SampledChoice
from draftwell.serving.artifacts.kinds import READ_BY_STRATEGIES
from draftwell.serving.device import device_type
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import move_file
from draftwell.serving.runtime.strategies import (
    PLAIN,
    STRATEGIES,
    StrategyChoice,
    find_strategy,
    served_choice,
)
from draftwell.serving.temperature import class_of

if TYPE_CHECKING:
    from draftwell.components.prompts.prompt import Prompt
    from draftwell.serving.recording.trace import TraceSet


@in_turn("draftwell step choose")
def run_tune(
    step: StepContext,
    traces: TraceSet,
    prompts: Sequence[Prompt],
    settings: TuneSettings,
    *,
    study: Path | None = None,
    keep: bool = True,
    workers: WorkerPool | None = None,
    limit: int | None = None,
) -> TuningEvidence:
    """Choose strategy and parameters by replay and measurement; the choice and its evidence go into
    the workspace.

    Artifacts that a person marked in MLflow are taken into the workspace first. A run that was
    killed resumes where it stopped when it is started again.

    Args:
        prompts: measured on; those that the traces and the artifacts were made from are left out.
        study: file of trials; None takes the workspace's, which may hold other searches too.
        keep: False saves nothing but a `study` that was named: for a padded target, whose times
            nobody is served with.
        workers: who makes the replays; what is measured is measured here, one at a time.
        limit: how many prompts to measure on, at most; None takes all.
    """

    device = device_type(step.pair.device)
    taken = take_marked(step.workspace, device, READ_BY_STRATEGIES)
    if settings.constraints.lossless_only:
        say_if_only_lossy(step.workspace, taken)
    used = training_prompts(step.workspace, traces.folder, READ_BY_STRATEGIES, step.pair)
    prompts = take_untouched(step.workspace, used, prompts, limit)
    inputs = inputs_of(step, traces, prompts, settings)
    folder = step.workspace.device_root / "tuning"
    rungs = folder / f"{report_name(settings.temperature, 'rungs')}.jsonl"
    spread = spread_replays(workers, step, traces.folder) if workers else None
    evidence = tune_strategy(
        inputs,
        settings,
        evaluator_of(step, inputs, settings),
        QualityReader(step.pair, settings.temperature),
        study=study or (folder / "trials.jsonl" if keep else None),
        rungs=rungs if keep else None,
        spread=spread,
        progress=step.bar,
    )
    if not keep:
        return evidence
    evidence = with_own_device(step, inputs, with_levels(step, inputs, settings, evidence))
    seen = {*(prompts_behind(traces, step.pair)[0] or ()), *hashes_of(prompts)}
    evidence = evidence.model_copy(
        update={"training_prompts": tuple(sorted(seen)), "unknown_prompts": used.unknown}
    )
    save_choice(
        step,
        config_with(step, evidence, traces.digest(), inputs.profile.provenance.device_class),
        evidence,
    )
    rungs.unlink(missing_ok=True)
    return evidence


def with_levels(
    step: StepContext, inputs: TuneInputs, settings: TuneSettings, evidence: TuningEvidence
) -> TuningEvidence:
    """The evidence with draft lengths of its choice by the number of requests at once."""
    sampling = step.pair.sampling(max_tokens=settings.max_tokens, temperature=settings.temperature)
    levels, loads = measure_levels(
        step.pair, inputs.resources, evidence.choice, inputs.prompts, sampling, step.bar
    )
    return evidence.model_copy(update={"levels": levels, "loads": loads})


def with_own_device(
    step: StepContext, inputs: TuneInputs, evidence: TuningEvidence
) -> TuningEvidence:
    """The evidence with what the draft would give on a device of its own, by formula; as it is
    where the draft has one."""
    apart = draft_device_of(step.pair) is not None
    found = None if apart else own_device(inputs.profile, evidence.trials)
    return evidence if found is None else evidence.model_copy(update={"own_device": found})


def evaluator_of(step: StepContext, inputs: TuneInputs, settings: TuneSettings) -> Evaluate:
    """What measures, with the step's bar; it tells the fastest of what was measured last."""

    evaluate = Evaluator(
        step.pair,
        inputs.resources,
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        progress=step.bar,
    )

    def telling(
        choices: Sequence[StrategyChoice], prompts: Sequence[Prompt], **options: Any
    ) -> list[Measured]:
        measured = evaluate(choices, prompts, **options)
        tell_fastest(dict(zip(choices, measured, strict=True)))
        return measured

    return telling


def tell_fastest(measured: Mapping[StrategyChoice, Measured]) -> None:
    """Tell the fastest of what was measured beside plain decoding."""
    others = {choice: one.pace for choice, one in measured.items() if choice != PLAIN}
    if PLAIN not in measured or not others:
        return
    choice = min(others, key=others.__getitem__)
    plain = measured[PLAIN]
    tell_best(
        f"{choice}: {plain.pace / others[choice]:.2f} times as fast as plain decoding on "
        f"{plural(len(plain.seconds), 'prompt')}"
    )


def report_name(temperature: float, name: str) -> str:
    """Name of a file about the tuning for a temperature: sampled requests have one of their own."""
    return name if class_of(temperature) == "greedy" else f"{name}_sampled"


def config_with(
    step: StepContext,
    evidence: TuningEvidence,
    trace_digest: str | None,
    device_class: str | None,
) -> DecodingConfig:
    """The decoding config with a new choice for its class of temperatures, and the choice for the
    other class as it was.

    That is the workspace's own or, where it has no config yet, the champion's; one of another
    machine class is dropped. Greedy requests get plain decoding until something is tuned for them.
    The provenance names the traces of the greedy choice, where there is one; the evidence of each
    choice names its own, and the prompts that it was tuned on: the provenance has those of both.
    """

    choice, temperature = evidence.choice, evidence.temperature or 0.0
    table = evidence.draft_length_by_batch
    before = previous_config(step, device_class)
    greedy = class_of(temperature) == "greedy"
    kept = kept_sampled(step, before, evidence) if greedy else None
    stays = kept if greedy else before
    known: Mapping[str, Any] = {} if stays is None else stays.evidence
    made_of = provenance(
        step.pair,
        trace_digest=trace_digest,
        device_class=device_class,
        parents=step.parents(*READ_BY_STRATEGIES),
        training_prompts=[
            *(evidence.training_prompts or ()),
            *(known.get("training_prompts") or ()),
        ],
        unknown_prompts=[*evidence.unknown_prompts, *known.get("unknown_prompts", ())],
    )
    if greedy:
        return DecodingConfig(
            choice.name, dict(choice.parameters), evidence.to_json(), made_of, kept, table
        )
    sampled = SampledChoice(
        temperature, choice.name, dict(choice.parameters), evidence.to_json(), table
    )
    if before is None:
        return DecodingConfig(PLAIN.name, {}, {}, made_of, sampled)
    made_of = made_of.model_copy(update={"trace_digest": before.provenance.trace_digest})
    return before.with_sampled(sampled, made_of)


def kept_sampled(
    step: StepContext, before: DecodingConfig | None, evidence: TuningEvidence
) -> SampledChoice | None:
    """The sampled choice that stays when greedy requests are tuned: none that is lossy, where only
    lossless ones are allowed now."""

    kept = before.sampled if before is not None else None
    limits = evidence.constraints
    if (
        kept is not None
        and limits is not None
        and limits.lossless_only
        and not find_strategy(kept.strategy).lossless
    ):
        step.workspace.say(
            f"the choice for sampled requests, {kept.strategy}, is lossy and left out: "
            "only lossless ones are allowed now"
        )
        return None
    return kept


def previous_config(step: StepContext, device_class: str | None) -> DecodingConfig | None:
    """The workspace's config, else the champion's, if it is of this pair and machine class."""

    folder = step.workspace.folder(DecodingConfig.kind)
    try:
        found = (
            DecodingConfig.load(folder, fingerprint=step.pair.fingerprint)
            if folder.is_dir()
            else champion_decoding(step)
        )
    except ArtifactError as error:
        step.workspace.say(f"the earlier decoding config is replaced as a whole: {error}")
        return None
    if found is None or found.provenance.device_class != device_class:
        return None
    return found if found.provenance.fingerprint == step.pair.fingerprint else None


def inputs_of(
    step: StepContext, traces: TraceSet, prompts: Sequence[Prompt], settings: TuneSettings
) -> TuneInputs:
    """What is tuned: the pair with the workspace's artifacts, and the champion."""

    space, pair = step.workspace, step.pair
    # before the artifacts: it may take time to measure a hardware profile
    check_temperature(traces, settings.temperature)
    traced = traces.header.max_tokens
    if traced < settings.max_tokens:
        space.say(
            f"predicting texts of {traced} tokens, which is all that the trace has, and "
            f"measuring {settings.max_tokens}: collect "
            f"with --set max_tokens={settings.max_tokens} to have both of one length"
        )
    profile = find_or_measure_profile(space, pair, STRATEGIES)
    if profile is None:
        raise DraftwellError(
            f"pair {space.spec.name} has no draft model, so there is nothing to tune",
            code="no_draft_model",
        )
    resources = space.resources(pair, STRATEGIES, profile=profile)
    champion = champion_decoding(step)
    served = None if champion is None else served_choice(champion, settings.temperature)
    return TuneInputs(pair, traces, prompts, resources, profile, served)


@in_turn("draftwell step choose")
def tune_as(
    settings: PipelineSettings, step: StepContext, prompts: Sequence[Prompt]
) -> dict[str, Any]:
    """Tune on the workspace's traces with the flows' settings, for each class of temperatures in
    turn and on the same prompts.

    Returns:
        the choice for greedy requests and why; `sampled`: that for sampled ones with its
        temperature, None where it was not tuned.
    """

    def tuned(temperature: float) -> dict[str, Any]:
        traces = open_trace(step, temperature=temperature)
        evidence = run_tune(
            step,
            traces,
            prompts,
            tune_settings_of(settings, temperature),
            workers=worker_pool_of(settings),
        )
        return {**evidence.choice.to_json(), "reason": evidence.reason}

    greedy, *sampled = [tuned(temperature) for temperature in settings.temperatures]
    return {
        **greedy,
        "sampled": {**sampled[0], "temperature": settings.sampled_temperature} if sampled else None,
    }


@in_turn("draftwell tune")
def tune_without_draft_as(
    settings: PipelineSettings, step: StepContext, prompts: Sequence[Prompt]
) -> dict[str, Any]:
    """As `tune_as`, for a pair without a draft model: greedy requests alone, by measurement. What
    is chosen for them serves sampled ones too, where the gate finds it fast enough for them."""
    wanted, space = tune_settings_of(settings), step.workspace
    profile = find_or_measure_profile(space, step.pair, STRATEGIES)
    resources = space.resources(step.pair, STRATEGIES, profile=profile)
    used = training_prompts(space, kinds=READ_BY_STRATEGIES)
    prompts = take_untouched(space, used, prompts)
    evaluate = Evaluator(step.pair, resources, max_tokens=wanted.max_tokens, progress=step.bar)
    champion = champion_decoding(step)
    served = None if champion is None else served_choice(champion, 0.0)
    evidence = tune_without_draft(step.pair, resources, prompts, wanted, evaluate, served)
    sampling = step.pair.sampling(max_tokens=wanted.max_tokens)
    levels, loads = measure_levels(
        step.pair, resources, evidence.choice, prompts, sampling, step.bar
    )
    evidence = evidence.model_copy(
        update={
            "levels": levels,
            "loads": loads,
            "training_prompts": tuple(hashes_of(prompts)),
            "unknown_prompts": used.unknown,
        }
    )
    save_choice(step, config_with(step, evidence, None, evidence.device_class), evidence)
    return {**evidence.choice.to_json(), "reason": evidence.reason, "sampled": None}


def tune_settings_of(settings: PipelineSettings, temperature: float = 0.0) -> TuneSettings:
    """The part of the flows' settings that tuning goes by, for requests of a temperature."""

    constraints = constraints_of(settings.lossless_only, settings.max_quality_loss)
    return TuneSettings(
        constraints=constraints,
        trials=settings.trials,
        max_tokens=settings.max_tokens,
        temperature=temperature,
    )


def constraints_of(
    lossless_only: bool, max_quality_loss: float | None, max_cost_ratio: float | None = None
) -> Constraints:
    """The limits of a tuning, with the gate's floor of quality; `max_quality_loss` None takes that
    from there, too."""

    floor = quality_floor()
    return Constraints(
        lossless_only=lossless_only,
        max_cost_ratio=max_cost_ratio,
        max_rouge_l_loss=floor.max_rouge_l_loss,
        max_surprisal_shift=floor.max_surprisal_shift,
        max_quality_loss=floor.max_share_loss if max_quality_loss is None else max_quality_loss,
    )


def save_choice(step: StepContext, config: DecodingConfig, evidence: TuningEvidence) -> None:
    """Put a config into the workspace, with the evidence of the choice that is new in it as JSON
    and as an HTML report."""

    space, pair = step.workspace, step.workspace.spec.name
    name = report_name(evidence.temperature or 0.0, "tuning")
    space.save(config)
    step.report(
        name,
        {
            "pair": pair,
            **evidence.choice.to_json(),
            "config_digest": config.digest,
            **evidence.to_json(),
        },
        per_device=True,
    )
    if name == "tuning":
        write_tuning_report(evidence, space.device_reports, pair=pair, plots=space.reports)
    else:  # its plots, which the page contains, would replace those of the greedy choice
        folder = space.device_reports / "sampled"
        folder.mkdir(parents=True, exist_ok=True)
        made = write_tuning_report(evidence, folder, pair=pair, plots=space.reports)
        move_file(made, space.device_reports / f"{name}.html")


def champion_decoding(step: StepContext) -> DecodingConfig | None:
    """The config that the pair's champion serves on this device, with what the gate let serve
    sampled requests; None without a champion, or where no registry can be reached."""

    try:
        champion = champion_of(step.workspace, device_type(step.pair.device))
        if champion is None:
            return None
        store = Store()
        pinned = store.resolve("decoding_config", champion.pair, champion.pins["decoding_config"])
        with tempfile.TemporaryDirectory() as place:
            config = DecodingConfig.load(store.download(pinned, Path(place) / "decoding_config"))
        record = standing_record(champion)
        as_greedy = record is not None and record.serves_greedy_choice(
            champion.version, champion.pins, champion.published.digest
        )
        return config.with_greedy_for_sampled() if as_greedy else config
    except DraftwellError as error:
        step.workspace.say(f"tuning without the champion: {error}")
        return None


@in_turn("draftwell step choose")
def choose_plain(step: StepContext, reason: str, *, sampled_only: bool = False) -> dict[str, Any]:
    """Make plain decoding the workspace's choice, keeping the evidence of the tuning that it
    replaces; returns the choice.

    Args:
        sampled_only: for sampled requests, which were tuned for; the choice for greedy ones stays.
            Otherwise for all requests.
    """

    folder = step.workspace.folder("decoding_config")
    tuned = DecodingConfig.load(folder, fingerprint=step.pair.fingerprint)
    old: Any = tuned.sampled if sampled_only else tuned
    made = {"strategy": old.strategy, "parameters": old.parameters, **old.evidence}
    evidence = TuningEvidence.read(made, f"the evidence in {folder}").with_choice(PLAIN, reason)
    made_of = tuned.provenance
    plain = DecodingConfig(PLAIN.name, {}, evidence.to_json(), made_of)
    if sampled_only:
        sampled = SampledChoice(old.temperature, PLAIN.name, {}, evidence.to_json())
        plain = tuned.with_sampled(sampled, made_of)
    save_choice(step, plain, evidence)
    return {**PLAIN.to_json(), "reason": reason}
