"""Parts in processes of their own: limits, failures, what is kept, and what is not done twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftwell.components.bench.gpu import parts as module
from draftwell.components.bench.gpu.card import Card, copy_bandwidth
from draftwell.components.bench.gpu.parts import Part, measure_parts
from draftwell.components.bench.gpu.results import (
    GpuResults,
    file_of,
    read_results,
    results_in,
    write_results,
)
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import write_json
from tests.support.errors import raises_code

CARD = Card(
    name="Fake 1", device_class="cuda-fake-1", gigabytes=1, bandwidth=9, cuda=None, torch="2.11.0"
)
LONG = 600.0


def reports(folder: Path) -> None:
    write_json(folder / "bench.json", {"tokens": 7})


def hangs_after_a_report(folder: Path) -> None:
    write_json(folder / "first.json", [1])
    (folder / "second.json.part").write_text("[")
    print(os.getpid(), flush=True)
    time.sleep(LONG)


def fails(folder: Path) -> None:
    raise DraftwellError("no such model:\ninstall it", code="no_model")


def is_killed(folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., GpuResults]:
    """Measure parts by name; what is said is kept in `lines`."""

    def run(*parts: Part, card: Card = CARD, seconds: float = LONG) -> GpuResults:
        file = file_of(tmp_path / "out", "tiny", card)
        before = read_results(file) if file.is_file() else GpuResults(pair="tiny", card=card)
        end = time.monotonic() + seconds
        lines.clear()
        measure_parts(parts, before, file, tmp_path / "work", end, lines.append)
        return read_results(file)

    lines: list[str] = []
    run.lines = lines  # type: ignore[attr-defined]
    return run


def test_a_part_over_its_limit_is_ended_and_what_it_wrote_is_kept(run: Any, tmp_path: Path) -> None:
    found = run(Part("slow", 1.0, hangs_after_a_report), Part("next", LONG, reports))
    slow, after = found.parts["slow"], found.parts["next"]
    assert (slow.state, slow.reports) == ("stopped", {"first": [1]})
    assert "1 s" in slow.why
    assert 1.0 <= slow.seconds < 60
    assert after.state == "measured", "the next one runs all the same"
    pid = int((tmp_path / "work" / "slow" / "log").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_part_that_fails_says_why_and_costs_only_itself(run: Any) -> None:
    found = run(
        Part("broken", LONG, fails),
        Part("killed", LONG, is_killed),
        Part("mute", LONG, lambda folder: None),
        Part("absent", LONG, reports, lambda: "there is no bundle"),
        Part("good", LONG, reports),
    )
    said = {name: (part.state, part.why) for name, part in found.parts.items()}
    assert said == {
        "broken": ("failed", "no such model: install it"),
        "killed": ("failed", "nothing was printed"),
        "mute": ("failed", "it wrote no report"),
        "absent": ("skipped", "there is no bundle"),
        "good": ("measured", ""),
    }
    assert run.lines[3].startswith("absent: skipped, there is no bundle")


def test_a_copy_leaves_what_its_process_does_at_its_end(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end() -> None:
        raise RuntimeError("this copy lacks the threads")

    monkeypatch.setattr(threading, "_shutdown", end)
    assert run(Part("good", LONG, reports)).parts["good"].state == "measured"


def test_what_was_measured_for_this_code_is_left_alone(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(Part("a", LONG, reports), Part("b", LONG, fails))
    again = run(Part("a", LONG, fails), Part("b", LONG, reports))
    assert [again.parts[name].state for name in "ab"] == ["measured", "measured"]
    assert run.lines[0] == "a: measured before"
    monkeypatch.setattr(module, "code_digest", lambda: "other code")
    other = run(Part("a", LONG, fails), Part("b", LONG, reports))
    assert other.parts["a"] == again.parts["a"], "a failure takes no earlier figure away"
    assert other.parts["b"].code == "other code"
    assert run.lines[0].startswith("a: failed"), "and yet it was tried"


def test_cards_have_files_of_their_own(run: Any, tmp_path: Path) -> None:
    other = CARD.model_copy(update={"name": "Fake 2", "device_class": "cuda-fake-2"})
    run(Part("a", LONG, reports))
    found = run(Part("a", LONG, reports), card=other)
    assert run.lines[0].startswith("a: measured ("), "not left out for the first card's sake"
    assert found.card == other
    assert [one.card.name for one in results_in(tmp_path / "out")] == ["Fake 1", "Fake 2"]


def test_without_time_nothing_is_begun(run: Any) -> None:
    found = run(Part("late", LONG, reports), seconds=1.0)
    assert (found.parts["late"].state, found.parts["late"].why) == ("skipped", "no time was left")


def test_a_changed_or_cut_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tiny-cuda-fake-1.json"
    write_results(file, GpuResults(pair="tiny", card=CARD))
    assert read_results(file).card == CARD
    text = file.read_text()
    file.write_text(text.replace("Fake 1", "Fake 9"))
    with raises_code("results_changed", str(file)):
        read_results(file)
    for broken in (text[:-20], "{}", "[" * 100_000):
        file.write_text(broken)
        with raises_code("results_unreadable", str(file)):
            read_results(file)
    with raises_code("results_unreadable", "missing.json"):
        read_results(tmp_path / "missing.json")


def test_a_copy_counts_bytes_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    from draftwell.components.bench.gpu import card

    ticks = iter(range(100))
    monkeypatch.setattr(card.time, "perf_counter", lambda: float(next(ticks)))
    assert copy_bandwidth("cpu", size=500) == pytest.approx(1e-6)


def test_a_part_computes_with_several_threads_though_this_process_has(tmp_path: Path) -> None:
    """OpenMP's threads are not in a copy of the process: a part that is copied from the thread that
    led them waits for ever."""
    script = """
import sys
from pathlib import Path
import torch
from draftwell.components.bench.gpu.limited import run_limited
torch.set_num_threads(2)
compute = lambda: torch.ones(1 << 22).mul_(2).sum()
compute()
print(run_limited(compute, 20.0, Path(sys.argv[1])))
"""
    command = [sys.executable, "-c", script, str(tmp_path / "log")]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout == "('measured', '')\n"
