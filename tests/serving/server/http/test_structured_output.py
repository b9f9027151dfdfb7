"""Structured output over HTTP: OpenAI's `response_format`, vLLM's names, streams, several choices,
and what is refused."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pydantic
import pytest

from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.grammar import guidance, masks
from draftwell.serving.server.http.keys import Keys
from draftwell.serving.server.http.requests import StructuredOutputs
from draftwell.serving.server.http.security import Security
from draftwell.serving.server.model import served_model as module
from draftwell.serving.server.model.served_model import ServedModel
from tests.serving.runtime.grammar.schemas import SCHEMAS, closed
from tests.support.server.served_pair import serving

MESSAGES = [{"role": "user", "content": "Who is it?"}]
CHAT = {"model": "tiny", "messages": MESSAGES, "max_tokens": 160, "temperature": 0}
PLAIN = {"model": "tiny", "prompt": "Who is it?", "max_tokens": 160, "temperature": 0}
PERSON = SCHEMAS["person"]
JSON = {"Content-Type": "application/json"}


def by_schema(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema} | more}


def answer(http: httpx.Client, path: str = "/v1/chat/completions", **change: Any) -> dict[str, Any]:
    response = http.post(path, json=(CHAT if "chat" in path else PLAIN) | change)
    assert response.status_code == 200, response.text
    return dict(response.json())


def text_of(found: dict[str, Any]) -> str:
    choice = found["choices"][0]
    assert choice["finish_reason"] == "stop", choice
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def test_a_schema_by_openais_client(client: openai.OpenAI) -> None:
    class Person(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=4)
        age: int = pydantic.Field(ge=0, le=9)
        unit: Literal["cm", "inch"]

    parsed = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Person, max_tokens=160, temperature=0
    )  # type: ignore[arg-type]
    person = parsed.choices[0].message.parsed
    assert isinstance(person, Person)
    assert parsed.choices[0].finish_reason == "stop"


def test_responses_by_openais_client(client: openai.OpenAI) -> None:
    wanted: Any = {
        "format": {"type": "json_schema", "name": "person", "schema": PERSON, "strict": True}
    }
    response = client.responses.create(
        model="tiny", input="Who is it?", text=wanted, temperature=0, max_output_tokens=160
    )
    jsonschema.validate(json.loads(response.output_text), PERSON)
    assert response.status == "completed"
    assert response.text is not None
    assert response.text.format is not None
    assert response.text.format.type == "json_schema"
    simple = client.responses.create(
        model="tiny", input="hi", max_output_tokens=40, text={"format": {"type": "json_object"}}
    )
    assert simple.output_text.startswith("{")
    chosen = client.responses.create(
        model="tiny", input="hi", extra_body={"guided_choice": ["yes", "no"]}
    )
    assert chosen.output_text in ("yes", "no")


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/chat/completions", {"response_format": by_schema(PERSON, strict=True)}),
        ("/v1/completions", {"guided_json": PERSON}),
        ("/v1/chat/completions", {"guided_json": json.dumps(PERSON)}),
        ("/v1/completions", {"structured_outputs": {"json": PERSON}}),
        (
            "/v1/chat/completions",
            {"structured_outputs": {"json": json.dumps(PERSON), "disable_any_whitespace": True}},
        ),
        ("/v1/completions", {"guided_json": PERSON, "guided_whitespace_pattern": " "}),
    ],
    ids=lambda value: str(value)[:60],
)
def test_every_name_of_a_schema(http: httpx.Client, path: str, asked: dict[str, Any]) -> None:
    text = text_of(answer(http, path, **asked))
    jsonschema.validate(json.loads(text), PERSON)
    if "disable_any_whitespace" in str(asked):
        assert (
            text == json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False)
            or "\\u" in text
        )


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({"guided_regex": "[a-c]{2,3}"}, "[a-c]{2,3}"),
        ({"structured_outputs": {"regex": "[a-c]{2,3}"}}, "[a-c]{2,3}"),
        ({"guided_choice": ["Paris", "Rome"]}, "Paris|Rome"),
        ({"structured_outputs": {"choice": ["Paris", "Rome"]}}, "Paris|Rome"),
        ({"guided_grammar": 'root ::= "a" | "b" root'}, "b*a"),
        ({"structured_outputs": {"grammar": 'start: "x" /[0-9]/'}}, "x[0-9]"),
    ],
    ids=str,
)
def test_the_other_kinds(http: httpx.Client, asked: dict[str, Any], wanted: str) -> None:
    for seed in range(3):
        assert re.fullmatch(wanted, text_of(answer(http, **asked, temperature=1, seed=seed)))


def test_any_object(http: httpx.Client) -> None:
    for asked in (
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True}},
    ):
        found = answer(http, **asked, temperature=1, seed=5, logit_bias={str(ord("}") - 33): 30})[
            "choices"
        ][0]
        assert found["message"]["content"].startswith("{")
        if found["finish_reason"] == "stop":
            assert isinstance(json.loads(found["message"]["content"]), dict)


@pytest.mark.parametrize(
    "schema",
    [
        SCHEMAS[name]
        for name in ("any of", "reference", "nested objects", "long forced text", "person")
    ],
)
def test_the_text_is_that_of_plain_decoding_under_the_mask(http: httpx.Client, schema: Any) -> None:
    asked = {"response_format": by_schema(schema)}
    plain = answer(http, **asked, speculation={"enabled": False})
    assert plain["speculation"]["drafted"] == plain["speculation"]["forced"] == 0
    fast = answer(http, **asked)
    assert text_of(fast) == text_of(plain)
    assert fast["speculation"]["target_calls"] < plain["speculation"]["target_calls"]
    jsonschema.validate(json.loads(text_of(fast)), schema)


def test_streams_and_choices(http: httpx.Client, client: openai.OpenAI) -> None:
    whole = answer(http, response_format=by_schema(PERSON), n=3, temperature=1, seed=4)
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert len(set(texts)) > 1
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)
    stream = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=160,
        temperature=1,
        seed=4,
        n=3,
        stream=True,  # type: ignore[call-overload]
        response_format=by_schema(PERSON),
    )
    streamed = ["", "", ""]
    for chunk in stream:
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_an_answer_that_is_cut_says_so(http: httpx.Client) -> None:
    found = answer(http, response_format=by_schema(PERSON), max_tokens=5)["choices"][0]
    assert found["finish_reason"] == "length"
    assert found["message"]["content"].startswith("{")


def test_what_ends_texts_otherwise_does_not_matter(http: httpx.Client) -> None:
    """A finished grammar has nothing to go on with."""
    asked = {"guided_choice": ["Paris"], "ignore_eos": True}
    assert text_of(answer(http, **asked)) == "Paris"
    assert text_of(answer(http, **asked, min_tokens=50)) == "Paris"
    assert (
        text_of(
            answer(
                http, "/v1/completions", **asked, prediction={"type": "content", "content": "Rome"}
            )
        )
        == "Paris"
    )
    assert text_of(answer(http, guided_choice=["Paris"], stop=["ri"])) == "Pa"


def test_logprobs_are_of_what_is_allowed(http: httpx.Client) -> None:
    found = answer(http, guided_choice=["a", "b"], logprobs=True, top_logprobs=3)["choices"][0]
    first = found["logprobs"]["content"][0]
    assert {one["token"] for one in first["top_logprobs"] if one["logprob"] > -9999} == {"a", "b"}
    assert found["logprobs"]["content"][1]["logprob"] == 0.0


def test_an_echoed_prompt_is_no_part_of_the_grammar(http: httpx.Client) -> None:
    found = answer(http, "/v1/completions", guided_choice=["yes", "no"], echo=True, logprobs=1)[
        "choices"
    ][0]
    assert found["text"] in ("Who is it?yes", "Who is it?no")
    assert all(rating > -9999 for rating in found["logprobs"]["token_logprobs"][1:])


OVERLAPPING = "/(" + "|".join(f"[{letter}-z]{letter}x" for letter in "abcdefghijkl") + ")+/"
"""Six texts of which one has to match all: minutes of a compiler."""


@pytest.mark.parametrize(
    ("asked", "param", "said"),
    [
        ({"response_format": by_schema({"type": "text"})}, "response_format", "Invalid type"),
        (
            {"response_format": by_schema({"type": "array", "uniqueItems": True})},
            "response_format",
            "uniqueItems",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
        ({"guided_json": "{"}, "guided_json", "no JSON"),
        ({"guided_json": "[1]"}, "guided_json", "an object"),
        ({"guided_json": {"$ref": "#/none"}}, "guided_json", "does not exist"),
        ({"guided_json": {"a": "x" * 300_000}}, "guided_json", "characters"),
        ({"guided_regex": "("}, "guided_regex", "unclosed"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed"),
        ({"guided_choice": []}, "guided_choice", "at least 1"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar", "unknown name"),
        (
            {
                "guided_grammar": "start: a0\n"
                + "".join(f"a{i}: a{i + 1}\n" for i in range(9000))
                + 'a9000: "x"'
            },
            "guided_grammar",
            "rules",
        ),
        (
            {
                "guided_json": {
                    "$defs": {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(4500)},
                    "$ref": "#/$defs/a0",
                }
            },
            "guided_json",
            "nested too deeply",
        ),
        ({"guided_regex": "a\ud800"}, "guided_regex", "unicode"),
        ({"guided_choice": ["\ud800"]}, "guided_choice[0]", "unicode"),
        ({"guided_json": {"enum": ["\ud800"]}}, "guided_json", "surrogate"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "structured_outputs",
            "exactly one",
        ),
        (
            {"structured_outputs": {"regex": "a", "disable_additional_properties": True}},
            "structured_outputs",
            "disable_additional_properties",
        ),
        (
            {"structured_outputs": {"json_object": True, "disable_additional_properties": True}},
            "structured_outputs",
            "disable_additional_properties",
        ),
        (
            {"structured_outputs": {"choice": ["a"], "whitespace_pattern": " "}},
            "structured_outputs",
            "whitespace_pattern",
        ),
        (
            {"structured_outputs": {"grammar": 'start: "a"', "disable_any_whitespace": True}},
            "structured_outputs",
            "disable_any_whitespace",
        ),
        (
            {"guided_grammar": "start: X\nX: " + " & ".join(6 * [OVERLAPPING])},
            "guided_grammar",
            "intersection",
        ),
        (
            {"guided_json": {"allOf": 6 * [{"pattern": OVERLAPPING[1:-1]}]}},
            "guided_json",
            "patterns",
        ),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "guided_regex",
            "response_format",
        ),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "guided_json"),
        (
            {"guided_whitespace_pattern": " ", "guided_regex": "a"},
            "guided_whitespace_pattern",
            "guided_json",
        ),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_cannot_be_followed_is_refused(
    http: httpx.Client, asked: dict[str, Any], param: str, said: str
) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", PLAIN)):
        response = http.post(path, content=json.dumps(body | asked), headers=JSON)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == param
        assert said in error["message"]
        assert "\n" not in error["message"]
        assert len(error["message"]) < 500


@pytest.mark.parametrize(
    "asked", [{"guided_regex": "a"}, {"structured_outputs": {"choice": ["a"]}}], ids=str
)
def test_a_response_has_one_format(http: httpx.Client, asked: dict[str, Any]) -> None:
    body = {
        "model": "tiny",
        "input": "hi",
        "max_output_tokens": 2,
        "text": {"format": {"type": "json_object"}},
    }
    response = http.post("/v1/responses", json=body | asked)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == next(iter(asked))
    assert "text.format" in response.json()["error"]["message"]


def test_tools_of_texts_that_no_tokenizer_encodes_are_refused(http: httpx.Client) -> None:
    for key, value, said in (
        ("parameters", {"title": "\ud800"}, "surrogate"),
        ("description", "\ud800", "unicode"),
    ):
        function = {"name": "f", key: value}
        body = CHAT | {"tools": [{"type": "function", "function": function}]}
        response = http.post("/v1/chat/completions", content=json.dumps(body), headers=JSON)
        assert response.status_code == 400
        assert said in response.json()["error"]["message"]


def test_a_schema_that_is_too_deep_is_refused(http: httpx.Client) -> None:
    schema: Any = {"type": "integer"}
    for _ in range(150):
        schema = {"anyOf": [schema, {"type": "null"}]}
    response = http.post("/v1/chat/completions", json=CHAT | {"guided_json": schema})
    assert response.status_code == 400
    assert http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 1}).status_code == 200


def test_a_grammar_that_turns_out_too_complex_ends_its_request_only(http: httpx.Client) -> None:
    many = {
        "type": "object",
        "properties": {f"p{i}": {"type": "boolean"} for i in range(3000)},
        "additionalProperties": False,
    }
    response = http.post("/v1/chat/completions", json=CHAT | {"guided_json": many})
    assert response.status_code in (200, 400)
    if response.status_code == 400:
        assert "grammar" in response.json()["error"]["message"]
    assert text_of(answer(http, guided_choice=["fine"])) == "fine"


@pytest.mark.parametrize(
    "asked",
    [
        {"guided_json": PERSON},
        {"guided_regex": "a"},
        {"guided_choice": ["a"]},
        {"guided_grammar": 'start: "a"'},
        {"guided_grammar": 'root ::= "a"'},
    ],
    ids=str,
)
def test_a_missing_package_is_the_servers_fault_and_says_so(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, asked: Any
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    response = http.post("/v1/chat/completions", json=CHAT | asked)
    assert response.status_code == 501
    assert response.json()["error"]["code"] == "missing_package"
    assert "pip install" in response.json()["error"]["message"]


def test_a_tokenizer_that_cannot_be_read_is_the_servers_fault(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unread(*given: Any) -> None:
        raise DraftwellError("no such tokenizer", code="tokenizer_unsupported")

    monkeypatch.setattr(module, "GuidanceGrammar", unread)
    response = http.post(
        "/v1/chat/completions", json=CHAT | {"guided_choice": ["never compiled before"]}
    )
    assert (response.status_code, response.json()["error"]["code"]) == (
        501,
        "tokenizer_unsupported",
    )


def test_a_grammar_is_compiled_once(
    http: httpx.Client, served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []
    right = module.GuidanceGrammar
    monkeypatch.setattr(
        module, "GuidanceGrammar", lambda *asked: compiled.append(asked) or right(*asked)
    )
    monkeypatch.setattr(module, "GRAMMARS_KEPT", 2)
    served._grammars.clear()
    schema = closed(only_here={"type": "boolean"})
    for _ in range(3):
        text_of(answer(http, guided_json=schema))
    assert len(compiled) == 1
    for word in ("a", "b", "c"):
        text_of(answer(http, guided_choice=[word]))
    text_of(answer(http, guided_json=schema))
    assert len(compiled) == 5


def test_a_grammar_that_is_used_again_outlives_newer_ones(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GRAMMARS_KEPT", 2)
    served._grammars.clear()
    first, second, third = (guidance.choice([word]) for word in ("first", "second", "third"))
    kept = served.grammar(first)
    served.grammar(second)
    assert served.grammar(first) is kept
    served.grammar(third)
    assert served.known_grammar(first) is kept
    assert served.known_grammar(second) is None


def test_a_grammar_is_compiled_for_each_key_and_salt(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the time of a request tells what others have asked for."""
    compiled = []
    right = module.GuidanceGrammar
    monkeypatch.setattr(
        module, "GuidanceGrammar", lambda *asked: compiled.append(asked) or right(*asked)
    )
    with (
        serving(served, security=Security(keys=Keys.of("one", "two"))) as (url, _),
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        for key, salt, count in (
            ("one", None, 1),
            ("one", None, 1),
            ("two", None, 2),
            ("two", "s", 3),
            ("two", "s", 3),
            ("one", None, 3),
        ):
            asked = CHAT | {"guided_choice": ["of one key"], "cache_salt": salt}
            response = http.post(
                "/v1/chat/completions", json=asked, headers={"Authorization": f"Bearer {key}"}
            )
            assert response.status_code == 200, response.text
            assert len(compiled) == count, (key, salt)


def test_requests_of_known_grammars_do_not_wait_for_compilers(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do others, however many wait."""
    text_of(answer(http, guided_choice=["known"]))
    begun, go_on, right = threading.Event(), threading.Event(), module.GuidanceGrammar

    def slow(*asked: Any) -> Any:
        begun.set()
        assert go_on.wait(100)
        return right(*asked)

    monkeypatch.setattr(module, "GuidanceGrammar", slow)
    with ThreadPoolExecutor(40) as clients:
        try:
            waiting = [
                clients.submit(
                    http.post, "/v1/chat/completions", json=CHAT | {"guided_choice": [f"slow {i}"]}
                )
                for i in range(40)
            ]
            assert begun.wait(60)
            assert text_of(answer(http, guided_choice=["known"])) == "known"
            assert answer(http, max_tokens=1)["choices"]
            assert not any(one.done() for one in waiting)
        finally:
            go_on.set()
    assert {one.result().status_code for one in waiting} <= {200, 429, 503}


def test_one_clients_grammars_leave_compilers_for_anothers(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, right = threading.Event(), threading.Event(), module.GuidanceGrammar

    def slow(tokenizer: Any, definition: str) -> Any:
        if "slow" in definition:
            begun.set()
            assert go_on.wait(100)
        return right(tokenizer, definition)

    monkeypatch.setattr(module, "GuidanceGrammar", slow)
    with (
        serving(served, security=Security(keys=Keys.of("one", "another", "third"))) as (url, _),
        httpx.Client(base_url=url, timeout=100) as clients,
        ThreadPoolExecutor(8) as threads,
    ):

        def ask(key: str, text: str, timeout: float | None = None) -> int:
            body = CHAT | {"guided_choice": [text], "timeout": timeout}
            headers = {"Authorization": f"Bearer {key}"}
            return clients.post("/v1/chat/completions", json=body, headers=headers).status_code

        try:
            waiting = [threads.submit(ask, "one", f"slow {i}") for i in range(6)]
            assert begun.wait(60)
            time.sleep(0.3)  # all of them wait by now
            assert threads.submit(ask, "another", "quick").result(30) == 200
            assert not any(one.done() for one in waiting)
            # nor do those that it gives up, while their threads compile on
            late = [ask("third", f"slow and late {i}", 0.3) for i in range(4)]
            assert late == [408] * 4
            assert threads.submit(ask, "another", "as quick").result(30) == 200
        finally:
            go_on.set()
        assert [one.result() for one in waiting] == [200] * 6


def test_a_grammar_whose_masks_take_too_long_ends_its_request(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks are made while all others wait."""
    monkeypatch.setattr(masks, "FREE_SECONDS", 0.0)
    monkeypatch.setattr(masks, "TOKEN_SECONDS", 0.0)
    response = http.post("/v1/completions", json=PLAIN | {"guided_json": PERSON})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_grammar")
    assert answer(http, "/v1/completions", max_tokens=3)["usage"]["completion_tokens"] == 3


def test_vllms_own_class_may_be_sent_with_all_its_fields() -> None:
    every = dict.fromkeys(
        ("json", "regex", "grammar", "json_object", "whitespace_pattern", "structural_tag")
    ) | {
        "choice": ["a"],
        "disable_fallback": False,
        "disable_any_whitespace": False,
        "disable_additional_properties": False,
    }
    assert StructuredOutputs.model_validate(every).asked == ["choice"]
    with pytest.raises(ValueError, match="structural_tag"):
        StructuredOutputs.model_validate(every | {"structural_tag": "{}"})
