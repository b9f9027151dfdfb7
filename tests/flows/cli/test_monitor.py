"""`draftwell monitor`: exit codes, reports, and what is said when it cannot compare; and that a
drift is announced once."""

from __future__ import annotations

import datetime
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from draftwell.components.drift.schema import CHECKS
from draftwell.components.drift.traffic import COLUMNS
from draftwell.flows.cli.monitor import DRIFT
from draftwell.flows.context import StepContext
from draftwell.flows.steps import monitor as monitor_step
from draftwell.flows.steps.announcement import announce_once, announced, announcement
from draftwell.flows.steps.reference_traces import kept_reference
from draftwell.flows.workspace import Workspace
from draftwell.serving.artifacts.decoding_config import DecodingConfig
from draftwell.serving.recording.trace import TraceSet
from tests.support.errors import raises_code
from tests.support.loop import drift_traffic as drifting, traffic
from tests.support.loop.drift_traffic import compared, rows

HOUR = datetime.timedelta(hours=1)
NOON = datetime.datetime(2026, 11, 21, 12, tzinfo=datetime.UTC)


@pytest.fixture(scope="module")
def step(pair_file: Path, isolated_stores: Path) -> Iterator[StepContext]:
    """The tiny pair, calibrated in its workspace; no registry."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTWELL_MODELS", str(isolated_stores / "models"))
        opened = traffic.station_of(pair_file)
        traffic.calibrate(opened)
        yield opened


@pytest.fixture(scope="module")
def pool(step: StepContext, tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    """Answers to 150 prompts of the calibrated sort."""
    return traffic.serve(step, tmp_path_factory.mktemp("pool"), traffic.prompts(150, seed=2)).read()


@pytest.mark.slow
def test_ten_checks_on_unchanged_traffic_raise_nothing(
    step: StepContext, pool: pa.Table, tmp_path: Path
) -> None:
    """Against the workspace's traces, with the shipped limits, the verifier and all."""
    for day in range(10):
        report, _ = monitor_step.check(
            step.workspace,
            spool=traffic.spool(tmp_path / str(day), traffic.some(pool, 40, seed=day)),
        )
        assert report.verdict == "steady", report.reasons
        assert [check.name for check in report.checks] == list(CHECKS)
        assert report.notes == ()


@pytest.mark.slow
def test_after_a_recalibration_traffic_that_is_half_old_is_no_drift(
    step: StepContext, pool: pa.Table, pair_file: Path, tmp_path: Path
) -> None:
    """What is watched is older than the newest prompts: who calibrates on those alone finds the
    older ones changed, hour by hour."""
    import pyarrow.compute as pc

    from draftwell.components.drift.prompts import write_prompts
    from draftwell.flows.loading import prompts_of
    from draftwell.flows.steps.monitor import DriftSettings
    from draftwell.flows.steps.traffic_prompts import newest_prompts

    first = traffic.prompts(150, seed=2)
    others = [
        prompt
        for prompt in traffic.prompts(120, seed=6)
        if prompt.turns not in [known.turns for known in first]
    ][:80]
    old = traffic.some(pool, 120, seed=5)
    new = traffic.elsewhere(traffic.serve(step, tmp_path / "others", others).read())
    names = set(old.column("prompt_id").to_pylist())
    asked = [prompt for prompt in first if prompt.id in names] + others
    spool = traffic.spool(tmp_path / "spool", pa.concat_tables([old, new]), asked)
    settings = DriftSettings(pair=str(pair_file), spool=spool)
    write_prompts(tmp_path / "kept.jsonl", newest_prompts(settings, spool))
    learnt = {
        prompt.prompt
        for prompt in prompts_of(settings.model_copy(update={"prompts": tmp_path / "kept.jsonl"}))[
            "collect"
        ]
    }
    rows = pa.concat_tables([old, new])

    def drifted_from(name: str, reference: list[str]) -> set[str]:
        """What is drift of the same spool beside another reference, of what does not rest on
        artifacts."""
        chosen = rows.filter(pc.is_in(rows.column("prompt_id"), pa.array(reference)))
        report, _ = monitor_step.check(
            step.workspace, spool=spool, reference=traffic.spool(tmp_path / name, chosen)
        )
        return {check.name for check in report.checks if check.drifted} & {
            "confidence_psi",
            "acceptance",
        }

    fair = [prompt.id for prompt in asked if prompt.prompt in learnt]
    assert len(fair) == settings.collect_prompts
    assert drifted_from("newest", [prompt.id for prompt in asked[-len(fair) :]])
    assert not drifted_from("after", fair)


def test_sampled_traffic_neither_hides_the_greedy_one_nor_is_calibrated_on(
    step: StepContext, pool: pa.Table, pair_file: Path, tmp_path: Path
) -> None:
    """Nine of ten requests name no temperature: the others are looked at, as many as there are."""
    from draftwell.flows.steps.monitor import DriftSettings
    from draftwell.flows.steps.traffic_prompts import newest_prompts

    greedy, other = traffic.some(pool, 40, seed=3), traffic.sampled(pool)
    folder = traffic.spool(tmp_path, greedy)
    for number in (1, 2):
        TraceSet(folder).write_shard(number, renamed(other, str(number)))
    report, _ = monitor_step.check(step.workspace, spool=folder)
    assert (report.verdict, report.feedback.prompts) == ("steady", 40), report.reasons
    assert report.notes == (
        "300 prompts of the feedback left out: sampled at another temperature than 0",
    )
    asked = {
        prompt.prompt
        for prompt in newest_prompts(DriftSettings(pair=str(pair_file), spool=folder), folder)
    }
    mine = set(greedy.column("prompt_id").to_pylist())
    assert asked == {prompt.prompt for prompt in traffic.prompts(150, seed=2) if prompt.id in mine}


def test_traffic_at_other_temperatures_alone_is_said_to_be_just_that(
    monitor: Any, pool: pa.Table
) -> None:
    done = monitor(traffic.sampled(pool))
    assert done.exit_code == 0, (done.output, done.exception)
    told = " ".join(done.stdout.split())
    assert (
        "not enough yet: the feedback has 0 different prompts at the reference's "
        "temperature 0 (24 are needed) and 150 at others"
    ) in told
    assert "wait for more traffic" not in told


def test_what_a_lossy_strategy_serves_is_no_drift_from_mixed_texts(
    step: StepContext, pool: pa.Table, tmp_path: Path
) -> None:
    """The reference holds texts that a coin has mixed; those of a lossy champion are others,
    however little has changed."""
    kinds = set(TraceSet(step.workspace.traces).read(["kind"]).column("kind").to_pylist())
    assert {"mixed", "target"} <= kinds, "or the test proves nothing"
    lossy, few = (traffic.some(pool, count, seed=seed) for count, seed in ((40, 3), (30, 4)))
    told = []
    for name, table in (
        ("alone", traffic.of_kind(traffic.elsewhere(lossy), "lossy")),
        (
            "most",
            pa.concat_tables(
                [renamed(few, "old"), traffic.of_kind(traffic.elsewhere(lossy), "lossy")]
            ),
        ),
        (
            "some",
            pa.concat_tables(
                [renamed(lossy, "old"), traffic.of_kind(traffic.elsewhere(few), "lossy")]
            ),
        ),
    ):
        report, _ = monitor_step.check(step.workspace, spool=traffic.spool(tmp_path / name, table))
        told.append(report.verdict)
        assert report.verdict == "steady" or [
            reason.split(":")[0] for reason in report.reasons
        ] == ["40 of the newest prompts were answered by a lossy strategy"]
        assert any("left out: answered by a lossy strategy" in note for note in report.notes)
    assert told == ["not enough yet", "not enough yet", "steady"]


def renamed(rows: pa.Table, prefix: str) -> pa.Table:
    """The rows with other names of their prompts."""
    return rows.set_column(
        0,
        rows.schema.field(0),
        pa.array([f"{prefix}/{name}" for name in rows.column("prompt_id").to_pylist()]),
    )


@pytest.fixture
def crowned(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, datetime.datetime], None]:
    """Let what is calibrated be a release with some strategy, champion since then."""
    real = monitor_step.served

    def crown(strategy: str, since: datetime.datetime) -> None:
        release: Any = SimpleNamespace(pair="tiny", device="cpu", version=1)
        monkeypatch.setattr(monitor_step, "Store", lambda: None)
        monkeypatch.setattr(monitor_step, "champion_since", lambda *given: since)
        artifacts = {
            "decoding_config": DecodingConfig(strategy, {}, {}, drifting.verifier().provenance)
        }
        monkeypatch.setattr(
            monitor_step,
            "served",
            lambda space, device, out: replace(
                real(space, device, out),
                name="the champion",
                release=release,
                artifacts={**real(space, device, out).artifacts, **artifacts},
            ),
        )

    return crown


def test_a_spool_that_stands_still_is_not_called_steady(
    step: StepContext, pool: pa.Table, tmp_path: Path, crowned: Any
) -> None:
    """A server that does not record leaves the spool that the champion was calibrated on, which
    looks steady for ever."""
    folder, now = (
        traffic.spool(tmp_path, traffic.some(pool, 40, seed=3)),
        datetime.datetime.now(datetime.UTC),
    )

    def check(at: datetime.datetime = now) -> Any:
        return monitor_step.check(step.workspace, spool=folder, now=at)[0]

    assert check().verdict == "steady"
    assert check(now + 23 * HOUR).verdict == "steady"
    late = check(now + 25 * HOUR)
    assert (late.verdict, len(late.reasons)) == ("not enough yet", 1)
    assert (
        "more than 24 hours ago: wait for more, and see that the server records it"
        in late.reasons[0]
    )
    assert check(now + 26 * HOUR).digest == late.digest, "nothing has changed"
    crowned("prompt_lookup", now - HOUR)
    assert check().verdict == "steady", "of now, whoever recorded it"
    crowned("prompt_lookup", now + HOUR)
    report = check()
    assert report.verdict == "not enough yet"
    assert "before the champion became champion: wait for more" in report.reasons[0]
    assert [item.name for item in report.checks] == list(CHECKS), (
        "the figures are there all the same"
    )


def test_old_traffic_that_has_changed_is_a_drift_all_the_same(
    step: StepContext, pool: pa.Table, tmp_path: Path
) -> None:
    """A drift that was found on Friday is no other on Monday."""
    folder = traffic.spool(tmp_path, traffic.elsewhere(traffic.some(pool, 40, seed=3)))
    later = datetime.datetime.now(datetime.UTC) + 60 * HOUR
    assert monitor_step.check(step.workspace, spool=folder, now=later)[0].verdict == "drift"


@pytest.fixture
def monitor(step: StepContext, run: Any, pair_file: Path, tmp_path: Path) -> Any:
    return lambda table, *more: run(
        f"monitor --pair {pair_file} --out {tmp_path}/report --set",
        f"spool={traffic.spool(tmp_path / 'spool', table)}",
        *more,
    )


def test_no_drift_is_exit_code_0(monitor: Any, pool: pa.Table, tmp_path: Path) -> None:
    done = monitor(traffic.some(pool, 40, seed=3))
    assert done.exit_code == 0, (done.output, done.exception)
    assert "tiny: steady" in done.stdout
    assert {path.name for path in (tmp_path / "report").iterdir()} == {
        "drift.json",
        "drift.md",
        "drift_history.json",
        "drift_confidence.png",
        "drift_acceptance.png",
    }
    # the second check of other traffic is drawn over time
    assert monitor(traffic.elsewhere(traffic.some(pool, 40, seed=3))).exit_code == DRIFT
    assert (tmp_path / "report" / "drift_over_time.png").read_bytes()[:4] == b"\x89PNG"


def test_drift_has_an_exit_code_of_its_own(monitor: Any, pool: pa.Table, tmp_path: Path) -> None:
    done = monitor(traffic.elsewhere(traffic.some(pool, 40, seed=3)), "--json")
    assert done.exit_code == DRIFT == 3, (done.output, done.exception)
    told = json.loads(done.stdout)
    assert told == json.loads((tmp_path / "report" / "drift.json").read_text())
    assert told["verdict"] == "drift"
    assert {check["name"] for check in told["checks"] if check["drifted"]} >= {
        "confidence_psi",
        "acceptance",
    }


def test_little_traffic_is_no_drift(monitor: Any, pool: pa.Table) -> None:
    done = monitor(traffic.elsewhere(traffic.some(pool, 5, seed=3)))
    assert done.exit_code == 0, (done.output, done.exception)
    assert "not enough yet" in done.stdout


def test_limits_of_ones_own(monitor: Any, pool: pa.Table, tmp_path: Path) -> None:
    file = tmp_path / "limits.yaml"
    text = (Path(monitor_step.registry.__file__).parent / "drift.yaml").read_text()
    file.write_text(text.replace("min_prompts: 24", "min_prompts: 100"))
    told = monitor(traffic.some(pool, 40, seed=3), f"--set limits={file}").stdout
    assert "40 different prompts, 100 are needed" in " ".join(told.split())
    file.write_text(text.replace("resamples: 9999", "resamples: 99"))
    done = monitor(traffic.some(pool, 40, seed=3), f"--set limits={file}")
    assert done.exit_code == 2
    assert "resamples must be at least 5000" in done.stderr


def test_what_cannot_be_compared(
    step: StepContext, run: Any, pair_file: Path, pool: pa.Table, tmp_path: Path
) -> None:
    some = f"monitor --pair {pair_file}"
    for arguments, told in (
        (f"{some} --set spool={tmp_path}/nowhere", "holds no traces"),
        (f"{some} --set spool={tmp_path} --set reference={tmp_path}/nowhere", "holds no trace:"),
        (
            f"{some} --set spool={tmp_path} --set dtype=bfloat16",
            "neither a champion on cpu nor calibrated artifacts",
        ),
    ):
        done = run(arguments)
        assert done.exit_code == 2, (done.output, done.exception)
        assert told in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def test_a_new_collection_does_not_lose_the_reference(
    step: StepContext, pool: pa.Table, tmp_path: Path
) -> None:
    """The workspace's traces are those of the last collection, not of the champion."""
    folder = traffic.spool(tmp_path / "spool", traffic.some(pool, 40, seed=3))
    first, _ = monitor_step.check(step.workspace, spool=folder)
    away = tmp_path / "away"
    shutil.move(step.workspace.traces, away)
    try:
        traffic.spool(step.workspace.traces, traffic.some(pool, 5, seed=1))
        assert monitor_step.check(step.workspace, spool=folder)[0].digest == first.digest
        shutil.rmtree(kept_reference(step.workspace, first.reference.digest))
        with raises_code("no_reference", "--set reference="):
            monitor_step.check(step.workspace, spool=folder)
        named, _ = monitor_step.check(step.workspace, spool=folder, reference=away)
        assert named.checks == first.checks
        other, _ = monitor_step.check(step.workspace, spool=folder, reference=folder)
        assert any("was not calibrated on this reference" in note for note in other.notes)
    finally:
        shutil.rmtree(step.workspace.traces)
        shutil.move(away, step.workspace.traces)


def test_hidden_states_are_read_only_where_the_verifier_needs_them(
    step: StepContext, pool: pa.Table, tmp_path: Path
) -> None:
    """A server that spools none can still be watched; the report says what was not checked."""
    bare = pool.select(COLUMNS)
    table = pa.table(
        [
            bare.column(field.name)
            if field.name in COLUMNS
            else pa.nulls(pool.num_rows, field.type)
            for field in pool.schema
        ],
        schema=pool.schema,
    )
    report, champion = monitor_step.check(
        step.workspace, spool=traffic.spool(tmp_path, traffic.some(table, 40, seed=3))
    )
    reads = set(champion.artifacts["verifier"].features)  # type: ignore[attr-defined]
    assert report.verdict == "steady"
    assert any("verifier not checked" in note for note in report.notes) == bool(
        reads & {"before", "after"}
    )


@pytest.fixture
def space(step: StepContext, tmp_path: Path) -> Workspace:
    """A workspace of its own, for announcements."""
    return step.workspace.aside(tmp_path / "space")


def test_a_drift_is_announced_once(space: Workspace) -> None:
    sent: list[int] = []

    def send() -> bool:
        sent.append(1)
        return True

    drift, steady, less = (
        compared(rows(1), rows(2, sure=-2)),
        compared(rows(1), rows(2)),
        compared(rows(1), rows(2, 5)),
    )
    assert announce_once(space, "cpu", drift, Path("spool"), send, NOON)
    again = compared(rows(1), rows(3, sure=-2))  # the spool has grown; it is the same drift
    for later in (again, less, drift):
        assert not announce_once(space, "cpu", later, Path("spool"), send, NOON + 11 * HOUR)
    found = announced(space, "cpu")
    assert found is not None
    assert (found.digest, found.champion, found.spool) == (
        drift.digest,
        "a release",
        Path("spool").absolute(),
    )
    assert announce_once(space, "cpu", again, Path("spool"), send, NOON + 12 * HOUR)
    of_another = compared(rows(1), rows(2, sure=-2), baseline="the next release")
    assert announce_once(space, "cpu", of_another, Path("spool"), send, NOON + 12 * HOUR)
    assert len(sent) == 3
    assert not announce_once(space, "cpu", steady, Path("spool"), send, NOON + 12 * HOUR)
    assert announced(space, "cpu") is None
    assert announce_once(space, "cpu", of_another, Path("spool"), send, NOON + 13 * HOUR)


def test_a_word_that_could_not_be_sent_is_sent_the_next_time(space: Workspace) -> None:
    drift = compared(rows(1), rows(2, sure=-2))
    assert not announce_once(space, "cpu", drift, Path("spool"), lambda: False, NOON)
    assert announced(space, "cpu") is None

    def fail() -> bool:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        announce_once(space, "cpu", drift, Path("spool"), fail, NOON)
    assert announce_once(space, "cpu", drift, Path("spool"), lambda: True, NOON)


@pytest.mark.parametrize("address", [None, "http://127.0.0.1:9/api"])
def test_an_event_that_no_server_has_taken_is_not_remembered(
    step: StepContext,
    pool: pa.Table,
    pair_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    address: str | None,
) -> None:
    """Without a server of one's own there is nobody to send it to but webhooks, which are told
    once; one that is away fails the run, and tells them nothing."""
    import httpx
    from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    from draftwell.flows.orchestration import monitor_flow
    from draftwell.flows.orchestration.monitor_flow import check
    from draftwell.flows.steps.monitor import DriftSettings

    spool = traffic.spool(tmp_path / "spool", traffic.elsewhere(traffic.some(pool, 40, seed=3)))
    settings = DriftSettings(pair=str(pair_file), spool=spool)
    with temporary_settings({PREFECT_API_URL: address, PREFECT_CLIENT_MAX_RETRIES: 0}):
        if address is None:
            found = check.fn(settings)
            assert (found["verdict"], found["announced"]) == ("drift", False)
            told = capsys.readouterr()
            assert "set PREFECT_API_URL to a Prefect server" in told.out + told.err
        else:
            with pytest.raises(httpx.HTTPError):
                check.fn(settings)
        assert announced(step.workspace, "cpu") is None
        if address is None:
            told: list[Any] = []

            def tell(*event: Any) -> bool:
                told.append(event)
                return True

            monkeypatch.setattr(monitor_flow, "send_event", tell)
            assert [check.fn(settings)["announced"] for _ in range(2)] == [True, False]
            assert len(told) == 1
            announcement(step.workspace, "cpu").unlink()


def test_two_checks_at_once_announce_once(space: Workspace) -> None:
    """The second comes while the first is sending."""
    drift = compared(rows(1), rows(2, sure=-2))
    inner: list[bool] = []

    def send() -> bool:
        inner.append(announce_once(space, "cpu", drift, Path("spool"), lambda: True, NOON))
        return True

    assert announce_once(space, "cpu", drift, Path("spool"), send, NOON)
    assert inner == [False]


def test_a_broken_record_is_no_announcement(space: Workspace) -> None:
    announcement(space, "cpu").parent.mkdir(parents=True)
    announcement(space, "cpu").write_text('{"champion": "a rel')
    assert announced(space, "cpu") is None
    assert announce_once(
        space, "cpu", compared(rows(1), rows(2, sure=-2)), Path("spool"), lambda: True, NOON
    )
