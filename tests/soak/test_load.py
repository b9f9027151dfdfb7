"""The server under load, for real: the default pair in float32, 64 clients for three minutes, on
this machine's clock.

About an hour on two idle cores; `make soak` runs it, `-s` shows the figures. What it holds: no
error but 429, memory that stays flat, every answer the same as when it is asked for alone (or first
different where the target's two best tokens are nearly tied), and eight at once that bring at least
2.5 times as many tokens as one at a time; speculation whose tokens are, in 95 % confidence, at
least .98 of plain decoding's with 1, 8, 32 and 64 clients.

Longer windows give narrower intervals: DRAFTWELL_TEST_WINDOW_SECONDS, 10 by default.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from draftwell.components.prompts.prompt import demo_prompts
from tests.support.server.light_client import LightClient
from tests.support.server.soak import Served, default_bundle, served_bundle

pytestmark = pytest.mark.soak

CLIENTS, SECONDS, WARM_UP = 64, 180, 60
SIZES = (16, 32, 48)
NEAR_TIE = 1e-3
"""Nats between the target's two best tokens."""
WINDOWS, SECONDS_OF_A_WINDOW = 10, float(os.environ.get("DRAFTWELL_TEST_WINDOW_SECONDS", "10"))
WARM_UP_WINDOWS = 4
T_95 = 2.262
"""Student's t for so many windows."""
NOT_SLOWER = 0.98
"""Least that the lower bound of a ratio of tokens may be."""

Question = tuple[str, int]
"""Prompt and max_tokens."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    bundle = default_bundle(
        tmp_path_factory.mktemp("bundle"), "float32", "vanilla_sd", {"num_speculative_tokens": 2}
    )
    with served_bundle(bundle, "--slots", "8", "--max-context", "512", "--deterministic") as served:
        yield served


def tuned_bundle(folder: Path, strategy: str, **parameters: Any) -> Path:
    """As a tuned release: bfloat16, compiled layers, and a hardware profile of this machine."""
    return default_bundle(folder, "bfloat16", strategy, parameters, profiled=True)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """What users get by default."""
    bundle = tuned_bundle(tmp_path_factory.mktemp("hybrid"), "hybrid")
    with served_bundle(bundle, "--slots", "32", "--max-context", "512") as served:
        yield served


@pytest.fixture(scope="module")
def eagle3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A strategy whose drafts under load are as long as the tuner finds best."""
    bundle = tuned_bundle(tmp_path_factory.mktemp("eagle3"), "eagle3", num_speculative_tokens=4)
    with served_bundle(bundle, "--slots", "32", "--max-context", "512") as served:
        yield served


@dataclass
class Record:
    """What the clients saw."""

    answers: list[tuple[Question, str]] = field(default_factory=list)
    statuses: Counter[int | str] = field(default_factory=Counter)
    tokens: int = 0
    memory: list[tuple[float, int]] = field(default_factory=list)


def body_of(question: Question, **more: Any) -> dict[str, Any]:
    prompt, size = question
    return {"model": "smollm2-135m", "prompt": prompt, "max_tokens": size, "temperature": 0, **more}


async def client(
    url: str,
    number: int,
    questions: list[Question],
    until: float,
    record: Record,
    more: dict[str, Any],
) -> None:
    """Ask one thing after another; wait as long as a 429 says."""
    order = random.Random(number)
    while time.monotonic() < until:
        try:
            async with LightClient(url) as http:
                while time.monotonic() < until:
                    question = order.choice(questions)
                    answer = await http.post("/v1/completions", body_of(question, **more))
                    record.statuses[answer.status] += 1
                    if answer.status == 429:
                        await asyncio.sleep(
                            float(answer.headers["retry-after"]) * order.uniform(0.5, 1)
                        )
                    elif answer.status == 200:
                        record.answers.append((question, answer.json()["choices"][0]["text"]))
        except (OSError, asyncio.IncompleteReadError) as error:
            record.statuses[type(error).__name__] += 1


async def watch(pid: int, until: float, record: Record) -> None:
    process, started = psutil.Process(pid), time.monotonic()
    while time.monotonic() < until:
        record.memory.append((time.monotonic() - started, process.memory_info().rss))
        await asyncio.sleep(2)


async def count(http: httpx.AsyncClient, until: float, record: Record) -> None:
    """Tokens as the server makes them: answers end eight at a time, hundreds of tokens at once, too
    coarse for half a minute."""
    before = await generated(http)
    await asyncio.sleep(until - time.monotonic())
    record.tokens = await generated(http) - before


async def generated(http: httpx.AsyncClient) -> int:
    """Tokens of all answers since the server began."""
    (line,) = [
        line
        for line in (await http.get("/metrics")).text.splitlines()
        if line.startswith("vllm:generation_tokens_total")
    ]
    return int(float(line.split()[-1]))


def load(
    served: Served, clients: int, seconds: float, questions: list[Question], **more: Any
) -> Record:
    record = Record()

    async def run() -> None:
        until = time.monotonic() + seconds
        async with httpx.AsyncClient(base_url=served.url, timeout=300) as http:
            asking = [
                client(served.url, number, questions, until, record, more)
                for number in range(clients)
            ]
            await asyncio.gather(
                *asking, watch(served.pid, until, record), count(http, until, record)
            )

    asyncio.run(run())
    return record


def questions() -> list[Question]:
    return [(prompt.prompt, size) for prompt in demo_prompts(16) for size in SIZES]


def first_difference(served: Served, question: Question, text: str) -> float:
    """The gap between the target's two best tokens (nats) where `text` leaves the answer that the
    server gives alone."""
    answer = httpx.post(
        f"{served.url}/v1/completions", json=body_of(question, logprobs=2), timeout=300
    ).json()["choices"][0]["logprobs"]
    for token, offset, top in zip(
        answer["tokens"], answer["text_offset"], answer["top_logprobs"], strict=True
    ):
        place = offset - answer["text_offset"][0]
        if text[place : place + len(token)] != token:
            best, second = sorted(top.values(), reverse=True)[:2]
            return float(best - second)
    return 0.0 if text.startswith("".join(answer["tokens"])) else float("inf")


def test_64_clients_for_three_minutes(server: Served) -> None:
    record = load(server, CLIENTS, SECONDS, questions())
    warm = [size for seconds, size in record.memory if seconds >= WARM_UP]
    middle = statistics.median(warm)
    print(
        f"\n{len(record.answers)} answers, {record.tokens / SECONDS:.1f} tokens/s, "
        f"statuses {dict(record.statuses)}, "
        f"memory {min(warm) / middle - 1:+.1%} to {max(warm) / middle - 1:+.1%} of "
        f"{middle / 1e6:.0f} MB"
    )
    assert set(record.statuses) <= {200, 429}
    assert max(warm) <= 1.05 * middle
    assert min(warm) >= 0.95 * middle
    alone: dict[Question, str] = {}
    for question in sorted({asked for asked, _ in record.answers}):
        given = httpx.post(
            f"{server.url}/v1/completions", json=body_of(question), timeout=300
        ).json()
        alone[question] = given["choices"][0]["text"]
    different = [(question, text) for question, text in record.answers if text != alone[question]]
    gaps = [first_difference(server, question, text) for question, text in different]
    for (question, _), gap in zip(different, gaps, strict=True):
        print(f"differs at a gap of {gap:.2e}: {question[0][:60]!r}, {question[1]} tokens")
    assert len(different) <= 0.001 * len(record.answers)
    assert all(gap < NEAR_TIE for gap in gaps)
    health = httpx.get(f"{server.url}/health").json()
    assert (health["running"], health["waiting"]) == (0, 0), "a slot was not given back"


def test_eight_at_once_bring_2_5_times_the_tokens(server: Served) -> None:
    asked = [(prompt, 48) for prompt, size in questions() if size == 48]
    ratios = []
    for _ in range(3):
        one, eight = (load(server, clients, 25, asked) for clients in (1, 8))
        ratios.append(eight.tokens / one.tokens)
    print(
        f"\neight at once over one: {statistics.median(ratios):.2f} "
        f"({', '.join(f'{ratio:.2f}' for ratio in ratios)})"
    )
    assert statistics.median(ratios) >= 2.5


@dataclass(frozen=True)
class Ratio:
    """Mean of the ratios of windows, and its two-sided 95 % interval by Student's t."""

    values: Sequence[float]

    @property
    def mean(self) -> float:
        return statistics.mean(self.values)

    @property
    def half(self) -> float:
        return T_95 * statistics.stdev(self.values) / len(self.values) ** 0.5

    def __str__(self) -> str:
        return f"{self.mean:.2f} [{self.mean - self.half:.3f}, {self.mean + self.half:.3f}]"

    def check_not_slower(self) -> None:
        """That nothing is lost, by 95 % confidence."""
        assert self.mean + self.half >= NOT_SLOWER, f"slower, beyond what windows differ by: {self}"
        assert self.mean - self.half >= NOT_SLOWER, (
            f"windows differ too much to tell: {self}; take longer ones"
        )


def check_memory(records: Sequence[Record]) -> None:
    """That memory stayed within 5 % of its median, over all windows of a server."""
    sizes = [size for record in records for _, size in record.memory]
    middle = statistics.median(sizes)
    print(
        f"memory {min(sizes) / middle - 1:+.1%} to {max(sizes) / middle - 1:+.1%} of "
        f"{middle / 1e6:.0f} MB"
    )
    assert max(sizes) <= 1.05 * middle
    assert min(sizes) >= 0.95 * middle


def short_questions() -> list[Question]:
    return [question for question in questions() if question[1] == 48]


@pytest.mark.parametrize(
    ("kind", "clients"),
    [
        ("server", 8),
        ("server", 64),
        ("hybrid", 1),
        ("hybrid", 8),
        *(("eagle3", clients) for clients in (1, 8, 32, 64)),
    ],
)
def test_speculation_under_load_is_not_slower_than_plain_decoding(
    kind: str, clients: int, request: pytest.FixtureRequest
) -> None:
    """Hybrid is measured to draft for a single request only, so one number of clients more is
    enough. The aim of 1.1 times plain decoding at eight clients is read from what is printed: this
    pair does not reach it (docs/log.md, 0.9.0)."""
    served = request.getfixturevalue(kind)
    warm_up(served, clients)
    ratios: list[float] = []
    records: list[Record] = []
    for turn in range(WINDOWS):
        made = {}
        for plain in (True, False) if turn % 2 else (False, True):
            made[plain] = window(served, clients, speculation={"enabled": not plain})
        ratios.append(made[False].tokens / made[True].tokens)
        records += made.values()
    found = Ratio(ratios)
    table = httpx.get(f"{served.url}/health").json()["draft_length_by_batch"]
    print(
        f"\n{kind}, {clients} at once, over plain decoding: {found}, "
        f"{made[False].tokens / SECONDS_OF_A_WINDOW:.1f} tokens/s, draft lengths {table}"
    )
    check_memory(records)
    found.check_not_slower()


def warm_up(served: Served, clients: int) -> None:
    """Until prompts are cached and drafters have learnt."""
    load(served, clients, WARM_UP_WINDOWS * SECONDS_OF_A_WINDOW, short_questions())


def window(served: Served, clients: int, **more: Any) -> Record:
    return load(served, clients, SECONDS_OF_A_WINDOW, short_questions(), **more)
