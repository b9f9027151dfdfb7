"""Engines in processes of their own: the protocol, that they rest while others compute, that they
end, and how failures are named."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from draftwell.components.bench.peers.group import ProcessPeer
from draftwell.components.bench.runner import measure
from draftwell.components.bench.settings import BenchSettings
from draftwell.components.engines import process as process_module
from draftwell.components.engines.port import Acceptance, EngineSettings
from draftwell.components.engines.process import EngineProcess
from draftwell.components.engines.process_group import END_SECONDS
from draftwell.components.prompts.prompt import Prompt
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import StrategyChoice, StrategyResources
from tests.support.errors import raises_code
from tests.support.models.tiny import table_pair
from tests.support.peers.environments import FAKE_DRIVER, is_stopped
from tests.support.server.server_process import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

PROMPTS = [
    Prompt(f"p{i}", None, [text]) for i, text in enumerate(["abcab", "hello", "zebra", "one two"])
]
Starter = Callable[..., EngineProcess]
PLAIN = EngineSettings()


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Starter]:
    """Start a fake driver; all end with the test."""
    made: list[EngineProcess] = []

    def begin(
        label: str = "vllm/ngram",
        *,
        driver: Path = FAKE_DRIVER,
        answer_seconds: float = 60.0,
        start_seconds: float = 60.0,
        threads: int = 1,
        **fixed: Any,
    ) -> EngineProcess:
        log = tmp_path / "logs" / f"{len(made)}.log"
        made.append(
            EngineProcess(
                label,
                [sys.executable, str(driver)],
                log,
                threads=threads,
                fixed=fixed,
            )
        )
        monkeypatch.setattr(process_module, "ANSWER_SECONDS", answer_seconds)
        monkeypatch.setattr(process_module, "START_SECONDS", start_seconds)
        made[-1].start(PLAIN)
        return made[-1]

    yield begin
    for process in made:
        process.stop()


def sampling(tokens: int, *stops: int, **more: Any) -> Sampling:
    return Sampling(max_tokens=tokens, stop_token_ids=frozenset(stops), **more)


def test_it_decodes_what_it_is_asked_and_ends_at_a_stop_token(start: Starter) -> None:
    process = start()
    answer = process.decode([[5, 6, 7]], sampling(5, 2)).answers[0]
    assert answer.tokens == [5, 6, 7, 5, 6]
    assert 0 < answer.first_token_seconds <= answer.seconds
    assert process.decode([[5, 2, 7]], sampling(5, 2)).answers[0].tokens == [5, 2]


def test_prompts_that_are_sent_at_once_come_back_in_their_order(start: Starter) -> None:
    found = start().decode([[5, 6], [7], [8, 9]], sampling(3))
    assert [answer.tokens for answer in found.answers] == [[5, 6, 5], [7, 7, 7], [8, 9, 8]]
    assert found.tokens == 9
    assert found.seconds == pytest.approx(max(answer.seconds for answer in found.answers), rel=0.1)


def test_it_says_how_drafts_fared_and_which_tokens_were_likely(start: Starter) -> None:
    answer = start().decode([[5, 6]], sampling(2, logprobs=2)).answers[0]
    assert answer.acceptance == Acceptance(rounds=2, drafted=4, accepted=3, accepted_at=(2, 1))
    assert answer.acceptance.rate == 0.75
    assert answer.acceptance.length == 2.5
    assert answer.top_logprobs == [[(5, -0.1), (6, -2.5)], [(6, -0.1), (7, -2.5)]]
    assert Acceptance().rate is None


def test_what_no_driver_knows_is_refused(start: Starter) -> None:
    with raises_code("engine_sampling", "penalties"):
        start().decode([[5]], sampling(2, presence_penalty=1.0))


def test_it_says_what_it_is_and_gets_the_threads_of_the_run(tmp_path: Path) -> None:
    process = EngineProcess(
        "vllm/ngram", [sys.executable, str(FAKE_DRIVER)], tmp_path / "log", threads=3
    )
    try:
        about = process.start(PLAIN)
        assert about.version == "fake 1.0"
        assert about.notes == ("fake: 3 threads, OMP_NUM_THREADS=3",)
        assert "a library says hello" in (tmp_path / "log").read_text()
    finally:
        process.stop()


def test_a_stopped_engine_starts_again_with_other_settings(start: Starter) -> None:
    process = start()
    first = process.pid
    process.start(EngineSettings(speculation={"method": "ngram", "num_speculative_tokens": 3}))
    assert process.pid != first
    assert process.decode([[5]], sampling(1)).tokens == 1
    with pytest.raises(ProcessLookupError):
        os.killpg(first, 0)
    process.stop()
    process.stop()
    with raises_code("engine_not_started", "vllm/ngram"):
        process.decode([[5]], sampling(1))


def test_an_engine_whose_threads_spin_rests_between_requests(start: Starter) -> None:
    """Its clock stands still although a thread of it never waits."""
    process = start(fault="spin")
    assert process.decode([[5]], sampling(1)).answers[0].tokens == [5]
    wait_until(lambda: is_stopped(process.pid), "it goes on")
    used = cpu_ticks(process.pid)
    sum(i * i for i in range(3_000_000))  # something else computes
    assert cpu_ticks(process.pid) == used
    assert process.decode([[5]], sampling(2)).answers[0].tokens == [5, 5]


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_contenders_are_interleaved_and_only_one_is_awake(start: Starter) -> None:
    peers = [
        ProcessPeer(start("vllm/autoregressive")),
        ProcessPeer(start("llama.cpp/autoregressive")),
    ]
    order: list[str] = []

    def look(done: int, total: int, label: str) -> None:
        order.append(label)
        for peer in peers:
            wait_until(lambda: is_stopped(peer.engine.pid), f"{peer.label} goes on")  # type: ignore[attr-defined]  # noqa: B023

    found = measure(
        table_pair(),
        StrategyResources(),
        [StrategyChoice("autoregressive")],
        PROMPTS[:3],
        BenchSettings(max_tokens=4),
        extra=peers,
        progress=look,
    )
    ours, first, second = "autoregressive", "vllm/autoregressive", "llama.cpp/autoregressive"
    assert order == [ours, first, second, first, second, ours, second, ours, first]
    assert [len(run.tokens) for run in found[first].typical] == [4, 4, 4]
    assert all(seconds > 0 for seconds in found[second].seconds)


@pytest.mark.parametrize(
    ("fault", "code", "names"),
    [
        ("die", "engine_failed", ("vllm/ngram", "exit code 3")),
        ("hang", "engine_timeout", ("vllm/ngram", "0.5 s")),
        ("wrong", "engine_bad_answer", ("vllm/ngram", "tokens.0")),
        ("killed", "engine_killed", ("vllm/ngram", "SIGKILL", "memory")),
    ],
)
def test_an_engine_that_fails_is_named_in_a_line(
    start: Starter, fault: str, code: str, names: tuple[str, ...]
) -> None:
    process = start(fault=fault, answer_seconds=0.5 if fault == "hang" else 60.0)
    with raises_code(code, *names) as caught:
        process.decode([[5]], sampling(2))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fault", "code", "names"),
    [
        ("start", "engine_failed", ("exit code 1", "model")),
        ("memory", "engine_out_of_memory", ("VLLM_CPU_KVCACHE_SPACE", "cache blocks")),
        ("plugin", "engine_failed", ("arctic_inference",)),
        ("slow", "engine_timeout", ("0.5 s",)),
    ],
)
def test_an_engine_that_does_not_start_says_why(
    start: Starter, fault: str, code: str, names: tuple[str, ...]
) -> None:
    with raises_code(code, "vllm/ngram", *names) as caught:
        start(fault=fault, start_seconds=0.5 if fault == "slow" else 60.0)
    assert "\n" not in str(caught.value)


def test_one_that_was_killed_from_outside_is_named_and_starts_again(start: Starter) -> None:
    process = start()
    os.kill(process.pid, signal.SIGKILL)
    with raises_code("engine_killed", "vllm/ngram"):
        process.decode([[5]], sampling(1))
    process.start(PLAIN)
    assert process.decode([[5]], sampling(1)).tokens == 1


def test_an_engine_that_prints_no_json_is_named(start: Starter, tmp_path: Path) -> None:
    driver = tmp_path / "driver.py"
    driver.write_text(
        "import sys\nsys.stdin.readline()\nprint('Loading …', flush=True)\nsys.stdin.read()\n"
    )
    with raises_code("engine_bad_answer", "vllm/ngram", "Loading", "Invalid JSON"):
        start(driver=driver)


def test_a_request_that_is_not_read_is_given_up(start: Starter, tmp_path: Path) -> None:
    driver = tmp_path / "driver.py"
    driver.write_text(
        'import sys, time\nsys.stdin.buffer.raw.readline()\nprint(\'{"version": "1"}\', '
        "flush=True)\ntime.sleep(3600)\n"
    )
    process = start(driver=driver, answer_seconds=0.5)
    with raises_code("engine_timeout", "vllm/ngram", "0.5 s"):
        process.decode([[5] * 500_000], sampling(1))
    began = time.monotonic()
    process.stop()
    assert time.monotonic() - began < END_SECONDS


def test_the_prompt_of_a_failure_is_named(start: Starter) -> None:
    peer = ProcessPeer(start(fault="die"))
    with pytest.raises(DraftwellError) as caught:
        measure(
            table_pair(),
            StrategyResources(),
            [],
            PROMPTS[:1],
            BenchSettings(max_tokens=4, warmup=False),
            extra=[peer],
        )
    assert str(caught.value).startswith("prompt p0: ")
    assert caught.value.code == "engine_failed"


def test_a_closed_engine_is_gone_with_all_that_it_started(start: Starter) -> None:
    process = start(fault="spin")
    pid = process.pid
    process.stop()
    with pytest.raises(ProcessLookupError):
        os.killpg(pid, signal.SIGCONT)
