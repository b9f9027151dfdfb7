"""The receiver of MLflow's webhooks, on a port of its own: what it answers, and what it lets
run."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import pytest

from draftwell.flows.workers import webhook_receiver
from draftwell.flows.workers.webhook_receiver import MOST_BYTES, InTurn, application, server_of
from draftwell.registry.webhooks import DELIVERY, SENT, SIGNATURE, Deliveries, signature
from draftwell.serving.errors import DraftwellError
from draftwell.serving.server.process import listen

SECRET = "a secret of this test"
MODEL = "release.tiny.cpu"


def said(model: str = MODEL, alias: str = "champion", action: str = "created") -> bytes:
    """The body of a delivery, as MLflow writes it."""
    data = {"name": model, "alias": alias, "version": "2"}
    about = {"entity": "model_version_alias", "action": action, "timestamp": "2026-01-01T00:00"}
    return json.dumps({**about, "data": data}).encode()


def signed(body: bytes, name: str) -> dict[str, str]:
    sent = str(int(time.time()))
    made = signature(SECRET.encode(), name, sent, body)
    return {DELIVERY: name, SENT: sent, SIGNATURE: made}


class Work:
    """Counts its runs, each of which waits until it may end."""

    def __init__(self) -> None:
        self.runs, self.may_end = 0, threading.Event()
        self.may_end.set()
        self.fails: Exception | None = None

    def __call__(self) -> None:
        self.runs += 1
        self.may_end.wait(60)
        if self.fails is not None:
            raise self.fails

    def ran(self, times: int) -> bool:
        """Whether it runs for this time within a while."""
        return waits_for(lambda: self.runs >= times) and self.runs == times

    def stays_at(self, times: int) -> bool:
        """Whether it ran so often and does not run again."""
        return self.ran(times) and not waits_for(lambda: self.runs > times, 0.2)


def waits_for(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


@pytest.fixture
def work() -> Work:
    return Work()


@pytest.fixture
def client(work: Work) -> Iterator[httpx.Client]:
    """Asks a receiver whose work ran once, at its start."""
    turn = InTurn(work)
    assert work.ran(1), "what was missed while nobody listened is made up for"
    with listen("127.0.0.1", 0) as listener:
        server = server_of(application(Deliveries(SECRET), MODEL, "champion", turn))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        with httpx.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}") as asked:
            assert waits_for(lambda: server.started)
            yield asked
        server.should_exit = True
        thread.join()


def test_an_alias_that_was_moved_runs_the_work(client: httpx.Client, work: Work) -> None:
    assert client.get("/health").status_code == 200
    work.may_end.clear()  # the answer does not wait for it
    body = said()
    assert client.post("/mlflow", content=body, headers=signed(body, "1")).status_code == 202
    assert work.ran(2)
    work.may_end.set()


def test_nothing_runs_for_anything_else(client: httpx.Client, work: Work) -> None:
    body = said()
    good = signed(body, "good")

    def status(content: bytes, headers: dict[str, str]) -> int:
        return client.post("/mlflow", content=content, headers=headers).status_code

    assert status(body, {}) == 401
    assert status(said(alias="other"), good) == 401, "the signature is of another body"
    for number, other in enumerate(
        (said(action="deleted"), said(alias="candidate"), said("release.other.cpu"))
    ):
        assert status(other, signed(other, f"other{number}")) == 200
    assert status(b"[" * 50_000, signed(b"[" * 50_000, "garbage")) == 400
    assert client.get("/mlflow").status_code == 405
    assert client.post("/", content=body, headers=signed(body, "4")).status_code == 404
    assert work.stays_at(1)
    assert status(body, good) == 202
    assert status(body, good) == 409, "the same delivery once more"
    assert work.stays_at(2)


def test_a_body_that_is_too_large_is_not_read(client: httpx.Client, work: Work) -> None:
    def parts() -> Iterator[bytes]:  # its length is not said
        for _ in range(64):
            yield bytes(2**14)

    large = bytes(2**20)
    assert client.post("/mlflow", content=large, headers=signed(b"", "1")).status_code == 413
    with suppress(httpx.WriteError):  # it hangs up in the middle
        assert client.post("/mlflow", content=parts()).status_code == 413
    most = said() + b" " * (MOST_BYTES - len(said()))
    assert client.post("/mlflow", content=most, headers=signed(most, "2")).status_code == 202
    assert work.ran(2)


def test_a_body_that_does_not_come_is_given_up(
    client: httpx.Client, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook_receiver, "BODY_SECONDS", 0.2)
    with socket.create_connection((client.base_url.host, client.base_url.port or 0), 30) as open_:
        open_.sendall(b"POST /mlflow HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        assert b" 408 " in open_.recv(1000)
    assert work.ran(1)


def test_many_at_once_are_one_more_run(client: httpx.Client, work: Work) -> None:
    work.may_end.clear()
    body = said()
    assert client.post("/mlflow", content=body, headers=signed(body, "first")).status_code == 202
    assert work.ran(2)  # under way from here on

    def post(number: int) -> int:
        headers = signed(body, f"many{number}")
        return client.post("/mlflow", content=body, headers=headers, timeout=60).status_code

    with ThreadPoolExecutor(20) as pool:
        assert set(pool.map(post, range(20))) == {202}
    assert work.runs == 2
    work.may_end.set()
    assert work.stays_at(3)


@pytest.mark.parametrize("fails", [DraftwellError("no gate"), OSError("the disk"), ValueError()])
def test_a_run_that_fails_ends_neither_the_receiver_nor_the_next_run(
    client: httpx.Client, work: Work, fails: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    work.fails, body = fails, said()
    for number in (2, 3):
        headers = signed(body, str(number))
        assert client.post("/mlflow", content=body, headers=headers).status_code == 202
        assert work.ran(number)


def test_it_looks_by_itself_after_a_while() -> None:
    work = Work()
    work.may_end.clear()
    InTurn(work, patience=0.01)
    assert work.ran(1)
    work.may_end.set()
    assert waits_for(lambda: work.runs >= 3)
    work.may_end.clear()  # the thread is idle for the rest of the tests
