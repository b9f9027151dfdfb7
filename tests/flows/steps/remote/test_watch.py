"""A look at a played vLLM over HTTP: from its metrics to alarms, probes and what is announced."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from draftwell.components.engines.port import Decoded
from draftwell.components.engines.remote.address import parse_address
from draftwell.components.engines.remote.dialects.llama_cpp import LlamaCppDialect
from draftwell.components.engines.remote.dialects.vllm import VllmDialect
from draftwell.components.engines.remote.remote import RemoteEngine
from draftwell.components.watch.probes import ProbePrompt
from draftwell.components.watch.report import watch_metrics
from draftwell.components.watch.schema import Alarm
from draftwell.flows.settings import PipelineSettings
from draftwell.flows.steps.remote.alarms import (
    WatchSettings,
    announce_each,
    payload_of,
    resource_of,
)
from draftwell.flows.steps.remote.watch import UNTOLD, Watch, look, open_watch, read_baseline
from draftwell.serving.errors import DraftwellError
from tests.support.errors import raises_code
from tests.support.watch.played_engine import PlayedEngine, served
from tests.support.watch.simulator import BEGIN, Faults, simulate

CHANGE = 40
LIMITS = "baseline_windows: 30\nwarm_up_seconds: 0\n"


@pytest.fixture
def limits(own_stores: Path) -> Path:
    """Limits for half an hour of baseline, and stores of the test's own."""
    file = own_stores / "limits.yaml"
    file.write_text(LIMITS)
    return file


@contextmanager
def play(faults: Faults, minutes: int = 75) -> Iterator[PlayedEngine]:
    """A played engine, at its first minute."""
    with served(PlayedEngine(simulate(minutes, 1, faults))) as engine:
        yield engine


def opened(engine: PlayedEngine, limits: Path, **more: Any) -> Watch:
    """A watch in the engine's time, which began with it."""
    watch = open_watch(parse_address(engine.url), more.pop("plain", None), limits=limits, **more)
    watch.clock = lambda: engine.now
    watch.since_file.write_text(json.dumps(BEGIN))
    return watch


def at(engine: PlayedEngine, watch: Watch, minute: int) -> Any:
    """The report of a look at a minute, after a look at each minute before."""
    watch.add(*engine.run.samples[len(watch.series.samples) : minute])
    engine.minute = minute
    return look(watch)


@pytest.mark.parametrize(
    ("faults", "cause"),
    [
        (Faults(), None),
        (Faults(noise_from=CHANGE), "dead_draft"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_planted_silences_are_named_over_http(
    limits: Path, faults: Faults, cause: str | None
) -> None:
    with play(faults) as engine:
        watch = opened(engine, limits)
        assert at(engine, watch, 20).verdict == "not enough yet"
        assert at(engine, watch, 38).verdict == "steady"
        report = at(engine, opened(engine, limits), 70)  # another process
        assert [alarm.cause for alarm in report.alarms] == ([cause] if cause else [])
        assert report.verdict == ("alarm" if cause else "steady")
        assert f'cause="{cause}"' in watch_metrics(report) or cause is None
        assert watch_metrics(report).count("} 1.0\n") >= (2 if cause else 1)


@pytest.mark.parametrize(
    ("status", "code"), [(503, "engine_unavailable"), (401, "engine_key"), (404, "not_an_engine")]
)
def test_an_engine_that_is_away_is_an_alarm_after_a_time(
    limits: Path, status: int, code: str
) -> None:
    """One that was never reached is a mistake; one that was is lost after five minutes."""
    with play(Faults(), 60) as engine:
        engine.away = status
        for minute in (0, 10):
            engine.minute = minute
            watch = open_watch(parse_address(engine.url), None, limits=limits)
            watch.clock = lambda: engine.now
            with raises_code(code):
                look(watch)
        assert look(watch, patient=True).verdict == "not enough yet"
        engine.away = 0
        watch = opened(engine, limits)
        at(engine, watch, 40)
        engine.away, engine.minute = status, 43
        with raises_code(code):
            look(watch)
        engine.minute = 47
        report = look(watch)
        assert [alarm.cause for alarm in report.alarms] == ["metrics_lost"]
        assert "reachable" in watch_metrics(report)
        engine.away, engine.minute = 0, 48
        assert look(watch).verdict == "steady"


def test_a_restart_between_two_looks_is_no_silence(limits: Path) -> None:
    """The first sample after it ends no window."""
    with play(Faults(restarts=(43,)), 60) as engine:
        watch = opened(engine, limits)
        at(engine, watch, 38)
        engine.minute = 48
        assert look(watch).verdict == "steady"
        engine.minute = 53
        assert look(watch).verdict == "steady"


def test_what_is_kept_in_memory_is_bounded_as_on_disk(limits: Path) -> None:
    with play(Faults(), 60) as engine:
        watch = opened(engine, limits)
        watch.store.largest = 10
        for sample in engine.run.samples:
            watch.add(sample)
            assert watch.store.read() == watch.series
        assert len(watch.series.samples) <= 20 < len(engine.run.samples)


def test_probes_that_cannot_tell_say_so(limits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwell.components.engines.remote.remote.GAIN_SECONDS", 0)
    run = simulate(60, 1, Faults())
    with served(PlayedEngine(run, plain=True)) as engine:
        few = opened(engine, limits, plain=parse_address(engine.url), probes_per_hour=1)
        assert "budget of 2 or more" in look(few).notes[0]
        silent = opened(engine, limits, probes_per_hour=12)
        assert look(silent).notes[0] == UNTOLD
        engine.minute = 20
        monkeypatch.setattr(VllmDialect, "tokens_of", lambda *_: None)
        dumb = opened(engine, limits, probes_per_hour=12)
        assert "tokens of a text" in look(dumb).notes[0]


def test_probes_keep_to_their_budget_and_stop_while_requests_wait(limits: Path) -> None:
    run = simulate(80, 1, Faults())
    with served(PlayedEngine(run)) as engine, served(PlayedEngine(run, plain=True)) as plain:
        none = opened(engine, limits)
        look(none)
        assert engine.prompts == []
        both = {"plain": parse_address(plain.url), "probes_per_hour": 12}
        watch = opened(engine, limits, **both)
        engine.waiting = 3
        assert look(watch).notes[0] == "no probes while 3 requests wait"
        engine.waiting = 0
        look(watch)
        assert (engine.prompts, plain.prompts) == ([200], [200])
        look(opened(engine, limits, **both))
        assert len(engine.prompts) == 1, "a restart has forgotten what was spent"
        engine.minute = plain.minute = 10
        report = look(opened(engine, limits, **both))
        assert engine.prompts == plain.prompts == [200, 1000]
        assert [row.prompt_tokens for row in report.probes] == [200, 1000]
        assert all(row.speedup is not None for row in report.probes)
        assert report.probes[0].acceptance is not None
        engine.minute, plain.minute = 20, 30
        watch = opened(engine, limits, **both)
        look(watch)
        loads = [probe.at_once for probe in watch.series.probes[-2:]]
        assert loads == [(run.samples[minute].running or 0) + 1 for minute in (20, 30)]
        assert loads[0] != loads[1]
        assert [probe.elsewhere for probe in watch.series.probes[-2:]] == [False, True]


@pytest.mark.parametrize("late", [False, True], ids=["plain", "speculative"])
def test_only_minutes_beside_plain_probes_say_nothing_of_the_machine(
    limits: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """Plain probes slow the others even where no answer comes in time. Where one with speculation
    gets none, the engine itself is slow."""
    decode = RemoteEngine.decode

    def decode_or_fail(engine: RemoteEngine, *request: Any) -> Decoded:
        if engine.speculate == late:
            raise DraftwellError("too late", code="engine_timeout")
        return decode(engine, *request)

    monkeypatch.setattr(RemoteEngine, "decode", decode_or_fail)
    monkeypatch.setattr(VllmDialect, "switches_off", True)
    with play(Faults(neighbour_from=50), 60) as engine:
        watch = opened(engine, limits, probes_per_hour=120)
        found = [at(engine, watch, minute) for minute in range(49, 60)]
    assert {alarm.cause for report in found for alarm in report.alarms} == (
        {"machine"} if late else set()
    )
    assert len({probe.name for probe in watch.series.probes}) > 5, "they take turns"


@pytest.mark.parametrize(("every", "judged"), [(5, True), (2, False)])
def test_a_baseline_waits_for_looks_apart_from_plain_probes_where_there_are_some(
    limits: Path, every: int, judged: bool
) -> None:
    """24 probes an hour leave three looks of five, and 60 none: the report says so."""
    prompt = ProbePrompt("code 200", "code", (7,) * 200)
    with play(Faults(), 120) as engine:
        watch = opened(engine, limits)
        for minute in range(0, 120, every):
            asked = BEGIN + 60 * minute + 5
            watch.add(prompt.unanswered(asked, plain=True, elsewhere=False))
        early, late = (at(engine, watch, minute) for minute in (40, 119))
    assert (early.verdict, late.verdict) == ("not enough yet" if judged else "steady", "steady")
    kept = read_baseline(watch.baseline_file)
    assert kept.length is not None
    assert (kept.step_time is not None) == judged
    assert any("speed is not judged" in note for note in late.notes) != judged
    assert len(late.notes) == (not judged)


def test_a_budget_that_leaves_no_looks_for_speed_is_told(limits: Path) -> None:
    """Also where the baseline knows speed, as of a time with fewer probes."""
    prompt = ProbePrompt("code 200", "code", (7,) * 200)
    with play(Faults(), 90) as engine:
        watch = opened(engine, limits)
        assert at(engine, watch, 45).notes == ()
        for minute in range(46, 90, 2):
            asked = BEGIN + 60 * minute + 5
            watch.add(prompt.unanswered(asked, plain=True, elsewhere=False))
        assert at(engine, watch, 70).notes == ()
        assert "baseline=new" not in "".join(at(engine, watch, 85).notes)
        assert [note[:19] for note in look(watch).notes] == ["speed is not judged"]


def test_a_prompt_that_is_too_long_for_the_engine_is_left_out(limits: Path) -> None:
    with play(Faults(), 60) as engine:
        engine.context = 1500
        watch = opened(engine, limits, probes_per_hour=12)
        for minute in range(0, 60, 5):
            engine.minute = minute
            look(watch)
        assert len(engine.prompts) > 6
        assert {*engine.prompts} == {200, 1000}


def test_each_alarm_is_announced_once_until_it_has_ended(limits: Path) -> None:
    faults = Faults(noise_from=CHANGE, noise_until=CHANGE + 15)
    with play(faults, 100) as engine:
        watch = opened(engine, limits)
        sent: list[str] = []

        def send(alarm: Alarm) -> bool:
            sent.append(alarm.cause)
            return True

        at(engine, watch, 35)
        report = at(engine, watch, 50)
        assert announce_each(watch, report, lambda alarm: False) == ([], [])
        for _ in range(2):
            announce_each(watch, report, send)
        assert sent == ["dead_draft"]
        assert announce_each(watch, at(engine, watch, 90), lambda alarm: True)[1] == ["dead_draft"]
        announce_each(watch, report, send)
        assert sent == ["dead_draft"] * 2


def test_an_event_is_answered_only_where_a_tuning_can_mend_the_alarm(limits: Path) -> None:
    """Its settings are those that the flow `draftwell` takes, with whole paths."""
    answer = {"pair": "default", "prompts": "recorded", "source": "traffic", "device": "cpu"}
    for faults, answered in (
        (Faults(drift_from=CHANGE, drift_minutes=5), True),
        (Faults(noise_from=CHANGE), False),
    ):
        with play(faults) as engine:
            settings = WatchSettings(
                engine=engine.url, answer=PipelineSettings.model_validate(answer)
            )
            watch = opened(engine, limits)
            at(engine, watch, 35)
            report = at(engine, watch, 70)
            payload = payload_of(settings, report, report.alarms[0])
            resource = resource_of(settings, payload)
            assert payload["remedy"] == report.alarms[0].remedy
            assert ("settings" in payload) == answered
            if answered:
                loop = PipelineSettings.model_validate(payload["settings"])
                assert loop.prompts == Path("recorded").absolute()
                assert loop.source == "traffic"
                assert resource["prefect.resource.id"] == "draftwell.pair.smollm2-135m"
                assert resource["draftwell.device"] == "cpu"
            else:
                assert resource["prefect.resource.id"] == f"draftwell.engine.{engine.url}"


def test_a_baseline_can_be_named_or_forgotten(limits: Path) -> None:
    with play(Faults(noise_from=CHANGE), 110) as engine:
        watch = opened(engine, limits)
        at(engine, watch, 38)
        kept = limits.parent / "kept.json"
        kept.write_bytes(watch.baseline_file.read_bytes())
        assert at(engine, watch, 50).verdict == "alarm"
        anew = open_watch(parse_address(engine.url), None, limits=limits, baseline="new")
        anew.clock = lambda: engine.now
        anew.since_file.write_text(json.dumps(engine.now))
        assert look(anew).verdict == "not enough yet"
        engine.minute = 55
        again = opened(engine, limits, baseline=str(kept))
        assert look(again).verdict == "alarm"
        with raises_code("bad_baseline"):
            opened(engine, limits, baseline=str(limits))


def test_a_baseline_of_another_day_is_no_silence(limits: Path) -> None:
    """The time since then was not watched, which is no alarm."""
    with play(Faults(), 60) as engine:
        watch = opened(engine, limits)
        at(engine, watch, 38)
        kept = limits.parent / "kept.json"
        kept.write_bytes(watch.baseline_file.read_bytes())
        engine.minute = 55
        again = opened(engine, limits, baseline=str(kept))
        again.since_file.write_text(json.dumps(engine.now))
        again.series.samples.clear()
        assert look(again).verdict == "steady"


@pytest.mark.parametrize("server", ["http://prefect", None])
def test_the_flow_shows_a_look_and_sends_each_alarm_once(
    limits: Path, monkeypatch: pytest.MonkeyPatch, server: str | None
) -> None:
    """The event is that of a drift, and says cause and remedy; webhooks are told without a server,
    too."""
    from draftwell.flows.orchestration import monitor_flow

    sent: list[tuple[dict[str, str], dict[str, Any]]] = []
    address = type("Address", (), {"value": staticmethod(lambda: server)})
    monkeypatch.setattr(monitor_flow, "PREFECT_API_URL", address)
    told: list[tuple[Any, ...]] = []
    monkeypatch.setattr(monitor_flow, "post_event", lambda *event: sent.append(event))

    def tell(*event: Any) -> bool:
        told.append(event)
        return True

    monkeypatch.setattr(monitor_flow, "send_event", tell)
    monkeypatch.setattr(monitor_flow, "announce", lambda line: None)
    with play(Faults(noise_from=CHANGE)) as engine:
        watch = opened(engine, limits)
        at(engine, watch, 38)
        at(engine, watch, 50)
        given = {"settings": {"engine": engine.url, "limits": str(limits)}}
        settings = monitor_flow.monitor.validate_parameters(given)["settings"]
        assert isinstance(settings, WatchSettings)
        monkeypatch.setattr(WatchSettings, "open", lambda self: watch)
        first, second = (monitor_flow.look_at.fn(settings) for _ in range(2))
    assert (first["announced"], second["announced"]) == (["dead_draft"], [])
    assert "dead draft since" in first["page"]
    assert [(event[0], event[1]["cause"]) for event in told] == [("engine.alarm", "dead_draft")]
    if server is None:
        assert sent == []
        return
    [(resource, payload)] = sent
    assert resource["prefect.resource.id"].startswith("draftwell.engine.http://127.0.0.1:")
    assert payload["cause"] == "dead_draft"
    assert "which draft is loaded" in payload["remedy"]


def test_a_closed_watch_has_no_connection_and_can_look_again(limits: Path) -> None:
    with play(Faults()) as engine:
        watch = opened(engine, limits)
        at(engine, watch, 2)
        client = watch.engine.client
        watch.close()
        assert client._http.is_closed
        assert at(engine, watch, 3).reachable
        watch.close()


def test_llama_cpp_counts_prompt_tokens_of_its_cache_apart() -> None:
    """Else more tokens would come from the cache than prompts have."""
    text = "llamacpp:prompt_tokens_total 26\nllamacpp:prompt_tokens_cached_total 29\n"
    client: Any = type("Client", (), {"find_text": lambda self, path: text})()
    counters = LlamaCppDialect({}).counters(client)
    assert (counters.prompt_tokens, counters.cached_prompt_tokens) == (55, 29)
