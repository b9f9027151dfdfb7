"""The whole loop as one Prefect flow: collect → train → calibrate → tune → release."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.learn import calibrate_task, collect_task, train_task, tune_task
from flows.release import deploy_task, gate_task, publish_task
from flows.settings import PipelineSettings


@flow(name="draftwell", log_prints=True, validate_parameters=True)
def pipeline(settings: PipelineSettings) -> dict[str, Any]:
    """Bring a pair from prompts to a deployed champion.

    Returns:
        the final report, the choice and why, the release, and where its bundle lies.
    """
    print("1/7 collect traces")
    collect_task(settings)
    print("2/7 train a verifier")
    train_task(settings)
    print("3/7 calibrate")
    calibrate_task(settings)
    print("4/7 tune")
    choice = tune_task(settings)
    print("5/7 publish")
    release = publish_task(settings)
    print("6/7 gate, and the final comparison of all strategies")
    gated = gate_task(settings, release)
    print("7/7 deploy" if gated["passed"] else "7/7 not deployed: the gate failed")
    bundle = deploy_task(settings, release) if gated["passed"] else None
    return {**choice, **gated, "release": release, "bundle": bundle}
