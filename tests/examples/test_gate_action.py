"""examples/gate-action: it parses, its script runs, and what it calls exists."""

from __future__ import annotations

import os
import re
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftwell.flows.cli.main import all_commands
from draftwell.registry.gates import load_gates
from tests.support.paths import REPO

FOLDER = REPO / "examples" / "gate-action"
ACTION: dict[str, Any] = yaml.safe_load((FOLDER / "action.yml").read_text(encoding="utf-8"))
STEPS: list[dict[str, Any]] = ACTION["runs"]["steps"]
PINNED = re.compile(r"^[\w-]+/[\w-]+@[0-9a-f]{40}$")
FAKE = """#!/usr/bin/env bash
printf '%s\\n' "$DRAFTWELL_GATES" "$@" > "$RUNNER_TEMP/called"
while [ $# -gt 0 ]; do
  if [ "$1" = --report ] && [ "$CODE" != 2 ]; then echo "verdict" > "$2"; fi
  shift
done
exit "$CODE"
"""


def step(name: str) -> dict[str, Any]:
    [found] = [one for one in STEPS if one.get("name") == name]
    return found


def run_gate(place: Path, code: int = 0, **inputs: str) -> tuple[int, list[str]]:
    """The step, with a program in the place of Draftwell's: its exit code, and the words that the
    program was called with, behind the folder of thresholds."""
    program = place / "draftwell" / "bin" / "draftwell"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(FAKE)
    program.chmod(0o755)
    values = {name: str(one.get("default", "")) for name, one in ACTION["inputs"].items()} | inputs
    written = {
        name: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda match: values[match[1]], value)
        for name, value in step("Gate")["env"].items()
    }
    files = {name: str(place / name.lower()) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", step("Gate")["run"]],
        cwd=place,
        env={**os.environ, **files, **written, "RUNNER_TEMP": str(place), "CODE": str(code)},
        check=False,
    )
    return done.returncode, (place / "called").read_text().splitlines()


def test_no_input_is_text_of_a_script() -> None:
    for one in STEPS:
        assert "${{" not in one.get("run", ""), one["name"]
        assert "run" in one or PINNED.match(one["uses"]), one
        assert "shell" in one or "uses" in one
    named = set(re.findall(r"inputs\.([\w-]+)", (FOLDER / "action.yml").read_text()))
    assert named == set(ACTION["inputs"])


@pytest.mark.parametrize("code", [0, 1, 2, 3])
def test_the_exit_code_is_the_gates(tmp_path: Path, code: int) -> None:
    returned, _ = run_gate(tmp_path, code, pair="models/pair.yaml")
    assert returned == code
    assert f"exit-code={code}\n" in (tmp_path / "github_output").read_text()
    summary = (tmp_path / "github_step_summary").read_text()
    assert summary == ("verdict\n" if code != 2 else summary)
    assert ("did not run" in summary) == (code == 2)
    assert step("Keep the reports")["if"] == "always()"


def test_the_counts_are_judged_where_no_release_is_named(tmp_path: Path) -> None:
    _, words = run_gate(tmp_path, pair="a pair.yaml", settings="\n\nthreads=2")
    reports = [word for ending in ("md", "xml", "json") for word in report(ending)]
    assert words == [
        "gates",
        "gate",
        *("--pair", "a pair.yaml"),
        *reports,
        *("--set", "counts_only=true", "--set", "threads=2"),
    ]


def test_a_release_is_measured_and_moves_no_alias(tmp_path: Path) -> None:
    _, words = run_gate(tmp_path, pair="p", release="candidate", prompts="$(touch evil)")
    assert words[-5:] == ["--release", "candidate", "--dry-run", "--prompts", "$(touch evil)"]
    assert "counts_only=true" not in words
    assert not (tmp_path / "evil").exists()


def report(ending: str) -> tuple[str, str]:
    return "--report", f"draftwell-gate/gate.{ending}"


def test_the_command_its_options_and_its_settings_exist(tmp_path: Path) -> None:
    command = all_commands()["gate"]
    options = {name for one in command.params for name in one.opts}
    for inputs in ({}, {"release": "candidate", "prompts": "p.jsonl"}):
        _, words = run_gate(tmp_path, pair="p", **inputs)
        assert {word for word in words if word.startswith("--")} <= options
        for option, value in pairwise(words):
            assert option != "--set" or value.partition("=")[0] in set(command.all_keys())


def test_what_is_installed_from_is_there() -> None:
    """The action's own checkout, two folders up."""
    script = step("Install Draftwell")["run"]
    assert (FOLDER / ".." / "..").resolve() == REPO
    named = re.findall(r"(?<![\w/])(\.ci/[\w-]+|constraints\.txt)", script)
    assert sorted(set(named)) == [".ci/install", ".ci/torch-index", "constraints.txt"]
    for name in named:
        assert (REPO / name).is_file()
    subprocess.run(["bash", "-n", "-c", script], check=True)


def test_the_workflow_names_this_action_and_its_inputs() -> None:
    text = (FOLDER / "workflow.yml").read_text(encoding="utf-8")
    [job] = yaml.safe_load(text)["jobs"].values()
    uses = job["steps"][-1]["uses"]
    assert uses.partition("@")[0] == f"draftwell/draftwell/{FOLDER.relative_to(REPO)}"
    given = set(job["steps"][-1]["with"])
    needed = {name for name, one in ACTION["inputs"].items() if one.get("required")}
    assert needed <= given <= set(ACTION["inputs"])
    version = re.search(r'^version = "(.+)"', (REPO / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert uses.partition("@")[2] == f"v{version[1]}"


def test_the_example_thresholds_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    projects = load_gates()
    monkeypatch.setenv("DRAFTWELL_GATES", str(FOLDER / "gates"))
    own = load_gates()
    assert (own.max_regression, own.min_quality_ratio) == (0.1, 0.95)
    assert own.model_copy(update={"max_regression": 0.05, "min_quality_ratio": 0.9}) == projects
