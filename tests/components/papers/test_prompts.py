"""Which prompts a cell is measured on."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from draftwell.components.papers.prompts import choose
from draftwell.components.prompts.overlap import TrainingPrompts, hash_of
from draftwell.components.prompts.prompt import demo_prompts
from draftwell.serving.errors import DraftwellError


def test_prompts_that_an_artifact_was_made_from_are_left_out() -> None:
    """By their hashes, as the tuner leaves them out; the source says so, and the next ones take
    their place."""
    code = [prompt for prompt in demo_prompts() if prompt.task == "code"]
    used = TrainingPrompts.of(
        {"acceptance_table": [hash_of(code[0]), hash_of(code[2])], "verifier": None}
    )
    found = choose("code", 3, None, used)
    assert [prompt.id for prompt in found.prompts] == [code[i].id for i in (1, 3, 4)]
    assert "2 prompts left out: they were used to make acceptance_table" in found.source
    assert "training prompts unknown: verifier" in found.source
    assert found.digest != choose("code", 3, None).digest


def test_a_set_that_was_all_used_is_an_error() -> None:
    used = TrainingPrompts.of({"acceptance_table": [hash_of(prompt) for prompt in demo_prompts()]})
    with pytest.raises(DraftwellError, match="were used to make acceptance_table: name a folder"):
        choose("code", 3, None, used)


def test_a_set_may_be_one_kind_of_a_file_with_longer_prompts(tmp_path: Path) -> None:
    """Spec-Bench holds six tasks; summaries have longer prompts than other sets."""
    rows = [
        {"id": "a", "task": "translation", "prompt": "x"},
        {"id": "b", "task": "summarization", "prompt": "y" * 2000},
        {"id": "c", "task": "summarization", "prompt": "z" * 2401},
        {"id": "d", "task": "summarization", "prompt": "w", "reference": "v"},
    ]
    with gzip.open(tmp_path / "spec_bench.jsonl.gz", "wt") as file:
        file.write("\n".join(map(json.dumps, rows)))
    found = choose("summaries", 5, tmp_path)
    assert [prompt.id for prompt in found.prompts] == ["b", "d"]
    assert found.source == "CNN/DailyMail (of Spec-Bench), 2 prompts"
    assert choose("summaries", 5, None).source.startswith(
        "shipped prompts of the kind `summarisation`"
    )
