"""`draftwell monitor --engine URL`: exit codes, what is printed, and that it goes on whatever the
engine does."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from draftwell.components.engines.remote.address import parse_address
from draftwell.flows.cli import watch as command
from draftwell.flows.steps.remote.watch import look, open_watch
from tests.support.watch.played_engine import PlayedEngine, served
from tests.support.watch.simulator import BEGIN, Faults, simulate


@pytest.fixture
def engine(own_stores: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PlayedEngine]:
    """An engine whose draft becomes noise at minute 40, with its first 38 minutes kept."""
    with served(PlayedEngine(simulate(60, 1, Faults(noise_from=40)))) as played:
        (own_stores / "limits.yaml").write_text("baseline_windows: 30\nwarm_up_seconds: 0\n")
        watch = open_watch(parse_address(played.url), None, limits=own_stores / "limits.yaml")
        watch.since_file.write_text(json.dumps(BEGIN))
        watch.clock = lambda: played.now
        watch.add(*played.run.samples[:38])
        played.minute = 38
        look(watch)
        monkeypatch.setattr(time, "time", lambda: played.now)
        monkeypatch.setattr("draftwell.flows.steps.remote.watch.Watch.clock", time.time)
        yield played


def asked(run: Any, engine: PlayedEngine, own_stores: Path, more: str = "") -> Any:
    """A run of the command."""
    return run(f"monitor --engine {engine.url} --set limits={own_stores / 'limits.yaml'} {more}")


def test_the_exit_code_says_whether_an_alarm_stands(
    run: Any, engine: PlayedEngine, own_stores: Path
) -> None:
    quiet = asked(run, engine, own_stores)
    assert quiet.exit_code == 0, quiet.output
    assert "steady" in quiet.stdout
    metrics = own_stores / "engine.prom"
    for minute in range(39, 46):
        engine.minute = minute
        found = asked(run, engine, own_stores, f"--json --set metrics_file={metrics}")
    assert found.exit_code == 3
    report = json.loads(found.stdout)
    assert [alarm["cause"] for alarm in report["alarms"]] == ["dead_draft"]
    assert report["alarms"][0]["remedy"]
    assert f'draftwell_monitor_alarm{{cause="dead_draft",engine="{engine.url}"}} 1.0' in (
        metrics.read_text()
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("monitor --engine http://127.0.0.1:9", "cannot be reached"),
        (
            "monitor --engine http://127.0.0.1:9 --set reference=traces",
            "--set reference means nothing",
        ),
        ("monitor --set every=5", "--set every means nothing with --engine draftwell"),
        (
            "monitor --engine vllm --set probes_per_hour=5",
            "--set probes_per_hour means nothing with --engine vllm",
        ),
        (
            "monitor --engine http://127.0.0.1:9 --set baseline=none.json",
            "none.json holds no baseline",
        ),
    ],
)
def test_a_mistake_is_one_line(run: Any, own_stores: Path, words: str, said: str) -> None:
    found = run(words)
    assert found.exit_code == 2
    assert said in " ".join(found.output.split())


def test_looking_goes_on_while_the_engine_is_away(
    engine: PlayedEngine,
    own_stores: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A line for each alarm that begins and ends; SIGTERM ends it."""
    watch = open_watch(parse_address(engine.url), None, limits=own_stores / "limits.yaml")
    watch.clock = lambda: engine.now
    places = iter([(39, False), (40, False), (42, True), (48, True), (49, False)])

    def next_minute(*_: Any, **__: Any) -> Any:
        place = next(places, None)
        if place is None:
            os.kill(os.getpid(), signal.SIGTERM)
            place = (49, False)
        engine.minute, engine.away = place[0], 503 * place[1]
        return look(watch, patient=True)

    monkeypatch.setattr(command, "look", next_minute)
    with pytest.raises(typer.Exit) as ended:
        command.watch_on(watch, 0.01, None, as_json=False)
    assert ended.value.exit_code in (0, 3)
    lines = capsys.readouterr().out.splitlines()
    assert sum("metrics lost since" in line for line in lines) == 1
    assert sum("metrics lost ended" in line for line in lines) == 1
