"""`draftwell gate --evidence`: a verdict on files alone, and one that is kept with a release."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from draftwell.registry.gates import load_gates
from draftwell.registry.releases import reports_folder
from draftwell.registry.store import Store
from draftwell.serving.bundle.verdict import settled
from draftwell.serving.files import sha256_file
from tests.components.gate.test_evidence_files import judged, place, runs
from tests.support.peers.releases import released, verdict

WITH, PLAIN = place("vllm_with"), place("vllm_plain")
FILES = ("--evidence", WITH, "--plain-evidence", PLAIN)


def test_files_are_judged_without_an_engine(run: Any, own_stores: Path, tmp_path: Path) -> None:
    """Nothing is stored, and Markdown and JUnit say what was not checked."""
    words, xml = tmp_path / "gate.md", tmp_path / "gate.xml"
    done = run("gate", *FILES, "--markdown", words, "--junit", xml)
    assert done.exit_code == 0, (done.output, done.exception)
    digest = sha256_file(WITH)[:16]
    for text in (words.read_text(), xml.read_text()):
        assert digest in text
        assert "greedy outputs as plain decoding's not checked" in text
        assert "100% of drafted tokens accepted" in text
    [suite] = ElementTree.parse(xml).getroot()
    assert (suite.get("failures"), suite.get("errors")) == ("0", "0")
    sums = ("--evidence", place("vllm_with_aggregates"), "--plain-evidence", PLAIN)
    assert run("gate", *sums).exit_code == 3
    turned = ("--evidence", place("guidellm_plain"), "--plain-evidence", place("guidellm_with"))
    assert run("gate", *turned).exit_code == 1


def test_mistakes_are_one_line(run: Any, own_stores: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.json"
    cut.write_text(WITH.read_text()[:500])
    calls = {
        "go together": ("--evidence", WITH),
        "--limit means nothing": (*FILES, "--limit", 3),
        "--release with --evidence needs --engine vllm": (*FILES, "--release", "candidate"),
        "cut off": ("--evidence", cut, "--plain-evidence", PLAIN),
        "name two measurements": ("--evidence", WITH, "--plain-evidence", WITH),
    }
    for named, call in calls.items():
        done = run("gate", *call)
        assert done.exit_code == 2, (named, done.output)
        assert named in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def test_the_verdict_is_kept_with_the_release_that_was_named(
    vllm: Callable[..., Any], run: Any, pair_file: Path
) -> None:
    assert vllm("tune --methods draft_model --limit 8").exit_code == 0
    named = ("gate", "--engine", "vllm", "--pair", pair_file, "--release", "candidate", *FILES)
    assert run(*named, "--dry-run").exit_code == 0
    assert verdict() is None
    done = run(*named)
    assert done.exit_code == 0, (done.output, done.exception)
    record = verdict()
    assert record is not None
    assert record.passed
    assert Store().get_aliases("release", "tiny.cpu-vllm") == {"candidate": 1, "challenger": 1}
    kept = Store().read_file(released().published, f"{reports_folder(record)}/evidence.json")
    assert kept is not None
    sides = json.loads(kept)["sides"]
    assert sides["plain"]["digests"] == {str(PLAIN): sha256_file(PLAIN)}
    assert "requests" not in sides["plain"]["runs"][0]
    refused = (*named[:-3], place("specdec_with"), "--plain-evidence", place("specdec_plain"))
    assert run(*refused).exit_code == 0  # vLLM, as the folder says
    other = run(*named[:-4], "--evidence", PLAIN, "--plain-evidence", WITH)
    assert other.exit_code == 2, "its plain decoding drafted"


def test_what_evidence_cannot_show_may_be_required() -> None:
    """`required` in gates.yaml makes it not enough evidence."""
    found, _ = judged(runs("vllm_with"), runs("vllm_plain"))
    limits = load_gates().model_copy(
        update={"required": {"vllm": ("speed over plain decoding", "regression")}}
    )
    assert settled(found, load_gates(), "vllm").passed
    assert settled(found, limits, "vllm").result == "not enough evidence"
