"""Peers in processes of their own: the protocol, that they rest while others compute, and how their failures are named."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from components.bench.peers.group import ProcessPeer
from components.bench.peers.process import PeerProcess
from components.bench.runner import measure
from components.bench.settings import BenchSettings
from components.prompts.prompt import Prompt
from serving.errors import DraftwellError
from serving.runtime.strategies import StrategyChoice, StrategyResources
from tests.support.errors import raises_code
from tests.support.models.tiny import table_pair
from tests.support.peers.environments import FAKE_DRIVER, is_stopped
from tests.support.server.server_process import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

PROMPTS = [Prompt(f"p{i}", None, [text]) for i, text in enumerate(["abcab", "hello", "zebra", "one two"])]
Starter = Callable[..., PeerProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    """Start a fake driver; all end with the test."""
    made: list[PeerProcess] = []

    def begin(label: str = "vllm/ngram", *, driver: Path = FAKE_DRIVER, answer_seconds: float = 60.0, **settings: Any) -> PeerProcess:
        log = tmp_path / "logs" / f"{len(made)}.log"
        made.append(PeerProcess(label, [sys.executable, str(driver)], log, threads=1, answer_seconds=answer_seconds))
        made[-1].start(settings)
        return made[-1]

    yield begin
    for process in made:
        process.close()


def test_it_decodes_what_it_is_asked_and_ends_at_a_stop_token(start: Starter) -> None:
    process = start()
    answer = process.decode([5, 6, 7], 5, [2])
    assert answer.tokens == [5, 6, 7, 5, 6]
    assert 0 < answer.first_token_seconds <= answer.seconds
    assert process.decode([5, 2, 7], 5, [2]).tokens == [5, 2]


def test_it_says_what_it_is_and_gets_the_threads_of_the_run(tmp_path: Path) -> None:
    process = PeerProcess("vllm/ngram", [sys.executable, str(FAKE_DRIVER)], tmp_path / "log", threads=3)
    try:
        about = process.start({})
        assert about.version == "fake 1.0"
        assert about.notes == ("fake: 3 threads, OMP_NUM_THREADS=3",)
        assert "a library says hello" in (tmp_path / "log").read_text()
    finally:
        process.close()


def test_a_peer_whose_threads_spin_rests_between_requests(start: Starter) -> None:
    """Its clock stands still although a thread of it never waits."""
    process = start(fault="spin")
    assert process.decode([5], 1, []).tokens == [5]
    wait_until(lambda: is_stopped(process.pid), "it goes on")
    used = cpu_ticks(process.pid)
    sum(i * i for i in range(3_000_000))  # something else computes
    assert cpu_ticks(process.pid) == used
    assert process.decode([5], 2, []).tokens == [5, 5]


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_contenders_are_interleaved_and_only_one_is_awake(start: Starter) -> None:
    peers = [ProcessPeer(start("vllm/autoregressive")), ProcessPeer(start("llama.cpp/autoregressive"))]
    order: list[str] = []

    def look(done: int, total: int, label: str) -> None:
        order.append(label)
        for peer in peers:
            wait_until(lambda: is_stopped(peer.process.pid), f"{peer.label} goes on")  # noqa: B023

    found = measure(table_pair(), StrategyResources(), [StrategyChoice("autoregressive")], PROMPTS[:3], BenchSettings(max_tokens=4),
                    extra=peers, progress=look)
    ours, first, second = "autoregressive", "vllm/autoregressive", "llama.cpp/autoregressive"
    assert order == [ours, first, second, first, second, ours, second, ours, first]
    assert [len(run.tokens) for run in found[first].typical] == [4, 4, 4]
    assert all(seconds > 0 for seconds in found[second].seconds)


@pytest.mark.parametrize(("fault", "code", "names"), [
    ("die", "peer_failed", ("vllm/ngram", "exit code 3")), ("hang", "peer_timeout", ("vllm/ngram", "0.5 s")),
    ("wrong", "peer_bad_answer", ("vllm/ngram", "tokens.0"))])
def test_a_peer_that_fails_is_named_in_a_line(start: Starter, fault: str, code: str, names: tuple[str, ...]) -> None:
    process = start(fault=fault, answer_seconds=0.5)
    with raises_code(code, *names) as caught:
        process.decode([5], 2, [])
    assert "\n" not in str(caught.value)


def test_a_peer_that_does_not_start_gives_its_last_line(start: Starter) -> None:
    with raises_code("peer_failed", "vllm/ngram", "exit code 1", "model") as caught:
        start(fault="start")
    assert "\n" not in str(caught.value)


def test_a_peer_that_prints_no_json_is_named(start: Starter, tmp_path: Path) -> None:
    driver = tmp_path / "driver.py"
    driver.write_text("import sys\nsys.stdin.readline()\nprint('Loading …', flush=True)\nsys.stdin.read()\n")
    with raises_code("peer_bad_answer", "vllm/ngram", "Loading", "not JSON"):
        start(driver=driver)


def test_the_prompt_of_a_failure_is_named(start: Starter) -> None:
    peer = ProcessPeer(start(fault="die"))
    with pytest.raises(DraftwellError) as caught:
        measure(table_pair(), StrategyResources(), [], PROMPTS[:1], BenchSettings(max_tokens=4, warmup=False), extra=[peer])
    assert str(caught.value).startswith("prompt p0: ")
    assert caught.value.code == "peer_failed"


def test_a_closed_peer_is_gone_with_all_that_it_started(start: Starter) -> None:
    process = start(fault="spin")
    process.close()
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, signal.SIGCONT)
