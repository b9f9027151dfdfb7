"""The whole loop as one Prefect flow: collect → train → calibrate → tune → release."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.orchestration.learn_tasks import FLOW, calibrate_task, collect_task, train_task, tune_task, within
from flows.orchestration.release_tasks import champion_task, deploy_task, gate_task, plain_choice_task, publish_task
from flows.progress import announce
from flows.settings import PipelineSettings


@flow(name="draftwell", **FLOW)
def pipeline(settings: PipelineSettings) -> dict[str, Any]:
    """Bring a pair from prompts to a deployed champion.

    Returns:
        the final report, the choice and why, the release, and where its bundle lies.
    """
    announce("1/7 collect traces")
    within(settings, collect_task)(settings)
    announce("2/7 train a verifier")
    within(settings, train_task)(settings)
    announce("3/7 calibrate")
    within(settings, calibrate_task)(settings)
    announce("4/7 tune")
    choice = within(settings, tune_task)(settings)
    announce("5/7 publish")
    release = within(settings, publish_task)(settings)
    announce("6/7 gate, and the final comparison of all strategies")
    gated = within(settings, gate_task)(settings, release)
    if not gated["passed"] and champion_task(settings) is None:
        announce("the gate refused the choice; with no champion to keep, plain decoding is released instead")
        choice = plain_choice_task(settings, refusal(choice, gated))
        release = within(settings, publish_task)(settings)
        gated |= {"passed": within(settings, gate_task)(settings, release, full=False)["passed"]}
    announce("7/7 promote and deploy" if gated["passed"] else "7/7 not deployed: the gate failed, the champion stays")
    bundle = deploy_task(settings, release) if gated["passed"] else None
    return {**choice, **gated, "release": release, "bundle": bundle}


def refusal(choice: dict[str, Any], gated: dict[str, Any]) -> str:
    """Why a choice was not released, in a sentence."""
    failed = "; ".join(check["detail"] for check in gated["checks"] if not check["passed"])
    return f"{choice['strategy']} {choice['parameters']} was tuned but refused by the gate: {failed}"
