"""Requests whose answers may call functions, whatever shape their endpoint has for tools."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from draftwell.serving.server.http.fields import contradiction
from draftwell.serving.server.http.formats import Format
from draftwell.serving.server.http.generation import Generation
from draftwell.serving.server.http.tool_calls import FirstCall, ToolCallParser
from draftwell.serving.server.http.tools import MOST_CALLS, ChosenFunction, Tool, calls_grammar
from draftwell.serving.server.scheduling.detokenize import StopStrings

Choice = Literal["none", "auto", "required"] | ChosenFunction | None
"""Whether a request wants calls, or which function's; None: auto."""


class Calling(Generation):
    """A request that may offer tools."""

    parallel_tool_calls: bool | None = Field(
        None, description="false: at most one call; default: several"
    )

    @property
    def functions(self) -> list[Tool]:
        """The tools of the request, offered or not."""
        raise NotImplementedError

    @property
    def choice(self) -> Choice:
        """Which of them to call."""
        raise NotImplementedError

    @model_validator(mode="after")
    def check_tools(self) -> Self:
        names = [tool.function.name for tool in self.functions]
        if len(set(names)) < len(names):
            raise contradiction("tools", "has two functions of one name")
        if isinstance(self.choice, ChosenFunction) and self.choice.name not in names:
            raise contradiction("tool_choice", "names a function that is not among the tools")
        if self.choice == "required" and not names:
            raise contradiction("tool_choice", "needs tools to choose from")
        asked = self.asked_format
        if self.offered and asked is not None and asked.rule is None:
            raise contradiction(
                "tools",
                f"cannot be combined with {asked.field}: ask for JSON or for a choice of "
                "texts, or set "
                "tool_choice to none",
            )
        return self

    @property
    def offered(self) -> list[Tool]:
        """The tools that the answer may call."""
        if self.choice == "none":
            return []
        chosen = self.choice.name if isinstance(self.choice, ChosenFunction) else None
        return [tool for tool in self.functions if chosen in (None, tool.function.name)]

    @property
    def must_call(self) -> bool:
        """Whether the answer is calls and nothing else."""
        return self.choice == "required" or isinstance(self.choice, ChosenFunction)

    @property
    def format(self) -> Format | None:
        """Calls where they are asked for; where the model decides, calls or what the request's own
        format says."""
        tools, asked = self.offered, self.asked_format
        most = (
            1
            if self.parallel_tool_calls is False or isinstance(self.choice, ChosenFunction)
            else MOST_CALLS
        )
        calls = Format("tools", lambda own: calls_grammar(tools, own, most=most))
        if tools and self.must_call:
            return calls
        if tools and asked is not None and asked.rule is not None:
            rule = asked.rule
            return Format(
                asked.field,
                lambda own: calls_grammar(tools, own, most=most, answer=rule()),
                parts=(calls,),
            )
        if tools and any(tool.function.strict for tool in tools):
            return Format("tools", lambda own: calls_grammar(tools, own, most=most, text=True))
        return asked

    def stops(self) -> StopStrings:
        """With a single call at most, its end ends the answer."""
        if not self.offered or self.parallel_tool_calls is not False:
            return super().stops()
        return FirstCall({tool.function.name for tool in self.offered}, self.stop_strings)

    def parser(self) -> ToolCallParser:
        """Takes the calls out of one answer's text."""
        return ToolCallParser(
            {tool.function.name for tool in self.offered},
            1 if self.parallel_tool_calls is False else None,
        )

    @property
    def tool_options(self) -> dict[str, Any]:
        """Keyword arguments for `ServedModel.encode_chat`."""
        return {"tools": [tool.plain() for tool in self.functions]} if self.offered else {}
