"""The loop as one Prefect flow of seven tasks: collect, train, calibrate, tune, publish, gate,
deploy.

`source` of the settings says on which prompts, and with that what it is: the demo, the weekly run
on served traffic, or the answer to drift. `engine` says what decodes: one that restarts has nothing
to calibrate, and is checked for drift here. A run that was killed loses nothing: the next one finds
finished shards, trials and results.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from prefect import flow, task

from draftwell.components.bench.engines.figures import Figure
from draftwell.components.bench.until import Until
from draftwell.components.card.card import FEWEST_CONFIRMING, WIDEST
from draftwell.components.gate.settings import GateSettings
from draftwell.components.tune.engines.choice import EngineChoice
from draftwell.flows.context import open_trace
from draftwell.flows.loading import open_from_settings, prompts_of, workspace_of
from draftwell.flows.orchestration import assets, run_artifacts as shown
from draftwell.flows.orchestration.result_cache import (
    CACHED,
    HEAD,
    believed,
    serves_head,
    standing,
    timed,
)
from draftwell.flows.orchestration.task_options import ANEW, FLOW, turn_of
from draftwell.flows.progress import announce, announce_step
from draftwell.flows.settings import PipelineSettings
from draftwell.flows.steps import (
    collect as collect_step,
    deploy as deploy_step,
    eagle3 as head_step,
    gate as gate_step,
    publish as publish_step,
    train as train_step,
    tune as tune_step,
)
from draftwell.flows.steps.announcement import forget_announced
from draftwell.flows.steps.at_once import measure_at_once
from draftwell.flows.steps.champion import champion_number, champion_of
from draftwell.flows.steps.engine import (
    collect as engine_collect,
    deploy as engine_deploy,
    gate as engine_gate,
    tune as engine_tune,
)
from draftwell.flows.steps.engine.card import EngineOutcome, engine_card
from draftwell.flows.steps.engine.recalibrate import recalibrate, said_of
from draftwell.flows.steps.engine.release import publish_on_engine
from draftwell.flows.steps.engine.space import (
    REPORT,
    EngineSpace,
    about,
    deployment_of,
    space_of,
)
from draftwell.flows.steps.fits import said_to_fit
from draftwell.flows.steps.gate_parts.record import earlier_verdict
from draftwell.flows.steps.keep_card import keep_with_release
from draftwell.flows.steps.outcome_card import Asked, card_of
from draftwell.flows.steps.plan import planned
from draftwell.flows.steps.reference_traces import of_release
from draftwell.flows.steps.traffic_prompts import settle_prompts
from draftwell.flows.steps.verdict import only_sampled, refusal, sentence, verdict_of
from draftwell.flows.workspace import Workspace
from draftwell.registry.pairs import find_pair
from draftwell.registry.releases import ReleaseVersion
from draftwell.serving.artifacts.kinds import CALIBRATED, READ_BY_STRATEGIES
from draftwell.serving.bundle.verdict import FAILED, PASSED, UNDECIDED
from draftwell.serving.files import remove_folder, write_json
from draftwell.serving.recording.trace import TraceSet

if TYPE_CHECKING:
    from draftwell.components.prompts.prompt import Prompt

STATES = {PASSED: "waiting", FAILED: "refused", UNDECIDED: "undecided"}
"""What becomes of a release that is not deployed; one that passed waits for a person."""
AFTER_GREEDY = 0.25
"""Share of `minutes` that our own engine keeps for what comes after the gate's greedy requests:
sampled ones, its other checks, several requests at once, and deployment."""
USES = {
    "bench": "to confirm with, at most",
    "collect": "to collect texts of",
    "calibrate": "to calibrate with",
    "tune": "to choose with",
}
"""Step → what its prompts are for, in words."""
STEPS = 7
LAST_STEPS = 0.3
"""Share of `minutes` that is kept for gate and deployment: four starts of the engine and some
minutes."""


@task(name="plan", **ANEW)
def plan(settings: PipelineSettings) -> dict[str, Any]:
    """The settings with counts of prompts and tokens for their minutes, by how fast the target
    writes here."""
    made = planned(open_from_settings(settings), settings)
    cut = ", ".join(f"{len(rows)} {USES[name]}" for name, rows in prompts_of(made).items() if rows)
    announce(f"prompts: {cut}; none is in two of them")
    return made.model_dump(mode="json")


def loading_of(settings: PipelineSettings, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """How the pair is loaded to collect: with many slots that are as long as these prompts need, or
    as all other steps have it, where the time that another loading takes is counted."""
    if settings.minutes is not None:
        return {}
    space = Workspace(settings.pair, settings.dtype)
    return collect_step.loading(space, prompts, collect_step.collection_at(settings, 0.0))


@task(name="collect", **ANEW)
def collect(settings: PipelineSettings) -> dict[str, Any]:
    """Fix the prompts, and collect traces of each class of temperatures; shards that stand stay.

    Returns:
        the settings with these prompts, name → digest of the traces, and the release that answered
        this drift, if one did: then nothing is collected. Of another engine, figures of its texts.
    """
    if settings.restarts:
        texts = engine_collect.collect_as(
            settings, space_of(settings), prompts_of(settings)["collect"]
        )
        return {"settings": settings.model_dump(mode="json"), "answered": None, "texts": texts}
    settings = settle_prompts(settings)
    fixed = {"settings": settings.model_dump(mode="json"), "answered": answer_to(settings)}
    if fixed["answered"] is not None or without_draft(settings):  # which has nothing to trace
        return {**fixed, "traces": {}}
    prompts = prompts_of(settings)["collect"]
    step = open_from_settings(settings, **loading_of(settings, prompts))
    traces = collect_step.collect_classes(step, prompts, settings)
    digests = {name: found.digest() for name, found in traces.items()}
    rows = [
        {"traces": name, "digest": digests[name], "positions": found.read(["position"]).num_rows}
        for name, found in traces.items()
    ]
    shown.table("collection", step.workspace, rows, f"The traces in {step.workspace.root}.")
    key = assets.artifact_key(step.workspace, assets.TRACES)
    assets.made(key, collections=rows, prompts=len(prompts))
    return {**fixed, "traces": digests}


def without_draft(settings: PipelineSettings) -> bool:
    """Whether the pair has no draft model."""
    return find_pair(settings.pair).draft is None


@task(name="train", **CACHED)
def train(settings: PipelineSettings) -> dict[str, Any]:
    """Train a SPRINTER verifier, where a lossy strategy may be chosen, and an acceptance head where
    the champion has one; for another engine an EAGLE-3 head, where the pair has none."""
    if settings.restarts:
        rows = prompts_of(settings)["collect"]
        return {"made": {}, "head": head_step.train_as(settings, space_of(settings), rows)}
    if without_draft(settings):
        return {"made": {}}
    step = open_from_settings(settings)
    report, kinds = {}, list[str]()
    if settings.takes_lossy:
        report, kinds = train_step.run_train(step, open_trace(step)).to_json(), ["verifier"]
    if serves_head(step.workspace):
        train_step.run_train_head(step, open_trace(step))
        kinds.append(HEAD)
    if report:
        shown.figures("training", step.workspace, report)
    shown.pictures(step.workspace, kinds)
    found = standing(step.workspace, kinds)
    assets.artifacts_made(step.workspace, found, [assets.TRACES])
    return {"made": found}


@task(name="calibrate", **CACHED)
def calibrate(settings: PipelineSettings) -> dict[str, Any]:
    """Make acceptance table (its counts of sampled texts too), hardware profile, and where a lossy
    strategy may be chosen a correction memory."""
    step = open_from_settings(settings)
    if without_draft(settings):
        report, kinds = train_step.run_profile(step), ["hardware_profile"]
    else:
        report = train_step.calibrate_as(settings, step, prompts_of(settings)["calibrate"])
        left_out = ("verifier",) if settings.takes_lossy else ("verifier", "correction_memory")
        kinds = [kind for kind in CALIBRATED if kind not in left_out]
    shown.figures("calibration", step.workspace, report)
    shown.pictures(step.workspace, kinds)
    found = standing(step.workspace, kinds)
    assets.artifacts_made(step.workspace, found, [assets.TRACES])
    return {"made": found}


@task(name="tune", **CACHED)
def tune(settings: PipelineSettings, seconds: float = 0.0) -> dict[str, Any]:
    """Choose strategy and parameters for each class of temperatures, compared with the champion;
    for another engine how it speculates, in so many seconds."""
    if settings.restarts:
        prompts = prompts_of(settings)["tune"]
        found = engine_tune.tune_as(settings, space_of(settings), prompts, seconds)
        return {"made": {}, "choice": found}
    step, kinds = open_from_settings(settings), ["decoding_config"]
    way = tune_step.tune_without_draft_as if without_draft(settings) else tune_step.tune_as
    choice = way(settings, step, prompts_of(settings)["tune"])
    rows = shown.measured_rows(step.workspace)
    shown.table("tuning", step.workspace, rows, choice["reason"])
    shown.pictures(step.workspace, kinds)
    found, read = standing(step.workspace, kinds), standing(step.workspace, READ_BY_STRATEGIES)
    assets.artifacts_made(step.workspace, found, [assets.TRACES, *read])
    return {"made": found, "choice": choice}


@task(name="publish", **ANEW)
def publish(settings: PipelineSettings) -> int:
    """Publish the workspace's artifacts and pin them in a release; returns its number."""
    if settings.restarts:
        space = space_of(settings)
        made = publish_on_engine(space, deployment_of(settings, space).temperature).release
        release_made(space.workspace, made)
        return made.version
    step = open_from_settings(settings)
    # one level down: no figures to compare releases by
    evidence = {"settings": settings.evidence(step.workspace.spec.name)}
    release = publish_step.run_publish(step, evidence, device=settings.device)
    release_made(step.workspace, release)
    return release.version


def release_made(space: Workspace, release: ReleaseVersion) -> None:
    """Show a release: a link to its run, and its asset."""
    assets.made(
        assets.device_key(space, release.device, "release"),
        of=[assets.artifact_key(space, kind) for kind in release.pins],
        url=shown.link(space, release.published),
        release=release.version,
        digest=release.published.digest,
        pins=release.pins,
    )


@task(name="gate", **ANEW)
def gate(
    settings: PipelineSettings,
    release: int,
    limit: int | None = None,
    seconds: float = 0.0,
    greedy: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Judge a release, unless a run on served traffic finds that it was judged beside the same
    champion.

    Args:
        limit: prompts, at most: two suffice for plain decoding, of which no speed is judged.
        seconds: of a loop of so many minutes: for more prompts, while the interval is wide.
        greedy: report of another release with the same choice for greedy requests.
    Returns:
        the bench's `report`, `checks`, whether it `passed`, and the `champion` that it was judged
        beside.
    """
    if settings.restarts:
        rows = prompts_of(settings)["bench"]
        return engine_gate.gate_as(settings, space_of(settings), release, rows)
    champion = champion_number(workspace_of(settings), settings.device)
    if settings.source != "prompts":
        kept = earlier_verdict(workspace_of(settings), settings.device, release, champion)
        if kept is not None:
            return {"report": None, **kept, "champion": champion}
    wanted = GateSettings(
        limit=None,
        max_tokens=settings.max_tokens,
    )
    prompts = prompts_of(settings)["bench"][:limit]
    until = (
        None
        if settings.minutes is None
        else Until(FEWEST_CONFIRMING, WIDEST, time.monotonic() + seconds)
    )
    step = open_from_settings(settings)
    found = gate_step.gate_release(step, prompts, wanted, alias=release, until=until, greedy=greedy)
    kept = {key: found[key] for key in ("report", "checks", "passed")}
    space = workspace_of(settings)
    assets.made(
        assets.device_key(space, settings.device, "verdict"),
        of=[assets.device_key(space, settings.device, "release")],
        release=release,
        verdict=verdict_of(kept),
        prompts=len(prompts),
    )
    return {**kept, "champion": champion}


@task(name="at once", **ANEW)
def at_once(settings: PipelineSettings) -> dict[str, Any]:
    """The speed of the choice for several requests at once, on the gate's prompts, and the peak of
    memory meanwhile."""
    return measure_at_once(open_from_settings(settings), prompts_of(settings)["bench"])


@task(name="card", **ANEW)
def card(
    settings: PipelineSettings, outcome: dict[str, Any], fits: str, seconds: float
) -> dict[str, Any]:
    """What came of the loop, on a page that is kept with the release; returns it as data."""
    asked = Asked(
        fits=fits,
        seconds=seconds,
        minutes=settings.engine_minutes if settings.restarts else settings.minutes or 0.0,
        prompts=None if settings.prompts is None else settings.prompts.name,
        confirming=settings.bench_prompts,
        in_time=not settings.restarts,
    )
    if settings.restarts:
        space = space_of(settings)
        promote = settings.promote or space.workspace.spec.promote
        made = engine_card(space.workspace, engine_outcome(space, outcome, promote), asked)
        temperature = deployment_of(settings, space).temperature
        keep_with_release(space.workspace, made, space.released_as(temperature))
    else:
        own = workspace_of(settings)
        made = card_of(outcome, settings, own, asked)
        keep_with_release(own, made)
    return made.model_dump(mode="json")


def engine_outcome(space: EngineSpace, outcome: dict[str, Any], promote: str) -> EngineOutcome:
    """What a card says of a loop on another engine."""
    name = space.workspace.on_command_lines
    serves = outcome["passed"] or outcome["champion"] is not None
    again = f"draftwell tune --engine {space.option} --pair {name}"
    serve = f"draftwell serve --engine {space.name} --pair {name}"
    if outcome["passed"] and promote == "manual":
        named = f"--set engine={space.name} --set device={space.workspace.device}"
        serve = f"draftwell release promote --pair {name} {named} --release {outcome['release']}"
    return EngineOutcome(
        engine=f"{space.name} {space.version}",
        choice=EngineChoice.model_validate_json(json.dumps(outcome["measured"])),
        figures=[Figure.model_validate_json(json.dumps(one)) for one in outcome["figures"]],
        verdict=outcome["verdict"],
        checks=outcome["checks"],
        next_command=serve if serves else again,
        release=outcome["release"],
    )


@task(name="deploy", **ANEW)
def deploy(settings: PipelineSettings, release: int) -> dict[str, Any]:
    """Make a release that passed the champion, and build its bundle; returns the `bundle`, None
    where a person promotes, and of another engine what its trial gave."""
    if settings.restarts:
        cut = prompts_of(settings)
        rows = [*cut["tune"], *cut["bench"]]
        return engine_deploy.deploy_as(settings, space_of(settings), release, rows)
    space = workspace_of(settings)
    if champion_number(space, settings.device) == release:
        bundle = deploy_step.deploy_champion(space, settings.device, settings.out)
    else:
        bundle = deploy_step.promote_and_deploy(
            space, settings.device, release, settings.out, settings.promote
        )
    if bundle is not None:
        assets.bundle_made(space, settings.device, release, bundle)
    return {"bundle": None if bundle is None else str(bundle)}


@task(name="grid", **ANEW)
def grid(settings: PipelineSettings) -> dict[str, Any]:
    """The regret of another engine's choice, by measuring all settings again."""
    return engine_tune.grid_as(settings, space_of(settings), prompts_of(settings)["tune"])


@flow(name="draftwell", **FLOW)
def draftwell(settings: PipelineSettings) -> dict[str, Any]:
    """Bring a pair from prompts to a deployed champion; a refusal leaves the one before as it is.

    Returns:
        `state` (deployed, waiting for a person, refused, undecided; or answered: the champion was
        made for this drift), the choices and why, the release, whether it `passed`, the gate's
        `report`, `checks` and `verdict`, the `champion` of before, and where the `bundle` is.
    """
    with turn_of(find_pair(settings.pair).name):
        if settings.restarts and settings.source == "drift" and settings.drift is None:
            return answer_drift(settings)
        return run_steps(settings)


def answer_drift(settings: PipelineSettings) -> dict[str, Any]:
    """The outcome of the check of an engine that restarts, and of the loop where it has drifted."""
    outcome = recalibrate(space_of(settings), settings, announce, run_steps)
    announce(said_of(outcome))
    shown.text("engine", find_pair(settings.pair).name, said_of(outcome))
    return {name: value for name, value in outcome.items() if name != "report"}


def run_steps(settings: PipelineSettings) -> dict[str, Any]:
    """The tasks, one after the other, in one turn of the workspace, so that nobody else's choice is
    published with this run's evidence; the outcome of the flow."""
    with workspace_of(settings).turn("the flow draftwell", wait=True):
        return steps_of(settings)


def steps_of(settings: PipelineSettings) -> dict[str, Any]:
    """As `run_steps`, which holds the turn."""
    begun = time.monotonic()
    fits = None
    if settings.minutes is not None:
        fits = said_to_fit(workspace_of(settings), refuse=not settings.restarts)
        if not settings.restarts:
            settings = planned_in_time(settings)
    announce_step("collect", 1, STEPS)
    collected = timed(settings, collect)(settings)
    settings = PipelineSettings.model_validate(collected["settings"])
    if (number := collected["answered"]) is not None:
        announce(f"this drift was answered already, by release {number}, the champion")
        deployed = deploy(settings, number)
        return {"state": "answered", "drift": settings.drift, "release": number, **deployed}
    choice = learn(settings, begun)
    outcome = release_choice(settings, choice, begun, fits)
    if settings.source == "drift" and outcome["state"] in ("deployed", "waiting"):
        forget_announced(workspace_of(settings), settings.device, settings.drift)
    if not settings.restarts:
        return outcome
    if settings.grid:
        announce("the grid")
        outcome["grid"] = timed(settings, grid)(settings)
    space = space_of(settings)
    report = {**about(space), **outcome, "texts": collected["texts"], "minutes": settings.minutes}
    report["seconds"] = time.monotonic() - begun
    write_json(space.folder / REPORT, report)
    return report


def learn(settings: PipelineSettings, begun: float = 0.0) -> dict[str, Any]:
    """Train, calibrate and tune, or believe what an earlier run made of the same; returns the
    choices.

    Args:
        begun: when the run was, of `time.monotonic`; what is left of `minutes` is the tuning's.
    """
    announce_step("train", 2, STEPS)
    trained = believed(settings, train)
    if not settings.restarts:
        announce_step("calibrate", 3, STEPS)
        believed(settings, calibrate)
        announce_step("tune", 4, STEPS)
        choice: dict[str, Any] = believed(settings, tune)["choice"]
        return choice
    announce(f"    {trained['head']}")
    announce_step("tune", 4, STEPS)
    left = 60 * settings.engine_minutes * (1 - LAST_STEPS) - (time.monotonic() - begun)
    return {**believed(settings, tune, left)["choice"], "head": trained["head"]}


def planned_in_time(settings: PipelineSettings) -> PipelineSettings:
    """The settings with counts for their minutes; begun again, nothing of an earlier run is left
    that it would continue."""
    space = workspace_of(settings)
    if settings.fresh:
        for folder in (*map(space.traces_at, settings.temperatures), space.device_root / "tuning"):
            if folder.is_dir():
                remove_folder(folder, folder.with_name(f".{folder.name}.removed"))
    return PipelineSettings.model_validate(timed(settings, plan)(settings))


def release_choice(
    settings: PipelineSettings, choice: dict[str, Any], begun: float = 0.0, fits: str | None = None
) -> dict[str, Any]:
    """Publish, gate, and deploy what passes; the outcome of the flow, with a card where it has so
    many minutes.

    Args:
        begun: when the run was, of `time.monotonic`.
        fits: as `said_to_fit` says it; None makes no card.
    """
    announce_step("publish", 5, STEPS)
    release = timed(settings, publish)(settings)
    announce_step("gate", 6, STEPS)
    seconds = 60 * (settings.minutes or 0.0) * (1 - AFTER_GREEDY) - (time.monotonic() - begun)
    gated = timed(settings, gate)(settings, release, seconds=seconds)
    if gated["champion"] is None and "withdrawn" not in gated and not settings.restarts:
        choice, release, gated = give_way_to_plain(settings, choice, release, gated)
    found = {**choice, **gated, "verdict": verdict_of(gated), "release": release, "bundle": None}
    if fits is not None:
        if not settings.restarts:
            announce("    several requests at once")
            found |= timed(settings, at_once)(settings)
        found["card"] = card(settings, found, fits, time.monotonic() - begun)
    champion = gated["champion"]
    stays = "nothing is served" if champion is None else f"release {champion}, the champion, stays"
    said = f"release {release}: {gated.get('withdrawn') or sentence(gated)}"
    last = "promote and deploy" if gated["passed"] else f"not deployed: {said}, {stays}"
    announce_step(last, 7, STEPS)
    # another engine's trial takes as long as it was asked to
    step = timed(settings, deploy) if settings.restarts else deploy
    deployed = step(settings, release) if gated["passed"] else {"bundle": None}
    words = said if gated["passed"] else f"{said}, {stays}"
    shown.table("gate", workspace_of(settings), gated["checks"], words)
    return {
        **found,
        "state": "deployed" if deployed["bundle"] else STATES[verdict_of(gated)],
        "drift": settings.drift,
        **deployed,
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
        refused = {name: choice[name] for name in ("strategy", "parameters")}
        refused |= {"passed": False, "verdict": verdict_of(gated), "checks": gated["checks"]}
        choice = (
            {**choice, "sampled": {**(choice["sampled"] or {}), **plain}}
            if sampled_only
            else {**choice, **plain, "sampled": None, "refused": refused}
        )
        release = timed(settings, publish)(settings)
        again = timed(settings, gate)(
            settings,
            release,
            limit=None if sampled_only else 2,
            greedy=gated["report"] if sampled_only else None,
        )
        # the table stays that of what was tuned
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
