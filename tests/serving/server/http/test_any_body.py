"""Whatever JSON a body holds, the models of requests take it or refuse it; and what they took, a
chat template makes tokens of, or refuses too. Without a server: a thousand bodies take seconds."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from pydantic import BaseModel, ValidationError

from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.server.http.requests import ChatRequest, CompletionRequest
from draftwell.serving.server.http.responses_api import ResponsesRequest
from draftwell.serving.server.http.tokens import DetokenizeRequest
from tests.support.server.served_pair import TEMPLATE, tiny_pair

GOOD: dict[str, Any] = json.loads(Path(__file__).with_name("good_bodies.json").read_text())
MODELS: dict[str, Any] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/detokenize": DetokenizeRequest,
}
NAMES = sorted({name for model in MODELS.values() for name in model.model_fields})
TEMPLATES = {
    "knows no tools": TEMPLATE,
    "knows tools": "{% for t in tools or [] %}{{ t | tojson }}{{ t.function.parameters.properties "
    "| length }}{% endfor %}{% for m in messages %}{{ m.role }}\n{{ m.content }}{% for c in "
    "m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}<|end|>{% endfor %}",
    "counts on values": "{{ depth + 1 }}{% for p in papers %}{{ p.title | upper }}{% endfor %}"
    "{% for m in messages %}{{ m.content.split('<')[1] }}{% endfor %}",
}

TEXTS = st.text(st.characters(exclude_categories=()), max_size=12) | st.sampled_from(
    ["<|end|>", "{{ 7 * 7 }}", "{% for %}", "<tool_call>", "\ud800", "\x00", "user", "x" * 400]
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from([2**31, 2**63, 10**400, -1])
    | TEXTS
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from([*NAMES, "type", "role", "content", "function", "properties"]) | TEXTS,
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
MANY = settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow])


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to everything inside a body."""
    keys = value if isinstance(value, dict) else range(len(value) if isinstance(value, list) else 0)
    for key in keys:
        yield (*path, key)
        yield from places(value[key], (*path, key))


def like(value: Any) -> st.SearchStrategy[Any]:
    """Values of the same type, most of which a model takes."""
    if isinstance(value, str):
        return TEXTS
    if isinstance(value, bool) or not isinstance(value, int | float):
        return VALUES
    return st.integers(0, 5) | st.floats(0, 2) | SCALARS


@st.composite
def bodies(draw: st.DrawFn, path: str) -> Any:
    """A right body with one to three values exchanged, fields added, or places taken out; or any
    value."""
    if draw(st.integers(0, 9)) == 0:
        return draw(VALUES)
    good = [body for name, body in GOOD.items() if path == name.partition("#")[0]]
    body = copy.deepcopy(draw(st.sampled_from(good)))
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        *above, last = draw(st.sampled_from(list(places(body))))
        holder = body
        for key in above:
            holder = holder[key]
        change = draw(st.sampled_from(["put", "put", "put", "put", "take", "add"]))
        if change == "put":
            holder[last] = draw(like(holder[last]))
        elif change == "take" and len(body) > 1:
            del holder[last]
        else:
            body[draw(st.sampled_from(NAMES) | TEXTS)] = draw(VALUES)
    return body


CALLS = st.fixed_dictionaries(
    {
        "type": st.just("function"),
        "function": st.fixed_dictionaries(
            {"name": TEXTS, "arguments": TEXTS | VALUES.map(json.dumps)}
        ),
    }
)
MESSAGES = st.one_of(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "developer", "user", "tool"]), "content": TEXTS},
        optional={"name": TEXTS, "tool_call_id": TEXTS},
    ),
    st.fixed_dictionaries(
        {"role": st.just("assistant")},
        optional={
            "content": st.none() | TEXTS,
            "tool_calls": st.lists(CALLS, max_size=2),
            "reasoning": TEXTS,
        },
    ),
)
TOOLS = st.fixed_dictionaries(
    {
        "type": st.just("function"),
        "function": st.fixed_dictionaries(
            {"name": st.sampled_from(["f", "g.h"])},
            optional={
                "description": TEXTS,
                "parameters": st.fixed_dictionaries(
                    {"type": st.just("object")}, optional={"properties": VALUES}
                ),
            },
        ),
    }
)
CONVERSATIONS = st.fixed_dictionaries(
    {"model": st.just("tiny"), "messages": st.lists(MESSAGES, min_size=1, max_size=4)},
    optional={
        "tools": st.lists(TOOLS, min_size=1, max_size=2),
        "chat_template_kwargs": st.dictionaries(
            st.sampled_from(["depth", "papers", "mood", "tokenize", "messages", "eos_token"])
            | TEXTS,
            VALUES,
            max_size=3,
        ),
        "continue_final_message": st.booleans(),
        "add_generation_prompt": st.booleans(),
    },
)
"""Conversations of the right shape, whatever is said in them."""


def taken(path: str, body: Any) -> Any:
    """The request that a body is, or None where it is refused; as from the wire."""
    try:
        return MODELS[path].model_validate(json.loads(json.dumps(body)))
    except ValidationError:
        return None


def readings(request: Any) -> None:
    """All that the server reads off a request; its own refusals are told to the client."""
    for name in set(dir(type(request))) - set(dir(BaseModel)):
        if isinstance(getattr(type(request), name), property):
            getattr(request, name)
    if not isinstance(request, DetokenizeRequest):
        request.stops()
        if (wanted := request.format) is not None:
            wanted.define(lambda text: False)


@pytest.mark.parametrize("path", MODELS)
@MANY
@given(data=st.data())
def test_any_body_is_taken_or_refused(path: str, data: st.DataObject) -> None:
    request = taken(path, data.draw(bodies(path)))
    if request is not None:
        with suppress(DraftwellError):
            readings(request)


@pytest.fixture(scope="module")
def pair() -> LoadedPair:
    return tiny_pair(1)


@pytest.mark.parametrize("template", TEMPLATES)
@MANY
@given(data=st.data())
def test_any_conversation_becomes_tokens_or_is_refused(
    pair: LoadedPair, template: str, data: st.DataObject
) -> None:
    request = taken("/v1/chat/completions", data.draw(CONVERSATIONS))
    if request is None:
        return
    pair.tokenizer.chat_template = TEMPLATES[template]
    code = None
    try:
        ids = pair.encode_chat([m.plain() for m in request.messages], **request.template_options)
    except DraftwellError as refusal:
        code = refusal.code
    else:
        assert all(0 <= token < len(pair.tokenizer) for token in ids)
    assert code in (None, "messages_refused", "template_value_refused")
