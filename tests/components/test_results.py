"""The store of results: it resumes, and never mixes subjects."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from draftwell.components.results import Results
from draftwell.serving.errors import DraftwellError
from tests.support.errors import raises_code


@dataclass(frozen=True)
class Figure:
    seconds: list[float]
    name: str = "x"


def test_a_result_is_made_once_and_read_as_what_it_was(tmp_path: Path) -> None:
    file, made = tmp_path / "new" / "r.jsonl", Figure([1.0, 0.5])
    first: Results[Figure] = Results(file, {"of": 1}, Figure)
    assert not file.exists(), "nothing is written before the first result"
    assert first.get("a", lambda: made) == made
    again: Results[Figure] = Results(file, {"of": 1}, Figure)
    assert again.get("a", lambda: pytest.fail("it is known")) == made
    assert (again.read, list(again), "a" in again, "b" in again) == (1, ["a"], True, False)
    again.put("a", Figure([2.0]))
    assert Results[Figure](file, {"of": 1}, Figure)["a"] == Figure([2.0]), "the later one counts"


def test_a_line_that_was_cut_short_is_made_again_and_costs_no_other(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    first: Results[int] = Results(file, 1, int)
    for key in ("a", "b"):
        first.put(key, 3)
    file.write_bytes(file.read_bytes()[:-5])
    second: Results[int] = Results(file, 1, int)
    assert second.items() == [("a", 3)]
    second.put("c", 4)
    assert Results[int](file, 1, int).items() == [("a", 3), ("c", 4)]


def test_another_subject_begins_again_or_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    Results[int](file, 1, int).put("a", 3)
    before = file.read_bytes()
    with raises_code("other", "mine"):
        Results[int](file, 2, int, refusal=DraftwellError("mine", code="other"))
    other: Results[int] = Results(file, 2, int)
    assert (other.read, file.read_bytes()) == (0, before), "kept until there is something else"
    other.put("b", 5)
    assert Results[int](file, 2, int).items() == [("b", 5)]
    assert Results[int](file, 1, int).read == 0
    fresh: Results[int] = Results(file, 2, int, fresh=True)
    fresh.put("c", 6)
    assert Results[int](file, 2, int).items() == [("c", 6)]
    file.write_bytes(b"")
    assert Results[int](file, 2, int, refusal=DraftwellError("mine", code="other")).read == 0
