"""API keys: what each may do, whose state it uses, and a file that is followed while it is used."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import threading
from itertools import count
from pathlib import Path

import httpx
import pytest

from draftwell.serving.errors import DraftwellError
from draftwell.serving.server.http import keys as keys_module
from draftwell.serving.server.http.keys import (
    KEY_VARIABLE,
    SCOPES,
    Keys,
    digest_of,
    read_keys,
    security_log,
    tenant_named,
)
from draftwell.serving.server.http.security import Refusals, Security
from tests.support.errors import raises_code
from tests.support.server.served_pair import served_pair, serving
from tests.support.server.server_process import wait_until

BODY = {"model": "tiny", "prompt": "hi", "max_tokens": 2, "temperature": 0}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def known(keys: Keys, *asked: str) -> list[bool]:
    return [keys.find(key.encode()) is not None for key in asked]


def test_keys_are_compared_in_constant_time_and_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[bytes, bytes]] = []
    compare = hmac.compare_digest
    monkeypatch.setattr(
        hmac, "compare_digest", lambda a, b: (seen.append((a, b)), compare(a, b))[1]
    )
    names = ("first-key", "zweiter-schlüssel")
    assert Keys.of(*names).find(b"first-key")
    assert [own for _, own in seen] == [name.encode() for name in names], (
        "no early end that tells which key it was"
    )


def test_no_keys_let_nobody_in_by_an_empty_key() -> None:
    assert not Keys()
    assert Keys().find(b"") is None
    assert Keys.of("one").find(b"") is None


def test_where_keys_come_from(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert not read_keys()
    monkeypatch.setenv(KEY_VARIABLE, "one, two words")
    keys = read_keys()
    assert known(keys, "one", "two words", "two", "") == [True, True, False, False]
    one = keys.find(b"one")
    assert one is not None
    assert one.scopes == SCOPES, "what the variable holds may do everything"
    file.write_text("# of the operators\nthree\n\n four \n")
    assert known(read_keys(file), "three", "four", "one", "#") == [True, True, False, False]
    for spoilt in ("", " , "):
        monkeypatch.setenv(KEY_VARIABLE, spoilt)
        with pytest.raises(DraftwellError, match=KEY_VARIABLE):
            read_keys()
    file.write_text("\n# none\n")
    with raises_code("no_keys"):
        read_keys(file)
    with raises_code("unreadable_keys"):
        read_keys(file.with_name("absent"))


@pytest.mark.parametrize(
    "line", ["secret-key all", "secret-key answers,", "secret-key answers a b"]
)
def test_a_wrong_line_is_named_by_its_number(file: Path, line: str) -> None:
    file.write_text(f"fine\n{line}\n")
    with raises_code("wrong_key_line", "line 2", str(file)) as caught:
        read_keys(file)
    assert "secret-key" not in str(caught.value)


def test_short_keys_are_warned_of(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    file.write_text("sixteen-letters-\nfifteen-letters\n")
    read_keys(file)
    [line] = caplog.messages
    assert line.startswith("1 API keys")
    assert "letters" not in line


def test_a_key_does_what_its_line_says(file: Path) -> None:
    """Probes need no key; every other path is one of the two scopes'."""
    file.write_text("asks\nasks-too answers\nscrapes metrics\ndoes-both answers,metrics\n")
    paths = ("/v1/models", "/openapi.json", "/version", "/metrics", "/metrics/grafana.json")
    security = Security(keys=Keys(file=file))
    with (
        serving(served_pair("autoregressive", slots=1), security=security) as (url, _),
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        found = {
            key: [http.get(path, headers=bearer(key)).status_code for path in paths]
            for key in ("asks", "asks-too", "scrapes", "does-both", "answers", "metrics")
        }
        refused = http.post("/v1/completions", json=BODY, headers=bearer("scrapes"))
        assert http.get("/health", headers=bearer("scrapes")).status_code == 200
    assert found == {
        "asks": [200, 200, 200, 403, 403],
        "asks-too": [200, 200, 200, 403, 403],
        "scrapes": [403, 403, 403, 200, 200],
        "does-both": [200] * 5,
        "answers": [401] * 5,
        "metrics": [401] * 5,
    }
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "wrong_scope")
    assert "answers" in refused.json()["error"]["message"]


def security_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name == "draftwell.serving.security"]


def test_a_refusal_is_a_line_of_the_security_log(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With the client's address and a digest of its key; what clients write is never in it."""
    caplog.set_level(logging.INFO, "draftwell.serving")
    file.write_text("asks-for-answers\n")
    security = Security(keys=Keys(file=file), hosts=("localhost",))
    asked: list[tuple[str, dict[str, str]]] = [
        ("/v1/models/mine", bearer("forged-key")),
        ("/v1/models", {}),
        ("/metrics", bearer("asks-for-answers")),
        ("/v1/models", bearer("asks-for-answers") | {"Host": "evil.example"}),
        ("/forged%0Aevent=forged", {"X-Forwarded-For": "fe80::1% event=forged"}),
        ("/v1/models", bearer("asks-for-answers")),
    ]
    with (
        serving(served_pair("autoregressive", slots=1), security=security) as (url, _),
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        statuses = [http.get(path, headers=headers).status_code for path, headers in asked]
        wait_until(lambda: len(security_lines(caplog)) == 5, "each refusal has its line", 30)
        wait_until(lambda: "/v1/models 401" in caplog.text, "and one of its own", 30)
    assert statuses == [401, 401, 403, 421, 401, 200]
    own, forged = digest_of(b"asks-for-answers"), digest_of(b"forged-key")
    assert security_lines(caplog) == [
        "security: event=invalid_api_key client=127.0.0.1 "
        f"key={forged} path=/v1/models/{{name:path}}",
        "security: event=invalid_api_key client=127.0.0.1 key=none path=/v1/models",
        f"security: event=wrong_scope client=127.0.0.1 key={own} path=/metrics",
        f"security: event=wrong_host client=127.0.0.1 key={own} path=/v1/models",
        "security: event=invalid_api_key client=unknown key=none path=unknown path",
    ]
    [line] = [line for line in caplog.messages if line.startswith("GET /v1/models 401 ")]
    assert "client 127.0.0.1" in line, "the line of the request names the address too"
    assert not {"forged-key", "event=forged"} & set(caplog.text.split())
    assert "asks-for-answers" not in caplog.text


def test_many_refusals_in_a_second_are_ten_lines_and_a_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The count comes by itself, without another refusal."""
    refusals, scope = Refusals(), {"client": ("10.0.0.7", 1), "state": {"refused": "none"}}

    async def burst() -> None:
        for _ in range(25):
            refusals.write(scope, "invalid_api_key", "/v1/models")
        assert len(security_lines(caplog)) == 10
        await asyncio.sleep(1.1)
        refusals.write(scope, "invalid_api_key", "/v1/models")

    asyncio.run(burst())
    assert security_lines(caplog)[10:] == [
        "security: event=refusals_left_out count=15",
        "security: event=invalid_api_key client=10.0.0.7 key=none path=/v1/models",
    ]


def test_keys_of_one_name_are_one_tenant(file: Path) -> None:
    file.write_text("old-key answers team\nnew-key answers,metrics team\nother-key\n")
    keys = Keys(file=file)
    old, new, other = (
        found.tenant
        for key in ("old", "new", "other")
        if (found := keys.find(f"{key}-key".encode()))
    )
    assert old == new == tenant_named(b"team")
    assert other == tenant_named(b"other-key"), "without a name it is the key's own"


def replace(file: Path, text: str) -> None:
    """In one step, as mounted secrets change and editors save."""
    new = file.with_name("new")
    new.write_text(text)
    os.replace(new, file)


def test_the_file_is_followed_within_two_seconds_while_a_stream_runs(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A key that is gone opens nothing more; what it opened is answered to its end."""
    file.write_text("leaving\nstaying\n")
    caplog.set_level(logging.INFO, "draftwell.serving.security")
    served = served_pair("autoregressive", slots=2)
    with (
        serving(served, security=Security(keys=Keys(file=file))) as (url, scheduler),
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        step, steps, go_on = scheduler.engine.step, count(), threading.Event()
        scheduler.engine.step = lambda: (next(steps) < 5 or go_on.wait(60), step())
        body = BODY | {"max_tokens": 60, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=body, headers=bearer("leaving")) as stream:
            lines = stream.iter_lines()
            next(lines)
            replace(file, "staying\ncoming\n")

            def statuses() -> list[int]:
                return [
                    httpx.get(f"{url}/v1/models", headers=bearer(key)).status_code
                    for key in ("leaving", "staying", "coming")
                ]

            wait_until(lambda: statuses() == [401, 200, 200], "the file is read again", 2)
            go_on.set()
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
    [line] = [line for line in security_lines(caplog) if "keys_reloaded" in line]
    coming, leaving = digest_of(b"coming"), digest_of(b"leaving")
    assert line == f"security: event=keys_reloaded added={coming} removed={leaving}"


@pytest.mark.parametrize("spoilt", ["", "# none\n", "key of four words\n", "\xff", None])
def test_a_spoilt_file_changes_nothing_and_is_logged_once(
    file: Path, caplog: pytest.LogCaptureFixture, spoilt: str | None
) -> None:
    file.write_text("one-of-the-server\n")
    keys = Keys(file=file)
    if spoilt is None:
        file.unlink()
    else:
        replace(file, spoilt)
        if spoilt == "\xff":
            file.write_bytes(b"\xff")
    for _ in range(3):
        keys.follow()
        assert known(keys, "one-of-the-server", "key", "") == [True, False, False]
    [line] = [one for one in caplog.records if one.levelno >= logging.ERROR]
    assert str(file) in line.getMessage()
    assert (line.name, "event=keys_kept" in line.getMessage()) == (security_log.name, True)
    replace(file, "another-of-the-server\n")
    keys.follow()
    assert known(keys, "one-of-the-server", "another-of-the-server") == [False, True]


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), MemoryError("none")])
def test_a_file_that_may_be_read_again_is(
    file: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Also where nothing but its mode changes, and whatever went wrong before."""
    file.write_text("one-of-the-server\n")
    keys = Keys(file=file)
    replace(file, "another-of-the-server\n")

    def forbidden(path: Path) -> str:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(keys_module, "read_text", forbidden)
        keys.follow()
    assert known(keys, "one-of-the-server", "another-of-the-server") == [True, False]
    keys.follow()
    assert known(keys, "one-of-the-server", "another-of-the-server") == [False, True]


def test_a_file_that_hangs_keeps_no_request(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a network's disk that is away: keys are found meanwhile, those known so far."""
    file.write_text("one-of-the-server\n")
    keys, asked, goes_on = Keys(file=file), threading.Event(), threading.Event()
    monkeypatch.setattr(keys_module, "CHECK_SECONDS", 0.0)
    stamp = keys_module.stamp_of

    def hang(file: Path) -> tuple[int, ...]:
        asked.set()
        assert goes_on.wait(60)
        return stamp(file)

    monkeypatch.setattr(keys_module, "stamp_of", hang)
    security = Security(keys=keys)
    with serving(served_pair("autoregressive", slots=1), security=security) as (url, _):
        assert asked.wait(30)
        replace(file, "another-of-the-server\n")
        answers = [
            httpx.get(f"{url}/v1/models", headers=bearer(key), timeout=5).status_code
            for key in ("one-of-the-server", "another-of-the-server")
        ]
        goes_on.set()
        assert answers == [200, 401]
        wait_until(lambda: known(keys, "another-of-the-server") == [True], "it is read again", 30)


def test_a_key_that_is_written_twice_is_named_by_its_lines(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which of both names and scopes would count is not for the server to guess."""
    file.write_text("secret-key metrics\n# two\nsecret-key answers team\n")
    with raises_code("duplicate_key", "line 3", "line 1", str(file)) as caught:
        read_keys(file)
    assert "secret-key" not in str(caught.value)
    monkeypatch.setenv(KEY_VARIABLE, "one-of-them,one-of-them")
    assert known(read_keys(), "one-of-them") == [True], "there it says the same twice"


def test_a_secret_behind_links_is_followed(tmp_path: Path) -> None:
    """As Kubernetes mounts it: the file is a link through a folder's link, and that one changes."""
    for name, key in (("v1", "first-of-the-keys"), ("v2", "other-of-the-keys")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "keys").write_text(key)
    (tmp_path / "data").symlink_to("v1")
    (tmp_path / "keys").symlink_to("data/keys")
    keys = Keys(file=tmp_path / "keys")
    (tmp_path / "next").symlink_to("v2")
    os.replace(tmp_path / "next", tmp_path / "data")
    keys.follow()
    assert known(keys, "first-of-the-keys", "other-of-the-keys") == [False, True]


def test_keys_from_a_pipe_are_read_once(caplog: pytest.LogCaptureFixture) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"one-of-the-server\n")
    os.close(writing)
    keys = Keys(file=Path(f"/dev/fd/{reading}"))
    os.close(reading)
    assert known(keys, "one-of-the-server", "") == [True, False]
    assert not caplog.records
