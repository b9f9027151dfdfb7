"""Deliveries of MLflow's webhooks: what is genuine, recent and new, and what is not."""

import base64
import json
from pathlib import Path

import pytest

from draftwell.registry.store import Store
from draftwell.registry.webhooks import (
    DELIVERY,
    SECRET,
    SENT,
    SIGNATURE,
    TOLERANCE,
    Deliveries,
    moved_alias,
    read_secret,
    register,
    signature,
)
from tests.support.errors import raises_code

NOW = 1_800_000_000
OURS = "a secret of this test"
BODY = b'{"entity": "model_version_alias"}'


def headers(name: str = "one", sent: str = str(NOW), secret: str = OURS) -> dict[str, str]:
    """Those of a delivery that was signed with a secret."""
    signed = signature(secret.encode(), name, sent, BODY)
    return {DELIVERY: name, SENT: sent, SIGNATURE: signed}


def test_the_signature_is_that_of_mlflow_and_of_standard_webhooks() -> None:
    from mlflow.webhooks.delivery import _generate_hmac_signature

    text = BODY.decode()
    assert signature(b"word", "d-1", "17", BODY) == _generate_hmac_signature(
        "word", "d-1", "17", text
    )
    # the example of the libraries of standardwebhooks.com
    key = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    assert (
        signature(key, "msg_p5jXN8AQM9LWM0D4loKWxJek", "1614265330", b'{"test": 2432232314}')
        == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    )


def test_what_is_not_signed_for_exactly_this_is_refused() -> None:
    good = headers()
    wrong = [
        {},
        *({name: value for name, value in good.items() if name != left} for left in good),
        good | {DELIVERY: "two"},
        good | {SENT: str(NOW + 1)},
        good | {SIGNATURE: good[SIGNATURE].removeprefix("v1,")},
        good | {SIGNATURE: good[SIGNATURE][:-4]},
        good | {SIGNATURE: "v1,ünï"},
        headers(secret="another secret of it"),
    ]
    deliveries = Deliveries(OURS, lambda: NOW)
    for each in wrong:
        refused = deliveries.refusal(each, BODY)
        assert refused is not None, each
        assert refused.status == 401
    refused = deliveries.refusal(good, BODY + b" ")
    assert refused is not None, "the body is signed, too"
    assert deliveries.refusal(good, BODY) is None, "none of them was remembered"


@pytest.mark.parametrize(
    ("sent", "taken"),
    [
        (NOW - TOLERANCE, True),
        (NOW + TOLERANCE, True),
        (NOW - TOLERANCE - 1, False),
        (NOW + TOLERANCE + 1, False),
        ("soon", False),
        (-NOW, False),
        ("9" * 40, False),
        ("١٨٠٠٠٠٠٠٠٠", False),
    ],
)
def test_only_what_was_sent_lately_is_taken(sent: float | str, taken: bool) -> None:
    text = sent if isinstance(sent, str) else f"{sent:.0f}"
    refused = Deliveries(OURS, lambda: NOW).refusal(headers(sent=text), BODY)
    assert (refused is None) == taken
    assert refused is None or refused.status == 401


def test_a_delivery_counts_once_for_as_long_as_its_timestamp_would_be_taken() -> None:
    now = float(NOW)
    deliveries = Deliveries(OURS, lambda: now)
    late = headers(sent=f"{NOW + TOLERANCE:.0f}")  # of a clock that is ahead
    assert deliveries.refusal(late, BODY) is None
    for later in (NOW + 1, NOW + TOLERANCE, NOW + 2 * TOLERANCE):
        now = later
        refused = deliveries.refusal(late, BODY)
        assert refused is not None
        assert refused.status == 409
    now = NOW + 2 * TOLERANCE + 1
    refused = deliveries.refusal(late, BODY)
    assert refused is not None
    assert refused.status == 401, "too old now"


def test_what_a_delivery_says() -> None:
    said = {"entity": "model_version_alias", "action": "created", "timestamp": "now"}
    data = {"name": "release.tiny.cpu", "alias": "champion", "version": "2"}

    def read(**changed: object) -> tuple[str, str] | None:
        return moved_alias(json.dumps({**said, "data": data, **changed}).encode())

    assert read() == ("release.tiny.cpu", "champion")
    assert read(action="deleted") is None
    assert read(entity="prompt_alias") is None
    for body in (b"", b"{", b"[]", b"\xff", b'{"a": 1}', b"[" * 60_000):
        with pytest.raises(ValueError):  # noqa: PT011
            moved_alias(body)
    for text in ("{}", '{"name": 1, "alias": "x"}', "[]", "null"):
        with pytest.raises(ValueError):  # noqa: PT011
            read(data=json.loads(text))


def test_the_secret_comes_from_a_file_or_the_environment_and_is_long_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "secret"
    monkeypatch.delenv(SECRET, raising=False)
    with raises_code("no_webhook_secret", SECRET):
        read_secret(None)
    monkeypatch.setenv(SECRET, OURS)
    assert read_secret(None) == OURS
    file.write_text("0123456789abcdef\nsecond line\n")
    assert read_secret(file) == "0123456789abcdef", "the file goes first"
    file.write_text("short\n")
    with raises_code("no_webhook_secret", str(file)):
        read_secret(file)
    for path in (tmp_path, tmp_path / "nowhere"):
        with raises_code("unreadable_webhook_secret", str(path)):
            read_secret(path)


def test_a_registry_in_a_file_sends_nothing(store: Store) -> None:
    with raises_code("webhooks_need_server", "draftwell release ui"):
        register(store, "release.tiny.cpu", "http://127.0.0.1:8100/mlflow", OURS)
