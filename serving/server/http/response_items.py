"""The items of a response, as its text comes: messages, and calls of functions."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from draftwell.serving.server.http.tool_calls import Call, Piece, Text, ToolCallParser

Event = tuple[str, dict[str, Any]]
"""Kind and fields of a stream's event."""
Status = Literal["in_progress", "completed", "incomplete"]


class OutputItems:
    """Makes the items of one response.

    Args:
        response: its id, which the items' ids are made of.
        parser: takes calls out of the text; None: all of it is one message.

    >>> items = OutputItems("resp-1", ToolCallParser({"add"}))
    >>> found = items.push('Well: <tool_call>{"name": "add", "arguments": {"a"', []) + items.push(
    ...     ": 1}}</tool_call>", []
    ... )
    >>> [
    ...     kind.removeprefix("response.") for kind, _ in found + items.finish("completed")
    ... ]  # doctest: +NORMALIZE_WHITESPACE
    ['output_item.added', 'content_part.added', 'output_text.delta', 'output_text.done',
    'content_part.done', 'output_item.done',
     'output_item.added', 'function_call_arguments.delta', 'function_call_arguments.delta',
     'function_call_arguments.done', 'output_item.done']
    >>> [item["type"] for item in items.items]
    ['message', 'function_call']
    """

    def __init__(self, response: str, parser: ToolCallParser | None = None):
        self.items: list[dict[str, Any]] = []
        self._response, self._parser = response, parser
        self._open = False  # whether the last item may grow
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text is not said yet

    def push(self, text: str, logprobs: Sequence[dict[str, Any]]) -> list[Event]:
        """What more text gives; log-probs of its tokens are listed where it is a message's."""
        self._logprobs += logprobs
        if self._parser is not None:
            return self._events(self._parser.push(text))
        return self._events([Text(text)] if text or logprobs else [])

    def finish(self, status: Status) -> list[Event]:
        """The rest, when no text follows; without any text it is an empty message.

        Args:
            status: of the last item.
        """
        # by a stop string: no call to make
        cut = self._parser is not None and self._parser.within_arguments
        events = self._events(self._parser.finish()) if self._parser is not None else []
        if not self.items:
            events += self._begin_message()
        return [*events, *self._close("incomplete" if cut else status)]

    def begin(self) -> list[Event]:
        """The beginning of a message, where the answer can be nothing else."""
        return [] if self._parser is not None else [*self._begin_message()]

    def _events(self, pieces: Sequence[Piece]) -> list[Event]:
        return [
            event
            for piece in pieces
            for event in (
                self._said(piece.text) if isinstance(piece, Text) else self._called(piece)
            )
        ]

    def _said(self, text: str) -> Iterator[Event]:
        if not self._open or self.items[-1]["type"] != "message":
            yield from self._close()
            yield from self._begin_message()
        part, (logprobs, self._logprobs) = self.items[-1]["content"][0], (self._logprobs, [])
        part["text"] += text
        part["logprobs"] += logprobs
        yield (
            "response.output_text.delta",
            self._place | {"content_index": 0, "delta": text, "logprobs": logprobs},
        )

    def _called(self, call: Call) -> Iterator[Event]:
        self._logprobs = []
        if call.id is not None:
            yield from self._close()
            yield self._begin(
                "fc",
                {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": ""},
            )
        if call.arguments:
            self.items[-1]["arguments"] += call.arguments
            yield "response.function_call_arguments.delta", self._place | {"delta": call.arguments}

    def _begin_message(self) -> Iterator[Event]:
        yield self._begin("msg", {"type": "message", "role": "assistant", "content": []})
        self.items[-1]["content"] = [part_of("", [])]
        yield (
            "response.content_part.added",
            self._place | {"content_index": 0, "part": part_of("", [])},
        )

    def _begin(self, prefix: str, item: dict[str, Any]) -> Event:
        made_of = f"{self._response} {len(self.items)}"
        self.items.append(
            {
                "id": f"{prefix}_{uuid.uuid5(uuid.NAMESPACE_OID, made_of).hex}",
                "status": "in_progress",
            }
            | item
        )
        self._open = True
        return "response.output_item.added", {
            "output_index": len(self.items) - 1,
            "item": dict(self.items[-1]),
        }

    def _close(self, status: Status = "completed") -> Iterator[Event]:
        """End the last item, if it may grow."""
        if not self._open:
            return
        self._open, item = False, self.items[-1]
        item["status"] = status
        if item["type"] == "message":
            part = item["content"][0]
            yield (
                "response.output_text.done",
                self._place
                | {"content_index": 0, "text": part["text"], "logprobs": part["logprobs"]},
            )
            yield "response.content_part.done", self._place | {"content_index": 0, "part": part}
        else:
            yield (
                "response.function_call_arguments.done",
                self._place | {"name": item["name"], "arguments": item["arguments"]},
            )
        yield "response.output_item.done", {"output_index": len(self.items) - 1, "item": item}

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}


def part_of(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    """A message's content."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
