"""`draftwell step collect`: its sources and settings reach the trace, and what was cut is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftwell.serving.recording.trace import TraceSet


@pytest.fixture
def collect(run: Any, pair_file: Path, own_stores: Path, tmp_path: Path) -> Callable[..., Any]:
    return lambda source, *more: run(
        f"step collect --pair {pair_file} --prompts {source} --set max_tokens=6 --set "
        f"out={tmp_path}/t",
        *more,
    )


def test_a_spool_of_served_traffic_with_every_setting(
    collect: Callable[..., Any], tmp_path: Path
) -> None:
    spool = tmp_path / "spool"
    spool.mkdir()
    talk = [
        {"role": "user", "content": "the inn"},
        {"role": "assistant", "content": "an inn"},
        {"role": "user", "content": "在哪里？"},
        {"role": "assistant", "content": "there"},
    ]
    (spool / "day.jsonl").write_text(
        "".join(json.dumps({"messages": said}) + "\n" for said in (talk, talk[:3], [talk[0]]))
    )
    done = collect(
        spool,
        "--set limit=2 --set turns=0 --set temperature=0.7 --set top_p=0.9 --set rollout=3 "
        "--set seed=5 "
        "--set prefix_kinds=draft,target",
    )
    assert done.exit_code == 0, (done.output, done.exception)
    trace = TraceSet(tmp_path / "t")
    header = trace.header
    assert (
        header.temperature,
        header.top_p,
        header.rollout,
        header.rollout_kinds,
        header.batch,
    ) == (0.7, 0.9, 3, ("target",), 16)
    rows = trace.read(["prompt_id", "turn", "kind", "position"]).to_pylist()
    texts = [(row["prompt_id"], row["turn"], row["kind"]) for row in rows if row["position"] == 0]
    assert texts == [
        (name, turn, kind)
        for name, turn in (("day/1", 0), ("day/1", 1), ("day/2", 0))
        for kind in ("draft", "target")
    ]


def test_a_table_and_what_was_too_long(collect: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("saying,story\nx,the inn\ny," + "the man " * 60 + "\n")
    done = collect(tmp_path / "t.csv", "--set column=story --set prefix_kinds=target")
    assert done.exit_code == 0, (done.output, done.exception)
    assert "1 of the prompts were too long and were cut, by " in done.stdout
    rows = TraceSet(tmp_path / "t").read(["prompt_id", "prompt_tokens", "cut_tokens"]).to_pylist()
    cut = {row["prompt_id"]: row["cut_tokens"] for row in rows if row["prompt_tokens"]}
    assert cut["t/0"] == 0 < cut["t/1"]


def test_sources_that_are_none(collect: Callable[..., Any], tmp_path: Path) -> None:
    for source, told in (
        ("nobody/nothing", "cannot read nobody/nothing from the hub"),
        (str(tmp_path), "nor a folder with such files"),
    ):
        done = collect(source)
        assert done.exit_code == 2
        assert told in done.stderr.strip().splitlines()[-1]
        assert not (tmp_path / "t").exists()


def test_slots_are_as_long_as_the_longest_conversation_needs(
    pair_file: Path, tmp_path: Path
) -> None:
    from draftwell.components.prompts.prompt import Prompt
    from draftwell.flows.steps.collect import context_for
    from draftwell.flows.workspace import Workspace
    from draftwell.serving.runtime.pair import LoadSettings, load_pair
    from tests.support.collecting import small

    space = Workspace(str(pair_file))
    prompt = Prompt(
        "p",
        None,
        ["one two", "three"],
        messages=({"role": "system", "content": "be kind"},),
        answers=("yes",),
    )
    needed = context_for(space, [prompt], small(max_tokens=6, rollout=4, turns=0))
    assert needed is not None
    pair = load_pair(space.files(), LoadSettings(dtype="float32"))
    talk = [
        *prompt.messages,
        {"role": "user", "content": "one two"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "three"},
    ]
    assert len(pair.encode_messages(talk)) + 6 + 4 <= needed < 256
    # more than the models read
    assert context_for(space, [prompt], small(max_tokens=200, rollout=4)) is None


@pytest.mark.parametrize("raw", [False, True])
def test_a_long_chat_template_cuts_nothing_from_a_message(
    pair_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raw: bool
) -> None:
    """Its own words take a hundred tokens around every message; of raw text nothing is added."""
    from draftwell.components.collect.continuations import write_texts
    from draftwell.components.prompts.prompt import Prompt, ids_of
    from draftwell.flows.steps.collect import context_for
    from draftwell.flows.workspace import Workspace
    from draftwell.serving.runtime import model_files, pair as loading
    from tests.support.collecting import small

    real = loading.load_tokenizer

    def wordy(folder: Path) -> Any:
        tokenizer = real(folder)
        words = "the man in the inn " * 5
        tokenizer.chat_template = (
            "{% for message in messages %}"
            + words
            + "{{ message.content }}"
            + words
            + "{% endfor %}"
        )
        return tokenizer

    for module in (model_files, loading):
        monkeypatch.setattr(module, "load_tokenizer", wordy)
    space = Workspace(str(pair_file))
    prompt = Prompt("p", None, ["one two"], raw=raw)
    needed = context_for(space, [prompt], small(max_tokens=6, rollout=4))
    assert needed is not None
    pair = loading.load_pair(
        space.files(), loading.LoadSettings(dtype="float32", max_context=needed)
    )
    whole = ids_of(pair, prompt)
    assert (len(whole) > 64) == (not raw)
    assert needed == -(-(len(whole) + 6 + 4) // 64) * 64, "and no more than that"
    (text,) = write_texts(
        pair, [(prompt, pair.sampling(max_tokens=6))], small(batch=1), needed - 10
    )
    assert (text.prompt_tokens, text.cut_tokens) == (whole, 0)


def test_requests_as_agents_send_them_are_collected_with_their_tools(
    collect: Callable[..., Any], pair_file: Path, tmp_path: Path
) -> None:
    from draftwell.flows.context import encoder_of
    from draftwell.flows.workspace import Workspace

    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    body = {
        "model": "m",
        "tools": tools,
        "messages": [
            {"role": "user", "content": "at"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "an inn: ann@example.org"},
        ],
    }
    (tmp_path / "day.jsonl").write_text(
        json.dumps(body) + "\n" + '{"prompt": "\\ud83c"}\n' + '{"prompt": [1000000]}\n'
    )
    done = collect(
        tmp_path / "day.jsonl", "--set prefix_kinds=target --set rollout=2 --set redact=true"
    )
    assert done.exit_code == 0, (done.output, done.exception)
    assert "2 rows left out: half a surrogate pair (U+D83C)" in done.stderr
    assert "token ids, in which nothing can be masked" in done.stderr
    rows = TraceSet(tmp_path / "t").read(["prompt_id", "prompt_tokens"]).to_pylist()
    (ids,) = [row["prompt_tokens"] for row in rows if row["prompt_tokens"]]
    text = encoder_of(Workspace(str(pair_file))).decode(ids)
    assert "<tool_response>\nan inn: [email]\n</tool_response>" in text
    assert "ann@" not in text


def test_what_the_template_refuses_costs_the_prompt(
    collect: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": [1000000]}\n{"prompt": "the inn"}\n')
    done = collect(tmp_path / "p.jsonl", "--set prefix_kinds=target --set rollout=2")
    assert done.exit_code == 0, (done.output, done.exception)
    assert "token ids that this model lacks" in done.stderr
