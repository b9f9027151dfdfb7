"""Work before the queue: a client has two turns at once, whatever it sends, and others are not kept
waiting by it."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from draftwell.serving.server.http.client_turns import ClientTurns
from draftwell.serving.server.http.security import Security
from draftwell.serving.server.model.served_model import ServedModel
from tests.support.server.served_pair import served_pair, serving
from tests.support.server.server_process import wait_until


class Busy:
    """Work that goes on until it may end."""

    def __init__(self) -> None:
        self.now, self.most = 0, 0
        self.go_on, self._lock = threading.Event(), threading.Lock()

    def __call__(self, result: int) -> int:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        assert self.go_on.wait(60)
        with self._lock:
            self.now -= 1
        return result


def test_a_client_has_two_turns_at_once() -> None:
    busy = Busy()

    async def check(pool: ThreadPoolExecutor) -> None:
        turns = ClientTurns(pool)
        many = [asyncio.create_task(turns.run("greedy", busy, number)) for number in range(20)]
        assert await turns.run("other", lambda: "answered") == "answered"
        await asyncio.to_thread(wait_until, lambda: busy.now == 2, "two are at work")
        busy.go_on.set()
        assert await asyncio.gather(*many) == list(range(20))
        assert busy.most == 2
        await asyncio.sleep(0.05)
        assert not turns._clients, "nothing is kept of clients that are gone"

    with ThreadPoolExecutor(4) as pool:
        asyncio.run(check(pool))


def test_work_that_nobody_waits_for_keeps_its_turn_until_it_ends() -> None:
    """Else a client would have many at once by short deadlines."""
    busy = Busy()

    async def check(pool: ThreadPoolExecutor) -> None:
        turns = ClientTurns(pool)
        for _ in range(6):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(turns.run("impatient", busy, 0), 0.05)
        assert (busy.now, busy.most) == (2, 2)
        busy.go_on.set()
        assert await turns.run("impatient", busy, 5) == 5

    with ThreadPoolExecutor(4) as pool:
        asyncio.run(check(pool))


def test_errors_are_those_of_the_work() -> None:
    def fail() -> None:
        raise KeyError("x")

    async def check(pool: ThreadPoolExecutor) -> None:
        turns = ClientTurns(pool, most=1)
        for _ in range(3):
            with pytest.raises(KeyError):
                await turns.run("one", fail)

    with ThreadPoolExecutor(1) as pool:
        asyncio.run(check(pool))


@pytest.fixture(scope="module")
def served() -> ServedModel:
    return served_pair("autoregressive", slots=2)


@pytest.mark.parametrize(
    ("slow", "path", "asked"),
    [
        ("encode", "/v1/completions", {"prompt": "slow"}),
        ("encode", "/tokenize", {"prompt": "slow"}),
        ("grammar", "/v1/completions", {"prompt": [5], "guided_choice": ["slow"]}),
    ],
    ids=str,
)
def test_another_key_is_answered_while_one_sends_much(
    served: ServedModel,
    monkeypatch: pytest.MonkeyPatch,
    slow: str,
    path: str,
    asked: dict[str, Any],
) -> None:
    busy, right = Busy(), getattr(served, slow)

    def work(*given: Any, **options: Any) -> Any:
        if "slow" in str(given):
            busy(0)
        return right(*given, **options)

    monkeypatch.setattr(served, slow, work)
    with (
        serving(served, security=Security(keys=("one", "two"))) as (url, _),
        httpx.Client(base_url=url, timeout=60) as http,
    ):

        def ask(key: str, path: str, **body: Any) -> int:
            return http.post(
                path, json={"model": "tiny"} | body, headers={"Authorization": f"Bearer {key}"}
            ).status_code

        with ThreadPoolExecutor(12) as clients:
            try:
                many = [clients.submit(ask, "one", path, **asked) for _ in range(12)]
                wait_until(lambda: busy.now == 2, "two are at work")
                assert ask("two", "/v1/completions", prompt="quick", max_tokens=1) == 200
                assert (
                    ask("two", "/v1/completions", prompt=[5], guided_choice=["quick"], max_tokens=1)
                    == 200
                )
                assert busy.most == 2
            finally:
                busy.go_on.set()
            assert {one.result() for one in many} == {200}
