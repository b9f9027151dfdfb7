"""The example workflow runs the gate and posts its table, also where the gate failed or never ran."""

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
    called = [words for step in steps for words in re.findall(r"^make ([a-z-]+)", step.get("run", ""), re.MULTILINE)]
    assert called == ["setup", "gate"]
    written = re.search(r"^GATE_OUT \?= (\S+)", (REPO / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert written is not None
    posted = next(step["run"] for step in steps if "GITHUB_STEP_SUMMARY" in step.get("run", ""))
    assert f"{written[1]}.md" in posted


def test_the_verdict_is_posted_whatever_it_is(steps: list[dict[str, Any]]) -> None:
    gate = next(i for i, step in enumerate(steps) if step.get("run") == "make gate")
    behind = steps[gate + 1 :]
    assert behind
    assert {step.get("if") for step in behind} == {"always()"}


@pytest.mark.parametrize(("verdict", "posted"), [("**Gate failed**\n", "**Gate failed**"), (None, "**The gate did not run**")])
def test_the_step_posts_the_table(steps: list[dict[str, Any]], tmp_path: Path, verdict: str | None, posted: str) -> None:
    """The step's own script, in a folder where the gate left a verdict, and in one where it left none."""
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
