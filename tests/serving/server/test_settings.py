"""The options of `draftwell-serve`: what users have typed so far keeps its meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from draftwell.serving.server.main import REMOVED, app, main
from draftwell.serving.server.settings import ServerSettings
from tests.support.errors import raises_code

OPTIONS: dict[str, tuple[Any, tuple[float | None, float | None] | None]] = {
    "bundle": (None, None),
    "signature-key": (None, None),
    "signature-flags": ("", None),
    "host": ("127.0.0.1", None),
    "port": (8000, (0, 65535)),
    "slots": (8, (1, 1024)),
    "queue": (256, (1, None)),
    "threads": (None, None),
    "max-context": (None, (2, None)),
    "prefix-caching": (None, None),
    "deterministic": (False, None),
    "api-key-file": (None, None),
    "insecure": (False, None),
    "cors-origin": (None, None),
    "allowed-host": (None, None),
    "root-path": ("", None),
    "request-timeout": (None, (0.001, None)),
    "drain-seconds": (20.0, (0, None)),
    "allow-parameters": (False, None),
    "generation-config": ("model", None),
    "strategies": (None, None),
    "state": (None, None),
    "state-dir": (None, None),
    "shared-datastore": (False, None),
    "feedback-dir": (None, None),
    "feedback-rate": (0.0, (0, 1)),
    "feedback-text": (False, None),
    "feedback-days": (30, (1, None)),
}
"""Flag → its default and bounds."""


def test_the_command_line_is_the_settings_and_keeps_its_flags_defaults_and_bounds() -> None:
    found: dict[str, tuple[Any, tuple[float | None, float | None] | None]] = {}
    for option in get_command(app).params:
        known: Any = option
        flags: list[str] = [*known.opts, *known.secondary_opts]
        flag, further = flags[0], flags[1:]
        assert further == (["--allowed-origins"] if flag == "--cors-origin" else [])
        limits = getattr(known, "type", known)  # older versions of Typer keep them in the type
        bounds = getattr(limits, "min", None), getattr(limits, "max", None)
        found[flag.removeprefix("--")] = (known.default, None if bounds == (None, None) else bounds)
        assert known.help
        assert known.required == (flag == "--bundle")
    assert found == OPTIONS
    settings = ServerSettings(bundle=Path("b")).model_dump()
    assert {
        name.replace("_", "-"): None if value == () else value for name, value in settings.items()
    } == {**{flag: default for flag, (default, _) in OPTIONS.items()}, "bundle": Path("b")}


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": 65536},
        {"slots": 0},
        {"max_context": 1},
        {"threads": 0},
        {"state": "mine"},
        {"slot": 1},
        {"port": "8000"},
    ],
)
def test_settings_are_strict(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ServerSettings(bundle=Path("b"), **wrong)


@pytest.mark.parametrize("option", REMOVED)
def test_an_earlier_option_is_answered_with_what_holds_now(
    option: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert option.removeprefix("--") not in OPTIONS
    for words in ([option, "1"], [f"{option}=1"], [option]):
        monkeypatch.setattr("sys.argv", ["draftwell-serve", "--bundle", "b", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"draftwell-serve: {option} is no option any more, leave it out: ")
        assert REMOVED[option] in line


@pytest.mark.parametrize(
    "option", [name for name, (default, _) in OPTIONS.items() if default not in (False, "")]
)
def test_an_empty_text_is_never_the_working_folder(
    option: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["draftwell-serve", f"--{option}="])
    with pytest.raises(SystemExit, match="2"):
        main()
    wanted = f"draftwell-serve: --{option} is empty: write a value, or leave it out\n"
    assert capsys.readouterr().err == wanted


def test_threads_are_a_number_or_auto() -> None:
    assert [
        ServerSettings.from_options(bundle=Path("b"), threads=text).threads
        for text in (None, "auto", "3")
    ] == [None, None, 3]
    for text in ("0", "-1", "two", "1.5", ""):
        with raises_code("invalid_option", "--threads"):
            ServerSettings.from_options(bundle=Path("b"), threads=text)
