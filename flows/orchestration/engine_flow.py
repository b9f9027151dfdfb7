"""The flow that keeps another engine tuned: a check of what it serves, and where that has drifted
the whole answer (`flows/steps/engine/recalibrate.py`).

It takes the pair's slots, because it measures. Nothing but drift makes it compute, and a run that
was killed resumes what was begun.
"""

from __future__ import annotations

from typing import Any

from prefect import flow, task
from prefect.artifacts import create_markdown_artifact

from draftwell.flows.orchestration.concurrency import pair_slots
from draftwell.flows.orchestration.learn_tasks import FLOW, LONGEST, RETRY
from draftwell.flows.orchestration.prefect_artifacts import key_for
from draftwell.flows.progress import announce
from draftwell.flows.steps.engine.recalibrate import (
    EngineDriftSettings,
    recalibrate_engine,
    said_of,
)
from draftwell.registry.pairs import find_pair

SPARE_SECONDS = 3600.0
"""Beyond `minutes`, which limit what a tuning measures: for starts of the engine, a head that is
trained, and the restart."""


@task(name="check and recalibrate an engine", **{**RETRY, "timeout_seconds": LONGEST})
def recalibrate_engine_task(settings: EngineDriftSettings) -> dict[str, Any]:
    """Check, and answer drift; returns the outcome without the loop's report, which is in the
    workspace."""
    from draftwell.flows.steps.engine.space import engine_space

    space = engine_space(settings.pair, settings.dtype, settings.device, settings.threads, announce)
    outcome = recalibrate_engine(space, settings, announce)
    return {name: value for name, value in outcome.items() if name != "report"}


@flow(name="engine-recalibration", **FLOW)
def engine_recalibration(settings: EngineDriftSettings) -> dict[str, Any]:
    """Check whether drafts of what vLLM serves fare as they did when they were tuned; where not,
    tune again on recorded prompts, gate, deploy after a trial, and restart what serves.

    Returns:
        `state`, `why` and, where one was deployed, `bundle`.
    """
    name = find_pair(settings.pair).name
    with pair_slots(name):
        timed = recalibrate_engine_task.with_options(
            timeout_seconds=60 * settings.minutes + SPARE_SECONDS
        )
        outcome = timed(settings)
    announce(said_of(outcome))
    create_markdown_artifact(
        f"# {outcome['state']}\n\n{outcome['why']}\n",
        key=key_for("engine-recalibration", name),
        description=f"{name}: {outcome['state']}",
    )
    return dict(outcome)
