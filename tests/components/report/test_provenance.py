"""Provenance says where things come from, and nothing about the machine's name."""

import platform
import subprocess
from pathlib import Path

import pytest

from draftwell.components.report import machine, provenance as module
from draftwell.components.report.drawing import drawing, drawn_of, note_artifact
from draftwell.components.report.provenance import (
    code_digest,
    device_class,
    git_commit,
    library_versions,
    provenance,
)
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.runtime.engine.thread_governor import CoreTimes
from tests.support.models.tiny import table_pair


def test_provenance_names_pair_libraries_and_commit_and_is_json():
    made = provenance(
        table_pair(),
        trace_digest="t",
        parents={"verifier": "v"},
        parameters={"path": Path("x"), "n": 3, "on": True},
        metrics={"auc": 0.8, "missing": None, "broken": float("nan")},
        device_class="cpu-x",
    )
    assert (made.pair, made.fingerprint, made.trace_digest, made.device_class) == (
        "tiny",
        "f" * 64,
        "t",
        "cpu-x",
    )
    assert made.parameters == {"path": "x", "n": 3, "on": True}
    assert made.metrics == {"auc": 0.8}
    assert made.library_versions["torch"]
    assert Provenance.model_validate_json(made.model_dump_json()) == made


def test_a_picture_says_which_artifact_it_shows(tmp_path):
    with drawing(tmp_path / "a.png", "title", "x", "y") as axes:
        axes.plot([0, 1])
    assert drawn_of(tmp_path / "a.png") is None
    note_artifact(tmp_path / "a.png", "d" * 64)
    assert drawn_of(tmp_path / "a.png") == "d" * 64


def test_the_commit_is_the_checkouts_own(monkeypatch, tmp_path):
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"],
        cwd=Path(module.__file__).parent,
        capture_output=True,
        text=True,
    )
    if head.returncode == 0:
        assert git_commit() == head.stdout.strip()
    monkeypatch.chdir(tmp_path)
    # of the project, not of the current directory
    assert git_commit() == (head.stdout.strip() or None)
    monkeypatch.setattr(
        module,
        "__file__",
        str(tmp_path / "site-packages" / "components" / "report" / "provenance.py"),
    )
    assert git_commit() is None
    monkeypatch.setenv("DRAFTWELL_COMMIT", "c" * 40)
    assert git_commit() == "c" * 40  # what an image was built of


def test_the_digest_of_the_sources_changes_with_each_of_them_and_needs_no_git(
    monkeypatch, tmp_path
):
    file = tmp_path / "components" / "report" / "provenance.py"
    file.parent.mkdir(parents=True)
    (tmp_path / "serving").mkdir()
    monkeypatch.setattr(module, "__file__", str(file))

    def digest() -> str:
        return code_digest.__wrapped__()

    seen = {digest()}
    for name, text in (
        ("components/report/provenance.py", "a"),
        ("serving/a.py", "a"),
        ("serving/a.py", "b"),
        ("serving/a.cpp", "a"),
    ):
        (tmp_path / name).write_text(text)
        seen.add(digest())
    (tmp_path / "serving" / "a.py").rename(tmp_path / "serving" / "b.py")
    seen.add(digest())
    assert len(seen) == 6
    (tmp_path / "serving" / "a.pyc").write_text("compiled")
    (tmp_path / "tests.py").write_text("not installed")
    assert digest() in seen


def test_a_device_class_is_stable_and_names_no_host():
    name = device_class()
    assert name == device_class()
    assert name.startswith(f"cpu-{platform.machine().lower()}-")
    assert platform.node().lower() not in name
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-_")


def test_library_versions_leave_out_what_is_not_installed(monkeypatch):
    monkeypatch.setattr(module, "LIBRARIES", ("torch", "no-such-library"))
    assert set(library_versions()) == {"python", "torch"}


@pytest.mark.parametrize(
    ("threads", "cores", "busy", "lacked"),
    [(2, 2, 0.0, 0.0), (2, 2, 1.5, 1.5), (2, 64, 20.0, 0.0), (4, 64, 62.0, 2.0)],
)
def test_what_others_took_is_what_the_threads_lacked(threads, cores, busy, lacked, monkeypatch):
    """In ten seconds; half a core was ours. A machine of many cores has some for us and others."""
    unused = 10 * (cores - busy - 0.5)
    times = iter([CoreTimes(100.0, 7.0, 3.0), CoreTimes(110.0, 7.0 + unused, 3.0 + 5)])
    monkeypatch.setattr(machine, "core_times", lambda: next(times))
    monkeypatch.setattr(machine.torch, "get_num_threads", lambda: threads)
    assert machine.Others().cores() == pytest.approx(lacked)


def test_nobody_knows_of_others_where_the_system_does_not_tell(monkeypatch):
    monkeypatch.setattr(machine, "core_times", lambda: None)
    assert machine.Others().cores() is None
