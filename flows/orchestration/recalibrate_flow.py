"""The flow that answers drift: new prompts → traces → artifacts → choice → release → gate →
champion → bundle, unattended.

Each step is a task around one of `recalibration`. It resumes where a killed run stopped, and does a
deployed one once only.
"""

from __future__ import annotations

import time
from typing import Any

from prefect import flow, task
from prefect.artifacts import create_markdown_artifact

from draftwell.components.gate.verdict import FAILED, PASSED, UNDECIDED
from draftwell.flows.orchestration import recalibration as recalibrating
from draftwell.flows.orchestration.concurrency import pair_slots
from draftwell.flows.orchestration.learn_tasks import FLOW, RETRY, TASK, within
from draftwell.flows.orchestration.prefect_artifacts import key_for
from draftwell.flows.orchestration.release_tasks import link_task
from draftwell.flows.progress import announce
from draftwell.flows.steps.monitor import DriftSettings
from draftwell.flows.steps.verdict import result_of, sentence
from draftwell.flows.workspace import Workspace

begin_task = task(name="take prompts from the spool", **RETRY)(recalibrating.begin)
collect_task = task(name="collect traces", **RETRY)(recalibrating.collect_traffic)
calibrate_task = task(name="train and calibrate", **RETRY)(recalibrating.calibrate_on_traffic)
tune_task = task(name="tune", **RETRY)(recalibrating.tune_on_traffic)
publish_task = task(name="publish", **RETRY)(recalibrating.publish_candidate)
gate_task = task(name="gate", **RETRY)(recalibrating.gate_candidate)
deploy_task = task(name="promote and deploy", **RETRY)(recalibrating.deploy_release)
finish_task = task(name="write down the outcome", **TASK)(recalibrating.finish)


@flow(name="recalibrate", **FLOW)
def recalibrate(settings: DriftSettings) -> dict[str, Any]:
    """Recalibrate a pair on the traffic that it serves now, and deploy the result if it passes the
    gate.

    Returns:
        `state`: deployed, waiting (it passed, and a person promotes), refused or undecided (the
            gate failed, or had not enough evidence:
        the champion stays), or busy (another recalibration of the pair is running); the choices and
        why, the release, the gate's checks, the speed over the old champion on the new traffic, the
        bundle, and the seconds that it took.
    """
    name = Workspace(settings.pair, settings.dtype, announce).spec.name
    with pair_slots(name), recalibrating.single_recalibration(settings) as free:
        if not free:
            announce("another recalibration of this pair is running: nothing to do")
            return {"state": "busy"}
        outcome, done_now = answer(settings)
    if done_now:
        create_markdown_artifact(
            outcome_markdown(outcome),
            key=key_for("recalibration", name),
            description=f"Recalibration: {outcome['state']}",
        )
        link_task(settings, outcome["release"])
    return outcome


def answer(settings: DriftSettings) -> tuple[dict[str, Any], bool]:
    """All seven steps; returns the outcome, and whether it is of this run: a drift that was
    answered already is left at that."""
    started = time.monotonic()
    announce("1/7 take prompts from the spool")
    job = begin_task(settings)
    folder, drift = job["folder"], job["drift"]
    if job["outcome"] is not None:
        announce(
            f"this drift was answered already, by release {job['outcome']['release']}: "
            "nothing to do"
        )
        return dict(job["outcome"]), False
    announce("2/7 collect traces")
    within(settings, collect_task)(settings, folder)
    announce("3/7 train and calibrate")
    within(settings, calibrate_task)(settings, folder)
    announce("4/7 tune")
    choice = within(settings, tune_task)(settings, folder)
    announce("5/7 publish")
    release = within(settings, publish_task)(settings, folder, drift)
    announce("6/7 gate")
    gated = within(settings, gate_task)(settings, folder, release)
    announce(
        "7/7 promote and deploy"
        if gated["passed"]
        else f"7/7 release {release} is not deployed: {sentence(gated)}, the champion stays"
    )
    bundle = deploy_task(settings, release) if gated["passed"] else None
    passed_as = "waiting" if bundle is None else "deployed"
    state = {PASSED: passed_as, FAILED: "refused", UNDECIDED: "undecided"}[result_of(gated)]
    outcome = finish_task(
        settings,
        folder,
        {
            "state": state,
            "drift": drift,
            **choice,
            "release": release,
            **gated,
            "bundle": bundle,
            "seconds": time.monotonic() - started,
        },
    )
    return dict(outcome), True


def outcome_markdown(outcome: dict[str, Any]) -> str:
    """An outcome as Markdown."""
    from draftwell.components.report.tables import markdown

    over = outcome["over_champion"]
    faster = (
        ""
        if over is None
        else (
            f"\n{over['ratio']:.2f} times as fast as the champion before it on the new traffic "
            f"[{over['low']:.2f}, {over['high']:.2f}].\n"
        )
    )
    rows = [
        (
            check["name"],
            f"{check['value']:.3f}",
            f"{check['threshold']:g}",
            "yes" if check["passed"] else "no",
            check["detail"],
        )
        for check in outcome["checks"]
    ]
    sampled = (
        f"\nSampled requests: {outcome['sampled']['reason']}\n" if outcome.get("sampled") else ""
    )
    return "\n".join(
        [
            f"# Release {outcome['release']}: {outcome['state']}\n",
            f"{outcome['reason']}\n{sampled}{faster}",
            markdown(("check", "value", "threshold", "passed", "detail"), rows),
            (
                f"{outcome['seconds']:.0f} s. Bundle: "
                f"{outcome['bundle'] or 'none, the champion stays'}.\n"
            ),
        ]
    )
