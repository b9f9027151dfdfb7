"""What slots hold of earlier requests, over HTTP: who gets it, what it is reported as, and how it
is turned off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from draftwell.serving.errors import DraftwellError
from draftwell.serving.server.http.keys import Keys
from draftwell.serving.server.http.security import Security
from draftwell.serving.server.settings import ServerSettings
from tests.support.models.whole_text import tokens_read
from tests.support.server.served_pair import served_pair, serving
from tests.support.server.server_process import wait_until

PROMPT = "The cat sat on the mat, and the rest of the story is as long"


@contextmanager
def server(
    slots: int = 3, strategy: str = "vanilla_sd", keys: tuple[str, ...] = (), **changes: Any
) -> Iterator[tuple[httpx.Client, Any]]:
    """A client, and the tokens that each model reads."""
    served = replace(served_pair(strategy, slots=slots), **changes)
    read = tokens_read(served.pair.models)
    with (
        serving(served, security=Security(keys=Keys.of(*keys))) as (url, _),
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        yield http, read


def complete(
    http: httpx.Client, prompt: Any = PROMPT, key: str | None = None, **change: Any
) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0} | change
    answer = http.post(
        "/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"} if key else {}
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


def cached(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_second_turn_reads_what_is_new_and_says_so() -> None:
    with server(strategy="autoregressive") as (http, read):
        ask = {
            "model": "tiny",
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": 8,
            "temperature": 0,
        }
        first = http.post("/v1/chat/completions", json=ask).json()
        assert cached(first) == 0
        assert sum(read["target"]) == first["usage"]["prompt_tokens"] + 7
        said = first["choices"][0]["message"]["content"]
        read["target"].clear()
        ask["messages"] += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": "And then?"},
        ]
        second = http.post("/v1/chat/completions", json=ask).json()
        assert cached(second) >= first["usage"]["prompt_tokens"] - 1
        assert sum(read["target"]) == second["usage"]["prompt_tokens"] - cached(second) + 7
        queried = first["usage"]["prompt_tokens"] + second["usage"]["prompt_tokens"]
        # A client has its answer before the request is counted.
        for counter, value in (("hits", cached(second)), ("queries", queried)):
            line = f'vllm:prefix_cache_{counter}_total{{model_name="tiny"}} {value}.0'
            wait_until(lambda line=line: line in http.get("/metrics").text, line)
    with server(strategy="autoregressive", prompt_sharing="off") as (http, _):
        fresh = http.post("/v1/chat/completions", json=ask).json()
        assert cached(fresh) == 0
        assert (
            'vllm:prefix_cache_queries_total{model_name="tiny"} 0.0' in http.get("/metrics").text
        ), "nothing is looked for"
        assert fresh["choices"][0]["message"] == second["choices"][0]["message"]


def test_a_response_reports_it_too() -> None:
    with server() as (http, _):
        ask = {"model": "tiny", "input": PROMPT, "max_output_tokens": 8, "temperature": 0}
        usages = [http.post("/v1/responses", json=ask).json()["usage"] for _ in range(2)]
    assert [usage["input_tokens_details"]["cached_tokens"] for usage in usages] == [
        0,
        usages[0]["input_tokens"] - 1,
    ]


@pytest.mark.parametrize("sharing", ["tenant", "request"])
@pytest.mark.parametrize("slots", [8, 2])
def test_eight_answers_compute_their_prompt_once(slots: int, sharing: str) -> None:
    """Also where six of them wait for slots; texts are those of requests that share nothing, each
    with its own seed."""
    asked: dict[str, Any] = {"n": 8, "temperature": 1, "seed": 3}
    with server(slots, "autoregressive", prompt_sharing=sharing) as (http, read):
        answer = complete(http, **asked)
        length = answer["usage"]["prompt_tokens"]
        assert [count for count in read["target"] if count > 1] == [length]
        assert sum(read["target"]) == length + 7 + answer["usage"]["completion_tokens"] - 8, (
            "and the last token for each of the others"
        )
        assert cached(answer) == 0, "one of them has read it"
    with server(8, "autoregressive", prompt_sharing="off") as (http, read):
        alone = complete(http, **asked)
        assert [count for count in read["target"] if count > 1] == [length] * 8
    assert answer["choices"] == alone["choices"]


def test_prompts_with_several_answers_count_what_none_of_them_has_read() -> None:
    with server(4) as (http, _):
        first = complete(http, [PROMPT, PROMPT[::-1]], n=2)
        again = complete(http, [PROMPT, PROMPT[::-1]], n=2)
    assert (cached(first), cached(again)) == (0, again["usage"]["prompt_tokens"] - 2)


def test_a_key_never_gets_what_another_has_left() -> None:
    with server(2, keys=("first-key", "other-key")) as (http, read):
        assert cached(complete(http, key="first-key")) == 0
        read["target"].clear()
        other = complete(http, key="other-key")
        assert cached(other) == 0
        assert max(read["target"]) == other["usage"]["prompt_tokens"]
        assert cached(complete(http, key="first-key")) == other["usage"]["prompt_tokens"] - 1


def test_a_salt_separates_requests_of_one_key() -> None:
    with server() as (http, _):
        found = [cached(complete(http, cache_salt=salt)) for salt in ("a", "b", "a", None)]
    assert [count > 0 for count in found] == [False, False, True, False]


@pytest.mark.parametrize("sharing", ["request", "off"])
def test_it_can_be_turned_off(sharing: str) -> None:
    with server(prompt_sharing=sharing) as (http, _):
        assert [cached(complete(http)) for _ in range(3)] == [0, 0, 0]


def test_ratings_of_a_prompt_need_it_read_again() -> None:
    with server() as (http, _):
        rated = {"echo": True, "logprobs": 1, "max_tokens": 2}
        fresh = complete(http, "Once more: " + PROMPT, **rated)
        complete(http)
        found = complete(http, **rated)
        assert cached(found) == 0
        assert len(found["choices"][0]["logprobs"]["tokens"]) == found["usage"]["prompt_tokens"] + 2
        again = complete(http, "Once more: " + PROMPT, **rated)
    assert again["choices"] == fresh["choices"]


def test_the_setting_and_its_default(tmp_path: Any) -> None:
    assert ServerSettings(bundle=tmp_path).prompt_sharing == "tenant"
    assert ServerSettings(bundle=tmp_path, deterministic=True).prompt_sharing == "off"
    assert (
        ServerSettings(bundle=tmp_path, deterministic=True, prefix_caching="request").prompt_sharing
        == "request"
    )
    with pytest.raises(DraftwellError, match="--prefix-caching all"):
        ServerSettings.from_options(bundle=tmp_path, prefix_caching="all")
