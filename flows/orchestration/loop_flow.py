"""The loop as one Prefect flow of seven tasks: collect, train, calibrate, tune, publish, gate,
deploy.

`source` of the settings says on which prompts, and with that what it is: the demo, the weekly run
on served traffic, or the answer to drift. `engine` vllm runs that engine's loop in one task. A run
that was killed loses nothing: the next one finds finished shards, trials and results.
"""

from __future__ import annotations

from typing import Annotated, Any

from prefect import flow, task
from pydantic import Field

from draftwell.components.gate.settings import GateSettings
from draftwell.components.gate.verdict import FAILED, PASSED, UNDECIDED
from draftwell.flows.context import open_trace
from draftwell.flows.loading import open_from_settings, prompts_of, workspace_of
from draftwell.flows.orchestration import run_artifacts as shown
from draftwell.flows.orchestration.result_cache import (
    CACHED,
    HEAD,
    believed,
    serves_head,
    standing,
    timed,
)
from draftwell.flows.orchestration.task_options import ANEW, FLOW, LONGEST, QUICK, turn_of
from draftwell.flows.progress import announce
from draftwell.flows.settings import PipelineSettings
from draftwell.flows.steps import (
    collect as collect_step,
    deploy as deploy_step,
    gate as gate_step,
    publish as publish_step,
    train as train_step,
    tune as tune_step,
)
from draftwell.flows.steps.champion import champion_number, champion_of
from draftwell.flows.steps.engine.recalibrate import (
    EngineDriftSettings,
    recalibrate_engine,
    said_of,
)
from draftwell.flows.steps.engine.space import engine_space
from draftwell.flows.steps.gate_parts.earlier_verdict import earlier_verdict
from draftwell.flows.steps.reference_traces import of_release
from draftwell.flows.steps.traffic_prompts import settle_prompts
from draftwell.flows.steps.verdict import only_sampled, refusal, result_of, sentence
from draftwell.flows.workspace import Workspace
from draftwell.registry.pairs import find_pair
from draftwell.serving.artifacts.kinds import CALIBRATED
from draftwell.serving.recording.trace import TraceSet

STATES = {PASSED: "waiting", FAILED: "refused", UNDECIDED: "undecided"}
"""What becomes of a release that is not deployed; one that passed waits for a person."""
LoopSettings = Annotated[PipelineSettings | EngineDriftSettings, Field(discriminator="engine")]


@task(name="collect", **ANEW)
def collect(settings: PipelineSettings) -> dict[str, Any]:
    """Fix the prompts, and collect traces of each class of temperatures; shards that stand stay.

    Returns:
        the settings with these prompts, name → digest of the traces, and the release that answered
        this drift, if one did: then nothing is collected.
    """
    settings = settle_prompts(settings)
    fixed = {"settings": settings.model_dump(mode="json"), "answered": answer_to(settings)}
    if fixed["answered"] is not None:
        return {**fixed, "traces": {}}
    prompts = prompts_of(settings)["collect"]
    load_with = collect_step.loading(
        Workspace(settings.pair, settings.dtype), prompts, collect_step.collection_at(settings, 0.0)
    )
    step = open_from_settings(settings, **load_with)
    traces = collect_step.collect_classes(step, prompts, settings)
    digests = {name: found.digest() for name, found in traces.items()}
    rows = [
        {"traces": name, "digest": digests[name], "positions": found.read(["position"]).num_rows}
        for name, found in traces.items()
    ]
    shown.table("collection", step.workspace, rows, f"The traces in {step.workspace.root}.")
    return {**fixed, "traces": digests}


@task(name="train", **CACHED)
def train(settings: PipelineSettings) -> dict[str, Any]:
    """Train a SPRINTER verifier, and an acceptance head where the champion has one."""
    step = open_from_settings(settings)
    report, kinds = train_step.run_train(step, open_trace(step)).to_json(), ["verifier"]
    if serves_head(step.workspace):
        train_step.run_train_head(step, open_trace(step))
        kinds.append(HEAD)
    shown.figures("training", step.workspace, report)
    shown.pictures(step.workspace, kinds)
    return {"made": standing(step.workspace, kinds)}


@task(name="calibrate", **CACHED)
def calibrate(settings: PipelineSettings) -> dict[str, Any]:
    """Make acceptance table (its counts of sampled texts too), correction memory and hardware
    profile."""
    step = open_from_settings(settings)
    report = train_step.calibrate_as(settings, step, prompts_of(settings)["calibrate"])
    kinds = [kind for kind in CALIBRATED if kind != "verifier"]
    shown.figures("calibration", step.workspace, report)
    shown.pictures(step.workspace, kinds)
    return {"made": standing(step.workspace, kinds)}


@task(name="tune", **CACHED)
def tune(settings: PipelineSettings) -> dict[str, Any]:
    """Choose strategy and parameters for each class of temperatures, compared with the champion."""
    step, kinds = open_from_settings(settings), ["decoding_config"]
    choice = tune_step.tune_as(settings, step, prompts_of(settings)["tune"])
    rows = shown.measured_rows(step.workspace)
    shown.table("tuning", step.workspace, rows, choice["reason"])
    shown.pictures(step.workspace, kinds)
    return {"made": standing(step.workspace, kinds), "choice": choice}


@task(name="publish", **ANEW)
def publish(settings: PipelineSettings) -> int:
    """Publish the workspace's artifacts and pin them in a release; returns its number."""
    step = open_from_settings(settings)
    # one level down: no figures to compare releases by
    evidence = {"settings": settings.evidence(step.workspace.spec.name)}
    release = publish_step.run_publish(step, evidence, device=settings.device)
    shown.link(step.workspace, release.published)
    return release.version


@task(name="gate", **ANEW)
def gate(
    settings: PipelineSettings, release: int, full: bool = True, limit: int | None = None
) -> dict[str, Any]:
    """Judge a release, unless a run on served traffic finds that it was judged beside the same
    champion.

    Args:
        full: other strategies decode the same prompts, for a table.
        limit: prompts, at most: two suffice for plain decoding, of which no speed is judged.
    Returns:
        the bench's `report`, `checks`, whether it `passed`, and the `champion` that it was judged
        beside.
    """
    champion = champion_number(workspace_of(settings), settings.device)
    if settings.source != "prompts":
        kept = earlier_verdict(workspace_of(settings), settings.device, release, champion)
        if kept is not None:
            return {"report": None, **kept, "champion": champion}
    wanted = GateSettings(
        device=settings.device,
        limit=None,
        max_tokens=settings.bench_tokens,
        others=full and settings.source != "drift",
    )
    prompts = prompts_of(settings)["bench"][:limit]
    found = gate_step.gate_release(open_from_settings(settings), prompts, wanted, alias=release)
    kept = {key: found[key] for key in ("report", "checks", "passed")}
    return {**kept, "champion": champion}


@task(name="deploy", **ANEW)
def deploy(settings: PipelineSettings, release: int) -> str | None:
    """Make a release that passed the champion, and build its bundle; returns the bundle's folder,
    None where a person promotes."""
    space = workspace_of(settings)
    if champion_number(space, settings.device) == release:
        bundle = deploy_step.deploy_champion(space, settings.device, settings.out)
    else:
        bundle = deploy_step.promote_and_deploy(
            space, settings.device, release, settings.out, settings.promote
        )
    return None if bundle is None else str(bundle)


@task(name="engine loop", **{**ANEW, "timeout_seconds": LONGEST})
def engine_loop(settings: EngineDriftSettings) -> dict[str, Any]:
    """Check another engine for drift, and answer it; returns the outcome without the loop's report,
    which is in the workspace."""
    space = engine_space(settings.pair, settings.dtype, settings.device, settings.threads, announce)
    outcome = recalibrate_engine(space, settings, announce)
    return {name: value for name, value in outcome.items() if name != "report"}


@flow(name="draftwell", **FLOW)
def draftwell(settings: LoopSettings) -> dict[str, Any]:
    """Bring a pair from prompts to a deployed champion; a refusal leaves the one before as it is.

    Returns:
        `state` (deployed, waiting for a person, refused, undecided; or answered: the champion was
        made for this drift), the choices and why, the release, whether it `passed`, the gate's
        `report`, `checks` and `verdict`, the `champion` of before, and where the `bundle` is.
    """
    with turn_of(find_pair(settings.pair).name):
        if isinstance(settings, EngineDriftSettings):
            return answer_on_engine(settings)
        announce("1/7 collect traces")
        collected = timed(settings, collect)(settings)
        settings = PipelineSettings.model_validate(collected["settings"])
        if (number := collected["answered"]) is not None:
            announce(f"this drift was answered already, by release {number}, the champion")
            bundle = deploy(settings, number)
            return {
                "state": "answered",
                "drift": settings.drift,
                "release": number,
                "bundle": bundle,
            }
        return release_choice(settings, learn(settings))


def learn(settings: PipelineSettings) -> dict[str, Any]:
    """Train, calibrate and tune, or believe what an earlier run made of the same; returns the
    choices."""
    announce("2/7 train")
    believed(settings, train)
    announce("3/7 calibrate")
    believed(settings, calibrate)
    announce("4/7 tune")
    choice: dict[str, Any] = believed(settings, tune)["choice"]
    return choice


def release_choice(settings: PipelineSettings, choice: dict[str, Any]) -> dict[str, Any]:
    """Publish, gate, and deploy what passes; the outcome of the flow."""
    announce("5/7 publish")
    release = timed(settings, publish)(settings)
    announce("6/7 gate")
    gated = timed(settings, gate)(settings, release)
    if gated["champion"] is None and "withdrawn" not in gated:
        choice, release, gated = give_way_to_plain(settings, choice, release, gated)
    champion = gated["champion"]
    stays = "nothing is served" if champion is None else f"release {champion}, the champion, stays"
    said = f"release {release}: {gated.get('withdrawn') or sentence(gated)}"
    announce("7/7 promote and deploy" if gated["passed"] else f"7/7 not deployed: {said}, {stays}")
    bundle = deploy(settings, release) if gated["passed"] else None
    words = said if gated["passed"] else f"{said}, {stays}"
    shown.table("gate", workspace_of(settings), gated["checks"], words)
    return {
        **choice,
        **gated,
        "state": "deployed" if bundle else STATES[result_of(gated)],
        "verdict": result_of(gated),
        "drift": settings.drift,
        "release": release,
        "bundle": bundle,
    }


def give_way_to_plain(
    settings: PipelineSettings, choice: dict[str, Any], release: int, gated: dict[str, Any]
) -> tuple[dict[str, Any], int, dict[str, Any]]:
    """With no champion to keep, something must serve: what the gate does not pass gives way to
    plain decoding, for sampled requests alone where only they are in the way."""
    for sampled_only in (True, False):
        if gated["passed"] or (sampled_only and not only_sampled(gated)):
            continue
        whom = "sampled" if sampled_only else "all"
        announce(f"{sentence(gated)}; plain decoding is released for {whom} requests instead")
        plain = tune_step.choose_plain(
            open_from_settings(settings),
            refusal(choice, gated, sampled_only),
            sampled_only=sampled_only,
        )
        choice = (
            {**choice, "sampled": {**(choice["sampled"] or {}), **plain}}
            if sampled_only
            else {**choice, **plain, "sampled": None}
        )
        release = timed(settings, publish)(settings)
        again = timed(settings, gate)(
            settings, release, full=sampled_only, limit=None if sampled_only else 2
        )
        # the table stays that of what was tuned, but where the greedy choice was judged again
        report = again["report"] if sampled_only else gated["report"]
        gated = {**again, "report": report}
    return choice, release, gated


def answer_to(settings: PipelineSettings) -> int | None:
    """The champion's number, where it was calibrated on this drift's traces."""
    space = workspace_of(settings)
    traces = TraceSet(space.traces)
    if settings.source != "drift" or not traces.shards:
        return None
    champion = champion_of(space, settings.device)
    answered = champion is not None and of_release(champion).trace_digest == traces.digest()
    return champion.version if champion is not None and answered else None


def answer_on_engine(settings: EngineDriftSettings) -> dict[str, Any]:
    """The outcome of another engine's check, which `minutes` limit but for the engine's starts."""
    timed_loop = engine_loop.with_options(timeout_seconds=60 * settings.minutes + QUICK)
    outcome: dict[str, Any] = timed_loop(settings)
    announce(said_of(outcome))
    shown.text("engine", find_pair(settings.pair).name, said_of(outcome))
    return outcome
