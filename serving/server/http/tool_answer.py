"""Answers of requests that offer tools: calls are taken out of the text, whole and in streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftwell.serving.server.http.answer import Answer
from draftwell.serving.server.http.conversation import AnswerChoice, Conversation
from draftwell.serving.server.http.responses import ChatShape
from draftwell.serving.server.http.schemas import ChatRequest
from draftwell.serving.server.http.tool_calls import Call, Piece, Text
from draftwell.serving.server.model.served_model import ServedModel


class ToolAnswer(Answer):
    """The events of a conversation in which functions may be called."""

    shape: ChatShape

    def __init__(
        self, served: ServedModel, conversation: Conversation, body: ChatRequest, shape: ChatShape
    ):
        super().__init__(served, conversation, body, shape)
        self._parsers = {choice.index: body.parser() for choice in conversation.choices}

    def _whole(
        self, choice: AnswerChoice, text: str, logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:
        parser = self._parsers[choice.index]
        found = [*parser.push(text), *parser.finish()]
        whole = self.shape.whole(choice.index, text, self._reason(choice), logprobs)
        if calls := joined(found):
            said = "".join(piece.text for piece in found if isinstance(piece, Text))
            whole["message"] |= {"content": said or None, "tool_calls": calls}
        return whole

    def _said(
        self,
        choice: AnswerChoice,
        text: str,
        logprobs: dict[str, Any] | None,
        fields: dict[str, Any],
    ) -> list[dict[str, Any]]:
        pieces = self._shaped(choice, self._parsers[choice.index].push(text))
        if not pieces:
            if logprobs is None and not fields:
                return []
            pieces = [self.shape.piece(choice.index, "")]
        pieces[0]["logprobs"] = logprobs
        return [
            self.shape.chunk(piece, **(fields if number == 0 else {}))
            for number, piece in enumerate(pieces)
        ]

    def _rest(self, choice: AnswerChoice) -> list[dict[str, Any]]:
        return [
            self.shape.chunk(piece)
            for piece in self._shaped(choice, self._parsers[choice.index].finish())
        ]

    def _reason(self, choice: AnswerChoice) -> str:
        reason, parser = super()._reason(choice), self._parsers[choice.index]
        # a stop string of the client may have cut them
        complete = parser.calls and not parser.within_arguments
        return "tool_calls" if reason == "stop" and complete else reason

    def _shaped(self, choice: AnswerChoice, found: Sequence[Piece]) -> list[dict[str, Any]]:
        """Pieces as choices of chunks."""
        return [
            self.shape.piece(choice.index, piece.text)
            if isinstance(piece, Text)
            else self.shape.calls(choice.index, [piece.delta])
            for piece in found
        ]


def joined(pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    """Complete calls from their pieces."""
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if not isinstance(piece, Call):
            continue
        if piece.id is not None:
            calls.append(
                {
                    "id": piece.id,
                    "type": "function",
                    "function": {"name": piece.name, "arguments": ""},
                }
            )
        calls[piece.index]["function"]["arguments"] += piece.arguments
    return calls
