"""The launcher: it waits for an answer, says why there is none, and leaves nothing behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftwell.components.engines import launcher as module
from draftwell.components.engines.launch_template import LaunchTemplate
from draftwell.components.engines.launched import LaunchedEngine
from draftwell.components.engines.launcher import Launcher, listens, next_port
from draftwell.components.engines.port import EngineSettings
from draftwell.components.engines.remote.address import parse_address
from draftwell.components.export.launch_options import launch_options
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.requests import Sampling
from tests.support.errors import raises_code
from tests.support.launching.ports import two_free_ports
from tests.support.paths import REPO
from tests.support.peers.environments import in_group, is_stopped
from tests.support.server.server_process import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

PLAYED = REPO / "tests" / "support" / "launching" / "played_vllm.py"
SPECULATION = "{speculation_options}"
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
HEAD = {"method": "eagle3", "num_speculative_tokens": 3}


def command(more: str = "", port: str = "{port}") -> str:
    return f"{sys.executable} {PLAYED} {port} {SPECULATION} {more}".strip()


ENGINES: list[LaunchedEngine] = []


@pytest.fixture(autouse=True)
def asked_often(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "ASK_SECONDS", 0.05)
    yield
    while ENGINES:
        ENGINES.pop().disconnect()


def made(
    text: str,
    folder: Path,
    *,
    stop: str | None = None,
    seconds: float = 20.0,
    rests: bool = False,
) -> Launcher:
    port = two_free_ports()
    return Launcher(
        LaunchTemplate(text.replace("PORT", str(port))),
        parse_address(f"http://127.0.0.1:{port}"),
        folder,
        stop=None if stop is None else LaunchTemplate(stop, stops=True),
        start_seconds=seconds,
        rests=rests,
    )


def engine(launcher: Launcher, label: str) -> LaunchedEngine:
    ENGINES.append(LaunchedEngine(label, launcher, lambda one: launch_options("vllm", one)))
    return ENGINES[-1]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[LaunchedEngine, LaunchedEngine]]:
    with made(command(), tmp_path) as launcher:
        yield engine(launcher, "plain"), engine(launcher, "ngram")
    assert not any(listens(address.url) for address in launcher.addresses)


def test_two_run_at_once_at_neighbouring_ports_and_speculate_as_they_are_told(
    pair: tuple[LaunchedEngine, LaunchedEngine],
) -> None:
    plain, other = pair
    about = plain.start(EngineSettings())
    other.start(EngineSettings(speculation=NGRAM))
    assert about.version == "vllm 0.32.0"
    urls = [one.remote.address.url for one in pair]
    assert int(urls[1].rpartition(":")[2]) == int(urls[0].rpartition(":")[2]) + 1
    one, two = (which.decode([[5, 6]], Sampling(max_tokens=4)) for which in pair)
    assert one.answers[0].tokens == two.answers[0].tokens
    assert (one.answers[0].acceptance.rounds, two.answers[0].acceptance.rounds) == (0, 2)


def test_the_settings_reach_an_engine_that_reads_a_file(tmp_path: Path) -> None:
    text = f"{sys.executable} {PLAYED} {{port}} --config {{speculation_file}}"
    with made(text, tmp_path / "a folder") as launcher:
        one = engine(launcher, "ngram")
        one.start(EngineSettings(speculation=NGRAM))
        assert one.decode([[5]], Sampling(max_tokens=4)).answers[0].acceptance.drafted == 6


def test_at_one_address_engines_take_turns_and_each_answers_as_itself(tmp_path: Path) -> None:
    with made(command(port="PORT"), tmp_path) as launcher:
        assert launcher.alternates
        plain, other = engine(launcher, "plain"), engine(launcher, "ngram")
        plain.start(EngineSettings())
        other.start(EngineSettings(speculation=NGRAM))
        rounds = [
            one.decode([[5, 6]], Sampling(max_tokens=4)).answers[0].acceptance.rounds
            for one in (plain, other, plain)
        ]
        assert rounds == [0, 2, 0]
        assert len(launcher._running) == 1


def test_one_that_nobody_asks_rests_and_answers_again_and_ends(tmp_path: Path) -> None:
    with made(f"exec {command()}", tmp_path, rests=True) as launcher:
        plain, other = engine(launcher, "plain"), engine(launcher, "ngram")
        plain.start(EngineSettings())
        running = launcher.running({})
        assert running is not None
        wait_until(lambda: is_stopped(running.group.pid), "it does not rest")
        other.start(EngineSettings(speculation=NGRAM))
        for one in (plain, other, plain):
            assert len(one.decode([[5]], Sampling(max_tokens=2)).answers[0].tokens) == 2
        wait_until(lambda: is_stopped(running.group.pid), "it does not rest")
    wait_until(lambda: not in_group(running.group.pid), "it goes on")


def test_one_that_never_answers_is_ended_in_time_and_its_log_is_quoted(tmp_path: Path) -> None:
    text = f"{SPECULATION} ; echo loading the model; exec sleep 300"
    with made(f"true {text}", tmp_path, seconds=0.3) as launcher:
        with raises_code("engine_timeout", "loading the model", "start_minutes"):
            launcher.start("plain", {})
        assert not launcher._running


def test_a_setting_that_fails_names_the_cause_and_not_the_last_line(tmp_path: Path) -> None:
    with made(command("--refuse ngram"), tmp_path) as launcher:
        launcher.start("plain", {})
        with raises_code("engine_failed", "no such method here"):
            engine(launcher, "ngram").start(EngineSettings(speculation=NGRAM))
        assert launcher.running({}) is not None


def test_one_that_dies_while_it_decodes_says_why(tmp_path: Path) -> None:
    with made(command("--die-with ngram"), tmp_path) as launcher:
        one = engine(launcher, "ngram")
        one.start(EngineSettings(speculation=NGRAM))
        one.decode([[5]], Sampling(max_tokens=2))
        with raises_code("engine_failed", "exit code 5", "the drafter has no weights"):
            one.decode([[5]], Sampling(max_tokens=2))


def test_what_answers_before_would_be_measured_in_its_place_and_is_refused(tmp_path: Path) -> None:
    with made(command(port="PORT"), tmp_path) as first:
        one = first.start("plain", {})
        second = Launcher(LaunchTemplate(command()), one.address, tmp_path / "second")
        with raises_code("engine_port_taken", one.address.url):
            second.start("plain", {})
        assert listens(one.address.url)


def test_all_that_a_waiting_shell_started_ends_with_it(tmp_path: Path) -> None:
    text = f"sleep 300 & {command()}; true"
    with made(text, tmp_path) as launcher:
        group = launcher.start("plain", {}).group.pid
        assert len(in_group(group)) >= 3
    wait_until(lambda: not in_group(group), "it goes on")


ASK = "import sys, urllib.request as u; u.urlopen(sys.argv[1])"
CHILD_STOP = f"{sys.executable} -c '{ASK}' {{url}}/end 2>/dev/null; true"


def test_an_engine_that_was_started_elsewhere_ends_by_its_own_command(tmp_path: Path) -> None:
    with made(command("--child"), tmp_path, stop=CHILD_STOP) as launcher:
        one = launcher.start("plain", {})
        assert one.group.exit_code(5) == 0
        assert listens(one.address.url)
    wait_until(lambda: not listens(one.address.url), "it goes on")


def test_a_setting_that_fails_is_named_also_where_there_is_nothing_to_end(tmp_path: Path) -> None:
    said: list[str] = []
    with made(command("--refuse ngram"), tmp_path, stop="exit 3") as launcher:
        launcher._say = said.append
        with raises_code("engine_failed", "no such method here"):
            launcher.start("ngram", launch_options("vllm", NGRAM))
        assert not launcher._running
    assert "exit code 3" in said[0]


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        # by whether what was left behind answers already when that is looked at
        (command("--child"), ("engine_failed", "engine_not_stopped")),
        (f"setsid {command()} & exec sleep 300", ("engine_not_stopped",)),
    ],
)
def test_what_nobody_could_end_is_refused_and_the_remedy_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, codes: tuple[str, ...]
) -> None:
    monkeypatch.setattr(module, "END_SECONDS", 0.3)
    launcher = made(text, tmp_path)
    url = launcher.addresses[0].url
    with pytest.raises(DraftwellError, match="stop_command") as caught, launcher:
        launcher.start("plain", {})
    assert caught.value.code in codes
    wait_until(lambda: listens(url), "the test's own engine does not start")
    subprocess.run(["/bin/sh", "-c", CHILD_STOP.replace("{url}", url)], check=True)


STARTER = """\
import pathlib, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where these tests are a shell's job
from draftwell.components.engines.launch_template import LaunchTemplate
from draftwell.components.engines.launcher import Launcher
from draftwell.components.engines.remote.address import parse_address
command, url, folder = sys.argv[1:]
with Launcher(LaunchTemplate(command), parse_address(url), pathlib.Path(folder)) as launcher:
    print(launcher.start("plain", {}).group.pid, flush=True)
    time.sleep(300)
"""  # noqa: E501


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ctrl_c_and_a_kill_end_everything(tmp_path: Path, number: signal.Signals) -> None:
    url = f"http://127.0.0.1:{two_free_ports()}"
    words = [sys.executable, "-c", STARTER, f"sleep 300 & {command()}; true", url, str(tmp_path)]
    with subprocess.Popen(words, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as it:
        assert it.stdout is not None
        group = int(it.stdout.readline())
        assert in_group(group)
        it.send_signal(number)
    wait_until(lambda: not in_group(group), "it goes on")
    time.sleep(0.1)
    assert not listens(url)


def test_the_last_port_leaves_none_for_the_second_engine() -> None:
    with raises_code("bad_engine_address", "65535", "{port}"):
        next_port("http://127.0.0.1:65535")
