"""Hands off, for real: the default pair, its own tuner and gate, a Prefect server, an event, an
automation.

Sums are served until the prompts change to Spanish. Nobody does anything: the monitor finds it, its
event starts the recalibration, and a new champion stands deployed. About a quarter of an hour on 2
idle cores; `-s` shows how far it is.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from draftwell.flows.context import StepContext
from draftwell.flows.progress import announce
from draftwell.flows.steps import monitor as monitor_step
from draftwell.flows.steps.champion import champion_of
from draftwell.flows.steps.reference_traces import of_release
from draftwell.registry.store import Store
from draftwell.serving.recording.trace import TraceSet
from tests.support.loop import languages, traffic
from tests.support.loop.unattended import (
    answer,
    over_champion,
    place,
    prefect_at_work,
    quick_dtype,
    runs,
    serve,
    settings_of,
    step,
    wait,
)

pytestmark = [pytest.mark.slow, pytest.mark.soak]

__all__ = ["place", "step"]  # fixtures

BAR = 15 * 60
"""Seconds from the change of prompts, as the monitor sees it, to the deployed champion."""


@pytest.fixture(scope="module")
def champion(prefect_server: None, step: StepContext, place: Path) -> dict[str, Any]:
    """Sums are served: a first champion, made of a spool by the same flow, run in this process."""
    announce(f"hands off: sums are served, in {quick_dtype()}; a first champion for them")
    spool = serve(step, place / "sums", languages.maths(40, seed=1))
    made = answer(settings_of(place, spool))
    announce(f"hands off: {made['strategy']} {made['parameters']}")
    assert made["state"] == "deployed", made["checks"]
    return made


def test_ten_checks_on_unchanged_traffic_raise_nothing(
    champion: dict[str, Any], step: StepContext, place: Path
) -> None:
    pool = TraceSet(serve(step, place / "pool", languages.maths(150, seed=2))).read()
    for day in range(10):
        report, _ = monitor_step.check(
            step.workspace,
            spool=traffic.spool(place / f"day-{day}", traffic.some(pool, 40, seed=day)),
        )
        assert report.verdict == "steady", report.reasons


def test_another_language_brings_a_new_champion_without_a_hand(
    champion: dict[str, Any], step: StepContext, place: Path
) -> None:
    from prefect.deployments import run_deployment

    spool = serve(step, place / "spanish", languages.spanish(60, seed=3))
    settings = settings_of(place, spool)
    first = Store().get_aliases("release", "smollm2-135m.cpu")["champion"]
    with prefect_at_work(place):
        announce("hands off: the prompts are Spanish now; the monitor looks")
        started = time.monotonic()
        given = {"settings": settings.model_dump(mode="json", exclude_unset=True)}
        seen = run_deployment("monitor/hands-off", parameters=given, timeout=300)
        assert seen.state is not None
        assert seen.state.is_completed(), seen.state
        wait(lambda: [run for run in runs() if run.name != seen.name], 60)
        wait(lambda: all(run.state is not None and run.state.is_final() for run in runs()), BAR)
        took = time.monotonic() - started
        assert [run.state_name for run in runs()] == ["Completed", "Completed"], (
            place / "serve.log"
        ).read_text()[-3000:]
    (folder,) = [
        path
        for path in (step.workspace.root / "recalibrations").iterdir()
        if (path / "prompts.jsonl").is_file()
        and "¿" in (path / "prompts.jsonl").read_text(encoding="utf-8")
    ]
    champion_now, found = (
        Store().get_aliases("release", "smollm2-135m.cpu")["champion"],
        over_champion(),
    )
    announce(f"hands off: {found.detail}, in {took:.0f} s")
    assert champion_now > first
    served = (place / "dist" / "smollm2-135m" / "current").resolve()
    assert served.name == f"{champion_now}-cpu"
    release = champion_of(step.workspace, "cpu")
    assert release is not None
    assert of_release(release).trace_digest == TraceSet(folder / "traces").digest()
    assert found.value > 1, found
    assert took < BAR
