"""Prompts that something was made from are known by their hashes, whatever their ids and files."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from draftwell.components.prompts.overlap import TrainingPrompts, different, hash_of, hashes_of
from draftwell.components.prompts.prompt import DEMO, Prompt, read_prompts
from draftwell.components.prompts.sources import load_prompts
from draftwell.flows import loading
from draftwell.flows.loading import prompts_of
from draftwell.flows.settings import PipelineSettings
from tests.support.errors import raises_code

ROWS = [Prompt(f"p{i}", None, [f"question {i}"]) for i in range(10)]


def test_a_hash_covers_what_is_asked_and_not_the_id() -> None:
    asked = Prompt("a", None, ["Hello"])
    assert hash_of(asked) == hash_of(
        Prompt("other", "chat", ["Hello", "and then?"], "Hi", answers=("Hi",), fields={"answer": 1})
    )
    system = ({"role": "system", "content": "Be brief."},)
    others = [
        Prompt("a", None, ["hello"]),
        Prompt("a", None, ["Hello"], messages=system),
        Prompt("a", None, ["Hello"], raw=True),
        Prompt("a", None, [""], tokens=((1, 2),)),
        Prompt("a", None, [""], tokens=((1, 3),)),
    ]
    assert len({hash_of(prompt) for prompt in [asked, *others]}) == 6
    assert hashes_of([asked, asked]) == [hash_of(asked)]


def test_repeated_prompts_count_once_in_order() -> None:
    again = Prompt("again", None, ["question 1"])
    assert [prompt.id for prompt in different([*ROWS[:3], again, ROWS[3]])] == [
        "p0",
        "p1",
        "p2",
        "p3",
    ]


def test_prompts_that_differ_in_what_is_masked_are_different() -> None:
    """They are other questions; yet what was made from one leaves the other out, too."""
    asked = [Prompt(name, None, [f"Is 10.0.{name}.7 in 10.0.0.0/24?"]) for name in "01"]
    assert different([*asked, *asked]) == asked
    used = TrainingPrompts.of({"traces": hashes_of(asked[:1])})
    assert used.split(asked) == ([], asked)


def test_prompts_that_something_was_made_from_are_left_out_and_named() -> None:
    renamed = [Prompt(f"served/{i}", "chat", prompt.turns) for i, prompt in enumerate(ROWS)]
    used = TrainingPrompts.of(
        {"traces": hashes_of(ROWS[:3]), "correction_memory": hashes_of(ROWS[2:5]), "verifier": None}
    )
    left, lines = used.untouched(renamed, 2)
    assert [prompt.id for prompt in left] == ["served/5", "served/6"]
    assert "5 prompts left out: they were used to make traces, correction_memory" in lines
    assert lines[1].startswith("warning: training prompts unknown: verifier (")
    assert TrainingPrompts.of({"traces": []}).untouched(ROWS) == (ROWS, [])
    with raises_code("no_untouched_prompts", "all 5", "traces, correction_memory", "--prompts"):
        used.untouched(renamed[:5])


def test_the_steps_of_a_pipeline_share_no_prompt(tmp_path: Path) -> None:
    """The naive cut takes calibration's and tuning's prompts out of the collection's, and the
    gate's again where a file is short."""
    for rows in (12, 40, 200):
        file = tmp_path / f"{rows}.jsonl"
        texts = [f"question {i}" for i in range(rows)]
        file.write_text(
            "".join(json.dumps({"prompt": text}) + "\n" for text in [*texts, texts[0], texts[-1]])
        )
        cut = prompts_of(PipelineSettings(prompts=file))
        hashes = [hash_of(prompt) for prompts in cut.values() for prompt in prompts]
        assert len(set(hashes)) == len(hashes) == min(rows, 16 + 16 + 8 + 8)
        assert all(cut.values())
    with raises_code("too_few_prompts", "3 different prompts"):
        file.write_text(
            "".join(json.dumps({"prompt": text}) + "\n" for text in ("a", "b", "c", "a"))
        )
        prompts_of(PipelineSettings(prompts=file))


@pytest.mark.parametrize("minutes", [None, 10.0])
@pytest.mark.parametrize("folder", [False, True])
def test_a_file_is_read_once_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minutes: float | None, folder: bool
) -> None:
    read = Counter[bool]()

    def counted(source: Path, *, redact: bool, **more: Any) -> list[Prompt]:
        read[redact] += 1
        return load_prompts(source, redact=redact, **more)

    monkeypatch.setattr(loading, "load_prompts", counted)
    file = tmp_path / "prompts.jsonl"
    text = "".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(10, 90))
    file.write_text(text)
    settings = PipelineSettings(prompts=tmp_path if folder else file, minutes=minutes, device="cpu")
    cut = prompts_of(settings)
    cut["bench"].clear()
    fewer = prompts_of(settings.model_copy(update={"bench_prompts": 8}))
    assert (len(fewer["bench"]), read) == (8, {False: 1})
    prompts_of(settings.model_copy(update={"redact": True}))
    assert read == {False: 1, True: 1}
    before = file.stat().st_mtime_ns
    file.write_text(text.replace("question", "Question"))
    os.utime(file, ns=(before, before + 1_000_000_000))
    again = prompts_of(settings.model_copy(update={"redact": True}))
    assert read == {False: 1, True: 2}
    assert all(one.prompt.startswith("Question") for rows in again.values() for one in rows)


def test_the_shipped_prompts_suffice_for_the_demo_and_for_each_command() -> None:
    from draftwell.flows.cli.learn.shared import COLLECTED

    rows = read_prompts(DEMO)
    assert len(different(rows)) == len(rows) >= COLLECTED + 24 + 12 + 16, (
        "collect, calibrate, tune and gate with their defaults"
    )
    settings = PipelineSettings()
    assert {name: len(prompts) for name, prompts in prompts_of(settings).items()} == {
        "bench": 16,
        "collect": 16,
        "calibrate": 8,
        "tune": 8,
    }
