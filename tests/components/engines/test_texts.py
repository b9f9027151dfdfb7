"""Texts of an engine: kept one by one, resumed, and not mixed with others."""

from __future__ import annotations

from pathlib import Path

from draftwell.components.engines.port import EngineSettings
from draftwell.components.engines.texts import open_texts, rows_of, write_texts
from draftwell.components.prompts.prompt import Prompt
from draftwell.serving.runtime.requests import Sampling
from tests.support.errors import raises_code
from tests.support.peers.fake_engine import FakeEngine

PROMPTS = [Prompt(f"p{i}", "a", ["x"]) for i in range(5)]
IDS = [[5 + i, 6] for i in range(5)]


def write(
    file: Path, log: list[str], *, count: int = 5, subject: str = "s", fresh: bool = False
) -> dict[str, object]:
    sampling = Sampling(max_tokens=3, logprobs=2)
    return write_texts(
        open_texts(file, subject, fresh=fresh),
        FakeEngine("off", {}, log),
        EngineSettings(slots=2),
        PROMPTS[:count],
        IDS[:count],
        sampling,
        decode=lambda ids: " ".join(map(str, ids)),
    )


def test_a_run_that_was_stopped_resumes(tmp_path: Path) -> None:
    file, first, second, third = tmp_path / "texts.jsonl", list[str](), list[str](), list[str]()
    assert write(file, first, count=2)["rows"] == 2
    made = write(file, second)
    assert (made["rows"], made["tokens"]) == (5, 15)
    assert second == ["start off", "decode off 2", "decode off 1"]
    rows = rows_of(file)
    assert [row["id"] for row in rows] == ["p0", "p1", "p2", "p3", "p4"]
    assert rows[4]["text"] == "9 6 9"
    assert rows[4]["top_logprobs"][0] == [[9, -0.1], [10, -0.3]]
    assert made["acceptance"].rounds == 10  # type: ignore[attr-defined]
    assert write(file, third)["tokens_per_second"] is None
    assert third == []


def test_texts_of_something_else_are_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    write(file, [], count=1)
    with raises_code("other_texts", "texts.jsonl", "--set fresh=true"):
        write(file, [], subject="other")
    assert write(file, [], subject="other", fresh=True)["rows"] == 5
    file.write_text("{}\n")
    with raises_code("other_texts"):
        write(file, [])
