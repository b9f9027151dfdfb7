"""Webhooks that are sent: signed, tried again within a bound, and never in the way of the work."""

import json
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from draftwell.registry import webhooks_out
from draftwell.registry.bundles.places import link_current
from draftwell.registry.promotion import adopt, promote, rollback
from draftwell.registry.releases import record_gate, tell_refused
from draftwell.registry.store import Store
from draftwell.registry.webhooks import signature
from draftwell.registry.webhooks_out import send_event, wait_for_deliveries
from tests.support.loop.publishing import Make, verdict

SECRET = "the operator's own secret"


@dataclass
class Receiver:
    """What came, and what is answered: the statuses in their order, then 204."""

    address: str = ""
    statuses: list[int] = field(default_factory=list)
    came: list[tuple[dict[str, str], bytes]] = field(default_factory=list)

    def events(self) -> list[dict[str, Any]]:
        """What was told, once everything is delivered."""
        wait_for_deliveries()
        return [json.loads(body) for _, body in self.came]


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """A receiver on a port of this machine, which the environment names."""
    found = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            found.came.append(({name.lower(): v for name, v in self.headers.items()}, body))
            status = found.statuses.pop(0) if found.statuses else 204
            self.send_response(status)
            if status == 302:
                self.send_header("location", f"{found.address}/elsewhere")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    found.address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv(webhooks_out.ADDRESSES, f"{found.address}/hooks/T0KEN")
    monkeypatch.setenv(webhooks_out.KEY, SECRET)
    monkeypatch.setattr(webhooks_out, "PAUSES", (0.01, 0.01, 0.01))
    yield found
    server.shutdown()
    server.server_close()


def test_a_receiver_can_tell_who_sent_what_and_when(receiver: Receiver) -> None:
    assert send_event("release.deployed", {"pair": "tiny", "release": 2})
    (said,) = receiver.events()
    assert said["type"] == "release.deployed"
    assert said["data"] == {"pair": "tiny", "release": 2}
    headers, body = receiver.came[0]
    name, sent = headers["webhook-id"], headers["webhook-timestamp"]
    assert headers["webhook-signature"] == signature(SECRET.encode(), name, sent, body)
    assert abs(time.time() - int(sent)) < 60
    assert headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("statuses", "tries"),
    [
        ([503, 429], 3),  # then it is taken
        ([500] * 9, 4),  # given up
        ([400], 1),  # it would be refused again
        ([302], 1),  # not followed: a signed body would go elsewhere
    ],
)
def test_what_may_pass_is_tried_again_with_one_id(
    receiver: Receiver, statuses: list[int], tries: int, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.statuses += statuses
    with caplog.at_level(logging.WARNING):
        send_event("traffic.drifted", {})
        assert len(receiver.events()) == tries
    assert len({headers["webhook-id"] for headers, _ in receiver.came}) == 1
    assert ("not delivered" in caplog.text) == (statuses != [503, 429])
    assert "T0KEN" not in caplog.text, "such a path is a password"
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    "wrong", ["http://127.0.0.1:1/x", "nonsense", "ftp://127.0.0.1/x", "http://[::1", "http://a:b/"]
)
def test_an_address_where_nobody_answers_neither_fails_nor_delays(
    receiver: Receiver, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(webhooks_out.ADDRESSES, f"{wrong} {receiver.address}")
    monkeypatch.setattr(webhooks_out, "PAUSES", ())
    may_begin, deliver = threading.Event(), webhooks_out._deliver
    monkeypatch.setattr(
        webhooks_out, "_deliver", lambda *given: (may_begin.wait(60), deliver(*given))
    )
    send_event("release.deployed", {})
    assert receiver.came == [], "threads send it, not the caller"
    may_begin.set()
    assert len(receiver.events()) == 1, "the others hear of it"


def test_a_process_waits_at_its_end_for_a_while_only(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()
    monkeypatch.setattr(webhooks_out, "_deliver", lambda *_: may_end.wait(60))
    send_event("release.deployed", {})
    (thread,) = webhooks_out._under_way
    began = time.monotonic()
    wait_for_deliveries(0.1)
    assert 0.05 < time.monotonic() - began < 30
    assert thread.is_alive()
    may_end.set()
    thread.join()
    webhooks_out._under_way.clear()


@pytest.mark.parametrize("secret", ["", "whsec_%%%", "whsec_", "short"])
def test_nothing_is_sent_unsigned(
    receiver: Receiver,
    secret: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(webhooks_out.KEY, secret)
    assert not send_event("release.deployed", {})
    assert receiver.events() == []
    assert webhooks_out.KEY in caplog.text
    assert "%%%" not in caplog.text


def test_what_becomes_of_a_release_is_told_once(
    receiver: Receiver, store: Store, make_release: Make, tmp_path: Path
) -> None:
    one, two = (make_release(str(n), accepted=n) for n in (1, 2))
    record_gate(store, verdict(one))
    assert receiver.events() == [], "that it passed is told when it is promoted"
    promote(store, "tiny", "cpu", 1)
    record_gate(store, verdict(two, value=0.5, beside=1))
    record_gate(store, verdict(two, beside=1))
    promote(store, "tiny", "cpu", 2)
    rollback(store, "tiny", "cpu", "answers are cut")
    store.set_alias(two.published, "champion")
    adopt(store, "tiny", "cpu")
    for _ in range(2):
        tell_refused(one, "it has no gate", mark="the same")
    said = receiver.events()
    told = {(e["type"], e["data"]["release"], e["data"].get("what")) for e in said}
    assert told == {
        ("release.promoted", 1, "promotion"),
        ("release.refused", 2, None),
        ("release.promoted", 2, "promotion"),
        ("release.rolled_back", 1, "rollback"),
        ("release.promoted", 2, "by hand"),
        ("release.refused", 1, None),
    }
    assert len(said) == 7
    refused = next(e["data"] for e in said if e["data"].get("why") == "failed")
    assert refused["checks"] == ["min_speedup_lower_bound"]
    back = next(e["data"] for e in said if e["type"] == "release.rolled_back")
    assert (back["before"], back["reason"]) == (2, "answers are cut")
    assert len({headers["webhook-id"] for headers, _ in receiver.came}) == 6, "one was told twice"


def test_a_bundle_is_told_of_when_current_moves_to_it(receiver: Receiver, tmp_path: Path) -> None:
    home = tmp_path / "dist" / "tiny"
    for name in ("1-cpu", "2-cpu"):
        (home / name).mkdir(parents=True)
    for name in ("1-cpu", "1-cpu", "2-cpu"):
        link_current(home, home / name, "cpu-vllm")
    said = sorted((e["data"]["before"] or "", e["data"]["bundle"]) for e in receiver.events())
    assert said == [("", "1-cpu"), ("1-cpu", "2-cpu")]
    assert {e["data"]["device"] for e in receiver.events()} == {"cpu-vllm"}
