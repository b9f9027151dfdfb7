"""`draftwell gate --evidence`: a verdict on files alone, and one that is kept with a release.

The data are those of tests/components/gate/test_evidence_files.py, which says what of them was
measured and what was made by hand.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from xml.etree import ElementTree

from draftwell.components.gate.evidence_files.reading import read_evidence
from draftwell.flows.steps.engine.evidence import judge_files, refuse_other_engine
from draftwell.flows.steps.engine.release import EngineRelease
from draftwell.registry.gates import load_gates
from draftwell.registry.releases import reports_folder
from draftwell.registry.store import Store
from draftwell.serving.bundle.verdict import settled
from draftwell.serving.files import sha256_file
from tests.support.errors import raises_code
from tests.support.evidence import place
from tests.support.peers.releases import released, verdict

WITH, PLAIN = place("vllm_with"), place("vllm_plain")
FILES = ("--evidence", WITH, "--set", f"plain_evidence={PLAIN}")


def test_files_are_judged_without_an_engine(run: Any, own_stores: Path, tmp_path: Path) -> None:
    """Nothing is stored, and Markdown and JUnit say what was not checked."""
    words, xml = tmp_path / "gate.md", tmp_path / "gate.xml"
    done = run("gate", *FILES, "--report", words, "--report", xml)
    assert done.exit_code == 0, (done.output, done.exception)
    digest = sha256_file(WITH)[:16]
    for text in (words.read_text(), xml.read_text()):
        assert digest in text
        assert "greedy outputs as plain decoding's not checked" in text
        assert "100% of drafted tokens accepted" in text
        assert "model smollm2-135m" in text
    [suite] = ElementTree.parse(xml).getroot()
    assert (suite.get("failures"), suite.get("errors")) == ("0", "0")
    sums = ("--evidence", place("vllm_with_aggregates"), "--set", f"plain_evidence={PLAIN}")
    assert run("gate", *sums).exit_code == 3
    turned = (
        "--evidence",
        place("guidellm_plain"),
        "--set",
        f"plain_evidence={place('guidellm_with')}",
    )
    assert run("gate", *turned).exit_code == 1


def test_mistakes_are_one_line(run: Any, own_stores: Path) -> None:
    calls = {
        "go together": ("--evidence", WITH),
        "--set limit means nothing": (*FILES, "--set", "limit=3"),
        "--set levels means nothing": (*FILES, "--set", "levels=1,8"),
        "--release with --evidence needs --engine vllm": (*FILES, "--release", "candidate"),
        "name two measurements": ("--evidence", WITH, "--set", f"plain_evidence={WITH}"),
    }
    for named, call in calls.items():
        done = run("gate", *call)
        assert done.exit_code == 2, (named, done.output)
        assert named in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def test_the_verdict_is_kept_with_the_release_that_was_named(
    vllm: Callable[..., Any], run: Any, pair_file: Path
) -> None:
    assert vllm("step choose --set methods=draft_model --set limit=8").exit_code == 0
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
    assert sides["plain"]["digests"] == {sha256_file(PLAIN): PLAIN.name}
    assert "requests" not in sides["plain"]["runs"][0]
    other = run(*named[:-4], "--evidence", PLAIN, "--set", f"plain_evidence={WITH}")
    assert other.exit_code == 2, "its plain decoding drafted"


def test_evidence_of_another_engine_or_version_is_refused() -> None:
    """A folder of specdec_bench names them; other files say nothing of them."""
    contents = SimpleNamespace(engine="vllm", version="0.32", dtype="float32")
    tuned = cast(
        EngineRelease,
        SimpleNamespace(
            config=SimpleNamespace(contents=contents), release=SimpleNamespace(name="release 1")
        ),
    )
    evidence = read_evidence([place("specdec_with")])
    refuse_other_engine(tuned, evidence)
    refuse_other_engine(tuned, read_evidence([WITH]))
    for change in ({"engine": "sglang"}, {"engine_version": "0.31"}):
        runs_of_other = tuple(one.model_copy(update=change) for one in evidence.runs)
        with raises_code("tuned_elsewhere", *change.values()):
            refuse_other_engine(tuned, evidence.model_copy(update={"runs": runs_of_other}))


def test_what_evidence_cannot_show_may_be_required() -> None:
    """`required` in gates.yaml makes it not enough evidence."""
    found, _ = judge_files(read_evidence([WITH]), read_evidence([PLAIN]))
    limits = load_gates().model_copy(
        update={"required": {"vllm": ("speed over plain decoding", "regression")}}
    )
    assert settled(found, load_gates(), "vllm").passed
    assert settled(found, limits, "vllm").result == "not enough evidence"
