"""Text from tokens as they arrive: complete characters only, and no part of a stop string.

Invariants: what `TextStream` returns, concatenated, is the text of the answer; nothing returned is
ever taken back; the result depends on the tokens alone, never on how they were grouped into rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draftwell.serving.runtime.logits import Rating
from draftwell.serving.runtime.types import Emitted, Origin

HALF = "\ufffd"
"""What decoders write for bytes that are not (yet) a complete character. It is a character too."""
SPELT_HALF = (HALF, "ï¿½", "<0xEF><0xBF><0xBD>")
"""How the names of tokens spell that character itself: as it is, in the letters of byte-level
vocabularies, or byte by byte."""

Decode = Callable[[Sequence[int]], str]
Name = Callable[[int], str]
"""A token as the vocabulary has it."""
LONGEST_LEAD = 8
"""Tokens at a prompt's end to search for text: a character has up to four bytes, and special tokens
may follow it."""
MOST_HELD = 4
"""Tokens that wait for the end of a character: as many as it has bytes. Where they are as many
without one, some bytes are no character."""


class Detokenizer:
    """Decodes token by token; a character whose bytes are spread over tokens is held back until it
    is complete.

    Only a short window is decoded at each token: the tokens of the last piece of text, which decide
    about the spaces at its border, and the newer ones. The first window begins with the prompt's
    last tokens (as in vLLM and TGI): the decoders of SentencePiece tokenizers drop the space that a
    text begins with, and an answer to a prompt begins none.

    The window stays short whatever the tokens are: those that have no text are left out of it, and
    bytes that are no character are shown as such as soon as that is certain. (The `DecodeStream` of
    tokenizers holds such bytes back until a character follows, and decodes all of them again at
    each token: 9 s for 4,000.)

    Args:
        decode: token ids → text.
        prompt: ids that the answer continues.
        name: tells U+FFFD that is written from bytes that are no character; without it, all are
            taken for such bytes.

    >>> Detokenizer(lambda ids: bytes(ids).decode(errors="replace")).push(65)
    'A'
    """

    def __init__(self, decode: Decode, prompt: Sequence[int] = (), name: Name | None = None):
        self._decode, self._name = decode, name or (lambda token: "")
        self._ids = _lead(decode, prompt, self._name)
        self._start = 0  # the window starts here
        self._read = len(self._ids)  # tokens before this one have been returned as text
        # text of the window's tokens before that one
        self._known = decode(self._ids) if self._ids else ""
        self._held = ""  # text of the others

    def push(self, token: int) -> str:
        """The text that `token` completes, often empty."""
        self._ids.append(token)
        held, text = self._held, self._unread()
        # a space may have no text by itself, but two have
        if text == held and not self._decode([token, token]):
            self._ids.pop()
            return ""
        if text and not self._is_cut(text):
            return self._take(len(self._ids), text)
        if text and len(self._ids) - self._read >= MOST_HELD:
            return self._take_settled(text)
        self._held = text
        return ""

    def flush(self) -> str:
        """The rest, when no token follows; bytes at the end that may have begun a character are
        left out."""
        return self._take(len(self._ids), self._unread()).rstrip(HALF)

    def _is_cut(self, text: str) -> bool:
        """Whether a text of the last tokens ends with bytes that are not (yet) a character."""
        return text.endswith(HALF) and not "".join(map(self._name, self._ids[-3:])).endswith(
            SPELT_HALF
        )

    def _unread(self) -> str:
        return self._decode(self._ids[self._start :])[len(self._known) :]

    def _take(self, end: int, text: str, held: str = "") -> str:
        """Return a text, that of the tokens before `end`; `held` is that of those that follow."""
        self._start, self._read = self._read, end
        self._known, self._held = self._decode(self._ids[self._start : end]), held
        return text

    def _take_settled(self, text: str) -> str:
        """The held text up to the last token before which no character is cut; all of it where
        there is none.

        A character that is cut shows more than once: its parts are no characters, and together they
        are one, or the beginning of one.
        """
        whole = self._known + text
        for end in range(len(self._ids) - 1, self._read, -1):
            first, rest = self._decode(self._ids[self._start : end]), self._decode(self._ids[end:])
            # a decoder may drop the space that a text begins with
            if whole in (first + rest, f"{first} {rest}"):
                return self._take(end, first[len(self._known) :], whole[len(first) :])
        return self._take(len(self._ids), text)


def is_whole(text: str, names: str) -> bool:
    """Whether a text is complete characters.

    Args:
        names: of its tokens, one after another.

    >>> is_whole("\ufffd", "ï¿½"), is_whole("\ufffd", "ï¿")
    (True, False)
    """
    return HALF not in text or text.count(HALF) == sum(map(names.count, SPELT_HALF))


def _lead(decode: Decode, prompt: Sequence[int], name: Name) -> list[int]:
    """The fewest tokens at a prompt's end that decode to complete characters; empty if there are
    none."""
    for count in range(1, min(LONGEST_LEAD, len(prompt)) + 1):
        lead = list(prompt[-count:])
        if (text := decode(lead)) and is_whole(text, "".join(map(name, lead))):
            return lead
    return []


class StopStrings:
    """Cuts text before the first stop string, holding back text that may still become one.

    The stop string that is completed first counts, and of several that end at the same place the
    longest: the result is a function of the text, not of its pieces.

    >>> stop = StopStrings(["END"])
    >>> stop.push("the E"), stop.push("ND."), stop.stopped
    ('the ', '', True)
    """

    def __init__(self, strings: Sequence[str] = ()):
        self.strings = tuple(strings)
        self.stopped = False
        self.found: str | None = None
        """The stop string that was completed."""
        self._held = ""

    def push(self, text: str) -> str:
        """The text that is certain to be shown; always empty after a stop string."""
        if self.stopped:
            return ""
        self._held += text
        found = [(at + len(s), at, s) for s in self.strings if (at := self._held.find(s)) >= 0]
        if found:
            self.stopped = True
            _, at, self.found = min(found)
            return self._take(at)
        return self._take(len(self._held) - self._pending())

    def let_pass(self, text: str) -> str:
        """A text that is shown in any case: no stop string is looked for in it."""
        return text

    def flush(self) -> str:
        """The text that was held back, when no text follows."""
        return self._take(0 if self.stopped else len(self._held))

    def _take(self, count: int) -> str:
        shown, self._held = self._held[:count], self._held[count:]
        return shown

    def _pending(self) -> int:
        """Length of the longest suffix of the held text that begins a stop string."""
        longest = max(map(len, self.strings), default=1) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            if any(s.startswith(self._held[-size:]) for s in self.strings):
                return size
        return 0


@dataclass(frozen=True)
class TokenInfo:
    """A token whose text is final.

    Args:
        text: what it adds to the answer; empty for tokens that are not shown, and while a character
            is incomplete.
        rating: log-prob and most likely tokens, if requested.
    """

    text: str
    id: int
    origin: Origin
    rating: Rating | None = None


class TextStream:
    """The text of one answer: decoded and cut at stop strings, with its tokens.

    Args:
        decode: token ids → text, special tokens left out.
        stop: strings that end the answer and are not part of it, or what looks for its end.
        prompt: ids that the answer continues.
        min_tokens: tokens in whose text no stop string is looked for.
        name: as in `Detokenizer`.

    `tokens` counts those up to the one that completes a stop string, `accepted` those of them that
    came from the draft.
    """

    def __init__(
        self,
        decode: Decode,
        stop: Sequence[str] | StopStrings = (),
        prompt: Sequence[int] = (),
        min_tokens: int = 0,
        name: Name | None = None,
    ):
        self._detokenizer = Detokenizer(decode, prompt, name)
        self._min_tokens = min_tokens
        self._stop = stop if isinstance(stop, StopStrings) else StopStrings(stop)
        # tokens whose text is not shown yet, or not all of it
        self._held: list[tuple[str, Emitted]] = []
        self._blank = 0  # how many of the first of them are known to have none
        self._credit = 0  # characters of theirs that are
        self._final: list[TokenInfo] = []
        self.tokens = 0
        self.accepted = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string was completed."""
        return self._stop.stopped

    @property
    def stop_string(self) -> str | None:
        """The stop string that was completed."""
        return self._stop.found

    def push(self, tokens: Sequence[Emitted]) -> str:
        """Text of further tokens; those after the one that completes a stop string are neither
        shown nor counted."""
        shown = []
        for token in tokens:
            if self.stopped:
                break
            self.tokens += 1
            self.accepted += token.origin in ("accepted", "rescued")
            text = self._detokenizer.push(token.id)
            self._held.append((text, token))
            shown.append(
                self._show(
                    self._stop.let_pass(text)
                    if self.tokens <= self._min_tokens
                    else self._stop.push(text)
                )
            )
        return "".join(shown)

    def flush(self) -> str:
        """The text that was held back, when no token follows."""
        rest = self._detokenizer.flush()
        if rest and self._held:  # bytes that the last token left open
            text, token = self._held.pop()
            self._held.append((text + rest, token))
            self._blank = min(self._blank, len(self._held) - 1)
        shown = self._show(self._stop.push(rest) + self._stop.flush())
        self._settle(len(self._held))
        return shown

    def take(self) -> list[TokenInfo]:
        """Tokens that became final since the last call. Their texts make up what is shown, though
        they may come a little later."""
        final, self._final = self._final, []
        return final

    def _show(self, shown: str) -> str:
        """Settle the tokens whose text is complete with `shown`; a token without text is settled
        with the next one that has text."""
        self._credit += len(shown)
        while self._blank < len(self._held):
            text, token = self._held[self._blank]
            if not text:
                self._blank += 1
                continue
            if len(text) > self._credit and not self.stopped:
                break
            # a stop string may begin within a token, or before it
            self._held[self._blank] = text[: self._credit], token
            self._credit -= len(self._held[self._blank][0])
            self._settle(self._blank + 1)
        if self.stopped:
            self._settle(len(self._held))
        return shown

    def _settle(self, count: int) -> None:
        """The first `count` held tokens are final."""
        self._final += [
            TokenInfo(text, token.id, token.origin, token.rating)
            for text, token in self._held[:count]
        ]
        del self._held[:count]
        self._blank = 0
