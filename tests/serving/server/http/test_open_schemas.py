"""Schemas as pydantic writes them leave open which further properties there may be: answers have
those that are listed, unless the request says otherwise."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any

import httpx
import jsonschema
import pydantic
import pytest

from draftwell.serving.runtime.strategies import build_strategy
from draftwell.serving.server.model.served_model import ServedModel
from tests.support.server.served_pair import TunedModel, tiny_pair

SEEDS = range(2)


class Place(pydantic.BaseModel):
    x: Annotated[int, pydantic.Field(ge=0, le=9)]


class Reading(pydantic.BaseModel):
    name: Annotated[str, pydantic.Field(max_length=4)]
    at: Place | None
    where: Annotated[list[Place], pydantic.Field(max_length=2)]


OPEN = Reading.model_json_schema()
NAMED: dict[str, Any] = {"name": "reading", "schema": OPEN}
CALL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": OPEN}}
CHOSEN = {"type": "function", "function": {"name": "f"}}
CLOSED_BY = {"disable_additional_properties": True}
OPENED_BY = {"disable_additional_properties": False}


def pair() -> ServedModel:
    """With room for tools as text."""
    return TunedModel("tiny", tiny_pair(1, context=1536), build_strategy("vanilla_sd"), 1)


@pytest.fixture(scope="module")
def served() -> ServedModel:
    return pair()


def answers(http: httpx.Client, path: str = "/v1/chat/completions", **asked: Any) -> Iterator[Any]:
    """JSON of a random model's answers, which invents properties where it may."""
    for seed in SEEDS:
        asks = {"input": "?"} if "responses" in path else {"messages": [USER]}
        most = "max_output_tokens" if "responses" in path else "max_tokens"
        body = {"model": "tiny", "seed": seed, "temperature": 1, most: 200} | asks | asked
        response = http.post(path, json=body)
        assert response.status_code == 200, response.text
        yield response.json()


USER = {"role": "user", "content": "?"}


def read(answer: Any) -> Any:
    if "output" in answer:
        assert answer["status"] == "completed"
        [item] = answer["output"]
        return json.loads(item["arguments"] if "arguments" in item else item["content"][0]["text"])
    choice = answer["choices"][0]
    assert choice["finish_reason"] in ("stop", "tool_calls")
    said = choice["message"]
    [call] = said.get("tool_calls") or [{"function": {"arguments": said["content"]}}]
    return json.loads(call["function"]["arguments"])


def invents(http: httpx.Client, **asked: Any) -> bool:
    """Whether some answer goes beyond the schema, or does not end."""
    found = (one["choices"][0] for one in answers(http, **asked))
    return any(
        one["finish_reason"] == "length"
        or not json.loads(one["message"]["content"]).keys() <= Reading.model_fields.keys()
        for one in found
    )


@pytest.mark.parametrize(
    "asked",
    [
        {"response_format": {"type": "json_schema", "json_schema": NAMED}},
        {"response_format": {"type": "json_object", "schema": OPEN}},
        {"structured_outputs": {"json": OPEN}},
        {"structured_outputs": {"json": json.dumps(OPEN)} | CLOSED_BY},
        {"guided_json": OPEN},
        {"tools": [CALL], "tool_choice": "required", "parallel_tool_calls": False},
        {"tools": [CALL], "tool_choice": CHOSEN},
        {
            "path": "/v1/responses",
            "text": {"format": {"type": "json_schema", **NAMED}},
        },
        {
            "path": "/v1/responses",
            "tools": [{"type": "function", **CALL["function"]}],
            "tool_choice": {"type": "function", "name": "f"},
        },
    ],
    ids=lambda asked: str(asked)[:50] + str(asked)[-35:],
)
def test_answers_end_with_the_properties_that_are_listed(
    http: httpx.Client, asked: dict[str, Any]
) -> None:
    found = read(next(answers(http, **asked)))
    jsonschema.validate(found, OPEN)
    assert Reading.model_validate(found).model_dump() == found


def test_a_request_may_open_them(http: httpx.Client) -> None:
    assert invents(http, structured_outputs={"json": OPEN} | OPENED_BY)
    opened = {"schema": OPEN | {"additionalProperties": True}}
    format_ = {"type": "json_schema", "json_schema": NAMED | opened}
    assert invents(http, response_format=format_)
