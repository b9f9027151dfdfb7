"""Tool calls out of a text as it comes: what is certain to be text is text, a call's name comes
first, then its arguments in pieces."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftwell.serving.server.scheduling.detokenize import StopStrings

BEGIN, END = "<tool_call>", "</tool_call>"
CLOSED = re.compile(r"\s*\}")
HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
STRING_OR_END = re.compile(r'"(?:[^"\\]|\\.)*("?)|</tool_call>', re.DOTALL)
NO_CALL = re.compile(r"\s*[^\s{\[]")
"""How a text begins that is neither a call nor a list of calls."""


@dataclass(frozen=True)
class TextPiece:
    """A piece of text."""

    text: str


@dataclass(frozen=True)
class Call:
    """A call, or more of one.

    Args:
        index: which call of the answer.
        id, name: with its first piece only.
        arguments: the next piece of their JSON text.
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None

    @property
    def delta(self) -> dict[str, Any]:
        """As a stream's chunk has it."""
        if self.id is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        return {
            "index": self.index,
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


Piece = TextPiece | Call


def joined(pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    """Complete calls from their pieces."""
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if isinstance(piece, Call) and piece.id is not None:
            function = {"name": piece.name, "arguments": ""}
            calls.append({"id": piece.id, "type": "function", "function": function})
        if isinstance(piece, Call):
            calls[piece.index]["function"]["arguments"] += piece.arguments
    return calls


class ToolCallParser:
    """Takes the text of one answer in pieces.

    What begins like a call and is none (no JSON, or a function that is not offered) is text, as it
    was written. White space around calls is dropped. Arguments may also be named "parameters", as
    Llama's are.

    Args:
        names: the functions that are offered.
        most: how many calls there may be; further ones are left out. None: any number.

    >>> parser = ToolCallParser({"add"})
    >>> found = parser.push('Let me see.\\n<tool_call>\\n{"name": "add", "argum')
    >>> found += parser.push('ents": {"a": 1}}\\n</tool_call>') + parser.finish()
    >>> [
    ...     piece.text if isinstance(piece, TextPiece) else (piece.name, piece.arguments)
    ...     for piece in found
    ... ]
    ['Let me see.', ('add', ''), (None, '{"a": 1}')]
    """

    def __init__(self, names: Collection[str], most: int | None = None):
        self.names, self.most = names, most
        self.calls = 0
        self._held = ""
        self._gap = ""  # white space before what may be a call
        self._after_call = False  # nothing but white space has come since the last one
        self._step = self._in_text
        self._depth, self._quoted, self._escaped = 0, False, False

    @property
    def within_arguments(self) -> bool:
        """Whether the arguments of the last call are not complete."""
        return self._step == self._in_arguments

    def push(self, text: str) -> list[Piece]:
        """What more text gives."""
        self._held += text
        found: list[Piece] = []
        while self._step(found):
            pass
        return self._allowed(found)

    def finish(self) -> list[Piece]:
        """The rest, when no text follows; a call that was cut within its arguments keeps what there
        is of them."""
        found: list[Piece] = []
        # the strings of what is no call may never have been closed
        while self._step == self._in_call and END in self._held:
            self._end_call(self._held.find(END), found)
            while self._step(found):
                pass
        if self._step == self._after_arguments:
            self._held = after_call(self._held[: len(self._held) - beginning(self._held, END)])
            self._step = self._in_text
            self._in_text(found)
        if self._step == self._in_call:
            self._whole(self._held.removeprefix(BEGIN), found)
        elif self._step == self._in_text and self._held and not self._after_call:
            found.append(TextPiece(self._held))
        self._held = ""
        return self._allowed(found)

    def _allowed(self, found: Sequence[Piece]) -> list[Piece]:
        """Without the calls beyond `most`: a list of calls, or several among an answer's least
        tokens."""
        return [
            piece
            for piece in found
            if isinstance(piece, TextPiece) or self.most is None or piece.index < self.most
        ]

    # Each step reads what it can of `_held`, and says whether another one may read on.

    def _in_text(self, found: list[Piece]) -> bool:
        if self._after_call:
            self._held = self._held.lstrip()
        at = self._held.find(BEGIN)
        text = (
            self._held[:at]
            if at >= 0
            else self._held[: len(self._held) - beginning(self._held, BEGIN)]
        )
        shown = text.rstrip()
        if shown:
            found.append(TextPiece(shown))
            self._after_call = False
        if at < 0:
            self._held = self._held[len(shown) :]
            self._after_call = self._after_call and not self._held
            return False
        self._gap, self._held = text[len(shown) :], self._held[at:]
        self._step = self._in_call
        return True

    def _in_call(self, found: list[Piece]) -> bool:
        body = self._held[len(BEGIN) :]
        head = HEAD.match(body)
        name = name_of(head[1]) if head else None
        if head and name in self.names:
            found.append(self._begun(name))
            self._held = body[head.end() :]
            self._depth, self._quoted, self._escaped = 0, False, False
            self._step = self._in_arguments
            return True
        if NO_CALL.match(body):  # the mark in a text: what follows may be shown
            found.append(TextPiece(self._gap + BEGIN))
            self._after_call, self._held, self._step = False, body, self._in_text
            return True
        end = end_of_call(body)
        if end < 0:
            return False
        self._end_call(len(BEGIN) + end, found)
        return bool(self._held)

    def _end_call(self, end: int, found: list[Piece]) -> None:
        self._whole(self._held[len(BEGIN) : end], found, ended=True)
        self._held = self._held[end + len(END) :]
        self._step = self._in_text

    def _in_arguments(self, found: list[Piece]) -> bool:
        size = self._object_end()
        if self._held[:size]:
            found.append(Call(self.calls - 1, self._held[:size]))
        self._held = self._held[size:]
        if self._depth > 0 or not size:
            return False
        self._step = self._after_arguments
        return True

    def _after_arguments(self, found: list[Piece]) -> bool:
        end, begin = self._held.find(END), self._held.find(BEGIN)
        if end < 0 and begin < 0:
            return False
        if end < 0 or 0 <= begin < end:  # the end was left out
            self._held = after_call(self._held[:begin]) + self._held[begin:]
        else:
            self._held = self._held[end + len(END) :]
        self._step = self._in_text
        return bool(self._held)

    def _object_end(self) -> int:
        """How much of the held text belongs to the JSON object that has begun; `_depth` is 0 where
        it ends there."""
        for at, letter in enumerate(self._held):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = letter == "\\", letter != '"'
            elif letter == '"':
                self._quoted = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1
        return len(self._held)

    def _begun(self, name: str | None) -> Call:
        self.calls += 1
        self._after_call = True
        return Call(self.calls - 1, id=f"call_{uuid.uuid4().hex[:24]}", name=name)

    def _whole(self, body: str, found: list[Piece], *, ended: bool = False) -> None:
        """A call whose parts come in another order, or a list of calls; text if it is neither."""
        calls = self._read_calls(body)
        if not calls:
            found.append(TextPiece(self._gap + BEGIN + body + (END if ended else "")))
            self._after_call = False
            return
        for name, arguments in calls:
            found.append(self._begun(name))
            found.append(Call(self.calls - 1, arguments))

    def _read_calls(self, body: str) -> list[tuple[str, str]]:
        """Names and JSON arguments of a complete call or a list of calls; none if the text is
        neither.

        Arguments are in ASCII, as an escaped half of a surrogate pair cannot be sent otherwise. NaN
        and infinity are no JSON.
        """
        try:
            read = json.loads(body)
            calls = read if isinstance(read, list) else [read]
            if not all(
                isinstance(call, dict)
                and isinstance(call.get("name"), str)
                and call["name"] in self.names
                and isinstance(arguments_of(call), dict)
                for call in calls
            ):
                return []
            return [
                (call["name"], json.dumps(arguments_of(call), allow_nan=False)) for call in calls
            ]
        except (ValueError, RecursionError):
            return []


class FirstCall(StopStrings):
    """Ends an answer once the first call's arguments are closed, as no other call is wanted;
    strings end it as ever.

    The mark of a call's end is no sign of it: arguments may hold the same letters.

    Args:
        names: the functions that are offered.
        strings: as in `StopStrings`.

    >>> stop = FirstCall({"say"}, [])
    >>> (
    ...     stop.push('<tool_call>{"name": "say", "arguments": {"text": "</tool_call>"'),
    ...     stop.stopped,
    ...     stop.push("}}"),
    ...     stop.stopped,
    ... )
    ('<tool_call>{"name": "say", "arguments": {"text": "</tool_call>"', False, '}}', True)
    """

    def __init__(self, names: Collection[str], strings: Sequence[str] = ()):
        super().__init__(strings)
        self._parser = ToolCallParser(names)

    def push(self, text: str) -> str:
        text = self.let_pass(super().push(text))
        self.stopped = self.stopped or (
            self._parser.calls > 0 and not self._parser.within_arguments
        )
        return text

    def let_pass(self, text: str) -> str:
        self._parser.push(text)
        return text


def arguments_of(call: Mapping[str, Any]) -> Any:
    """Arguments of a call as a model writes it, also as the text of their JSON; None where they are
    missing and something else is there.

    Raises:
        ValueError: they are a text that is no JSON.

    >>> (
    ...     arguments_of({"name": "add", "parameters": '{"a": 1}'}),
    ...     arguments_of({"name": "stop"}),
    ...     arguments_of({"name": "add", "a": 1}),
    ... )
    ({'a': 1}, {}, None)
    """
    found = call.get(
        "arguments", call.get("parameters", None if call.keys() - {"name", "id", "type"} else {})
    )
    return json.loads(found) if isinstance(found, str) else found


def end_of_call(body: str) -> int:
    """Where the mark of a call's end begins in the call's text, which may hold the same letters in
    its strings; -1 where it has not come.

    >>> end_of_call('{"x": "</tool_call>"}</tool_call>'), end_of_call('{"x": "</tool_call>')
    (21, -1)
    """
    for found in STRING_OR_END.finditer(body) if END in body else ():
        if found[0] == END:
            return found.start()
        if not found[1]:  # a string that is not closed yet
            return -1
    return -1


def name_of(text: str) -> str | None:
    """A name from how it is written, as JSON; None if it is not: models write escapes that JSON
    does not have, and raw line ends.

    >>> name_of('"add"'), name_of(r'"get\\_weather"')
    ('add', None)
    """
    try:
        return str(json.loads(text))
    except ValueError:
        return None


def after_call(text: str) -> str:
    """What follows a call, of a text that follows its arguments; "" where the call is not complete.

    >>> after_call("}\\nIt is warm."), after_call(', "id": 3')
    ('\\nIt is warm.', '')
    """
    closed = CLOSED.match(text)
    return text[closed.end() :] if closed else ""


def beginning(text: str, mark: str) -> int:
    """Length of the longest end of a text that begins a mark.

    >>> beginning("see <too", "<tool_call>"), beginning("see", "<tool_call>")
    (4, 0)
    """
    return next(
        (
            size
            for size in range(min(len(mark) - 1, len(text)), 0, -1)
            if mark.startswith(text[-size:])
        ),
        0,
    )
