"""Hands off with the live server: what it serves is what is watched, and what comes of that is what
it serves next.

Sums are asked of a server that runs the champion of sums, until the questions are Spanish. The
server's own spool shows it: the monitor raises drift, its event starts the recalibration, the new
bundle is deployed, and the running server goes over to it while it is asked. No request is lost,
and what the new champion serves, with a draft model or without, is watched like what the old one
served. About twenty minutes on 2 idle cores, of which the recalibration is most; `-s` shows how far
it is.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from draftwell.components.prompts.prompt import Prompt
from draftwell.flows.context import StepContext
from draftwell.flows.progress import announce
from draftwell.flows.steps import monitor as monitor_step
from draftwell.flows.steps.monitor import DriftSettings, load_limits
from draftwell.registry.store import Store
from draftwell.serving.recording.trace import TraceSet
from tests.support.loop import languages
from tests.support.loop.unattended import (
    answer,
    place,
    prefect_at_work,
    runs,
    serve,
    settings_of,
    step,
    wait,
)
from tests.support.paths import REPO
from tests.support.server.server_process import entry_with

pytestmark = [pytest.mark.slow, pytest.mark.soak]

__all__ = ["place", "step"]  # fixtures

TOKENS = 48
BAR = 25 * 60
"""Seconds from the change of prompts to the new champion in service."""
WINDOW = load_limits().window
"""Prompts that the monitor looks at."""
PAUSE = 5.0
"""Seconds between two requests while a recalibration measures speeds: enough to see that none is
lost, too few to disturb it."""


@contextmanager
def server(bundle: Path, spool: Path, log: Path) -> Iterator[str]:
    """A running `draftwell-serve` that records everything, with texts: its address."""
    command = [
        *entry_with(per_minute=10_000),
        "--bundle",
        str(bundle),
        "--port",
        "0",
        "--slots",
        "2",
        "--max-context",
        "512",
        "--threads",
        str(len(os.sched_getaffinity(0))),
        "--feedback-dir",
        str(spool),
        "--feedback-rate",
        "1",
        "--feedback-text",
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=REPO, stdout=output, stderr=subprocess.STDOUT)
        try:
            wait(lambda: re.search(r"http://\S+", log.read_text()), 240, process)
            found = re.search(r"http://[\d.:]+", log.read_text())
            assert found is not None
            yield found[0]
        finally:
            process.terminate()
            assert process.wait(90) == 0, log.read_text()[-3000:]


class Client:
    """Asks, and remembers every answer."""

    def __init__(self, address: str):
        self.address = address
        self.answers: list[tuple[int, str]] = []
        """Status of each, and the text or the error."""

    def ask(self, prompt: Prompt) -> None:
        """One greedy answer, as long as the champion's traces."""
        import httpx

        body = {
            "model": "smollm2-135m",
            "messages": [{"role": "user", "content": prompt.prompt}],
            "max_tokens": TOKENS,
            "temperature": 0,
        }
        try:
            answer = httpx.post(f"{self.address}/v1/chat/completions", json=body, timeout=300)
            self.answers.append((answer.status_code, answer.text))
        except httpx.HTTPError as error:
            self.answers.append((0, repr(error)))

    def ask_all(self, prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            self.ask(prompt)

    @property
    def lost(self) -> list[tuple[int, str]]:
        """Answers that are none."""
        return [
            (status, text)
            for status, text in self.answers
            if status != 200 or not json.loads(text)["usage"]["completion_tokens"]
        ]

    def version(self) -> str:
        """Of the bundle that serves."""
        import httpx

        return str(httpx.get(f"{self.address}/health", timeout=60).json()["version"])

    @contextmanager
    def asking(self, prompts: Sequence[Prompt]) -> Iterator[None]:
        """Ask now and then, for as long as the block."""
        over = threading.Event()

        def go_on() -> None:
            number = 0
            while not over.wait(PAUSE):
                self.ask(prompts[number % len(prompts)])
                number += 1

        thread = threading.Thread(target=go_on)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def prompts_in(spool: Path) -> int:
    """Different texts that a spool holds by now; shard by shard, because another release may record
    with other settings."""
    import pyarrow.parquet as pq

    return len(
        {
            name
            for path in TraceSet(spool).shards
            for name in pq.read_table(path, columns=["prompt_id"]).column(0).to_pylist()
        }
    )


@pytest.fixture(scope="module")
def champion(prefect_server: None, step: StepContext, place: Path) -> dict[str, Any]:
    """The champion of sums, made by the same flow, run in this process."""
    announce("hands off, live: a first champion, for sums")
    made = answer(settings_of(place, serve(step, place / "sums", languages.maths(40, seed=1))))
    assert made["state"] == "deployed", made["checks"]
    announce(f"hands off, live: {made['strategy']} {made['parameters']}")
    return made


def test_the_server_goes_over_to_a_champion_that_its_own_traffic_called_for(
    champion: dict[str, Any], step: StepContext, place: Path
) -> None:
    from prefect.deployments import run_deployment

    spool, current = place / "live", place / "dist" / "smollm2-135m" / "current"
    sums, questions = languages.maths(40, seed=12), languages.spanish(WINDOW + 50, seed=13)
    with server(current, spool, place / "server.log") as address:
        client = Client(address)
        first = client.version()
        assert first == str(champion["release"])
        client.ask_all(sums)
        wait(lambda: prompts_in(spool) >= len(sums), 60)
        report, _ = monitor_step.check(step.workspace, spool=spool)
        announce(f"hands off, live: {len(sums)} sums served, traffic is {report.verdict}")
        assert report.verdict == "steady", report.reasons

        # a window that still held sums would make a champion for both, and drift once more
        client.ask_all(questions[:WINDOW])
        wait(lambda: prompts_in(spool) >= len(sums) + WINDOW, 60)
        settings: DriftSettings = settings_of(place, spool)
        with prefect_at_work(place), client.asking(questions[WINDOW : WINDOW + 10]):
            announce("hands off, live: the questions are Spanish now; the monitor looks")
            started = time.monotonic()
            given = {"settings": settings.model_dump(mode="json", exclude_unset=True)}
            seen = run_deployment("monitor/hands-off", parameters=given, timeout=600)
            assert seen.state is not None
            assert seen.state.is_completed(), seen.state
            wait(lambda: [run for run in runs() if run.name != seen.name], 60)
            wait(lambda: all(run.state is not None and run.state.is_final() for run in runs()), BAR)
            assert [run.state_name for run in runs()] == ["Completed", "Completed"], (
                place / "serve.log"
            ).read_text()[-3000:]
            wait(lambda: client.version() != first, 120)
            took = time.monotonic() - started
        second = client.version()
        announce(
            f"hands off, live: release {second} serves instead of {first} after {took:.0f} "
            f"s; {len(client.answers)} answers"
        )
        recorded = prompts_in(spool)
        client.ask_all(questions[WINDOW + 10 :])
        wait(lambda: prompts_in(spool) >= recorded + 40, 60)
        report, new = monitor_step.check(step.workspace, spool=spool)
        announce(
            "hands off, live: 40 more questions served by "
            f"{new.artifacts['decoding_config'].strategy}, traffic is {report.verdict}"
        )  # type: ignore[attr-defined]
        assert report.verdict == "steady", report.reasons
        assert client.lost == []
        assert (
            Store().get_aliases("release", "smollm2-135m.cpu")["champion"]
            == int(second)
            > int(first)
        )
        assert current.resolve().name == f"{second}-cpu"
        assert took < BAR
    assert (folder_of_spanish(step) / "traces").is_dir()
    assert not [path for path in spool.iterdir() if path.name.startswith(".")]


def folder_of_spanish(step: StepContext) -> Path:
    """The recalibration whose prompts are questions."""
    (folder,) = [
        path
        for path in (step.workspace.root / "recalibrations").iterdir()
        if (path / "prompts.jsonl").is_file()
        and "¿" in (path / "prompts.jsonl").read_text(encoding="utf-8")
    ]
    return folder
