"""Hands off, on the tiny pair with a scripted tuner: drift → event → new champion, measured faster
on the new traffic, and deployed.

The default pair, with its own tuner and a real Prefect server, is `test_hands_off.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from draftwell.flows.context import StepContext
from draftwell.flows.orchestration import loop_flow as loop, monitor_flow as monitor
from draftwell.flows.settings import PipelineSettings
from draftwell.flows.steps import monitor as monitor_step, tune as tune_step
from draftwell.flows.steps.announcement import announced
from draftwell.flows.steps.monitor import DriftSettings
from draftwell.flows.steps.traffic_prompts import settle_prompts
from draftwell.registry.store import Store
from tests.support.errors import raises_code
from tests.support.loop import traffic
from tests.support.loop.thresholds import ANY_PREDICTION, thresholds_in
from tests.support.loop.tiny_files import snapshot
from tests.support.patching import replace_everywhere

pytestmark = pytest.mark.slow  # a champion, its traffic and two recalibrations are made first: 40 s


@pytest.fixture(scope="module")
def place(place: Path) -> Iterator[Path]:
    """The same with thresholds that leave the verdict to the speed."""
    with thresholds_in(place / "registry", ANY_PREDICTION):
        yield place


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
        "max_tokens": traffic.TOKENS,
        "calibrate_prompts": 2,
        "tune_prompts": 2,
        "trials": 2,
        "bench_prompts": 8,
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


def answer(raised: list[dict[str, Any]]) -> PipelineSettings:
    """What the event starts the flow with."""
    return PipelineSettings.model_validate(raised[0]["payload"]["settings"])


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
    gate = loop.gate_step.gate_release

    def refuse(*arguments: Any, **options: Any) -> dict[str, Any]:
        return {**gate(*arguments, **options), "passed": False}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune_step, "run_tune", traffic.scripted("autoregressive"))
        patch.setattr(loop.shown, "measured_rows", lambda space: [])
        patch.setattr(loop.gate_step, "gate_release", refuse)
        return loop.draftwell(answer(raised))


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
        replace_everywhere(patch, bundles, "build_bundle", die)
        # no task: Prefect would not try it again either
        patch.setattr(loop, "deploy", loop.deploy.fn)
        with pytest.raises(KeyboardInterrupt):
            loop.draftwell(answer(raised))
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
        given = settings(spool=spool).model_dump(exclude_unset=True)
        return loop.draftwell(PipelineSettings(**given, source="drift"))


def test_one_event_names_pair_report_and_spool(
    raised: list[dict[str, Any]], spool: Path, pair_file: Path
) -> None:
    assert len(raised) == 1
    (sent,) = raised
    assert (sent["event"], sent["resource"]) == ("draftwell.drift", "draftwell.pair.tiny")
    payload = sent["payload"]
    assert (payload["pair"], payload["champion"]) == ("tiny", "release.tiny.cpu version 1")
    assert payload["settings"]["spool"] == str(spool)
    assert (payload["settings"]["source"], payload["settings"]["drift"]) == (
        "drift",
        payload["digest"],
    )
    assert payload["settings"]["pair"] == str(pair_file)
    assert payload["reasons"]


def test_the_drift_is_noted_in_mlflow(raised: list[dict[str, Any]]) -> None:
    store = Store()
    version = store.resolve("release", "tiny.cpu", 1)
    digest = raised[0]["payload"]["digest"]
    assert version.tags["drift"] == digest[:12]
    kept = {Path(file.path).name for file in store.client.list_artifacts(version.run_id, "drift")}
    assert kept == {f"{digest[:12]}.json", f"{digest[:12]}.md", digest[:12]}
    plots = store.client.list_artifacts(version.run_id, f"drift/{digest[:12]}")
    assert {Path(plot.path).suffix for plot in plots} == {".png"}


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
        "drift-tiny-drift-confidence",
        "drift-tiny-drift-acceptance",
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

    assert deployed["state"] == "answered", "by the run that was killed; its bundle was lacking"
    assert Store().get_aliases("release", "tiny.cpu")["champion"] == deployed["release"] > 1
    bundle = open_bundle(place / "dist" / "tiny" / "current")
    config: Any = bundle.artifacts()["decoding_config"]
    assert (config.strategy, bundle.manifest.release_version) == (
        "autoregressive",
        deployed["release"],
    )


def test_it_was_measured_faster_than_the_old_config_on_the_new_traffic(
    refused: dict[str, Any],
) -> None:
    """The old one's draft costs as much as the target, so this is sure."""
    (over,) = [check for check in refused["checks"] if check["name"] == "regression"]
    assert over["value"] > 1, over


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
    done = run("release show release.tiny.cpu@champion --json")
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
    again = loop.draftwell(answer(raised))
    assert again == deployed
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


def test_a_drift_keeps_the_prompts_that_its_answer_began_with(
    settings: Callable[..., DriftSettings], pools: dict[str, pa.Table], place: Path
) -> None:
    """Started again after it was killed, while the spool has grown; another drift has its own."""
    asked = traffic.prompts(54, seed=8)
    spool = traffic.spool(place / "again", pools["first"], asked[:44])

    def begin(drift: str) -> Path:
        begun = settle_prompts(settings(spool=spool, source="drift", drift=drift * 64))
        assert begun.drift == drift * 64
        assert begun.prompts is not None
        return begun.prompts

    first = begin("a")
    prompts = first.read_bytes()
    traffic.spool(spool, pools["first"], asked)
    assert begin("a") == first
    assert first.read_bytes() == prompts
    assert begin("b").parent.name == "b" * 12
    assert begin("b").read_bytes() != prompts


def test_too_few_prompts_are_refused(
    deployed: dict[str, Any],
    settings: Callable[..., DriftSettings],
    pools: dict[str, pa.Table],
    place: Path,
) -> None:
    few = traffic.spool(place / "few", traffic.some(pools["first"], 39, seed=0))
    with raises_code("too_few_prompts", "39 different prompts", "40 "):
        settle_prompts(settings(spool=few, source="drift", drift="c" * 64))
    with raises_code("no_spool", "nowhere"):
        settle_prompts(settings(spool=place / "nowhere", source="drift", drift="c" * 64))
