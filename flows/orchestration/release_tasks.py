"""Prefect tasks of releasing: publish, gate, promote, deploy."""

from __future__ import annotations

from typing import Any

from prefect import task

from draftwell.components.gate.settings import GateSettings
from draftwell.flows.loading import open_from_settings, prompts_of
from draftwell.flows.orchestration import prefect_artifacts
from draftwell.flows.orchestration.learn_tasks import RETRY, TASK
from draftwell.flows.progress import announce
from draftwell.flows.settings import PipelineSettings
from draftwell.flows.steps import champion, deploy
from draftwell.flows.steps import publish as publish_step
from draftwell.flows.steps import tune as tune_step
from draftwell.flows.steps.gate import gate_release
from draftwell.flows.workspace import Workspace


@task(name="publish", **RETRY)
def publish_task(settings: PipelineSettings) -> int:
    """Publish the workspace's artifacts and pin them in a release; returns its number."""
    step = open_from_settings(settings)
    # one level down: no figures to compare releases by
    evidence = {"settings": settings.evidence(step.workspace.spec.name)}
    return publish_step.run_publish(step, evidence, device=settings.device).version


@task(name="gate", **RETRY)
def gate_task(
    settings: PipelineSettings, release: int, full: bool = True, limit: int | None = None
) -> dict[str, Any]:
    """Gate a release; returns report, checks and whether it passed.

    Args:
        full: other strategies decode the same prompts, for a table.
        limit: prompts, at most: two suffice for plain decoding, of which no speed is judged; None
            takes all.
    """
    prompts = prompts_of(settings)["bench"][:limit]
    gate = GateSettings(
        device=settings.device, limit=None, max_tokens=settings.bench_tokens, others=full
    )
    result = gate_release(open_from_settings(settings), prompts, gate, alias=release)
    return {key: result[key] for key in ("report", "checks", "passed")}


@task(name="promote and deploy", **RETRY)
def deploy_task(settings: PipelineSettings, release: int) -> str | None:
    """Make a release that passed the champion, and build its bundle; returns the bundle's folder,
    None where a person promotes."""
    space = open_from_settings(settings).workspace
    bundle = deploy.promote_and_deploy(
        space, settings.device, release, settings.out, settings.promote
    )
    return None if bundle is None else str(bundle)


@task(name="deploy the champion", **RETRY)
def deploy_champion_task(settings: PipelineSettings) -> str | None:
    """Build the champion's bundle where it is not there; returns its folder, None where a person
    deployed without a gate."""
    bundle = deploy.deploy_champion(
        open_from_settings(settings).workspace, settings.device, settings.out
    )
    return None if bundle is None else str(bundle)


@task(name="deploy what the alias names", **RETRY)
def sync_task(settings: PipelineSettings) -> dict[str, Any]:
    """Let `current` lead to the champion of the alias; returns what was found or done."""
    done = deploy.sync_champion(
        Workspace(settings.pair, settings.dtype, announce), settings.device, settings.out
    )
    return {
        "state": done.state,
        "release": done.release,
        "bundle": None if done.bundle is None else str(done.bundle),
    }


@task(name="which release is champion", **RETRY)
def champion_task(settings: PipelineSettings) -> int | None:
    """Number of the pair's champion on the device."""
    return champion.champion_number(
        Workspace(settings.pair, settings.dtype, announce), settings.device
    )


@task(name="link the release", **RETRY)
def link_task(settings: PipelineSettings, release: int) -> None:
    """Link to a release's run in MLflow."""
    from draftwell.registry.pairs import find_pair
    from draftwell.registry.store import Store

    store, name = Store(), find_pair(settings.pair).name
    prefect_artifacts.links(
        "mlflow", name, store, [store.resolve("release", f"{name}.{settings.device}", release)]
    )


@task(name="fall back to plain decoding", **TASK)
def plain_choice_task(
    settings: PipelineSettings, choice: dict[str, Any], reason: str, sampled_only: bool
) -> dict[str, Any]:
    """Put plain decoding into the workspace as the choice for all requests, or for sampled ones;
    returns `choice` with it in its place."""
    plain = tune_step.choose_plain(open_from_settings(settings), reason, sampled_only=sampled_only)
    return (
        {**choice, "sampled": {**(choice["sampled"] or {}), **plain}}
        if sampled_only
        else {**choice, **plain, "sampled": None}
    )
