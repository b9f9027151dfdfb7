"""Draft lengths by load: what each engine's format means, round trips, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from draftwell.components.engines.vllm_methods import schedule_of
from draftwell.components.export.schedules import (
    read_schedule,
    sglang_adaptive,
    tensorrt_llm_schedule,
)
from tests.support.engine_figures import written
from tests.support.errors import raises_code

LEVELS = {1: 5, 4: 3, 16: 0}


def vllm() -> dict[str, Any]:
    table = [list(part) for part in schedule_of(LEVELS)]
    return {
        "method": "eagle3",
        "num_speculative_tokens": 5,
        "num_speculative_tokens_per_batch_size": table,
    }


@pytest.mark.parametrize(
    "document",
    [
        vllm(),
        {"speculative_config": vllm()},
        vllm()["num_speculative_tokens_per_batch_size"],
        sglang_adaptive([(load, (k,)) for load, k in LEVELS.items()]),
        tensorrt_llm_schedule(list(LEVELS.items())),
    ],
)
def test_what_we_write_means_the_same_at_every_load_when_it_is_read(
    tmp_path: Path, document: Any
) -> None:
    """Between two measured loads the length of the higher one holds, whatever a format's keys
    are."""
    found = read_schedule(written(tmp_path, document))
    assert [found.at(load) for load in (1, 2, 4, 5, 16, 40)] == [(5,), (3,), (3,), (0,), (0,), (0,)]
    assert found.lengths == (3, 5)


@pytest.mark.parametrize(
    ("document", "loads", "method"),
    [
        # a gap keeps what was before it, and nothing exceeds the longest
        (
            {
                "method": "draft_model",
                "num_speculative_tokens": 4,
                "num_speculative_tokens_per_batch_size": [[1, 16, 9], [64, 128, 2]],
            },
            {1: (4,), 63: (4,), 64: (2,), 500: (2,)},
            "draft_model",
        ),
        # a key is the lowest load of its lengths
        (
            {"8": {"candidate_steps": [3, 1]}, "1": {"candidate_steps": [5]}, "ema_alpha": 0.2},
            {1: (5,), 7: (5,), 8: (1, 3), 99: (1, 3)},
            "eagle3",
        ),
        # a key is the highest load of its length, and beyond the last nothing is drafted
        (
            {"decoding_type": "Eagle3", "draft_len_schedule": {"4": 4, "8": 2}},
            {1: (4,), 4: (4,), 5: (2,), 9: (0,)},
            "eagle3",
        ),
    ],
)
def test_each_format_is_read_as_its_engine_reads_it(
    tmp_path: Path, document: Any, loads: dict[int, tuple[int, ...]], method: str
) -> None:
    found = read_schedule(written(tmp_path, document))
    assert {load: found.at(load) for load in loads} == loads
    assert found.method == method


def test_options_of_tensorrt_llm_in_yaml(tmp_path: Path) -> None:
    options = {
        "speculative_config": {
            "decoding_type": "NGram",
            "max_draft_len": 4,
            "draft_len_schedule": {2: 4, 8: 1, 16: 6},
        }
    }
    found = read_schedule(written(tmp_path, yaml.safe_dump(options), "options.yaml"))
    assert (found.method, found.at(2), found.at(3)) == ("ngram", (4,), (1,))
    assert found.at(16) == (4,), "no more than max_draft_len"


@pytest.mark.parametrize(
    "document",
    [
        "{",
        "3",
        "{}",
        {"strategy": "throughput_aware", "1": {"candidate_steps": [1]}},
        {"1": {"candidate_steps": []}},
        {"1": {"candidate_steps": [-1]}},
        [[2, 4, 3]],
        [[1, 4, 3], [4, 8, 2]],
        [[1, 4]],
        [[1, 4, 2.5]],
        {"draft_len_schedule": {}},
        {"draft_len_schedule": {"0": 4}},
        {"draft_len_schedule": [4]},
        {"method": "medusa", "num_speculative_tokens_per_batch_size": [[1, 4, 3]]},
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, document: Any) -> None:
    with raises_code("bad_schedule") as told:
        read_schedule(written(tmp_path, document))
    assert "\n" not in str(told.value)
    with raises_code("bad_schedule"):
        read_schedule(tmp_path / "nowhere.json")
