"""Text from tokens: whole characters, and stop strings whatever the pieces."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.server.detokenize import Detokenizer, StopStrings, TextStream


def from_bytes(ids: Sequence[int]) -> str:
    """A tokenizer whose tokens are bytes."""
    return bytes(ids).decode("utf-8", errors="replace")


def spaced(ids: Sequence[int]) -> str:
    """A tokenizer as SentencePiece's: each token is a word, the first one loses its space."""
    return " ".join(f"w{i}" for i in ids)


def all_at_once(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Reference: read character by character until a stop string is complete; the longest one that ends there counts."""
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


@given(st.binary(max_size=40))
def test_pieces_concatenate_to_the_whole_decoding(data: bytes) -> None:
    detokenizer = Detokenizer(from_bytes)
    assert "".join(map(detokenizer.push, data)) + detokenizer.flush() == from_bytes(data).rstrip("\ufffd")


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.data())
def test_stop_strings_do_not_depend_on_the_pieces(text: str, stops: list[str], data: st.DataObject) -> None:
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
    assert stream.push(b"ab") == "ab"
    assert stream.push(b"cENDmore") == "c"
    assert (stream.stopped, stream.tokens) == (True, 6)
    assert stream.push(b"x") + stream.flush() == ""


def test_a_stop_string_may_be_completed_by_what_was_held_for_a_character() -> None:
    words = [b"the ", b"END\xe2"]
    stream = TextStream(lambda ids: b"".join(words[i] for i in ids).decode(errors="replace"), ["END"])
    assert stream.push([0, 1]) == "the "
    assert not stream.stopped
    assert stream.flush() == ""
    assert stream.stopped


def test_a_stop_string_that_stays_incomplete_is_shown_at_the_end() -> None:
    stream = TextStream(from_bytes, ["END"])
    assert (stream.push(b"the EN"), stream.flush()) == ("the ", "EN")
