"""Wrong requests: OpenAI's error shape, the right status, never a 422 and never a stack trace."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from draftwell.serving.server.model.served_model import ServedModel
from draftwell.serving.server.scheduling.detokenize import LONGEST_LEAD
from tests.support.server.served_pair import MAX_CONTEXT, served_pair

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
PLAIN = {"model": "tiny", "prompt": "hi", "max_tokens": 2}


@pytest.fixture(scope="module")
def served() -> ServedModel:
    return served_pair("autoregressive", slots=1)


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "\n" not in error["message"]
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    return error


def chat(http: httpx.Client, **change: Any) -> httpx.Response:
    return http.post("/v1/chat/completions", json=CHAT | change)


def plain(http: httpx.Client, **change: Any) -> httpx.Response:
    return http.post("/v1/completions", json=PLAIN | change)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
                ]
            },
            "messages[0].content[0].image_url",
        ),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        ({"stop": "\udfff"}, "stop"),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
            "messages[0].tool_calls[0].function",
        ),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]},
            "messages",
        ),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"logprobs": 2}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "x"}},
                }
            },
            "response_format",
        ),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": "1"}, "frequency_penalty"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": {"the": 1}}, "logit_bias.the"),
        ({"logit_bias": {"5000": 1}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
        ({"messages": CHAT["messages"] * 2049}, "messages"),
        ({"top_k": -2}, "top_k"),
        ({"timeout": 0}, "timeout"),
        ({"speculation": True}, "speculation"),
        ({"speculation": {"strategy": "telepathy"}}, "speculation.strategy"),
        ({"speculation": {"strategy": "spide"}}, "speculation.strategy"),
        ({"speculation": {"stat": True}}, "speculation.stat"),
        ({"temprature": 0.5}, "temprature"),
        ({"prediction": {"type": "content"}}, "prediction.content"),
        ({"prediction": {"type": "text", "content": "x"}}, "prediction.type"),
        ({"prediction": "x"}, "prediction"),
        ({"\ud800": 1}, None),
    ],
)
def test_a_wrong_chat_field_is_named(
    http: httpx.Client, change: dict[str, Any], param: str | None
) -> None:
    body = json.dumps(CHAT | change)  # as ASCII: lone surrogates travel as escapes
    error = error_of(
        http.post(
            "/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}
        )
    )
    assert error["param"] == param
    assert "Traceback" not in error["message"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": ["one", ""]}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a"] * 33, "n": 4}, "prompt"),
        ({"prompt": "x" * 500_001}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1, 100_000]}, "prompt"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
    ],
)
def test_a_wrong_completion_field_is_named(
    http: httpx.Client, change: dict[str, Any], param: str
) -> None:
    assert (error_of(plain(http, **change))["param"] or "").split("[")[0] == param


@pytest.mark.parametrize(
    "change",
    [
        {
            "user": "me",
            "metadata": {"a": "b"},
            "store": True,
            "service_tier": "auto",
            "parallel_tool_calls": True,
            "tool_choice": "none",
        },
        {
            "prediction": {"type": "content", "content": "x"},
            "reasoning_effort": "low",
            "cache_salt": "x",
            "stream_options": {"include_obfuscation": False},
        },
        {
            "n": 1,
            "logprobs": False,
            "presence_penalty": 0,
            "frequency_penalty": 0.0,
            "logit_bias": {},
            "tools": [],
            "seed": None,
        },
        {
            "temperature": None,
            "top_p": None,
            "stop": None,
            "stream": None,
            "stream_options": None,
            "response_format": {"type": "text"},
        },
    ],
)
def test_fields_that_change_nothing_are_taken(http: httpx.Client, change: dict[str, Any]) -> None:
    assert chat(http, **change).status_code == 200


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"model": NaN}', b"[" * 100_000, b"9" * 10_000],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_malformed_body_is_a_400(http: httpx.Client, path: str, body: bytes) -> None:
    error_of(http.post(path, content=body, headers={"Content-Type": "application/json"}))


def test_not_a_number_is_refused(http: httpx.Client) -> None:
    body = b'{"model": "tiny", "prompt": "hi", "temperature": NaN}'
    assert (
        error_of(
            http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
        )["param"]
        == "temperature"
    )


def test_a_missing_field_is_named(http: httpx.Client) -> None:
    error = error_of(http.post("/v1/completions", json={"model": "tiny"}))
    assert (error["param"], "prompt" in error["message"]) == ("prompt", True)


def test_an_unknown_model_is_a_404(http: httpx.Client) -> None:
    for response in (chat(http, model="gpt-9"), plain(http, model="gpt-9")):
        error = error_of(response, 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "'tiny'" in error["message"], "the mend is to write the right name"
    error_of(http.get("/v1/models/gpt-9"), 404)


def test_unknown_paths_and_methods_have_the_shape_too(http: httpx.Client) -> None:
    error_of(http.get("/v2/nothing"), 404)
    error_of(http.get("/v1/completions"), 405)


def test_a_context_too_long_is_refused_before_anything_runs(
    http: httpx.Client, served: ServedModel
) -> None:
    for response in (
        chat(http, max_tokens=MAX_CONTEXT),
        plain(http, prompt="x" * MAX_CONTEXT, max_tokens=1),
        http.post("/v1/completions", json={"model": "tiny", "prompt": "x" * 1000}),
        plain(http, max_tokens=10**30),
        chat(http, max_tokens=MAX_CONTEXT, stream=True),
    ):
        error = error_of(response)
        assert error["code"] == "context_length_exceeded"
        assert str(MAX_CONTEXT) in error["message"]
    fits = plain(http, prompt=[1] * (MAX_CONTEXT - 1), max_tokens=1)
    assert fits.json()["usage"]["total_tokens"] == MAX_CONTEXT
    rest = http.post("/v1/completions", json={"model": "tiny", "prompt": [1] * (MAX_CONTEXT - 3)})
    assert rest.json()["usage"]["completion_tokens"] <= 3


def test_what_cannot_fit_is_refused_before_it_is_encoded_or_decoded(
    http: httpx.Client, served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    worked: list[str] = []
    for name in ("encode", "encode_chat", "decode"):
        monkeypatch.setattr(served, name, lambda what, name=name: worked.append(name))
    long = "x" * 100_000
    for response in (
        plain(http, prompt=long),
        chat(http, messages=[{"role": "user", "content": long}]),
        chat(http, messages=[{"role": "user", "content": "x" * 100}] * 1000),
        plain(http, prompt=[1] * MAX_CONTEXT, echo=True),
    ):
        assert error_of(response)["code"] == "context_length_exceeded"
    assert worked == []


def test_the_longest_text_that_fits_is_taken(http: httpx.Client) -> None:
    """All of its tokens are the longest one of the vocabulary."""
    fits = plain(http, prompt="<|start|>" * (MAX_CONTEXT - 1), max_tokens=1)
    assert fits.json()["usage"]["total_tokens"] == MAX_CONTEXT


def test_an_echo_is_decoded_beside_the_loop(
    http: httpx.Client, served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the loop a few of its last tokens at most are decoded: the answer continues them."""
    decode, calls, prompt = served.decode, [], list(range(1, 4 * LONGEST_LEAD))
    monkeypatch.setattr(
        served,
        "decode",
        lambda ids: (calls.append((asyncio._get_running_loop(), len(ids))), decode(ids))[1],
    )
    assert plain(http, prompt=prompt, echo=True).status_code == 200
    assert (None, len(prompt)) in calls
    assert all(loop is None or length <= LONGEST_LEAD for loop, length in calls)


def test_a_fault_of_ours_tells_no_details(
    http: httpx.Client, served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(rows: Any) -> Any:
        raise RuntimeError("cannot read /secret/path")

    with monkeypatch.context() as patch:
        patch.setattr(served.pair.models["target"], "forward", broken)
        assert "secret" not in str(error_of(plain(http), 500))
        assert "secret" not in str(error_of(plain(http, stream=True), 500)), (
            "nothing was sent yet: the status can say it"
        )
    assert plain(http).status_code == 200, "the next request is answered"


def test_a_fault_behind_the_first_token_ends_the_stream(
    http: httpx.Client, served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = served.pair.models["target"]
    forward, calls = model.forward, []

    def breaking(rows: Any) -> Any:
        calls.append(rows)
        if len(calls) == 12:
            raise RuntimeError("cannot read /secret/path")
        return forward(rows)

    monkeypatch.setattr(model, "forward", breaking)
    streamed = plain(http, stream=True, prompt="1 2 3", max_tokens=16, temperature=0)
    assert streamed.status_code == 200
    assert '"text"' in streamed.text
    assert '"error"' in streamed.text
    assert "secret" not in streamed.text
    assert "[DONE]" not in streamed.text


def test_a_fault_outside_the_scheduler_has_the_shape_too(
    http: httpx.Client, served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(prompt: str) -> list[int]:
        raise RuntimeError("cannot read /secret/path")

    monkeypatch.setattr(served, "encode", broken)
    assert "secret" not in str(error_of(plain(http), 500))


def test_openai_raises_its_own_exceptions(http: httpx.Client) -> None:
    with openai.OpenAI(
        base_url=f"{http.base_url}/v1", api_key="none", max_retries=0, http_client=httpx.Client()
    ) as client:
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.completions.create(model="gpt-9", prompt="hi")
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="tiny", messages=[], max_tokens=1)
        assert caught.value.param == "messages"


def test_the_api_document_knows_no_422(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert "422" not in document["paths"][path]["post"]["responses"]
