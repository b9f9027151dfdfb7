"""Others' benchmark results as evidence: read, paired and judged; wrong files are refused by name.

The files of vLLM 0.32, guidellm 0.8.1 and llama.cpp's client are what these tools wrote against a
server here, trimmed; speed_bench.py had prompts of ours in place of SPEED-Bench's. AIPerf 0.13
and specdec_bench do not run here: theirs are written by these tools' own models and metrics, from
the times that `vllm bench serve` had measured. Made by hand, and measured by nobody, are AIPerf's
`spec_decode_acceptance`, its request of warm-up and its `inputs.json`, and specdec_bench's steps
(their lengths and times) and the spread between its three runs.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftwell.components.engines.port import Acceptance
from draftwell.components.gate.evidence_files import reading
from draftwell.components.gate.evidence_files.judgement import LoadFigure, judge_evidence
from draftwell.components.gate.evidence_files.reading import read_evidence
from draftwell.components.gate.evidence_files.run import BenchmarkRun, Request
from draftwell.components.report.intervals import ratio_of_runs
from draftwell.serving import files
from draftwell.serving.bundle.verdict import GateVerdict, Thresholds
from tests.support.errors import raises_code
from tests.support.evidence import DATA, place

LIMITS = Thresholds(min_speedup_lower_bound=1.0)
TOOLS = {
    "vllm": ("vllm bench serve", None),
    "guidellm": ("guidellm", "0.8.1"),
    "aiperf": ("AIPerf", "0.13.0"),
    "specdec": ("specdec_bench", "0.0.0"),
    "llama": ("llama.cpp speed_bench", None),
}


def runs(*names: str) -> tuple[BenchmarkRun, ...]:
    return read_evidence([place(name) for name in names]).runs


def judged(other: Any, plain: Any) -> tuple[GateVerdict, list[LoadFigure]]:
    return judge_evidence(other, plain, LIMITS)


def edited(tmp_path: Path, name: str, change: Callable[[Any], object]) -> Path:
    """A copy of a file of the data with a change."""
    document = json.loads(place(name).read_text())
    change(document)
    file = tmp_path / f"{name}.json"
    file.write_text(json.dumps(document))
    return file


@pytest.mark.parametrize("tool", TOOLS)
def test_every_tools_results_are_read_and_judged(tool: str) -> None:
    with_drafts, plain = runs(f"{tool}_with"), runs(f"{tool}_plain")
    for run in (*with_drafts, *plain):
        assert (run.tool, run.version) == TOOLS[tool]
        assert (run.load, run.completed, run.failed, run.tokens) == ("1 at once", 12, 0, 288)
        assert run.seconds > 0
        assert len(run.requests) == (0 if tool == "specdec" else 12)
        if tool != "llama":
            assert run.model == "smollm2-135m"
    verdict, [figure] = judged(with_drafts, plain)
    assert [check.name for check in verdict.checks] == ["speed over plain decoding, 1 at once"]
    assert figure.low <= figure.ratio <= figure.high
    assert figure.plain_tokens_per_second == pytest.approx(
        sum(run.tokens for run in plain) / sum(run.seconds for run in plain)
    )
    assert {one.name for one in verdict.skipped} == {
        "greedy outputs as plain decoding's",
        "regression",
    }
    assert verdict.result == ("not enough evidence" if tool == "llama" else "passed")
    if tool == "guidellm":
        turned, _ = judged(plain, with_drafts)
        assert turned.result == "failed"
    else:
        with raises_code("unlike_evidence", "plain_evidence drafted"):
            judged(plain, with_drafts)


def test_acceptance_is_reported() -> None:
    for tool in ("vllm", "aiperf", "specdec"):
        _, [figure] = judged(runs(f"{tool}_with"), runs(f"{tool}_plain"))
        assert figure.acceptance.length == pytest.approx(4.8 if tool == "specdec" else 11)
        assert figure.acceptance.rate == (None if tool == "specdec" else 1.0)
    counted = Acceptance.of_histogram({2: 1, 0: 1, 1: 1}, drafted=6)
    assert counted == Acceptance.of_histogram([1, 1, 1], drafted=6)
    assert (counted.rounds, counted.accepted, counted.accepted_at) == (3, 3, (2, 1))


def test_requests_are_paired_by_prompt_and_not_by_place(tmp_path: Path) -> None:
    """guidellm lists requests as they end; the order of one side says nothing."""

    def turn(report: Any) -> None:
        done = report["benchmarks"][0]["requests"]["successful"]
        starts = [(one["request_start_time"], one["request_end_time"]) for one in done]
        done.reverse()
        for one, (start, end) in zip(done, starts, strict=True):
            one["request_start_time"], one["request_end_time"] = start, end

    turned = read_evidence([edited(tmp_path, "guidellm_with", turn)]).runs
    plain = runs("guidellm_plain")
    one, two = (judged(side, plain)[1][0] for side in (runs("guidellm_with"), turned))
    assert (one.low, one.high) == (two.low, two.high)


def test_warm_up_is_left_out(tmp_path: Path) -> None:
    lines = (place("aiperf_plain") / "profile_export.jsonl").read_text().splitlines()
    assert sum('"warmup"' in line for line in lines) == 1
    assert len(lines) == len(runs("aiperf_plain")[0].requests) + 1

    def measure_later(report: Any) -> None:
        benchmark = report["benchmarks"][0]
        second = sorted(one["request_start_time"] for one in benchmark["requests"]["successful"])[1]
        benchmark["scheduler_metrics"]["measure_start_time"] = second

    [run] = read_evidence([edited(tmp_path, "guidellm_plain", measure_later)]).runs
    assert run.completed == 11


def test_sums_alone_are_not_enough_evidence_until_there_are_several_runs() -> None:
    plain = runs("vllm_plain")
    verdict, figures = judged(runs("vllm_with_aggregates"), plain)
    assert (verdict.result, figures) == ("not enough evidence", [])
    assert "--save-detailed" in verdict.checks[0].detail
    three = [
        run.model_copy(update={"seconds": run.seconds * x}) for run in plain for x in (1, 2, 3)
    ]
    sums = [run.model_copy(update={"requests": ()}) for run in three]
    faster = [run.model_copy(update={"seconds": run.seconds / 20}) for run in sums]
    assert judged(faster, sums)[0].passed
    close, _ = judged(sums, sums)
    assert close.result == "not enough evidence"
    assert "3 runs" in close.checks[0].detail
    assert judged(faster[:2], sums[:2])[0].result == "not enough evidence"


def test_the_interval_over_runs_covers_what_it_says() -> None:
    rng = np.random.default_rng(0)
    beyond = 0
    for _ in range(2000):
        base, other = np.exp(rng.normal(0, 0.1, (2, 4)))
        beyond += ratio_of_runs(list(base), list(other)).low > 1
    assert 0.03 < beyond / 2000 < 0.065


def run_of(seconds: list[float], **changes: Any) -> BenchmarkRun:
    """A run at some load of requests that took so long."""
    known = {
        "tool": "tool",
        "load": "8 at once",
        "conditions": {},
        "completed": len(seconds),
        "failed": 0,
        "details": "--all",
        "seconds": sum(seconds) / 8,
        "tokens": 10.0 * len(seconds),
        "requests": tuple(
            Request(prompt=str(place), seconds=one, tokens=10) for place, one in enumerate(seconds)
        ),
    }
    return BenchmarkRun.model_validate(known | changes)


def test_requests_at_once_count_as_one() -> None:
    """Sixteen requests in two groups of eight, of which one had a slow machine: they are not
    sixteen."""
    few, _ = judged([run_of([1.0] * 16)], [run_of([1.2] * 16)])
    assert few.result == "not enough evidence"
    assert few.prompts_needed == 64
    halves = [1.3] * 8 + [0.9] * 8
    plain = run_of(halves * 4)
    alone = plain.model_copy(update={"seconds": plain.seconds * 8})
    other = run_of([1.0] * 64)
    _, [grouped] = judged([other], [plain])
    _, [single] = judged([other.model_copy(update={"seconds": other.seconds * 8})], [alone])
    assert (grouped.at_once, single.at_once) == (8, 1)
    assert grouped.low < single.low < 1.1 < single.high < grouped.high


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tool": "another"}, "tool"),
        ({"model": "another"}, "model"),
        ({"engine_version": "2"}, "engine version"),
        ({"conditions": {"dtype": "float16"}}, "dtype"),
        ({"load": "4 at once"}, "4 at once"),
        ({"failed": 3}, "3 of 67"),
        ({"completed": 0, "requests": (), "tokens": 0.0}, "no request"),
        ({"completed": 63}, "number of requests"),
    ],
)
def test_what_cannot_be_compared_is_refused(change: dict[str, Any], named: str) -> None:
    plain = run_of([1.0] * 64)
    with raises_code("unlike_evidence", named):
        judged([plain.model_copy(update=change)], [plain])


def test_other_prompts_other_lengths_and_drafts_in_plain_decoding_are_refused() -> None:
    plain = run_of([1.0] * 64)
    rows = plain.requests
    others = tuple(row.model_copy(update={"prompt": f"x{row.prompt}"}) for row in rows)
    longer = (rows[0].model_copy(update={"tokens": 100}), *rows[1:])
    for requests, named in ((others, "requests are others"), (longer, "90 of 640")):
        with raises_code("unlike_evidence", named):
            judged([plain.model_copy(update={"requests": requests})], [plain])
    ended = (rows[0].model_copy(update={"tokens": 6}), *rows[1:])  # at a near-tie
    assert judged([plain.model_copy(update={"requests": ended})], [plain])[1]
    with raises_code("unlike_evidence", "plain_evidence"):
        judged(runs("vllm_with"), runs("vllm_with"))
    with raises_code("no_threshold"):
        judge_evidence([plain], [plain], Thresholds())


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("aiperf_plain/profile_export.jsonl", '"request_latency":{"value":', "null"),
        ("aiperf_plain/profile_export.jsonl", '"request_latency":{"value":', "[1.0]"),
        ("aiperf_plain/profile_export.jsonl", '"output_sequence_length":{"value":', "NaN"),
        (
            "aiperf_plain/profile_export_aiperf.json",
            '"request_count": {"unit": "requests", "avg": ',
            "NaN",
        ),
        ("guidellm_plain.json", '"start_time": ', "1e30"),
        ("guidellm_plain.json", '"request_start_time": ', "NaN"),
        ("vllm_with.json", '"spec_decode_per_position_acceptance_rates": [', "NaN"),
        ("llama_plain.json", '"latency_s": ', "NaN"),
        ("specdec_plain/timing.json", '"Output TPS": ', "NaN"),
    ],
)
def test_a_wrong_number_of_any_tool_is_one_line(
    tmp_path: Path, file: str, old: str, new: str
) -> None:
    copy = Path(shutil.copytree(DATA, tmp_path / "data")) / file
    text, changed = re.subn(f"(?<={re.escape(old)})[^],}}]+", new, copy.read_text())
    assert changed
    copy.write_text(text)
    with raises_code("bad_evidence", str(copy)):
        read_evidence([copy.parent if "/" in file else copy])


def wrong(document: Any) -> dict[str, Callable[[], object]]:
    """Changes of a result of vLLM that make it none."""
    return {
        "NaN": lambda: document["latencies"].__setitem__(0, float("nan")),
        "unequal": lambda: document["output_lens"].pop(),
        "missing": lambda: document.pop("duration"),
        "no output": lambda: document["output_lens"].__setitem__(0, 0),
    }


@pytest.mark.parametrize("kind", wrong({}))
def test_a_wrong_value_is_one_line(tmp_path: Path, kind: str) -> None:
    file = edited(tmp_path, "vllm_plain", lambda document: wrong(document)[kind]())
    with raises_code("bad_evidence", str(file)):
        read_evidence([file])


def test_failed_and_empty_runs(tmp_path: Path) -> None:
    def fail(document: Any) -> None:
        document.update(completed=0, failed=12, total_output_tokens=0, output_lens=[0] * 12)
        document.update(errors=["refused"] * 12)

    plain = runs("vllm_plain")
    failed = read_evidence([edited(tmp_path, "vllm_with", fail)]).runs
    with raises_code("unlike_evidence", "12 of 12"):
        judged(failed, plain)
    errored = edited(
        tmp_path, "llama_plain", lambda document: document["results"][3].update(ok=False)
    )
    with raises_code("unlike_evidence", "1 of 12"):
        judged(read_evidence([errored]).runs, runs("llama_plain"))


def test_a_sample_of_guidellms_requests_is_sums_alone(tmp_path: Path) -> None:
    def strip(report: Any) -> None:
        for one in report["benchmarks"][0]["requests"]["successful"]:
            one["request_args"] = None

    [run] = read_evidence([edited(tmp_path, "guidellm_with", strip)]).runs
    verdict, _ = judged([run], runs("guidellm_plain"))
    assert verdict.result == "not enough evidence"
    assert "sample_size" in verdict.checks[0].detail


def test_files_that_are_no_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = place("vllm_plain").read_text()
    cases = {
        whole[: len(whole) // 2]: "bad_evidence",
        "": "unknown_evidence",
        "[]": "unknown_evidence",
        "3": "unknown_evidence",
        '{"benchmarks": [], "metadata": {"guidellm_version": "0.8.1"}}': "bad_evidence",
        '{"metadata": 3}': "unknown_evidence",
        "[" * 100_000: "bad_evidence",
        '[{"build_commit": "x", "samples_ts": [1.0]}]': "evidence_without_drafts",
    }
    file = tmp_path / "file.json"
    for text, code in cases.items():
        file.write_text(text)
        with raises_code(code):
            read_evidence([file])
    file.write_bytes(b"\xff\xfe")
    for path in (file, tmp_path / "nowhere"):
        with raises_code("unreadable_file", str(path)):
            read_evidence([path])
    monkeypatch.setattr(files, "MOST_TEXT", 1000)
    with raises_code("unreadable_file", "vllm_plain"):
        read_evidence([place("vllm_plain")])
    monkeypatch.setattr(reading, "MOST_FILES", 1)
    with raises_code("bad_evidence", "more than 1"):
        read_evidence([place("aiperf_plain")])


@pytest.mark.parametrize("part", ["aiperf_plain/profile_export.jsonl", "specdec_plain/timing.json"])
def test_a_part_of_a_folder_asks_for_the_folder(part: str) -> None:
    with raises_code("bad_evidence", "name the folder"):
        read_evidence([DATA / part])


def test_a_summary_of_aiperf_alone_is_sums(tmp_path: Path) -> None:
    shutil.copy(place("aiperf_plain") / "profile_export_aiperf.json", tmp_path)
    [run] = read_evidence([tmp_path]).runs
    assert (run.completed, run.tokens, run.requests) == (12, 288.0, ())


def test_lines_of_results_are_runs_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "appended.json"
    text = place("vllm_plain").read_text().strip()
    file.write_text(f"{text}\n{text}")
    evidence = read_evidence([file])
    assert len(evidence.runs) == 2
    assert evidence.digests == {files.sha256_file(file): "appended.json"}
    with raises_code("unlike_evidence", "named twice"):
        judged(runs("vllm_with"), evidence.runs)


def test_the_sums_of_one_run_are_no_three_runs(tmp_path: Path) -> None:
    """Copies vary by nothing, and would have an interval without width."""
    sides = []
    for side in ("specdec_with", "specdec_plain"):
        copies = [shutil.copytree(place(side), tmp_path / f"{side}{count}") for count in range(3)]
        sides.append(read_evidence(copies).runs)
    with raises_code("unlike_evidence", "named twice"):
        judged(*sides)


def test_runs_at_several_loads_in_a_folder_of_specdec_bench_are_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(place("specdec_plain"), tmp_path / "runs")
    for name in ("timing", "acceptance_rate"):
        file = folder / f"{name}.json"
        one = json.loads(file.read_text())[0]
        two = one | ({"Output TPS": 8 * one["Output TPS"]} if name == "timing" else {})
        file.write_text(json.dumps([one, two]))
    with raises_code("bad_evidence", "several loads"):
        read_evidence([folder])


def test_no_key_is_kept_and_a_run_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    def add_keys(report: Any) -> None:
        backend = report["benchmarks"][0]["config"]["backend"]
        backend["target"] = "http://me:hu@sh@127.0.0.1:8000/?api_key=hush"
        backend["extras"]["headers"] = {"Authorization": "Bearer hush"}

    evidence = read_evidence([edited(tmp_path, "guidellm_plain", add_keys)])
    assert "sh@" not in evidence.model_dump_json()
    assert "hush" not in evidence.model_dump_json()
    folder = shutil.copytree(place("aiperf_plain"), tmp_path / "aiperf")
    summary = folder / "profile_export_aiperf.json"
    document = json.loads(summary.read_text())
    summary.write_text(json.dumps(document | {"is_complete": False}))
    with raises_code("bad_evidence", str(summary)):
        read_evidence([folder])
