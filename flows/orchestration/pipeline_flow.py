"""The whole loop as one Prefect flow: collect → train → calibrate → tune → release."""

from __future__ import annotations

from typing import Any

from prefect import flow

from draftwell.components.gate.verdict import FAILED
from draftwell.flows.orchestration.learn_tasks import (
    FLOW,
    calibrate_task,
    collect_task,
    train_task,
    tune_task,
    within,
)
from draftwell.flows.orchestration.release_tasks import (
    champion_task,
    deploy_task,
    gate_task,
    plain_choice_task,
    publish_task,
)
from draftwell.flows.progress import announce
from draftwell.flows.settings import PipelineSettings
from draftwell.flows.steps.verdict import only_sampled, result_of, sentence, unmet


@flow(name="draftwell", **FLOW)
def pipeline(settings: PipelineSettings) -> dict[str, Any]:
    """Bring a pair from prompts to a deployed champion.

    Returns:
        the gate's `report`, with other strategies beside the choice, the choices and why, the
        release, whether it `passed`, the gate's checks and its `verdict`, the champion of before
        (None where there was none), and where the bundle is.
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
    announce("6/7 gate, and a table of strategies")
    gated, champion = within(settings, gate_task)(settings, release), champion_task(settings)
    # with no champion to keep, something must serve: the choice that passes, and plain decoding
    for sampled_only in (True, False):
        if gated["passed"] or champion is not None or (sampled_only and not only_sampled(gated)):
            continue
        whom = "sampled" if sampled_only else "all"
        announce(
            f"{sentence(gated)}; with no champion to keep, plain decoding is released for "
            f"{whom} requests instead"
        )
        choice = plain_choice_task(
            settings, choice, refusal(choice, gated, sampled_only), sampled_only
        )
        release = within(settings, publish_task)(settings)
        again = within(settings, gate_task)(
            settings, release, full=sampled_only, limit=None if sampled_only else 2
        )
        gated |= {"passed": again["passed"], "checks": again["checks"]}
        if sampled_only:  # the greedy choice was judged again, so its figures are those of this run
            gated["report"] = again["report"]
    stays = "nothing is served" if champion is None else f"release {champion}, the champion, stays"
    announce(
        "7/7 promote and deploy"
        if gated["passed"]
        else f"7/7 not deployed: {sentence(gated)}, {stays}"
    )
    bundle = deploy_task(settings, release) if gated["passed"] else None
    return {
        **choice,
        **gated,
        "verdict": result_of(gated),
        "release": release,
        "bundle": bundle,
        "champion": champion,
    }


def refusal(choice: dict[str, Any], gated: dict[str, Any], sampled: bool) -> str:
    """Why a choice, `sampled`: that for sampled requests, was not released, in a sentence."""
    # of sampled requests, kept
    found = (choice["sampled"] if sampled else choice) or {
        "strategy": "an earlier choice",
        "parameters": "",
    }
    against = "; ".join(check["detail"] for check in unmet(gated))
    verdict = (
        "refused by the gate"
        if result_of(gated) == FAILED
        else "the gate had not enough evidence for it"
    )
    return (
        f"{found['strategy']} {found['parameters']}".rstrip() + f" was tuned, {verdict}: {against}"
    )
