"""Text from tokens, as they come: whole characters only, and nothing that belongs to a stop string.

Invariants: what `TextStream` returns, concatenated, is the text of the answer; nothing returned is ever taken back; the
result depends on the tokens alone, never on how they were grouped into rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

HALF = "\ufffd"
"""What decoders write in place of bytes that are no character (yet)."""

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """Decodes token by token; a character whose bytes are spread over tokens waits until it is whole.

    Only a short window is decoded at each token: the tokens of the last piece of text, which decide about the spaces at
    its border, and those that came since.

    >>> Detokenizer(lambda ids: bytes(ids).decode(errors="replace")).push(65)
    'A'
    """

    def __init__(self, decode: Decode):
        self._decode = decode
        self._ids: list[int] = []
        self._start = 0  # the window starts here
        self._read = 0  # tokens before this one are text already

    def push(self, token: int) -> str:
        """The text that `token` completes, often empty."""
        self._ids.append(token)
        text = self._unread()
        if not text or text.endswith(HALF):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return text

    def flush(self) -> str:
        """The rest, once no token follows; a character that the budget cut in half is left out."""
        text = self._unread().rstrip(HALF)
        self._start = self._read = len(self._ids)
        return text

    def _unread(self) -> str:
        known = self._decode(self._ids[self._start : self._read])
        return self._decode(self._ids[self._start :])[len(known) :]


class StopStrings:
    """Cuts text before the first of some strings, holding back whatever may still become one.

    The stop string that is complete first wins, and among those that end at one place the longest: the result is a
    function of the text, not of its pieces.

    >>> stop = StopStrings(["END"])
    >>> stop.push("the E"), stop.push("ND."), stop.stopped
    ('the ', '', True)
    """

    def __init__(self, strings: Sequence[str] = ()):
        self.strings = tuple(strings)
        self.stopped = False
        self._held = ""

    def push(self, text: str) -> str:
        """The text that is certain to be shown; empty for ever once stopped."""
        if self.stopped:
            return ""
        self._held += text
        found = [(at + len(s), at) for s in self.strings if (at := self._held.find(s)) >= 0]
        if found:
            self.stopped = True
            return self._take(min(found)[1])
        return self._take(len(self._held) - self._pending())

    def flush(self) -> str:
        """What was held back, once no text follows."""
        return self._take(0 if self.stopped else len(self._held))

    def _take(self, count: int) -> str:
        shown, self._held = self._held[:count], self._held[count:]
        return shown

    def _pending(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max(map(len, self.strings), default=1) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            if any(s.startswith(self._held[-size:]) for s in self.strings):
                return size
        return 0


class TextStream:
    """The text of one answer: detokenised, cut at stop strings, with the tokens that it took.

    Args:
        decode: token ids → text, special tokens left out.
        stop: strings that end the answer and are not part of it.
    """

    def __init__(self, decode: Decode, stop: Sequence[str] = ()):
        self._detokenizer = Detokenizer(decode)
        self._stop = StopStrings(stop)
        self.tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string was completed."""
        return self._stop.stopped

    def push(self, tokens: Sequence[int]) -> str:
        """Text of further tokens; those behind the one that completes a stop string are neither shown nor counted."""
        shown = []
        for token in tokens:
            if self.stopped:
                break
            self.tokens += 1
            shown.append(self._stop.push(self._detokenizer.push(token)))
        return "".join(shown)

    def flush(self) -> str:
        """Text that was held back, once no token follows."""
        return self._stop.push(self._detokenizer.flush()) + self._stop.flush()
