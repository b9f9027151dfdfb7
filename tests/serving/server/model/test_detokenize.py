"""Text from tokens: whole characters, and stop strings whatever the pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, strategies as st

from draftwell.serving.runtime.logits import Rating
from draftwell.serving.runtime.types import Emitted
from draftwell.serving.server.scheduling.detokenize import Detokenizer, StopStrings, TextStream
from tests.support.server.served_pair import calling_pair, spaced_tokenizer


def from_bytes(ids: Sequence[int]) -> str:
    """A tokenizer whose tokens are bytes."""
    return bytes(ids).decode("utf-8", errors="replace")


SILENT = 256
"""A token without text, as special tokens are."""


def from_bytes_and_silent(ids: Sequence[int]) -> str:
    """The same with `SILENT`."""
    return from_bytes([i for i in ids if i != SILENT])


def spaced(ids: Sequence[int]) -> str:
    """A tokenizer as SentencePiece's: each token is a word, the first one loses its space."""
    return " ".join(f"w{i}" for i in ids)


def emitted(ids: Sequence[int]) -> list[Emitted]:
    """Tokens of which every third comes from the draft."""
    return [
        Emitted(i, "accepted" if n % 3 == 2 else "target", Rating(-float(n)))
        for n, i in enumerate(ids)
    ]


def all_at_once(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Reference: read character by character until a stop string is complete; the longest one that
    ends there counts."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stops if text[:end].endswith(s)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


@pytest.mark.parametrize("text", ["é€😀", "a😀b", "日本語", "plain"])
def test_no_half_character_is_ever_emitted(text: str) -> None:
    detokenizer = Detokenizer(from_bytes)
    pieces = [detokenizer.push(byte) for byte in text.encode()]
    assert [p for p in pieces if p] == list(text)
    assert detokenizer.flush() == ""


def test_a_character_cut_in_half_by_the_end_is_left_out() -> None:
    detokenizer = Detokenizer(from_bytes)
    assert [detokenizer.push(byte) for byte in b"a\xf0\x9f"] == ["a", "", ""]
    assert detokenizer.flush() == ""


def test_bytes_that_are_no_character_show_as_one_that_says_so() -> None:
    detokenizer = Detokenizer(from_bytes)
    assert "".join(detokenizer.push(byte) for byte in b"a\xf0b") == "a\ufffdb"


def test_spaces_at_the_border_of_two_pieces_are_kept() -> None:
    detokenizer = Detokenizer(spaced)
    assert "".join(detokenizer.push(i) for i in [1, 2, 3]) == "w1 w2 w3"


@given(
    st.lists(
        st.integers(0, 255) | st.sampled_from([0x80, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, SILENT]),
        max_size=40,
    ),
    st.sampled_from([b"", b"so: ", b"\x80"]),
)
def test_pieces_concatenate_to_the_whole_decoding(data: list[int], prompt: bytes) -> None:
    """But for what may be an incomplete character at the end."""
    detokenizer, whole = Detokenizer(from_bytes_and_silent, prompt), from_bytes_and_silent(data)
    shown = "".join(map(detokenizer.push, data)) + detokenizer.flush()
    assert whole.startswith(shown)
    left_out = whole[len(shown) :]
    assert left_out == "\ufffd" * len(left_out)
    assert len(left_out) < 4


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        (b"so: ", [0x80]),
        (b"", [0x80]),
        (b"so: ", [SILENT]),
        (b"", [SILENT]),
        (b"so: ", [0xE2, *[SILENT] * 50]),
        (b"so: ", [0xF0, 0x80]),
        (b"", [*[SILENT] * 7, 0xE2, 0x82, SILENT, 0x61]),
    ],
    ids=str,
)
def test_the_work_does_not_grow_with_what_has_no_text(prompt: bytes, tokens: list[int]) -> None:
    """Whatever a client has a model write: bytes that are no character, or tokens that are not
    shown."""
    decoded: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        decoded.append(len(ids))
        return from_bytes_and_silent(ids)

    stream, written = TextStream(decode, prompt=prompt), (tokens * 4000)[:4000]
    shown = "".join(stream.push([token]) for token in emitted(written))
    assert max(decoded) < 20
    assert sum(decoded) < 50 * len(written)
    shown += stream.flush()
    assert from_bytes_and_silent(written).startswith(shown)
    assert len(shown) > len(from_bytes_and_silent(written)) - 4


def test_tokens_without_text_are_looked_at_once() -> None:
    class Watched(list[tuple[str, Emitted]]):
        looked_at = 0

        def __iter__(self) -> Iterator[tuple[str, Emitted]]:
            for one in super().__iter__():
                self.looked_at += 1
                yield one

    stream = TextStream(from_bytes_and_silent)
    stream._held = held = Watched()
    for token in emitted([SILENT] * 1000):
        stream.push([token])
    assert held.looked_at < 5000
    assert stream.push(emitted(b"a")) == "a"
    assert len(stream.take()) == 1001


@pytest.mark.parametrize("lead", ["", "a"])
def test_spaces_that_begin_a_text_are_those_of_the_whole(lead: str) -> None:
    """A space that the decoder drops at the beginning of a text is not a token without text."""
    served = spaced_tokenizer()
    space, word = served.convert_tokens_to_ids("▁"), served.convert_tokens_to_ids("▁a")
    ids, prompt = (
        [space, space, word, space, word],
        served.encode(lead, add_special_tokens=False) if lead else [],
    )
    detokenizer = Detokenizer(served.decode, prompt)
    assert (
        "".join(map(detokenizer.push, ids)) + detokenizer.flush()
        == served.decode([*prompt, *ids])[len(served.decode(prompt)) :]
    )


@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.data(),
)
def test_stop_strings_do_not_depend_on_the_pieces(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    """What is shown is a prefix of the right answer at every moment, and equal to it at the end."""
    expected, stopped = all_at_once(text, stops)
    stream, shown, at = StopStrings(stops), "", 0
    while at < len(text):
        size = data.draw(st.integers(1, 5))
        shown += stream.push(text[at : at + size])
        assert expected.startswith(shown)
        at += size
    assert (shown + stream.flush(), stream.stopped) == (expected, stopped)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    stream = StopStrings(["END", "\n\n"])
    assert [stream.push(p) for p in ["one E", "N", "d\n", "x"]] == ["one ", "", "ENd", "\nx"]


def test_tokens_behind_the_stop_string_are_not_counted() -> None:
    stream = TextStream(from_bytes, ["END"])
    assert stream.push(emitted(b"ab")) == "ab"
    assert stream.push(emitted(b"cENDmore")) == "c"
    assert (stream.stopped, stream.tokens) == (True, 6)
    assert stream.push(emitted(b"x")) + stream.flush() == ""


def test_the_last_of_the_least_tokens_is_part_of_no_stop_string() -> None:
    stream = TextStream(from_bytes, ["b"], min_tokens=2)
    assert (stream.push(emitted(b"ab")), stream.stopped) == ("ab", False)
    assert (stream.push(emitted(b"cb")), stream.stopped) == ("c", True)
    assert stream.tokens == 4


def test_a_stop_string_may_be_completed_by_what_was_held_for_a_character() -> None:
    words = [b"the ", b"END\xe2"]
    stream = TextStream(
        lambda ids: b"".join(words[i] for i in ids).decode(errors="replace"), ["END"]
    )
    assert stream.push(emitted([0, 1])) == "the "
    assert not stream.stopped
    assert stream.flush() == ""
    assert stream.stopped


def test_a_stop_string_that_stays_incomplete_is_shown_at_the_end() -> None:
    stream = TextStream(from_bytes, ["END"])
    assert (stream.push(emitted(b"the EN")), stream.flush()) == ("the ", "EN")


@given(
    st.text("abé", max_size=24),
    st.lists(st.text("abé", min_size=1, max_size=3), max_size=2),
    st.data(),
)
def test_tokens_make_up_what_is_shown(text: str, stops: list[str], data: st.DataObject) -> None:
    """Whatever the pieces: in order, none twice, never text that is not shown, and at the end all
    of it."""
    expected, stopped = all_at_once(text, stops)
    tokens, stream, shown, at, taken = (
        emitted(text.encode()),
        TextStream(from_bytes, stops),
        "",
        0,
        [],
    )
    while at < len(tokens):
        size = data.draw(st.integers(1, 5))
        shown += stream.push(tokens[at : at + size])
        taken += stream.take()
        assert shown.startswith("".join(token.text for token in taken))
        at += size
    shown += stream.flush()
    taken += stream.take()
    assert "".join(token.text for token in taken) == shown == expected
    assert [(t.id, t.origin, t.rating) for t in taken] == tokens[: len(taken)]
    assert len(taken) == stream.tokens, (
        "every token that counts is told, those of the stop string too"
    )
    assert stream.tokens == len(tokens) or stopped


def test_a_token_that_a_stop_string_cuts_keeps_the_shown_part() -> None:
    words = ["the", " sun END", " now"]
    stream = TextStream(lambda ids: "".join(words[i] for i in ids), ["END"])
    assert stream.push(emitted([0, 1, 2])) == "the sun "
    assert [token.text for token in stream.take()] == ["the", " sun "]
    assert (stream.tokens, stream.accepted) == (2, 0), (
        "the third token, from the draft, is not part of the answer"
    )


def test_tokens_of_a_stop_string_are_told_without_text() -> None:
    words = ["the ", "E", "ND", " now"]
    stream = TextStream(lambda ids: "".join(words[i] for i in ids), ["END"])
    assert [stream.push(emitted([i])) for i in range(4)] == ["the ", "", "", ""]
    assert [(token.text, token.id) for token in stream.take()] == [("the ", 0), ("", 1), ("", 2)]
    assert stream.tokens == 3


def test_tokens_without_text_come_at_the_end() -> None:
    words = {0: "a", 1: "", 2: "b", 3: ""}
    stream = TextStream(lambda ids: "".join(words[i] for i in ids))
    taken = []
    for i in range(4):
        stream.push(emitted([i]))
        taken.append([token.id for token in stream.take()])
    stream.flush()
    assert [*taken, [token.id for token in stream.take()]] == [[0], [], [1, 2], [], [3]]


def test_an_added_token_is_one_that_is_written_as_text() -> None:
    served = calling_pair()
    assert served.is_token("<tool_call>")
    assert not served.is_token(str(served.pair.tokenizer.eos_token)), "special ones are not written"
    assert not served.is_token("hello")
