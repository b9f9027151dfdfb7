"""`speculation_profile.json`: both conventions from counts, what is read, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftwell.components.export.measured import profile_from
from draftwell.components.export.profile import (
    FILE,
    profile_of,
    read_profile,
    unmeasured,
    write_profile,
)
from tests.support.bench_reports import ENTRY, REPORT
from tests.support.engine_figures import ENGINE, figure, written
from tests.support.errors import raises_code


def test_the_example_of_model_optimizers_own_tests() -> None:
    """40, 30 and 30 of 100 rounds gave 1, 2 and 3 tokens."""
    made = profile_of(100, (60, 30), method="eagle3", k=3).written()
    assert made["marginal_accept_rates"] == [0.6, 0.3, 0.0]
    assert made["conditional_accept_rates"] == [0.6, 0.5, 0.0]
    assert made["acceptance_length_histogram"] == {"1": 40, "2": 30, "3": 30}
    assert made["mean_accept_length"] == pytest.approx(1.9)
    assert made["validation"]["mean_consistency"]["passed"]


def test_a_length_that_never_came_is_left_out_and_not_taken_for_the_end() -> None:
    made = profile_of(100, (50, 50), method="eagle3", k=2).written()
    assert made["acceptance_length_histogram"] == {"1": 50, "3": 50}
    assert made["conditional_accept_rates"] == [0.5, 1.0]


def test_rates_of_shorter_drafts_than_were_drafted_do_not_pass() -> None:
    made = profile_of(100, (60, 30, 20), method="eagle3", k=2).written()
    assert not made["validation"]["mean_consistency"]["passed"]


def test_written_and_read_from_the_folder_and_from_the_file(tmp_path: Path) -> None:
    made = profile_of(10, (7, 3), method="eagle3", k=2, measurement_conditions={"dtype": "x"})
    file = write_profile(tmp_path, made)
    assert file.name == FILE
    assert read_profile(tmp_path) == read_profile(file) == made
    assert made.expected == (0.7, 0.3)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"conditional_accept_rates": [0.8, 0.5]}, (0.8, 0.4)),
        ({"marginal_accept_rates": [0.8, 0.4], "per_category": {"coding": 2.1}}, (0.8, 0.4)),
    ],
)
def test_a_profile_of_another_producer(
    tmp_path: Path, fields: dict[str, Any], expected: tuple[float, ...]
) -> None:
    """`ar_validate` writes neither method nor `measured`, and no consumer may ask for them."""
    file = written(tmp_path, {"schema_version": "1.0", "of_theirs": 1, **fields})
    found = read_profile(file)
    assert found.expected == pytest.approx(expected)
    assert found.written()["of_theirs"] == 1


@pytest.mark.parametrize(
    ("document", "code"),
    [
        ("{", "bad_profile"),
        ([1], "bad_profile"),
        ({"marginal_accept_rates": [0.5]}, "bad_profile"),
        ({"schema_version": "2.0"}, "bad_profile"),
        ({"schema_version": "1.0", "marginal_accept_rates": [1.7]}, "bad_profile"),
        ('{"schema_version": "1.0", "marginal_accept_rates": [NaN]}', "bad_profile"),
        # conditional rates under the other name
        (
            {"schema_version": "1.0", "marginal_accept_rates": [0.5, 0.9]},
            "profile_mixes_conventions",
        ),
        (
            {
                "schema_version": "1.0",
                "marginal_accept_rates": [0.8, 0.7],
                "conditional_accept_rates": [0.8, 0.7],
            },
            "profile_mixes_conventions",
        ),
    ],
)
def test_what_is_no_profile_is_one_line(tmp_path: Path, document: Any, code: str) -> None:
    with raises_code(code) as told:
        read_profile(written(tmp_path, document))
    assert "\n" not in str(told.value)


def test_a_folder_without_a_profile_and_one_that_says_nothing_was_measured(tmp_path: Path) -> None:
    with raises_code("bad_profile"):
        read_profile(tmp_path)
    write_profile(tmp_path, unmeasured("eagle3"))
    with raises_code("profile_not_measured"):
        _ = read_profile(tmp_path).expected


def test_figures_of_another_engine_become_a_profile(tmp_path: Path) -> None:
    """The rates are of the longest drafts; lengths that a load decides, and other methods, are
    none of it."""
    rows = [
        figure("eagle3(k=2)", 100, 70, 40),
        figure("eagle3(k=3)", 90, 63, 36, 18),
        figure("eagle3(k=5@1-4,0@5-8)", 10, 10),
        figure("ngram(k=5,n=3)", 10, 10),
    ]
    file = written(tmp_path, {**ENGINE, "figures": rows})
    made, drafter = profile_from(file, "eagle3")
    assert made.expected == (0.7, 0.4, 0.2)
    assert made.accept_length_by_k == {"2": 2.1, "3": 2.3}
    assert drafter == "pair-head-0123456789ab"
    conditions = made.measurement_conditions or {}
    assert [conditions[name] for name in ("engine", "engine_version", "machine", "dtype")] == [
        "vllm",
        "0.32.0",
        "a CPU",
        "bfloat16",
    ]
    with raises_code("not_in_bench"):
        profile_from(file, "draft_model")


def test_a_report_of_our_engine_becomes_one_and_a_tree_does_not(tmp_path: Path) -> None:
    counted = {**ENTRY, "rounds": 50, "accepted_at": [30, 10], "per_prompt": []}
    chain = {**counted, "strategy": "eagle3", "parameters": {"num_speculative_tokens": 2}}
    tree = {**chain, "parameters": {"num_speculative_tokens": 4, "top_k": 2}}
    early = {**chain, "parameters": {"num_speculative_tokens": 4, "threshold": 0.3}}
    report = {**REPORT, "strategies": {"a": tree, "b": chain, "c": early, "d": counted}}
    made, _ = profile_from(written(tmp_path, report), "eagle3")
    assert (made.num_speculative_tokens, made.expected) == (2, (0.6, 0.2))
    assert (made.measurement_conditions or {})["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    "document", ["{", {}, {"figures": [{}]}, {"address": "http://x"}, {**ENGINE, "figures": 3}]
)
def test_what_no_bench_wrote_is_refused(tmp_path: Path, document: Any) -> None:
    with raises_code("bad_bench_file"):
        profile_from(written(tmp_path, document), "eagle3")
