"""Webhooks of MLflow: which deliveries are genuine, what they say of an alias, and how MLflow is
told to send them.

MLflow signs as Standard Webhooks (https://www.standardwebhooks.com) do: HMAC-SHA256 over the
delivery's id, its timestamp and the body as it is sent. What is in a genuine body is a hint, no
order: whoever receives it asks the registry what the alias names.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from draftwell.registry.access import hidden
from draftwell.registry.connection import registry_errors
from draftwell.registry.store import Store
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import read_text

if TYPE_CHECKING:
    from mlflow.entities.webhook import Webhook

SECRET = "DRAFTWELL_WEBHOOK_SECRET"
SHORTEST_SECRET = 16
"""Characters; a shorter secret can be guessed from one delivery."""
DELIVERY, SENT, SIGNATURE = "X-MLflow-Delivery-Id", "X-MLflow-Timestamp", "X-MLflow-Signature"
EVENT = "model_version_alias.created"
"""MLflow sends it for an alias that is set for the first time and for one that is moved."""
TOLERANCE = 300.0
"""Seconds by which a delivery's timestamp and this machine's clock may differ."""
LONGEST_NAME = 62
"""Characters of a webhook's name in MLflow."""


def signature(secret: bytes, delivery: str, timestamp: str, body: bytes) -> str:
    """The signature of a delivery, as its header has it.

    >>> signature(b"0123456789abcdef", "id-1", "1700000000", b"{}")[:10]
    'v1,Kq9NmXA'
    """
    signed = b".".join((delivery.encode(), timestamp.encode(), body))
    digest = hmac.new(secret, signed, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"


def read_secret(file: Path | None) -> str:
    """The secret that MLflow signs with: a file's first line, else `$DRAFTWELL_WEBHOOK_SECRET`.

    Raises:
        DraftwellError: there is none (`no_webhook_secret`), it is shorter than `SHORTEST_SECRET`,
            or the file cannot be read.
    """
    try:
        text = os.environ.get(SECRET, "") if file is None else read_text(file)
    except (OSError, UnicodeDecodeError) as error:
        raise DraftwellError(
            f"cannot read the secret in {file} ({getattr(error, 'strerror', None) or 'not text'}):"
            " name a text file with the secret in its first line",
            code="unreadable_webhook_secret",
        ) from error
    secret = text.strip().partition("\n")[0].strip()
    if len(secret) < SHORTEST_SECRET:
        raise DraftwellError(
            f"{f'{file} holds' if file else f'{SECRET} has'} no secret of {SHORTEST_SECRET} "
            "characters or more: make one with `openssl rand -hex 32`, for MLflow and for this "
            "command, and name its file with --set secret_file=…",
            code="no_webhook_secret",
        )
    return secret


@dataclass(frozen=True)
class Refusal:
    """Why a delivery is not taken: a status of HTTP, and words for the sender."""

    status: int
    why: str


class Deliveries:
    """Tells genuine, recent and new deliveries from others.

    Only ids of genuine ones are remembered, for as long as their timestamp would be taken.
    """

    def __init__(self, secret: str, clock: Callable[[], float] = time.time):
        self._secret, self._clock = secret.encode(), clock
        self._taken: dict[str, float] = {}

    def refusal(self, headers: Mapping[str, str], body: bytes) -> Refusal | None:
        """Why a delivery is refused; None where it is taken, which is remembered.

        Args:
            headers: of the request, whose names may be in any case.
            body: as it came, to the byte.
        """
        delivery, sent, given = (headers.get(name, "") for name in (DELIVERY, SENT, SIGNATURE))
        if not (delivery and sent and given):
            return Refusal(401, f"{DELIVERY}, {SENT} and {SIGNATURE} are needed")
        expected = signature(self._secret, delivery, sent, body)
        if not hmac.compare_digest(expected.encode(), given.encode()):
            return Refusal(401, "the signature is not that of this body with this server's secret")
        now = self._clock()
        if not re.fullmatch("[0-9]{1,12}", sent) or abs(now - int(sent)) > TOLERANCE:
            return Refusal(401, f"the timestamp is more than {TOLERANCE:.0f} s from this clock")
        kept = {one: at for one, at in self._taken.items() if now - at <= 2 * TOLERANCE}
        self._taken = kept
        if delivery in kept:
            return Refusal(409, "this delivery came before")
        kept[delivery] = now
        return None


class _Body(BaseModel):
    entity: str
    action: str
    data: dict[str, Any]


class _Alias(BaseModel):
    name: str
    alias: str


def moved_alias(body: bytes) -> tuple[str, str] | None:
    """The model and the alias that a delivery says was set; None for any other event.

    Raises:
        ValueError: it is not JSON of MLflow's form.
    """
    said = _Body.model_validate_json(body)
    if f"{said.entity}.{said.action}" != EVENT:
        return None
    moved = _Alias.model_validate(said.data)
    return moved.name, moved.alias


def register(store: Store, model: str, url: str, secret: str) -> str | None:
    """Let MLflow's server send `EVENT` to an address, and try it once; a webhook that was made for
    the same model is changed, not made again.

    Returns:
        what went wrong when MLflow tried it; None where the receiver answered.
    Raises:
        DraftwellError: the registry is no server (`webhooks_need_server`), or MLflow refuses the
            address (`webhook_address_refused`).
    """
    from mlflow.exceptions import MlflowException

    registry = os.environ.get("MLFLOW_REGISTRY_URI") or store.uri
    if not registry.lower().startswith("http"):
        raise DraftwellError(
            f"{hidden(registry)} is no server, and only MLflow's server sends webhooks: start one "
            "(`draftwell release ui`), and name it in MLFLOW_TRACKING_URI",
            code="webhooks_need_server",
        )
    name = f"draftwell.{model}"
    if len(name) > LONGEST_NAME:
        name = f"draftwell.{hashlib.sha256(model.encode()).hexdigest()[:32]}"
    wanted: dict[str, Any] = {"url": url, "events": [EVENT], "secret": secret, "status": "ACTIVE"}
    with registry_errors(registry):
        known = [hook for hook in _webhooks(store) if hook.name == name]
        try:
            if known:
                made = store.client.update_webhook(known[0].webhook_id, **wanted)
            else:
                made = store.client.create_webhook(name, **wanted)
        except MlflowException as error:
            if error.error_code != "INVALID_PARAMETER_VALUE":
                raise
            raise DraftwellError(
                f"MLflow refuses the address ({str(error)[:200]}): its server sends to http:// "
                "with MLFLOW_WEBHOOK_ALLOWED_SCHEMES=http,https, and within a machine or a private "
                "network with MLFLOW_WEBHOOK_ALLOW_PRIVATE_IPS=true, set where it is started",
                code="webhook_address_refused",
            ) from error
        tried = store.client.test_webhook(made.webhook_id)
    if tried.success:
        return None
    return str(tried.error_message or f"status {tried.response_status}")[:300]


def _webhooks(store: Store) -> Iterator[Webhook]:
    """All webhooks that MLflow has."""
    token: str | None = None
    while token != "":
        page = store.client.list_webhooks(max_results=100, page_token=token)
        yield from page
        token = page.token or ""
