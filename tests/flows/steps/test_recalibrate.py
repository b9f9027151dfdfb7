"""Hands off, on the tiny pair with a scripted tuner: drift → event → new champion, measured faster
on the new traffic, and deployed.

The default pair, with its own tuner and a real Prefect server, is `test_hands_off.py`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from prefect import Flow, Task
from prefect.cache_policies import NO_CACHE

from draftwell.flows.context import StepContext
from draftwell.flows.orchestration import monitor_flow as monitor
from draftwell.flows.orchestration import recalibrate_flow as recalibrate
from draftwell.flows.orchestration import recalibration as recalibrating
from draftwell.flows.orchestration.monitor_flow import announced
from draftwell.flows.steps import monitor as monitor_step
from draftwell.flows.steps import tune as tune_step
from draftwell.flows.steps.monitor import DriftSettings
from draftwell.registry.store import Store
from tests.support.errors import raises_code
from tests.support.loop import traffic
from tests.support.loop.tiny_files import snapshot

pytestmark = pytest.mark.slow  # a champion, its traffic and two recalibrations are made first: 40 s


@pytest.fixture(scope="module")
def step(place: Path, pair_file: Path) -> StepContext:
    return traffic.station_of(pair_file)


@pytest.fixture(scope="module")
def champion(step: StepContext, place: Path) -> Any:
    """Release 1, calibrated on the first sort of traffic, deployed."""
    return traffic.crown(step, place / "dist")


@pytest.fixture(scope="module")
def pools(step: StepContext, place: Path) -> dict[str, pa.Table]:
    """Answers to prompts of both sorts."""
    return {
        "first": traffic.serve(step, place / "first", traffic.prompts(60, seed=2)).read(),
        "second": traffic.serve(
            step, place / "second", traffic.prompts(60, seed=3, words=traffic.OTHERS)
        ).read(),
    }


@pytest.fixture(scope="module")
def settings(pair_file: Path, place: Path) -> Callable[..., DriftSettings]:
    """Small enough for seconds."""
    small = {
        "pair": str(pair_file),
        "collect_prompts": 16,
        "collect_tokens": traffic.TOKENS,
        "calibrate_prompts": 2,
        "tune_prompts": 2,
        "tune_tokens": 8,
        "trials": 2,
        "bench_prompts": 8,
        "bench_tokens": 16,
        "sampled_prompts": 4,
        "threads": 1,
        "out": place / "dist",
    }
    return lambda **more: DriftSettings.model_validate({**small, **more})


@pytest.fixture(scope="module")
def spool(place: Path, pools: dict[str, pa.Table]) -> Path:
    """Traffic of another sort; what it does to confidence and acceptance is made, the requests are
    real."""
    return traffic.spool(
        place / "spool",
        traffic.elsewhere(pools["second"]),
        traffic.prompts(40, seed=4, words=traffic.OTHERS),
    )


class Events:
    """Stands in the place of a client of Prefect's server."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def request(self, method: str, path: str, json: list[dict[str, Any]]) -> None:
        assert (method, path) == ("POST", "/events")
        self.sent += [
            {**event, "resource": event["resource"]["prefect.resource.id"]} for event in json
        ]


@pytest.fixture(scope="module")
def raised(
    prefect_server: None,
    champion: Any,
    pools: dict[str, pa.Table],
    spool: Path,
    place: Path,
    settings: Callable[..., DriftSettings],
) -> Iterator[list[dict[str, Any]]]:
    """What a monitor sends: of unchanged traffic, of the changed one, and of the same again."""
    events = Events()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(monitor, "get_client", lambda sync_client: nullcontext(events))
        calm = monitor.monitor(settings(spool=traffic.spool(place / "calm", pools["first"])))
        assert (calm["verdict"], calm["announced"], events.sent) == ("steady", False, [])
        first = monitor.monitor(settings(spool=spool))
        assert (first["verdict"], first["announced"]) == ("drift", True)
        again = monitor.monitor(settings(spool=spool))
        assert (again["verdict"], again["announced"]) == ("drift", False)
        yield events.sent


@pytest.fixture(scope="module")
def before(raised: Any, step: StepContext) -> dict[str, int]:
    return snapshot(step.workspace.artifacts) | snapshot(step.workspace.traces)


@pytest.fixture(scope="module")
def refused(before: Any, raised: list[dict[str, Any]], place: Path) -> dict[str, Any]:
    """The first answer: a gate that says no."""
    gate = recalibrating.gate_step.gate_release

    def refuse(*arguments: Any, **options: Any) -> dict[str, Any]:
        return {**gate(*arguments, **options), "passed": False}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune_step, "run_tune", traffic.scripted("autoregressive"))
        patch.setattr(recalibrating.gate_step, "gate_release", refuse)
        return recalibrate.recalibrate(
            DriftSettings.model_validate(raised[0]["payload"]["settings"])
        )


@pytest.fixture(scope="module")
def untouched(refused: Any, place: Path, step: StepContext) -> dict[str, Any]:
    """What the refusal left behind."""
    return {
        "champion": Store().get_aliases("release", "tiny.cpu")["champion"],
        "current": (place / "dist" / "tiny" / "current").resolve().name,
        "announced": announced(step.workspace, "cpu"),
    }


@pytest.fixture(scope="module")
def killed(untouched: Any, raised: list[dict[str, Any]]) -> int:
    """The second: killed when the new champion stands, but its bundle does not; returns the
    champion then."""
    from draftwell.registry.bundles import build as bundles

    def die(*arguments: Any, **options: Any) -> Path:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune_step, "run_tune", traffic.scripted("autoregressive"))
        patch.setattr(bundles, "build_bundle", die)
        # no task: Prefect would not try it again either
        patch.setattr(recalibrate, "deploy_task", recalibrating.deploy_release)
        with pytest.raises(KeyboardInterrupt):
            recalibrate.recalibrate(DriftSettings.model_validate(raised[0]["payload"]["settings"]))
    return int(Store().get_aliases("release", "tiny.cpu")["champion"])


@pytest.fixture(scope="module")
def deployed(
    killed: int, raised: list[dict[str, Any]], settings: Callable[..., DriftSettings], spool: Path
) -> dict[str, Any]:
    """The third goes on, although the spool has grown, and although it is started without a word of
    the drift."""
    (spool / "more.jsonl").write_text(json.dumps({"prompt": "ten men"}) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune_step, "run_tune", traffic.scripted("autoregressive"))
        return recalibrate.recalibrate(settings(spool=spool))


def test_one_event_names_pair_report_and_spool(
    raised: list[dict[str, Any]], spool: Path, pair_file: Path
) -> None:
    assert len(raised) == 1
    (sent,) = raised
    assert (sent["event"], sent["resource"]) == ("draftwell.drift", "draftwell.pair.tiny")
    payload = sent["payload"]
    assert (payload["pair"], payload["spool"], payload["champion"]) == (
        "tiny",
        str(spool),
        "release.tiny.cpu version 1",
    )
    assert payload["settings"]["drift"] == payload["digest"]
    assert payload["settings"]["pair"] == str(pair_file)
    assert payload["reasons"]


def test_the_drift_is_noted_in_mlflow(raised: list[dict[str, Any]]) -> None:
    store = Store()
    version = store.resolve("release", "tiny.cpu", 1)
    digest = raised[0]["payload"]["digest"]
    assert version.tags["drift"] == digest[:12]
    kept = {Path(file.path).name for file in store.client.list_artifacts(version.run_id, "drift")}
    assert kept == {f"{digest[:12]}.json", f"{digest[:12]}.md"}


def test_the_report_is_shown_in_prefect(raised: Any) -> None:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter

    with get_client(sync_client=True) as client:
        keys = {
            artifact.key for artifact in client.read_artifacts(artifact_filter=ArtifactFilter())
        }
    assert {
        "drift-tiny",
        "drift-checks-tiny",
        "drift-confidence-tiny",
        "drift-acceptance-tiny",
    } <= keys


def test_a_refused_candidate_leaves_everything_as_it_is(
    refused: dict[str, Any], untouched: dict[str, Any], before: dict[str, int], step: StepContext
) -> None:
    assert (refused["state"], refused["bundle"]) == ("refused", None)
    assert (untouched["champion"], untouched["current"]) == (1, "1-cpu")
    assert snapshot(step.workspace.artifacts) | snapshot(step.workspace.traces) == before
    assert untouched["announced"] is not None  # so that it is not announced again at once


def test_a_killed_run_goes_on_with_the_release_that_it_made(
    killed: int, deployed: dict[str, Any], refused: dict[str, Any]
) -> None:
    assert deployed["release"] == killed
    assert deployed["drift"] == refused["drift"]


def test_a_new_champion_stands_deployed(deployed: dict[str, Any], place: Path) -> None:
    from draftwell.serving.bundle.bundle import open_bundle

    assert deployed["state"] == "deployed"
    assert Store().get_aliases("release", "tiny.cpu")["champion"] == deployed["release"] > 1
    bundle = open_bundle(place / "dist" / "tiny" / "current")
    config: Any = bundle.artifacts()["decoding_config"]
    assert (config.strategy, bundle.manifest.release_version) == (
        "autoregressive",
        deployed["release"],
    )


def test_it_was_measured_faster_than_the_old_config_on_the_new_traffic(
    deployed: dict[str, Any],
) -> None:
    """The old one's draft costs as much as the target, so this is sure."""
    over = deployed["over_champion"]
    assert 1 < over["low"] <= over["ratio"] <= over["high"]


def test_it_learnt_from_the_new_prompts(deployed: dict[str, Any], step: StepContext) -> None:
    store = Store()
    table = store.resolve("acceptance_table", "tiny", "champion-cpu")
    folder = step.workspace.root / "recalibrations" / deployed["drift"][:12]
    asked = {
        json.loads(line)["turns"][0] for line in (folder / "prompts.jsonl").read_text().splitlines()
    }
    assert asked <= {prompt.prompt for prompt in traffic.prompts(40, seed=4, words=traffic.OTHERS)}
    assert len(asked) == 40, "all that the monitor looks at"
    from draftwell.serving.recording.trace import TraceSet

    assert TraceSet(folder / "traces").digest() == table.tags["trace_digest"]


def test_lineage_finds_the_traces_of_a_recalibration(deployed: dict[str, Any], run: Any) -> None:
    done = run("lineage", "release.tiny.cpu@champion", "--json")
    assert done.exit_code == 0, (done.output, done.exception)
    assert "recalibrations" in done.stdout
    assert "not here" not in done.stdout


def test_the_workspace_stays_the_users(
    deployed: dict[str, Any], before: dict[str, int], step: StepContext
) -> None:
    assert snapshot(step.workspace.artifacts) | snapshot(step.workspace.traces) == before


def test_a_drift_is_answered_once(
    deployed: dict[str, Any], raised: list[dict[str, Any]], step: StepContext
) -> None:
    again = recalibrate.recalibrate(DriftSettings.model_validate(raised[0]["payload"]["settings"]))
    assert again == deployed
    assert announced(step.workspace, "cpu") is None
    assert len(Store().versions("release", "tiny.cpu")) == deployed["release"]


def test_the_new_traffic_is_what_the_new_champion_knows(
    deployed: dict[str, Any], pools: dict[str, pa.Table], place: Path, step: StepContext
) -> None:
    """The loop is closed: its traces are found, and real traffic of the new sort is steady."""
    report, served = monitor_step.check(
        step.workspace, spool=traffic.spool(place / "now", pools["second"])
    )
    assert served.name == f"release.tiny.cpu version {deployed['release']}"
    assert report.verdict == "steady", report.reasons
    assert report.reference.digest == served.trace_digest


def test_a_verdict_is_kept_beside_one_champion(
    tmp_path: Path, settings: Callable[..., DriftSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was killed before it promoted, and goes on when another release is champion, asks
    the gate again."""
    asked: list[int] = []

    def judge(*arguments: Any) -> dict[str, Any]:
        asked.append(1)
        return {"passed": True, "checks": [], "over_champion": None}

    monkeypatch.setattr(recalibrating, "gate_verdict", judge)
    for champion, times in ((1, 1), (1, 1), (2, 2), (7, 2), (1, 3)):
        monkeypatch.setattr(
            recalibrating, "champion_number", lambda space, device, now=champion: now
        )
        # which is promoted by the fourth
        recalibrating.gate_candidate(settings(), str(tmp_path), 7)
        assert len(asked) == times, champion


def test_one_at_a_time(
    deployed: dict[str, Any], settings: Callable[..., DriftSettings], spool: Path
) -> None:
    with recalibrating.single_recalibration(settings()) as free:
        assert free
        assert recalibrate.recalibrate(settings(spool=spool)) == {"state": "busy"}


def test_a_drift_that_is_announced_again_goes_on_with_what_was_begun(
    settings: Callable[..., DriftSettings],
    pools: dict[str, pa.Table],
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A killed recalibration, half a day later: the spool has grown, so that the report has another
    digest."""
    monkeypatch.setattr(recalibrating, "champion_number", lambda space, device: 7)
    asked = traffic.prompts(54, seed=8)
    spool = traffic.spool(place / "again", pools["first"], asked[:44])

    def begin(drift: str, folder: Path = spool) -> Path:
        job = recalibrating.begin(settings(spool=folder, drift=drift * 64))
        assert (job["drift"], job["outcome"]) == (drift * 64, None)
        return Path(job["folder"])

    first = begin("a")
    prompts = (first / "prompts.jsonl").read_bytes()
    traffic.spool(spool, pools["first"], asked)
    assert begin("b") == first
    assert (first / "prompts.jsonl").read_bytes() == prompts
    assert begin("c", traffic.spool(place / "elsewhere", pools["first"])).name == "c" * 12
    monkeypatch.setattr(recalibrating, "champion_number", lambda space, device: 8)
    assert begin("d").name == "d" * 12, "of another champion"
    os.utime(first.parent / ("d" * 12) / "prompts.jsonl", (0, 0))
    assert begin("e").name == "e" * 12, "its prompts are of long ago"
    (first.parent / ("e" * 12) / "outcome.json").write_text(
        json.dumps({"state": "refused", "drift": "e" * 64})
    )
    assert begin("f").name == "f" * 12, "what the gate refused is over"
    (first.parent / ("f" * 12) / "outcome.json").write_text(
        json.dumps({"state": "deployed", "drift": "0" * 64})
    )
    answered = recalibrating.begin(settings(spool=spool, drift="0" * 64))
    assert answered["outcome"] == {"state": "deployed", "drift": "0" * 64}, (
        "begun for one drift, it answered another"
    )


def test_with_other_settings_what_depends_on_them_is_made_anew(
    settings: Callable[..., DriftSettings],
    pools: dict[str, pa.Table],
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed in tuning, and started again with fewer tokens: an artifact of the first traces would
    name what is not there any more."""
    from draftwell.serving.recording.trace import TraceSet

    learnt: list[str] = []
    champion: list[int | None] = [None]
    monkeypatch.setattr(recalibrating, "champion_of", lambda space, device: None)
    monkeypatch.setattr(recalibrating, "champion_number", lambda space, device: champion[0])
    monkeypatch.setattr(
        recalibrating.train_step, "run_train", lambda step, traces: learnt.append(traces.digest())
    )
    monkeypatch.setattr(
        recalibrating.train_step, "run_calibrate", lambda *arguments, **options: {"ece": 0.5}
    )
    monkeypatch.setattr(
        recalibrating.train_step,
        "run_calibrate_sampled",
        lambda step, traces, temperature: {"from": traces.digest()},
    )
    spool = traffic.spool(place / "resumed", pools["first"], traffic.prompts(44, seed=9))
    folder = Path(recalibrating.begin(settings(spool=spool, drift="9" * 64))["folder"])

    def started(**more: Any) -> list[str]:
        """Up to tuning; what was learnt from, in all runs."""
        given = settings(spool=spool, **more)
        collected = recalibrating.collect_traffic(given, str(folder))
        found = recalibrating.calibrate_on_traffic(given, str(folder))
        assert collected == {
            name: TraceSet(folder / name).digest() for name in ("traces", "traces_sampled")
        }
        assert champion[0] or found == {"ece": 0.5, "sampled_from": collected["traces_sampled"]}
        assert champion[0] or learnt[-1] == collected["traces"], (
            "it was calibrated on traces that are gone"
        )
        return learnt

    assert len(started(drift="9" * 64)) == 1
    assert len(started(drift="8" * 64, out=place / "elsewhere")) == 1, (
        "announced anew, deployed elsewhere: nothing depends on these"
    )
    left = [folder / "artifacts" / "verifier", folder / "cpu" / "artifacts" / "decoding_config"]
    for place_of_kind in left:
        place_of_kind.mkdir(parents=True)
    assert len({*started(collect_tokens=8)}) == 2
    assert not any(place_of_kind.exists() for place_of_kind in left), (
        "they would be published with what is made now"
    )
    assert len(started(collect_tokens=8, trials=3)) == 3
    (folder / "steps" / "publish.json").write_text("7")
    champion[0] = 7
    traces = TraceSet(folder / "traces").digest()
    assert len(started()) == 3, "read in the form of an older version"
    (folder / "steps" / "publish.json").write_text('{"key": "publish", "result": 7}')
    assert len(started()) == 3
    assert TraceSet(folder / "traces").digest() == traces, "those of the champion"


def test_too_few_prompts_are_refused(
    deployed: dict[str, Any],
    settings: Callable[..., DriftSettings],
    pools: dict[str, pa.Table],
    place: Path,
) -> None:
    few = traffic.spool(place / "few", traffic.some(pools["first"], 39, seed=0))
    with raises_code("too_few_prompts", "39 different prompts", "40 "):
        recalibrating.begin(settings(spool=few))
    with raises_code("no_spool", "nowhere"):
        recalibrating.begin(settings(spool=place / "nowhere"))


@pytest.mark.parametrize("module", [monitor, recalibrate], ids=lambda module: str(module.__name__))
def test_every_task_and_flow_asks_for_json_and_runs_each_time(module: Any) -> None:
    found = [value for value in vars(module).values() if isinstance(value, Flow | Task)]
    assert found
    assert [value.name for value in found if value.result_serializer != "json"] == []
    assert [
        value.name for value in found if isinstance(value, Task) and value.cache_policy != NO_CACHE
    ] == []
