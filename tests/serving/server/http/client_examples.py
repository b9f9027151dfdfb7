"""The first example of each client's documentation, its tools, its structured output and its
stream, against a server whose model writes at random: what the client makes of the answer is
checked, not what it says.

Run by an interpreter that has the clients: `python client_examples.py URL CLIENT EXAMPLE`.
"""

import asyncio
import importlib.metadata
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

MODEL, KEY = "tiny", "none"
MOST = 160
URL = ""
"""Of the server, without /v1."""
USER = {"role": "user", "content": "Where is it?"}


class Place(BaseModel):
    """As people write it: what else it may have is left open."""

    city: Literal["Paris", "Rome"]
    sure: bool


def weather(city: Literal["Paris", "Rome"]) -> str:
    """Get the weather of a city.

    Args:
        city: which one.
    """
    return f"It is sunny in {city}."


FUNCTION: dict[str, Any] = {
    "name": "weather",
    "description": "Get the weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
    },
}
TOOL: dict[str, Any] = {"type": "function", "function": FUNCTION}


def check_call(name: str, arguments: Any) -> None:
    """A call of the one tool, with one of its two arguments."""
    read = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert name == "weather", name
    assert read.keys() == {"city"}, read
    assert read["city"] in ("Paris", "Rome"), read


def check_text(text: Any) -> None:
    assert isinstance(text, str), text
    assert text, "no text"


def check_pieces(pieces: list[str]) -> None:
    assert len(pieces) > 1, pieces
    check_text("".join(pieces))


def check_place(place: Any) -> None:
    assert isinstance(place, Place), place


# openai


def openai_client() -> Any:
    from openai import OpenAI

    return OpenAI(base_url=f"{URL}/v1", api_key=KEY)


def openai_first() -> None:
    client = openai_client()
    answer = client.chat.completions.create(model=MODEL, messages=[USER], max_tokens=MOST)
    check_text(answer.choices[0].message.content)
    answer = client.responses.create(model=MODEL, input="Where?", max_output_tokens=MOST)
    check_text(answer.output_text)


def openai_tools() -> None:
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "weather"}}]}
    for choice in ("required", {"type": "allowed_tools", "allowed_tools": allowed}):
        answer = openai_client().chat.completions.create(
            model=MODEL, messages=[USER], tools=[TOOL], tool_choice=choice, max_tokens=MOST
        )
        call = answer.choices[0].message.tool_calls[0].function
        check_call(call.name, call.arguments)


def openai_structured() -> None:
    client = openai_client()
    answer = client.chat.completions.parse(
        model=MODEL, messages=[USER], response_format=Place, max_tokens=MOST
    )
    check_place(answer.choices[0].message.parsed)
    response = client.responses.parse(
        model=MODEL, input="Where?", text_format=Place, max_output_tokens=MOST
    )
    check_place(response.output_parsed)


def openai_streaming() -> None:
    client = openai_client()
    stream = client.chat.completions.create(
        model=MODEL, messages=[USER], max_tokens=MOST, stream=True
    )
    check_pieces([chunk.choices[0].delta.content or "" for chunk in stream])
    events = client.responses.create(model=MODEL, input="?", max_output_tokens=MOST, stream=True)
    check_pieces([one.delta for one in events if one.type == "response.output_text.delta"])


# anthropic


def anthropic_client() -> Any:
    from anthropic import Anthropic

    return Anthropic(base_url=URL, api_key=KEY)


CLAUDE_TOOL = {"name": "weather", "input_schema": FUNCTION["parameters"]}


def anthropic_first() -> None:
    messages = anthropic_client().messages
    answer = messages.create(model=MODEL, messages=[USER], max_tokens=MOST)
    check_text(answer.content[0].text)
    assert messages.count_tokens(model=MODEL, messages=[USER]).input_tokens > 0


def anthropic_tools() -> None:
    asked: dict[str, Any] = {"tools": [CLAUDE_TOOL], "tool_choice": {"type": "any"}}
    messages = anthropic_client().messages
    answer = messages.create(model=MODEL, messages=[USER], max_tokens=MOST, **asked)
    call = answer.content[0]
    check_call(call.name, call.input)
    with messages.stream(model=MODEL, messages=[USER], max_tokens=MOST, **asked) as stream:
        call = stream.get_final_message().content[0]
    check_call(call.name, call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    turns = [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    check_text(messages.create(model=MODEL, messages=turns, max_tokens=MOST).content[0].text)


def anthropic_structured() -> None:
    answer = anthropic_client().messages.parse(
        model=MODEL, messages=[USER], max_tokens=MOST, output_format=Place
    )
    check_place(answer.parsed_output)


def anthropic_streaming() -> None:
    messages = anthropic_client().messages
    with messages.stream(model=MODEL, messages=[USER], max_tokens=MOST) as stream:
        check_pieces([*stream.text_stream])


# instructor


def instructor_by(mode: str) -> Any:
    import instructor

    return instructor.from_openai(openai_client(), mode=instructor.Mode[mode])


def instructor_place(mode: str) -> None:
    place = instructor_by(mode).chat.completions.create(
        model=MODEL, response_model=Place, messages=[USER], max_tokens=MOST
    )
    assert type(place).__name__ == "Place", place


def instructor_structured() -> None:
    instructor_place("JSON_SCHEMA")


def instructor_streaming() -> None:
    partial = instructor_by("TOOLS").chat.completions.create_partial(
        model=MODEL, response_model=Place, messages=[USER], max_tokens=MOST
    )
    assert [*partial][-1].city in ("Paris", "Rome")


# outlines


def outlines_model() -> Any:
    import outlines

    return outlines.from_vllm(openai_client(), MODEL)


def outlines_structured() -> None:
    import outlines

    check_place(Place.model_validate_json(outlines_model()("Where?", Place, max_tokens=MOST)))
    model = outlines.from_openai(openai_client(), MODEL)
    check_place(Place.model_validate_json(model("Where?", Place, max_tokens=MOST)))
    assert outlines_model()("?", Literal["Paris", "Rome"], max_tokens=MOST) in ("Paris", "Rome")


# llm


def llm_model() -> Any:
    folder = Path(tempfile.mkdtemp())
    os.environ["LLM_USER_PATH"] = str(folder)
    listed = {"model_id": "own", "model_name": MODEL, "api_base": f"{URL}/v1"}
    can = {"supports_tools": True, "supports_schema": True}
    (folder / "extra-openai-models.yaml").write_text(json.dumps([listed | can]))
    import llm

    return llm.get_model("own")


def llm_first() -> None:
    check_text(llm_model().prompt("Where?", max_tokens=MOST, key=KEY).text())


def llm_tools() -> None:
    # it has no way to require a call
    response = llm_model().prompt("Where?", tools=[weather], max_tokens=MOST, key=KEY)
    check_text(response.text())
    response.tool_calls()


def llm_structured() -> None:
    answer = llm_model().prompt("Where?", schema=Place, max_tokens=MOST, key=KEY)
    check_place(Place.model_validate_json(answer.text()))


def llm_streaming() -> None:
    check_pieces([*llm_model().prompt("Where?", max_tokens=MOST, key=KEY)])


# litellm


def litellm_ask(provider: str = "openai", **asked: Any) -> Any:
    import litellm

    return litellm.completion(
        model=f"{provider}/{MODEL}",
        api_base=f"{URL}/v1",
        api_key=KEY,
        messages=[USER],
        max_tokens=MOST,
        **asked,
    )


def litellm_first() -> None:
    for provider in ("openai", "hosted_vllm"):
        check_text(litellm_ask(provider).choices[0].message.content)


def litellm_tools() -> None:
    answer = litellm_ask(tools=[TOOL], tool_choice="required")
    call = answer.choices[0].message.tool_calls[0].function
    check_call(call.name, call.arguments)


def litellm_structured() -> None:
    for provider in ("openai", "hosted_vllm"):
        text = litellm_ask(provider, response_format=Place).choices[0].message.content
        check_place(Place.model_validate_json(text))


def litellm_streaming() -> None:
    check_pieces([one.choices[0].delta.content or "" for one in litellm_ask(stream=True)])


# langchain-openai


def langchain_model() -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key=KEY, max_tokens=MOST)


def langchain_first() -> None:
    check_text(langchain_model().invoke("Where?").content)


def langchain_tools() -> None:
    [call] = langchain_model().bind_tools([weather], tool_choice="weather").invoke("?").tool_calls
    check_call(call["name"], call["args"])


def langchain_structured() -> None:
    for method in ("json_schema", "function_calling"):
        check_place(langchain_model().with_structured_output(Place, method=method).invoke("?"))


def langchain_streaming() -> None:
    check_pieces([piece.content for piece in langchain_model().stream("Where?")])


# llama-index-llms-openai-like


def llama_index_model() -> Any:
    from llama_index.llms.openai_like import OpenAILike

    return OpenAILike(
        model=MODEL,
        api_base=f"{URL}/v1",
        api_key=KEY,
        max_tokens=MOST,
        context_window=4096,
        is_chat_model=True,
        is_function_calling_model=True,
    )


def llama_index_first() -> None:
    check_text(llama_index_model().complete("Where?").text)


def llama_index_tools() -> None:
    from llama_index.core.tools import FunctionTool

    model, tool = llama_index_model(), FunctionTool.from_defaults(weather)
    answer = model.chat_with_tools([tool], user_msg="Where?", tool_required=True)
    call = model.get_tool_calls_from_response(answer)[0]
    check_call(call.tool_name, call.tool_kwargs)


def llama_index_structured() -> None:
    from llama_index.core.prompts import PromptTemplate

    place = llama_index_model().structured_predict(Place, PromptTemplate("Where is it?"))
    check_place(place)


def llama_index_streaming() -> None:
    check_pieces([piece.delta or "" for piece in llama_index_model().stream_complete("Where?")])


# pydantic-ai


def pydantic_ai_agent(**options: Any) -> Any:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)
    settings: Any = {"max_tokens": MOST}
    return Agent(OpenAIChatModel(MODEL, provider=provider), model_settings=settings, **options)


def pydantic_ai_first() -> None:
    check_text(pydantic_ai_agent().run_sync("Where?").output)


def pydantic_ai_tools() -> None:
    # a model that writes at random never ends a loop of required calls
    check_text(pydantic_ai_agent(tools=[weather]).run_sync("Where?").output)


def pydantic_ai_structured() -> None:
    from pydantic_ai import NativeOutput

    for wanted in (Place, NativeOutput(Place)):
        check_place(pydantic_ai_agent(output_type=wanted).run_sync("Where?").output)


def pydantic_ai_streaming() -> None:
    async def streamed() -> list[str]:
        async with pydantic_ai_agent().run_stream("Where?") as result:
            return [one async for one in result.stream_text(delta=True, debounce_by=None)]

    check_pieces(asyncio.run(streamed()))


# dspy


def dspy_model() -> Any:
    import dspy

    return dspy.LM(f"openai/{MODEL}", api_base=f"{URL}/v1", api_key=KEY, max_tokens=MOST)


def dspy_first() -> None:
    check_text(dspy_model()("Where is it?")[0])


def dspy_structured() -> None:
    answer = dspy_model()(messages=[USER], response_format=Place)
    check_place(Place.model_validate_json(answer[0]))


# haystack


def haystack_generator(**more: Any) -> Any:
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.utils import Secret

    wanted = {"max_tokens": MOST} | more.pop("wanted", {})
    return OpenAIChatGenerator(
        model=MODEL,
        api_base_url=f"{URL}/v1",
        api_key=Secret.from_token(KEY),
        generation_kwargs=wanted,
        **more,
    )


def haystack_ask(**more: Any) -> Any:
    from haystack.dataclasses import ChatMessage

    return haystack_generator(**more).run([ChatMessage.from_user("Where is it?")])["replies"][0]


def haystack_first() -> None:
    check_text(haystack_ask().text)


def haystack_tools() -> None:
    from haystack.tools import Tool

    tool = Tool(function=weather, **FUNCTION)
    call = haystack_ask(tools=[tool], wanted={"tool_choice": "required"}).tool_calls[0]
    check_call(call.tool_name, call.arguments)


def haystack_structured() -> None:
    text = haystack_ask(wanted={"response_format": Place}).text
    check_place(Place.model_validate_json(text))


def haystack_streaming() -> None:
    pieces: list[str] = []
    haystack_ask(streaming_callback=lambda chunk: pieces.append(chunk.content))
    check_pieces(pieces)


# openai-agents


def agents_agent(kind: str = "OpenAIChatCompletionsModel", **options: Any) -> Any:
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY)
    settings = agents.ModelSettings(max_tokens=MOST, **options.pop("settings", {}))
    model = getattr(agents, kind)(model=MODEL, openai_client=client)
    return agents.Agent(name="a", model=model, model_settings=settings, **options)


def agents_first() -> None:
    from agents import Runner

    # by its model of responses an answer that max_tokens cuts is an error, and this model's all are
    check_text(Runner.run_sync(agents_agent(), "Where is it?").final_output)


def agents_tools() -> None:
    from agents import Runner, function_tool

    for kind in ("OpenAIChatCompletionsModel", "OpenAIResponsesModel"):
        required = {"tool_choice": "required"}
        agent = agents_agent(
            kind,
            tools=[function_tool(weather)],
            settings=required,
            tool_use_behavior="stop_on_first_tool",
        )
        assert "sunny" in str(Runner.run_sync(agent, "Where is it?").final_output)


def agents_structured() -> None:
    from agents import Runner

    for kind in ("OpenAIChatCompletionsModel", "OpenAIResponsesModel"):
        check_place(Runner.run_sync(agents_agent(kind, output_type=Place), "Where?").final_output)


def agents_streaming() -> None:
    from agents import Runner

    async def streamed() -> list[str]:
        result = Runner.run_streamed(agents_agent(), "Where is it?")
        events = [event async for event in result.stream_events()]
        raw = [one.data for one in events if one.type == "raw_response_event"]
        return [one.delta for one in raw if one.type == "response.output_text.delta"]

    check_pieces(asyncio.run(streamed()))


EXAMPLES = ("first", "tools", "structured", "streaming")
NOT_ITS_OWN = "not a feature of the client"
OWN_FORMAT = "the model has to follow the client's own format of the prompt"
CLIENTS: dict[str, dict[str, Callable[[], None] | str]] = {
    "openai": {
        "first": openai_first,
        "tools": openai_tools,
        "structured": openai_structured,
        "streaming": openai_streaming,
    },
    "anthropic": {
        "first": anthropic_first,
        "tools": anthropic_tools,
        "structured": anthropic_structured,
        "streaming": anthropic_streaming,
    },
    "instructor": {
        "first": lambda: instructor_place("TOOLS"),
        "tools": lambda: instructor_place("TOOLS_STRICT"),
        "structured": instructor_structured,
        "streaming": instructor_streaming,
    },
    "outlines": {
        "first": lambda: check_text(outlines_model()("Where?", max_tokens=MOST)),
        "tools": NOT_ITS_OWN,
        "structured": outlines_structured,
        "streaming": lambda: check_pieces([*outlines_model().stream("?", max_tokens=MOST)]),
    },
    "llm": {
        "first": llm_first,
        "tools": llm_tools,
        "structured": llm_structured,
        "streaming": llm_streaming,
    },
    "litellm": {
        "first": litellm_first,
        "tools": litellm_tools,
        "structured": litellm_structured,
        "streaming": litellm_streaming,
    },
    "langchain-openai": {
        "first": langchain_first,
        "tools": langchain_tools,
        "structured": langchain_structured,
        "streaming": langchain_streaming,
    },
    "llama-index-llms-openai-like": {
        "first": llama_index_first,
        "tools": llama_index_tools,
        "structured": llama_index_structured,
        "streaming": llama_index_streaming,
    },
    "pydantic-ai-slim": {
        "first": pydantic_ai_first,
        "tools": pydantic_ai_tools,
        "structured": pydantic_ai_structured,
        "streaming": pydantic_ai_streaming,
    },
    "dspy": {
        "first": dspy_first,
        "tools": OWN_FORMAT,
        "structured": dspy_structured,
        "streaming": OWN_FORMAT,
    },
    "haystack-ai": {
        "first": haystack_first,
        "tools": haystack_tools,
        "structured": haystack_structured,
        "streaming": haystack_streaming,
    },
    "openai-agents": {
        "first": agents_first,
        "tools": agents_tools,
        "structured": agents_structured,
        "streaming": agents_streaming,
    },
}
"""Package → its examples, or why there is none."""


if __name__ == "__main__":
    URL = sys.argv[1]
    client = sys.argv[2]
    for name in sys.argv[3:] or EXAMPLES:
        example = CLIENTS[client][name]
        if callable(example):
            example()
    print(importlib.metadata.version(client))
