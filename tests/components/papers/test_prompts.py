"""Which prompts a cell is measured on."""

from __future__ import annotations

import pytest

from components.papers.prompts import choose
from components.prompts.overlap import TrainingPrompts, hash_of
from components.prompts.prompt import demo_prompts
from serving.errors import DraftwellError


def test_prompts_that_an_artifact_was_made_from_are_left_out() -> None:
    """By their hashes, as the tuner leaves them out; the source says so, and the next ones take their place."""
    code = [prompt for prompt in demo_prompts() if prompt.task == "code"]
    used = TrainingPrompts.of({"acceptance_table": [hash_of(code[0]), hash_of(code[2])], "verifier": None})
    found = choose("code", 3, None, used)
    assert [prompt.id for prompt in found.prompts] == [code[i].id for i in (1, 3, 4)]
    assert "2 prompts left out: they were used to make acceptance_table" in found.source
    assert "training prompts unknown: verifier" in found.source
    assert found.digest != choose("code", 3, None).digest


def test_a_set_that_was_all_used_is_an_error() -> None:
    used = TrainingPrompts.of({"acceptance_table": [hash_of(prompt) for prompt in demo_prompts()]})
    with pytest.raises(DraftwellError, match="were used to make acceptance_table: name a folder"):
        choose("code", 3, None, used)
