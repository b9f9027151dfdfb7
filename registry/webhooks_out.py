"""Webhooks that Draftwell sends: what became of a release, and drift, to the addresses in
`DRAFTWELL_WEBHOOKS`.

They are signed as Standard Webhooks (https://www.standardwebhooks.com) ask. Threads send them and
try again; nothing here fails or delays the caller, but the end of its process, by `AT_END` seconds
at most. The addresses are the operator's own, so they may be of this network; redirections are not
followed, because they would lead a signed body elsewhere.
"""

from __future__ import annotations

import atexit
import base64
import binascii
import hashlib
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal
from urllib.parse import urlsplit

from draftwell.registry.webhooks import SHORTEST_SECRET, signature

Event = Literal[
    "release.promoted",
    "release.rolled_back",
    "release.deployed",
    "release.refused",
    "traffic.drifted",
    "engine.alarm",
]
ADDRESSES, KEY = "DRAFTWELL_WEBHOOKS", "DRAFTWELL_WEBHOOKS_SECRET"
PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds between one try and the next."""
WORTH_ANOTHER_TRY = {408, 425, 429}
"""Statuses below 500 that say: not now."""
ANSWER = 5.0
"""Seconds that a receiver may take to connect, and to answer."""
AT_END = 15.0
"""Seconds that a process waits at its end for what is not delivered yet."""
log = logging.getLogger(__name__)
_under_way: set[threading.Thread] = set()


def send_event(event: Event, data: Mapping[str, Any], mark: str | None = None) -> bool:
    """Send an event to every address of the environment, from threads of its own.

    Args:
        data: values of JSON, without secrets and texts of prompts or answers.
        mark: names what happened; whoever tells of it again gives it the same id, by which a
            receiver knows it. None: an id of its own.
    Returns:
        whether it was handed to a thread.
    """
    addresses = os.environ.get(ADDRESSES, "").split()
    if not addresses:
        return False
    named = hashlib.sha256(f"{event}.{mark}".encode()).hexdigest() if mark else uuid.uuid4().hex
    said = {"type": event, "timestamp": datetime.now(UTC).isoformat(), "data": dict(data)}
    try:
        key = signing_key(os.environ.get(KEY, ""))
        body = json.dumps(said, allow_nan=False, default=str).encode()
        for address in addresses:
            given = (address, key, f"msg_{named[:32]}", body)
            thread = threading.Thread(target=_deliver, args=given, daemon=True)
            _under_way.add(thread)
            thread.start()
    except (ValueError, RuntimeError) as error:  # no secret, or no room for a thread
        log.warning("no webhook is sent: %s", error)
        return False
    return True


def signing_key(secret: str) -> bytes:
    """The bytes to sign with: those behind `whsec_` in base64, as Standard Webhooks write them,
    else those of the text.

    Raises:
        ValueError: there is none, or it is no base64.

    >>> signing_key("whsec_c2VjcmV0LW9mLXNpeHRlZW4=")
    b'secret-of-sixteen'
    """
    if not secret:
        raise ValueError(f"{ADDRESSES} is set, and {KEY}, which signs them, is not")
    if not secret.startswith("whsec_"):
        return long_enough(secret.encode())
    try:
        key = base64.b64decode(secret.removeprefix("whsec_"), validate=True)
    except binascii.Error:
        raise ValueError(f"what follows whsec_ in {KEY} is no base64") from None
    return long_enough(key)


def long_enough(key: bytes) -> bytes:
    """The key, unless it is short enough to be guessed."""
    if len(key) < SHORTEST_SECRET:
        raise ValueError(f"{KEY} is shorter than {SHORTEST_SECRET} letters")
    return key


def _deliver(address: str, key: bytes, name: str, body: bytes) -> None:
    """Deliver a body, and say in the log where that fails."""
    try:
        why = _refusal(address, key, name, body)
    except Exception as error:  # an address that is none, say: the caller's work goes on
        why = type(error).__name__
    if why is not None:
        log.warning("the webhook %s was not delivered to %s: %s", name, shown(address), why)
    _under_way.discard(threading.current_thread())


def _refusal(address: str, key: bytes, name: str, body: bytes) -> str | None:
    """Post a body until a receiver takes it (None) or refuses it for good, or the pauses are
    over."""
    import httpx

    why = ""
    with httpx.Client(timeout=ANSWER, follow_redirects=False) as client:
        for pause in (0.0, *PAUSES):
            time.sleep(pause)
            try:
                status = _post(client, address, key, name, body)
            except httpx.TransportError as error:
                why = type(error).__name__
                continue
            if 200 <= status < 300:
                return None
            why = f"status {status}"
            if status < 500 and status not in WORTH_ANOTHER_TRY:
                break
    return why


def _post(client: Any, address: str, key: bytes, name: str, body: bytes) -> int:
    """One try, signed with the time of now; the answer's body is not read."""
    now = str(int(time.time()))
    headers = {
        "content-type": "application/json",
        "user-agent": "draftwell",
        "webhook-id": name,
        "webhook-timestamp": now,
        "webhook-signature": signature(key, name, now, body),
    }
    with client.stream("POST", address, content=body, headers=headers) as answer:
        return int(answer.status_code)


def shown(address: str) -> str:
    """An address as a log may have it: the paths of some services are a password.

    >>> shown("https://name:word@hooks.example.com:8443/services/T0/B1")
    'https://hooks.example.com:8443/…'
    """
    try:
        parts = urlsplit(address)
        port = f":{parts.port}" if parts.port else ""
        return f"{parts.scheme}://{parts.hostname}{port}/…"
    except ValueError:
        return "an address that cannot be read"


@atexit.register
def wait_for_deliveries(seconds: float = AT_END) -> None:
    """Wait until all that was handed over is delivered or given up, or the seconds are over."""
    end = time.monotonic() + seconds
    for thread in list(_under_way):
        thread.join(max(0.0, end - time.monotonic()))
