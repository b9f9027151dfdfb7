"""Texts under a chat template: many scripts, system messages, later turns, prompts that are too
long, and bare ends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from draftwell.components.collect.continuations import WrittenText, cut_messages, write_texts
from draftwell.components.prompts.prompt import Message, Prompt, context_of, ids_of
from draftwell.serving.recording.trace_schema import KINDS, TraceError
from draftwell.serving.runtime.pair import LoadedPair
from tests.support.collecting import collect_traces, small
from tests.support.errors import raises_code
from tests.support.server.served_pair import MAX_CONTEXT, tiny_pair

SCRIPTS = ["今天天气怎么样？", "كيف حالك اليوم؟", "🙂👩‍👩‍👧 ok", "Grüße an die Füße"]
ROOM = MAX_CONTEXT - 12


@pytest.fixture(scope="module")
def pair() -> LoadedPair:
    return tiny_pair(4)


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def write(
    pair: LoadedPair, prompts: list[Prompt], kinds: tuple[str, ...] = ("target",), *, turns: int = 1
) -> list[WrittenText]:
    sampling = pair.sampling(max_tokens=8)
    return write_texts(
        pair,
        [(prompt, sampling) for prompt in prompts],
        small(prefix_kinds=kinds, batch=4, turns=turns),
        ROOM,
    )


def spelt(pair: LoadedPair, ids: list[int]) -> str:
    return str(pair.tokenizer.decode(ids))


def test_every_script_reaches_the_model_as_it_was_written(pair: LoadedPair) -> None:
    system = {"role": "system", "content": "答えは短く。"}
    texts = write(
        pair, [Prompt(f"p{i}", None, [said], messages=(system,)) for i, said in enumerate(SCRIPTS)]
    )
    for said, text in zip(SCRIPTS, texts, strict=True):
        assert (
            spelt(pair, text.prompt_tokens)
            == f"<|start|>system\n答えは短く。<|end|><|start|>user\n{said}<|end|><|start|>assistant"
        )
        assert text.cut_tokens == 0


def test_a_pair_that_is_not_for_chat_reads_plain_text(pair: LoadedPair) -> None:
    plain = replace(pair, chat=False)
    (text,) = write(plain, [Prompt("p", None, ["hello"], messages=(user("before"),))])
    assert text.prompt_tokens == plain.encode("before\n\nhello")
    assert plain.encode_prompt("hello") == plain.encode("hello")


def test_a_template_that_refuses_a_conversation_is_named_in_one_line(pair: LoadedPair) -> None:
    with raises_code("messages_refused", "a system message must come first") as error:
        write(
            pair,
            [
                Prompt(
                    "p", None, ["hello"], messages=(user("a"), {"role": "system", "content": "b"})
                )
            ],
        )
    assert "\n" not in str(error.value)


def test_a_cut_in_the_second_of_three_turns_keeps_the_template_and_the_latest_words(
    pair: LoadedPair,
) -> None:
    system = {"role": "system", "content": "be kind"}
    prompt = Prompt(
        "p", None, ["one", "天" * 100 + "地", "two"], messages=(system,), answers=("yes", "no")
    )
    first, second, third = write(pair, [prompt], turns=0)
    head, tail = "<|start|>system\nbe kind<|end|><|start|>user\n", "<|end|><|start|>assistant"
    assert spelt(pair, first.prompt_tokens) == f"{head}one{tail}"
    assert first.cut_tokens == 0
    said = spelt(pair, second.prompt_tokens)
    assert said.startswith(f"{head}天")
    assert said.endswith(f"天地{tail}")
    assert "one" not in said  # the oldest turn went first
    whole = pair.encode_messages(
        [system, user("one"), {"role": "assistant", "content": "yes"}, user(prompt.turns[1])]
    )
    assert ROOM - 3 < len(second.prompt_tokens) <= ROOM  # a character has three bytes, each a token
    assert second.cut_tokens == len(whole) - len(second.prompt_tokens)
    assert spelt(pair, third.prompt_tokens) == f"{head}two{tail}"
    assert third.cut_tokens > 0


def test_the_call_and_the_question_stay_before_a_tools_result(pair: LoadedPair) -> None:
    call = {"role": "assistant", "content": "calls ls"}
    asked = [user("one"), call, user("two"), call, {"role": "tool", "content": "abc" * 200 + "end"}]
    ids, left_out = cut_messages(pair, asked, ROOM + 60)
    said = spelt(pair, ids)
    assert len(ids) <= ROOM + 60
    assert left_out == len(pair.encode_messages(asked)) - len(ids)
    assert "user\ntwo<|end|><|start|>assistant\ncalls ls<|end|>" in said
    assert "abcend\n" in said
    assert "one" not in said


def test_what_a_template_alone_does_not_leave_room_for_keeps_its_end(pair: LoadedPair) -> None:
    ids = pair.encode_messages([user("hello")])
    assert cut_messages(pair, [user("hello")], 4) == (ids[-4:], len(ids) - 4)
    assert cut_messages(pair, [user("hello")], len(ids)) == (ids, 0)


def test_a_completion_is_read_as_it_was_written(pair: LoadedPair) -> None:
    """Together with a chat in the same batch, cut like plain text, and bare up to its last word,
    which the chat is not."""
    completion, chat_prompt = (
        Prompt("t", None, ["once upon a time"], raw=True),
        Prompt("s", None, ["once upon a time"]),
    )
    raw, chat = write(pair, [completion, chat_prompt])
    assert raw.prompt_tokens == ids_of(pair, completion) == pair.encode("once upon a time")
    assert chat.prompt_tokens == ids_of(pair, chat_prompt) == pair.encode_prompt("once upon a time")
    assert context_of(completion) != context_of(chat_prompt) == ["once upon a time"]
    (long,) = write(pair, [Prompt("l", None, ["word " * 100 + "end"], raw=True)])
    assert (len(long.prompt_tokens), spelt(pair, long.prompt_tokens)[-8:]) == (ROOM, "word end")
    assert long.cut_tokens == len(pair.encode("word " * 100 + "end")) - ROOM
    (whole,) = write(pair, [completion, chat_prompt], ("bare",))
    assert spelt(pair, whole.prompt_tokens + whole.tokens) == "once upon a time"


def test_no_position_is_inside_a_users_message(pair: LoadedPair) -> None:
    """Nobody drafts there: what is learnt from a chat pair comes after the template's opening of
    the answer."""
    texts = write(
        pair, [Prompt("a", None, ["hello, how are you there?"]), Prompt("b", None, ["ok"])], KINDS
    )
    assert {text.kind for text in texts} == {"draft", "target", "mixed"}
    for text in texts:
        assert spelt(pair, text.prompt_tokens).endswith("<|end|><|start|>assistant")


def test_a_chat_pair_has_no_bare_texts_to_collect(pair: LoadedPair, tmp_path: Path) -> None:
    with raises_code("no_texts", "bare", error=TraceError):
        collect_traces(
            pair,
            [Prompt("a", None, ["hello there"])],
            tmp_path,
            max_tokens=8,
            rollout=1,
            prefix_kinds=("bare",),
        )
