"""The workflows: lint and tests, and the gate, whose table is posted also if it failed or never
ran."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.paths import REPO

WORKFLOW = REPO / ".github" / "workflows" / "gate.yml"


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


@pytest.mark.parametrize(
    "path", sorted((REPO / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.stem
)
def test_every_workflow_calls_make_within_limits(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["group"].endswith("${{ github.ref }}")
    assert "env" not in workflow, (
        "`make setup` finds PyTorch's builds for CPUs by itself, and for PyTorch alone"
    )
    makefile = (REPO / "Makefile").read_text(encoding="utf-8")
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 60
        targets = [
            target
            for step in job["steps"]
            for target in re.findall(r"^make ([a-z-]+)", step.get("run", ""), re.MULTILINE)
        ]
        assert targets[0] == "setup"
        assert [
            target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)
        ] == []


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
