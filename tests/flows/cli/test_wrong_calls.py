"""Wrong calls of every command: exit code 2, one line on stderr, nothing stored, no traceback.

Nothing is computed: fetching or loading a pair, starting a flow or a process ends a call with a
line of its own, so a value that is accepted after all costs nothing.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, get_args

import pytest
from typer.testing import CliRunner

from draftwell.flows.cli.main import all_commands, app
from draftwell.flows.cli.settings_option import WORDS, Given, read_value
from draftwell.flows.settings import PipelineSettings
from draftwell.serving.errors import DraftwellError
from tests.support.loop.tiny_files import snapshot, write_pair
from tests.support.patching import replace_everywhere

NEEDED = {
    "generate": ["--prompt", "hello"],
    "release rollback": ["--reason", "slow"],
    "release show": ["release.tiny.cpu@champion"],
    "reproduce import": ["results.json"],
    "export": ["--to", "vllm"],
}
"""What a command asks for beside the option that is wrong."""
WITHOUT_PAIR = (
    *(
        "doctor",
        "release forget",
        "step distil",
        "list pairs",
        "list strategies",
        "release show",
        "reproduce import",
    ),
    *("release ui", "reproduce papers", "reproduce gpu"),
)
ODD = ("", " ", "nope", "../..", "/", "x" * 5000, "a\nb", "ünï☃", "a b'\"%$", "-1", "\x1b[31m")
WRONG: dict[str, tuple[str, ...]] = {
    "int": ("x", "", "-1", "0", "1.5", "nan", "9" * 40, "1e3", "٣"),
    "float": ("x", "", "-1", "nan", "inf", "-inf", "1e999", "0"),
    "file": (
        *("nowhere", "nowhere/file", "folder", "empty", "binary", "text", "", "x" * 300),
        *("text/below", "loop", "ünï☃ %20?#", "a\nb", "locked"),
    ),
    "text": ODD,
}
BEGAN = "the call was accepted"


NAMED_AS_TEXT = ("prompts", "pair", "traces")
"""Names of files that are options of text."""


def kind_of(name: str, given: Any) -> str:
    """Which wrong values an option, or a setting, of a type gets."""
    kinds = {int: "int", float: "float", Path: "file"}
    parts = [one for one in (given, *get_args(given)) if one in kinds]
    return "file" if name in NAMED_AS_TEXT else kinds[parts[0]] if parts else "text"


def calls() -> list[list[str]]:
    """Every option and every setting of every command with every wrong value."""
    found: list[list[str]] = []
    for name, command in all_commands().items():
        base = [*name.split(), *([] if name in WITHOUT_PAIR else ["--pair", "tiny.yaml"])]
        for option in command.params:
            if option.name == "help" or getattr(option, "is_flag", False):
                continue
            if option.name == WORDS:
                continue
            for value in WRONG[kind_of(option.name, option.type_descriptor.annotation)]:
                if option.param_type_name == "argument":
                    found.append([*name.split(), "--", value])
                else:
                    found.append([*base, option.opts[0], value, *NEEDED.get(name, [])])
        for key, field in command.settings.model_fields.items():
            for value in WRONG[kind_of(key, field.annotation)]:
                found.append([*base, "--set", f"{key}={value}", *NEEDED.get(name, [])])
        if any(option.name == WORDS for option in command.params):
            for word in ODD:
                found.append([*base, "--set", word, *NEEDED.get(name, [])])
                found.append([*base, "--set", f"{word}=1", *NEEDED.get(name, [])])
        found += [[*base, "--no-such-option"], [*base, *NEEDED.get(name, []), "one", "too many"]]
    return found


HOMES = ("text", "text/below", "/dev/full", "/proc/nowhere", "x" * 300, "loop")
"""Of DRAFTWELL_HOME: places where no folder can be."""


@pytest.fixture
def folder(
    own_stores: Path, empty_database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The working directory, with files that are wrong in one way each."""
    shutil.copyfile(empty_database, own_stores / "mlflow.db")
    work = tmp_path / "work"
    (work / "folder").mkdir(parents=True)
    (work / "empty").touch()
    (work / "binary").write_bytes(bytes(range(256)) * 64)
    (work / "text").write_text("neither JSON nor YAML: [\n")
    (work / "loop").symlink_to("loop")
    (work / "locked").touch()
    shutil.copyfile(write_pair(tmp_path / "pair"), work / "tiny.yaml")
    monkeypatch.chdir(work)
    monkeypatch.setenv("COLUMNS", "200")
    return work


@pytest.fixture
def nothing_begins(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes long ends the call instead."""

    def began(*_: object, **__: object) -> NoReturn:
        raise DraftwellError(BEGAN, code="began")

    for name in (
        "draftwell.registry.pairs.fetch",
        "draftwell.flows.orchestration.whole.run_loop",
        "draftwell.flows.orchestration.deployments.get_client",
        "draftwell.flows.cli.gpu_run.measure_card",
        "draftwell.flows.cli.papers_run.run_of",
        "draftwell.flows.workers.webhook_receiver.InTurn",
    ):
        replace_everywhere(monkeypatch, name, began)
    monkeypatch.setattr(subprocess, "run", began)
    monkeypatch.setattr(subprocess, "Popen", began)
    real = Path.open

    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        """Root may read everything, so what may not be read is played."""
        if path.name == "locked":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)


def faults(words: list[str], folder: Path) -> Iterator[str]:
    """What is wrong with the answer to a wrong call."""
    before = snapshot(folder)
    done = CliRunner().invoke(app, words)
    shown = " ".join(word if len(word) < 40 else f"{word[:10]}…" for word in words)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        yield f"{shown!r}: {type(done.exception).__name__}: {str(done.exception)[:150]}"
        return
    if "Traceback" in done.output:
        yield f"{shown!r}: a traceback"
    if done.exit_code not in (0, 2):
        yield f"{shown!r}: exit code {done.exit_code}: {done.output[-200:]}"
    errors = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    if done.exit_code == 2 and len(errors) != 1 and "Usage:" not in done.stderr:
        yield f"{shown!r}: {len(errors)} lines: {done.stderr[-300:]}"
    changed = {key for key, _ in snapshot(folder).items() ^ before.items()}
    if words[0] == "gate":  # which writes its error into the reports that were asked for
        changed -= set(words)
    if done.exit_code == 2 and changed:
        yield f"{shown!r}: stored {sorted(map(str, changed))[:3]}"


@pytest.mark.slow  # minutes: every option of every command
def test_every_option_with_every_wrong_value(folder: Path, nothing_begins: None) -> None:
    every = calls()
    assert len(every) >= 1500
    wrong = [fault for words in every for fault in faults(words, folder)]
    assert wrong == [], "\n".join([f"{len(wrong)} of {len(every)} calls", *wrong])


@pytest.mark.parametrize("home", HOMES)
def test_a_home_that_cannot_be(
    folder: Path, nothing_begins: None, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    monkeypatch.setenv("DRAFTWELL_HOME", home)
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    commands = (
        *(["release", "promote"], ["release", "sync"], ["step", "collect"], ["step", "train"]),
        ["generate", "--prompt", "hello"],
    )
    every = [[*words, "--pair", "tiny.yaml"] for words in commands]
    assert [fault for words in every for fault in faults(words, folder)] == []


def test_an_empty_text_is_never_the_working_folder(folder: Path, nothing_begins: None) -> None:
    """A shell writes one for a variable that is not set."""
    for name, command in all_commands().items():
        for option in command.params:
            if option.name == "help" or getattr(option, "is_flag", False):
                continue
            of_name = option.param_type_name == "option"
            words = [option.opts[0], ""] if of_name else [""]
            done = CliRunner().invoke(app, [*name.split(), *words])
            shown = option.opts[0] if of_name else option.name.upper()
            wanted = f"Error: {shown} is empty: write a value, or leave it out\n"
            assert (done.exit_code, done.stderr) == (2, wanted), name
        for key, field in command.settings.model_fields.items():
            if kind_of(key, field.annotation) != "file":
                continue
            for written in (True, False):  # by --set, and in a file of settings
                with suppress(DraftwellError):
                    assert read_value(command.settings, Given(key, "", key, written)) is None, key
    for key in ("prompts", "spool", "out"):  # of flows, which a deployment's settings name
        with pytest.raises(ValueError, match="working folder"):
            PipelineSettings.model_validate({key: ""})


@pytest.mark.slow  # two processes
@pytest.mark.parametrize("words", ["--help", "list strategies --json"])
def test_a_full_disk_behind_stdout_is_one_line(words: str) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")
    command = [sys.executable, "-m", "draftwell.flows.cli.main", *words.split()]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert "no room left" in done.stderr


def test_a_sample_of_wrong_calls(folder: Path, nothing_begins: None) -> None:
    """One value of each kind for each command: they change with nothing but the list itself."""
    sample = random.Random(7).sample(calls(), 60)
    assert [fault for words in sample for fault in faults(words, folder)] == []
