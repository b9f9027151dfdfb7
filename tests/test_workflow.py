"""The workflows: lint and tests, and the gate, whose table is posted also if it failed or never
ran."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.paths import REPO

WORKFLOWS = sorted((REPO / ".github" / "workflows").glob("*.yml"))
WORKFLOW = REPO / ".github" / "workflows" / "gate.yml"
NIGHTLY = REPO / ".github" / "workflows" / "nightly.yml"
LONGEST = {"ci": 60, "gate": 60, "nightly": 180}
"""Workflow → minutes that one of its jobs may take."""


@pytest.fixture(scope="module")
def steps() -> list[dict[str, Any]]:
    return list(yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"]["gate"]["steps"])


def test_it_runs_what_the_makefile_knows(steps: list[dict[str, Any]]) -> None:
    called = [
        words
        for step in steps
        for words in re.findall(r"^make ([a-z-]+)", step.get("run", ""), re.MULTILINE)
    ]
    assert called == ["setup", "gate"]
    written = re.search(
        r"^GATE_OUT \?= (\S+)", (REPO / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert written is not None
    posted = next(step["run"] for step in steps if "GITHUB_STEP_SUMMARY" in step.get("run", ""))
    assert f"{written[1]}.md" in posted


def test_the_verdict_is_posted_whatever_it_is(steps: list[dict[str, Any]]) -> None:
    gate = next(i for i, step in enumerate(steps) if step.get("run") == "make gate")
    behind = steps[gate + 1 :]
    assert behind
    assert {step.get("if") for step in behind} == {"always()"}


@pytest.mark.parametrize(
    ("verdict", "posted"),
    [("**Gate failed**\n", "**Gate failed**"), (None, "**The gate did not run**")],
)
def test_the_step_posts_the_table(
    steps: list[dict[str, Any]], tmp_path: Path, verdict: str | None, posted: str
) -> None:
    """The step's own script, in a folder where the gate left a verdict, and in one where it left
    none."""
    script = next(step["run"] for step in steps if "GITHUB_STEP_SUMMARY" in step.get("run", ""))
    (tmp_path / ".draftwell").mkdir()
    if verdict is not None:
        (tmp_path / ".draftwell" / "gate.md").write_text(verdict)
    (tmp_path / "summary").write_text("before\n")
    environment = {**os.environ, "GITHUB_STEP_SUMMARY": str(tmp_path / "summary")}
    subprocess.run(["bash", "-eu", "-c", script], cwd=tmp_path, env=environment, check=True)
    text = (tmp_path / "summary").read_text()
    assert text.startswith("before\n")
    assert posted in text


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_workflow_calls_make_within_limits(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["group"].endswith("${{ github.ref }}")
    assert "env" not in workflow, (
        "`make setup` finds PyTorch's builds for CPUs by itself, and for PyTorch alone"
    )
    makefile = (REPO / "Makefile").read_text(encoding="utf-8")
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= LONGEST[path.stem]
        targets = [
            target
            for step in job["steps"]
            for target in re.findall(
                r"(?:^|[A-Z] |\" )make ([a-z-]+)", step.get("run", ""), re.MULTILINE
            )
        ]
        assert targets[0] == "setup"
        assert [
            target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)
        ] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_of_others_are_named_by_commit_and_get_no_credentials(path: Path) -> None:
    """A tag can be moved to other code; the version behind it is for people."""
    used = re.findall(r"uses: *(.*)", path.read_text(encoding="utf-8"))
    assert used
    assert [
        line for line in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)
    ] == []
    for job in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values():
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False


# What only the nightly workflow runs

OF_THE_MACHINE = (
    r"/dev/full|the packages are installed"
    r"|Linux|/proc|processor|x86_64|mallopt|OpenMP|large pages|peak memory|in the place of Python"
    r"|only root"
    r"|asks for the cores|this machine has CUDA|file system|data sets|schemas are not shipped"
    r"|no \{\} is shipped|run it with --|^\{\} is not installed \(make setup\)"
)
"""Reasons of skips that no installation mends, and of texts that are put together: those of the
marks, and schemathesis and lm-eval, which the nightly names."""


@pytest.fixture(scope="module")
def nights() -> list[tuple[list[str], list[str]]]:
    """Of each run of the nightly's tests: the words of REQUIRE, and what it runs; nothing is
    everything."""
    jobs = yaml.safe_load(NIGHTLY.read_text(encoding="utf-8"))["jobs"]
    runs = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
    makefile = (REPO / "Makefile").read_text(encoding="utf-8")
    (gpu,) = re.findall(r"pytest -m gpu --require \"(.*)\"", makefile)
    found = [(gpu.split(","), ["tests"])]
    for run in runs:
        if "make test-all" in run:
            words = re.search(r'REQUIRE=("[^"]*"|\S+)', run)
            files = re.search(r'TESTS="([^"]*)"', run)
            assert words is not None
            found.append((words[1].strip('"').split(","), files[1].split() if files else ["tests"]))
    return found


def reasons(path: Path) -> Iterator[str]:
    """Why tests of a file are skipped; `{}` where a text is put together."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or not re.fullmatch(
            r"pytest\.(skip|importorskip|mark\.skip(if)?)", ast.unparse(node.func)
        ):
            continue
        given = {word.arg: word.value for word in node.keywords}
        reason = given.get("reason") or node.args[0]
        parts = reason.values if isinstance(reason, ast.JoinedStr) else [reason]
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts)


def test_the_nightly_has_what_tests_are_skipped_without(
    nights: list[tuple[list[str], list[str]]],
) -> None:
    """Each reason of a skip has a word in a run that takes the file; nothing is green because it
    was left out."""
    helpers = REPO / "tests" / "support"
    left_out = [
        f"{path.relative_to(REPO)}: {reason}"
        for path in sorted((REPO / "tests").rglob("*.py"))
        for reason in reasons(path)
        if not re.search(OF_THE_MACHINE, reason)
        and not any(
            any(word.lower() in reason.lower() for word in words)
            and (helpers in path.parents or any(path.is_relative_to(REPO / name) for name in files))
            for words, files in nights
        )
    ]
    assert left_out == []
    assert [name for _, files in nights for name in files if not (REPO / name).exists()] == []


def test_the_nightly_runs_the_tests_of_every_mark() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))
    marks = {line.partition(":")[0] for line in project["tool"]["pytest"]["ini_options"]["markers"]}
    makefile = (REPO / "Makefile").read_text(encoding="utf-8")
    called = set(re.findall(r"make ([a-z-]+)", NIGHTLY.read_text(encoding="utf-8")))
    recipes = re.findall(r"^([a-z-]+):.*\n\t.* pytest (.*)$", makefile, re.MULTILINE)
    chosen = {name: re.findall(r"-m \"?(\w.*?)\"?(?: |$)", words) for name, words in recipes}
    assert chosen["test-all"] == [], "every test, the slow ones too"
    assert {mark for name in called for mark in chosen.get(name, ())} == marks - {"slow"}
    assert "test-all" in called


def test_a_skip_for_want_of_what_is_required_is_a_failure(tmp_path: Path) -> None:
    """In a process of its own, beside skips for other reasons."""
    (tmp_path / "conftest.py").write_text(
        "from tests.conftest import pytest_addoption, pytest_runtest_makereport\n"
    )
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "@pytest.mark.skipif(True, reason='Helm is not on PATH')\n"
        "def test_mark(): pass\n"
        "def test_call(): pytest.skip('needs curl')\n"
        "def test_import(): pytest.importorskip('no_such_module')\n"
        "def test_other(): pytest.skip('reads /proc')\n"
        "def test_good(): pass\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--require", "helm, no_such_module"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPO), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout
    assert "1 failed, 1 passed, 2 skipped, 1 error" in done.stdout
    assert "--require: Skipped: could not import 'no_such_module'" in done.stdout


def test_pull_requests_are_linted_tested_and_documented() -> None:
    jobs = yaml.safe_load((REPO / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))[
        "jobs"
    ]
    called = {step["run"] for job in jobs.values() for step in job["steps"] if "run" in step}
    assert called == {"make setup", "make lint", "make docs", "make test"}


@pytest.mark.parametrize(
    "path", sorted((REPO / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem
)
def test_issue_forms_have_what_github_asks_for(path: Path) -> None:
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path.stem == "config":
        assert form["contact_links"]
        return
    assert {"name", "description", "body"} <= set(form)
    names = [part["id"] for part in form["body"]]
    assert len(set(names)) == len(names)
    assert all(part["attributes"]["label"] for part in form["body"])


def test_hooks_call_what_setup_installs_or_make_knows() -> None:
    hooks = yaml.safe_load((REPO / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert [repo["repo"] for repo in hooks] == ["local"]
    entries = [hook["entry"] for hook in hooks[0]["hooks"]]
    assert all(entry.startswith((".venv/bin/", "make ")) for entry in entries)
