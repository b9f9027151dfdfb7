"""What a run makes, as assets: the events that Prefect's server has of them."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from prefect import flow, task

from draftwell.flows.orchestration import assets
from draftwell.flows.orchestration.task_options import ANEW
from tests.support.loop.asset_events import materialized, parents

pytestmark = pytest.mark.slow


def test_an_asset_is_recorded_by_the_task_that_made_it_and_by_no_other(
    prefect_server: None, tmp_path: Any
) -> None:
    """Slow: it starts Prefect's server."""
    base = f"draftwell://{uuid.uuid4().hex}/"
    runs: list[str] = []

    @task(name="made", **ANEW)
    def make() -> None:
        assets.made(f"{base}table", of=[f"{base}traces"], digest="7" * 64)
        assets.made(f"{base}release", url="http://127.0.0.1:5000/#/runs/1", release=2)

    @task(name="nothing made", **ANEW)
    def make_nothing() -> None:
        pass

    @task(
        name="kept",
        cache_key_fn=lambda *_: f"kept-{base.rpartition(':')[2].strip('/')}",
        persist_result=True,
        result_storage=tmp_path,
    )
    def keep() -> str:
        runs.append("run")
        assets.made(f"{base}kept")
        return "kept"

    @task(name="failed")
    def fail() -> None:
        assets.made(f"{base}failed")
        raise ValueError("half of it")

    @flow
    def loop() -> None:
        make()
        make_nothing()
        keep()
        keep()
        fail(return_state=True)

    loop()
    assert runs == ["run"]
    found = materialized(base, lambda found: len(found) == 4)
    ends = {key: [event["event"].rpartition(".")[2] for event in found[key]] for key in found}
    assert ends == {
        "table": ["succeeded"],
        "release": ["succeeded"],
        "kept": ["succeeded"],
        "failed": ["failed"],
    }
    (table,), (release,) = found["table"], found["release"]
    assert parents(table) == {f"{base}traces"}
    assert table["payload"] == {"digest": "7" * 64}
    assert release["payload"] == {"release": 2}
    assert release["resource"]["prefect.asset.url"].endswith("/runs/1")


def test_without_a_run_nothing_is_recorded() -> None:
    assets.made("draftwell://tiny/traces", prompts=3)
