"""The flows that `prefect.yaml` deploys: weekly, of collection, calibration, tuning and release;
and sync.

Each holds the concurrency slots of its pair, wraps the tasks of `learn_tasks` and `release_tasks`,
and shows the results as artifacts in Prefect. Each reads what the earlier ones left in the pair's
workspace, so workers of a pool share one `DRAFTWELL_HOME`. A run that was killed loses nothing: the
next one finds finished shards, trials and measurements, and resumes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefect import flow, task

from draftwell.components.gate.verdict import PASSED
from draftwell.flows.context import pictures_of
from draftwell.flows.orchestration import prefect_artifacts
from draftwell.flows.orchestration.cached_steps import once, standing, traces_of
from draftwell.flows.orchestration.concurrency import pair_slots
from draftwell.flows.orchestration.learn_tasks import (
    FLOW,
    RETRY,
    calibrate_task,
    collect_task,
    train_task,
    tune_task,
    within,
)
from draftwell.flows.orchestration.release_tasks import (
    champion_task,
    deploy_champion_task,
    deploy_task,
    gate_task,
    link_task,
    publish_task,
    sync_task,
)
from draftwell.flows.progress import announce
from draftwell.flows.settings import PipelineSettings, TrafficSettings
from draftwell.flows.steps.champion import champion_number
from draftwell.flows.steps.traffic_prompts import on_taken, take_prompts
from draftwell.flows.steps.verdict import result_of, sentence
from draftwell.flows.workspace import Workspace
from draftwell.serving.artifacts.kinds import CALIBRATED, READ_BY_STRATEGIES


@task(name="collection", **RETRY)
def collection_step(settings: PipelineSettings) -> dict[str, Any]:
    """Collect traces; returns what was made and how many positions it has."""
    from draftwell.serving.recording.trace import TraceSet

    made, root = collect_task.fn(settings), workspace_of(settings).root
    positions = {name: TraceSet(root / name).read(["position"]).num_rows for name in made}
    return {"made": made, "report": {"positions": positions}}


@task(name="calibration", **RETRY)
def calibration_step(settings: PipelineSettings) -> dict[str, Any]:
    """Train the verifier, make table, memory and profile; returns what was made and its metrics."""
    report = {**train_task.fn(settings), **calibrate_task.fn(settings)}
    return {"made": standing(workspace_of(settings), CALIBRATED), "report": scalars(report)}


@task(name="tuning", **RETRY)
def tuning_step(settings: PipelineSettings) -> dict[str, Any]:
    """Choose strategy and parameters; returns what was made and the choice."""
    choice = tune_task.fn(settings)
    return {"made": standing(workspace_of(settings), ["decoding_config"]), "report": choice}


@task(name="take prompts of served traffic", **RETRY)
def take_prompts_task(settings: TrafficSettings) -> None:
    """Fix the prompts of the week."""
    take_prompts(settings, workspace_of(settings))


@task(name="look for an earlier verdict", **RETRY)
def earlier_verdict_task(settings: PipelineSettings, release: int) -> dict[str, Any] | None:
    """The gate's verdict about a release compared with the champion of today."""
    return earlier_verdict(settings, workspace_of(settings), release)


@task(name="register in MLflow", **RETRY)
def register_task(settings: PipelineSettings, kinds: Sequence[str]) -> dict[str, int]:
    """Register artifacts of the workspace (once, however often it runs) and link to them; returns
    their versions."""
    from draftwell.registry.store import Store

    space, store = workspace_of(settings), Store()
    made = [
        store.publish(space.folder(kind), pair=space.spec.name, plots=pictures_of(space, kind))
        for kind in kinds
    ]
    prefect_artifacts.links("mlflow", space.spec.name, store, made)
    for kind in kinds:
        prefect_artifacts.pictures(kind, space.spec.name, pictures_of(space, kind))
    return {version.kind: version.version for version in made}


@flow(name="collection", **FLOW)
def collection(settings: TrafficSettings) -> dict[str, Any]:
    """Collect traces of a pair on served traffic, or on its prompts until there is any; where pair,
    prompts and settings are those of the last run, nothing is computed."""
    space = workspace_of(settings)
    with pair_slots(space.spec.name):
        take_prompts_task(settings)
        settings = on_taken(settings, space)
        done = once(collection_step, settings, space, {})
    rows = [
        {
            "traces": name,
            "digest": digest[:12],
            "positions": done["report"]["positions"][name],
            "folder": str(space.root / name),
        }
        for name, digest in done["made"].items()
    ]
    prefect_artifacts.table("collection", space.spec.name, rows, "The traces in the workspace.")
    return done


@flow(name="calibration", **FLOW)
def calibration(settings: TrafficSettings) -> dict[str, Any]:
    """Make verifier, acceptance table, correction memory and hardware profile from the traces, and
    register them."""
    space = workspace_of(settings)
    with pair_slots(space.spec.name):
        settings = on_taken(settings, space)
        done = once(calibration_step, settings, space, standing(space, traces_of(settings)))
        versions = register_task(settings, CALIBRATED)
    rows = [{"figure": name, "value": value} for name, value in done["report"].items()]
    prefect_artifacts.table(
        "calibration", space.spec.name, rows, f"Registered as {kinds_with_versions(versions)}."
    )
    return {**done, "versions": versions}


@flow(name="tuning", **FLOW)
def tuning(settings: TrafficSettings) -> dict[str, Any]:
    """Choose strategy and parameters, compared with the champion, and register the choice."""
    space = workspace_of(settings)
    with pair_slots(space.spec.name):
        settings = on_taken(settings, space)
        before = {
            **standing(space, (*traces_of(settings), *READ_BY_STRATEGIES)),
            "champion": champion_task(settings),
        }
        done = once(tuning_step, settings, space, before)
        versions = register_task(settings, ["decoding_config"])
    prefect_artifacts.table(
        "tuning", space.spec.name, measured_rows(space), str(done["report"]["reason"])
    )
    return {**done, "versions": versions}


@flow(name="release", **FLOW)
def release(settings: TrafficSettings) -> dict[str, Any]:
    """Publish what the workspace holds, gate it, and deploy it if it passes; the champion itself is
    not gated again."""
    space = workspace_of(settings)
    with pair_slots(space.spec.name):
        settings = on_taken(settings, space)
        number = within(settings, publish_task)(settings)
        if number == champion_task(settings):
            print(f"release {number} is the champion already: its bundle is all that it may lack")
            return {
                "release": number,
                "passed": True,
                "verdict": PASSED,
                "checks": [],
                "bundle": deploy_champion_task(settings),
            }
        gated = earlier_verdict_task(settings, number) or within(settings, gate_task)(
            settings, number
        )
        bundle = deploy_task(settings, number) if gated["passed"] else None
    announce(said := release_line(number, gated))
    prefect_artifacts.table(
        "gate", space.spec.name, gated["checks"], f"{said[:1].upper()}{said[1:]}."
    )
    link_task(settings, number)
    return {
        "release": number,
        "passed": gated["passed"],
        "verdict": result_of(gated),
        "checks": gated["checks"],
        "bundle": bundle,
    }


@flow(name="weekly", **FLOW)
def weekly(settings: TrafficSettings) -> dict[str, Any]:
    """Collection, calibration, tuning and release in one run, which holds the pair's slots
    throughout: each begins when the one before has ended well. What failed ends the run; the next
    one computes only what is missing."""
    with pair_slots(workspace_of(settings).spec.name):
        collection(settings)
        calibration(settings)
        tuning(settings)
        return release(settings)


@flow(name="sync", **FLOW)
def sync(settings: PipelineSettings) -> dict[str, Any]:
    """Deploy the champion that the alias names, whoever set it, if something else is served.

    It takes no slot, because it measures nothing: a person's choice does not wait for a tuning. It
    fails, and names the release, where the champion has no passed gate: what was asked for in
    MLflow was not done, and a person has to see that.
    """
    return sync_task(settings)


def workspace_of(settings: PipelineSettings) -> Workspace:
    """The workspace of a pair, without loading its models."""
    return Workspace(settings.pair, settings.dtype, announce, settings.device)


def earlier_verdict(
    settings: PipelineSettings, space: Workspace, number: int
) -> dict[str, Any] | None:
    """The gate's verdict about a release compared with the champion of today; None where the gate
    has to run. `withdrawn`: why there will be none.

    A refused candidate that nothing has changed is not measured again each week, until it passes by
    luck; one that could not be measured at that moment is. One that is no longer champion stays as
    it is: a person rolled it back, or moved the alias, or another release was better.
    """
    from draftwell.registry.promotion import CHAMPION_SINCE, withdrawal
    from draftwell.registry.releases import find_release, gate_record, objection
    from draftwell.registry.store import Store

    release = find_release(Store(), space.spec.name, settings.device, number)
    record = gate_record(release)
    why = withdrawal(release)
    if why is None and release.published.tags.get(CHAMPION_SINCE):
        why = (
            f"it was champion before; `draftwell promote --pair {space.spec.name} --device "
            f"{settings.device} --release {number}` to "
            "promote it again"
        )
    if why is not None:
        print(f"release {number} is neither judged nor promoted: {why}")
        return {
            "passed": False,
            "checks": [check.model_dump() for check in record.checks] if record else [],
            "withdrawn": f"neither judged nor promoted, {why}",
        }
    same = record is not None and record.baseline_version == champion_number(space, settings.device)
    if record is None or not same or (record.passed and objection(release, record)):
        return None
    if record.undecided:
        why = ", ".join(check.name for check in record.checks if not check.passed)
        print(
            f"release {number} is measured again: {why} failed on {record.created} for "
            "what the machine lacked"
        )
        return None
    print(
        f"release {number} was compared with this champion already: the verdict of "
        f"{record.created} is used"
    )
    return {"passed": record.passed, "checks": [check.model_dump() for check in record.checks]}


def release_line(number: int, gated: dict[str, Any]) -> str:
    """What became of a release, for a person.

    >>> release_line(3, {"passed": False, "checks": [{"passed": False, "enough": False}]})
    'release 3: the gate had not enough evidence, the champion stays'
    """
    return (
        f"release {number}: "
        f"{gated.get('withdrawn') or sentence(gated)}{'' if gated['passed'] else ', the champion stays'}"  # noqa: E501
    )


def measured_rows(space: Workspace) -> list[dict[str, Any]]:
    """What the tuning measured, as rows of its report's table."""
    import json

    from draftwell.components.tune.evidence import TuningEvidence
    from draftwell.components.tune.report.tables import measured

    file = space.device_reports / "tuning.json"
    section = measured(TuningEvidence.read(json.loads(file.read_text(encoding="utf-8")), str(file)))
    return [dict(zip(section.columns, row, strict=True)) for row in section.rows]


def scalars(report: dict[str, Any]) -> dict[str, Any]:
    """The numbers and texts of a report, without its curves."""
    return {name: value for name, value in report.items() if isinstance(value, int | float | str)}


def kinds_with_versions(versions: dict[str, int]) -> str:
    """Kinds with their versions, for a person."""
    return ", ".join(f"{kind} version {number}" for kind, number in versions.items())
