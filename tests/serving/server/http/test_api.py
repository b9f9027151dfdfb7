"""The server as its users see it: OpenAI's own client against a running server."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from draftwell.serving.runtime.strategies import StrategyResources
from draftwell.serving.server.http.rendering import sse
from draftwell.serving.server.model.served_model import ServedModel
from tests.support.models.resources import table_resources
from tests.support.server.served_pair import MAX_CONTEXT, served_pair, serving
from tests.support.server.server_process import wait_until

PROMPTS = ["hello there", "The cat", "1 2 3", "on and on"]
USER = [{"role": "user", "content": "Say hé!"}]


@pytest.fixture(scope="module")
def served() -> ServedModel:
    return served_pair("vanilla_sd", slots=3, num_speculative_tokens=4)


@pytest.fixture(scope="module")
def server(served: ServedModel) -> Iterator[SimpleNamespace]:
    with (
        serving(served) as (url, scheduler),
        httpx.Client(base_url=url, timeout=60) as http,
        openai.OpenAI(
            base_url=f"{url}/v1",
            api_key="none",
            max_retries=0,
            timeout=60,
            http_client=httpx.Client(),
        ) as client,
    ):
        yield SimpleNamespace(url=url, scheduler=scheduler, http=http, client=client)


def expected(
    served: ServedModel, ids: list[int], max_tokens: int, **sampling: Any
) -> tuple[str, int]:
    """Text and token count of the engine alone; a character that the budget cuts in half is not
    shown."""
    job = served.pair.engine().generate(
        ids, served.pair.sampling(max_tokens=max_tokens, **sampling), served.strategy
    )
    return served.decode(job.output).rstrip("\ufffd"), len(job.output)


@pytest.fixture(scope="module")
def greedy(served: ServedModel) -> dict[str, tuple[str, int]]:
    """prompt → the engine's own greedy text of 24 tokens, run on a pair of its own."""
    return {
        prompt: expected(served_pair("autoregressive", slots=1), served.encode(prompt), 24)
        for prompt in PROMPTS
    }


def complete(
    server: SimpleNamespace, prompt: Any = "hello there", max_tokens: int = 24, **more: Any
) -> Any:
    return server.client.completions.create(
        model="tiny", prompt=prompt, max_tokens=max_tokens, **{"temperature": 0, **more}
    )


def chat(server: SimpleNamespace, messages: Any = USER, max_tokens: int = 16, **more: Any) -> Any:
    return server.client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=max_tokens, **{"temperature": 0, **more}
    )


def counters(answer: Any) -> dict[str, Any]:
    """What speculation brought, without the times."""
    return {
        name: value
        for name, value in answer.model_extra["speculation"].items()
        if "second" not in name
    }


def wait_until_idle(server: SimpleNamespace) -> None:
    wait_until(
        lambda: server.scheduler.running + server.scheduler.waiting == 0, "all slots are free"
    )


def test_models_are_listed(server: SimpleNamespace) -> None:
    assert [model.id for model in server.client.models.list()] == ["tiny"]
    assert server.client.models.retrieve("tiny").object == "model"


def test_greedy_completion_equals_the_engine_alone(
    server: SimpleNamespace, greedy: dict[str, tuple[str, int]]
) -> None:
    answer = complete(server)
    text, tokens = greedy["hello there"]
    assert answer.choices[0].text == text
    assert answer.usage.completion_tokens == tokens
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")


def test_usage_and_speculation_add_up(server: SimpleNamespace, served: ServedModel) -> None:
    answer = complete(server)
    usage, details = answer.usage, answer.usage.completion_tokens_details
    speculation = answer.model_extra["speculation"]
    assert usage.prompt_tokens == len(served.encode("hello there"))
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert (
        details.accepted_prediction_tokens + details.rejected_prediction_tokens
        == speculation["drafted"]
    )
    assert details.accepted_prediction_tokens == speculation["accepted"] > 0
    assert speculation["strategy"] == "vanilla_sd"
    assert 0 < speculation["acceptance_rate"] < 1
    # each token came from the prompt's forward, from a draft, or from a target call
    assert usage.completion_tokens == 1 + speculation["accepted"] + speculation["target_calls"]


def test_chat_goes_through_the_template(server: SimpleNamespace, served: ServedModel) -> None:
    answer = chat(server)
    assert (
        answer.choices[0].message.content
        == expected(served_pair("autoregressive"), served.encode_chat(USER), 16)[0]
    )
    assert answer.choices[0].message.role == "assistant"
    parts = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Say "}, {"type": "text", "text": "hé!"}],
        }
    ]
    assert chat(server, parts).choices[0].message.content == answer.choices[0].message.content
    assert (
        chat(server, max_tokens=openai.NOT_GIVEN, max_completion_tokens=16).choices[0]
        == answer.choices[0]
    )


def test_an_answer_can_be_sent_back_as_history(server: SimpleNamespace) -> None:
    message = chat(server).choices[0].message
    again = chat(server, [*USER, message, {"role": "user", "content": "and?", "name": "me"}])
    assert again.usage.prompt_tokens > 16


def test_streamed_chat_concatenates_to_the_whole(server: SimpleNamespace) -> None:
    whole = chat(server, max_tokens=40)
    chunks = list(chat(server, max_tokens=40, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert sum(1 for chunk in chunks if chunk.choices and chunk.choices[0].delta.content) > 3, (
        "it comes in pieces"
    )
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][
        -1
    ] == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert counters(chunks[-2]) == counters(whole)
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_streamed_completion_is_plain_server_sent_events(
    server: SimpleNamespace, greedy: dict[str, tuple[str, int]]
) -> None:
    body = {"model": "tiny", "prompt": "1 2 3", "max_tokens": 24, "temperature": 0, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == greedy["1 2 3"][0]
    assert all("usage" not in chunk for chunk in chunks)


def test_an_event_is_one_line_for_every_reader() -> None:
    """httpx splits lines as Python does, at U+2028 and U+0085 too; text of the model may hold any
    of them."""
    said = {"text": "a\u2028b\u2029c\u0085d\x0be\x1cf\r\ng 你好 🙂 \ud83d"}
    event = sse(said)
    lines = event.splitlines()
    assert lines == [event.removesuffix("\n\n"), ""]
    assert json.loads(lines[0].removeprefix("data: ")) == said
    assert event.encode().isascii(), "half a character is no reason to break off"


def test_concurrent_requests_give_what_each_gives_alone(
    server: SimpleNamespace, greedy: dict[str, tuple[str, int]]
) -> None:
    prompts = PROMPTS * 2  # more than there are slots
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: complete(server, prompt), prompts))
    assert [answer.choices[0].text for answer in answers] == [
        greedy[prompt][0] for prompt in prompts
    ]


def test_a_strategy_that_learns_from_all_requests_stays_lossless(
    greedy: dict[str, tuple[str, int]],
) -> None:
    resources = table_resources()
    served = served_pair(
        "spide", slots=2, resources=StrategyResources(resources.artifacts), tau=0.5, max_draft=8
    )
    with (
        serving(served) as (url, _),
        httpx.Client(base_url=url, timeout=60) as http,
        ThreadPoolExecutor(4) as pool,
    ):

        def ask(prompt: str) -> Any:
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0}
            return http.post("/v1/completions", json=body).json()["choices"][0]["text"]

        assert list(pool.map(ask, PROMPTS)) == [greedy[prompt][0] for prompt in PROMPTS]
    assert sum(resources.artifacts["acceptance_table"].total) > 0


def test_stop_strings_across_tokens(
    server: SimpleNamespace, greedy: dict[str, tuple[str, int]]
) -> None:
    text = greedy["The cat"][0]
    for start in (3, 8, 13):
        stop = text[start : start + 3]
        whole = complete(server, "The cat", stop=stop)
        assert whole.choices[0].text == text[: text.index(stop)]
        assert whole.choices[0].finish_reason == "stop"
        shown = [
            chunk.choices[0].text
            for chunk in complete(server, "The cat", stop=[stop, "never"], stream=True)
        ]
        assert "".join(shown) == whole.choices[0].text
        details = whole.usage.completion_tokens_details
        assert details.accepted_prediction_tokens < whole.usage.completion_tokens < 24


def test_the_end_token_is_counted_but_not_shown(
    server: SimpleNamespace, served: ServedModel
) -> None:
    text, tokens = expected(served_pair("autoregressive"), served.encode("zzz"), 60)
    assert tokens < 60, "this prompt is here because its answer ends by itself"
    answer = complete(server, "zzz", max_tokens=60)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text, "stop")
    assert answer.usage.completion_tokens == tokens


def test_a_seed_repeats_the_answer(server: SimpleNamespace) -> None:
    first, again, other = (
        complete(server, temperature=1, seed=seed).choices[0].text for seed in (7, 7, 8)
    )
    assert first == again != other
    unseeded = {
        complete(server, max_tokens=12, temperature=openai.NOT_GIVEN).choices[0].text
        for _ in range(2)
    }
    assert len(unseeded) == 2, "temperature is 1 and the seed random by default"
    assert (
        complete(server, temperature=1, top_p=0).choices[0].text == complete(server).choices[0].text
    )


def test_without_a_budget_a_chat_fills_the_context_and_a_completion_takes_16_tokens(
    server: SimpleNamespace, served: ServedModel
) -> None:
    long = [{"role": "user", "content": "x" * 215}]
    answer = chat(server, long, max_tokens=openai.NOT_GIVEN)
    assert answer.usage.completion_tokens <= MAX_CONTEXT - len(served.encode_chat(long))
    assert answer.choices[0].finish_reason == "stop" or answer.usage.total_tokens == MAX_CONTEXT
    assert complete(server, max_tokens=openai.NOT_GIVEN).usage.completion_tokens == 16


def test_clients_that_go_away_free_their_slots(
    server: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two streams in slots and two that wait, and a plain request: none of them runs to its end."""
    engine, jobs = server.scheduler.engine, []
    submit, step = engine.submit, engine.step
    monkeypatch.setattr(
        engine, "submit", lambda *request: jobs.append(submit(*request)) or jobs[-1]
    )
    # 200 tokens take ten seconds at least
    monkeypatch.setattr(engine, "step", lambda: (time.sleep(0.05), step()))
    host, port = server.url.removeprefix("http://").split(":")
    with ExitStack() as connections:
        for number in range(5):
            body = json.dumps(
                {
                    "model": "tiny",
                    "prompt": "hello",
                    "max_tokens": 200,
                    "temperature": 0,
                    "stream": number > 0,
                }
            )
            connection = connections.enter_context(socket.create_connection((host, int(port))))
            connection.sendall(
                f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
            )
            if number == 1:
                assert connection.recv(1000), "this one has begun to answer"
    wait_until_idle(server)
    assert jobs
    assert [job.session.text.finish_reason for job in jobs] == [None] * len(jobs)
    assert complete(server, max_tokens=2).usage.completion_tokens == 2


def test_health_tells_the_state(server: SimpleNamespace) -> None:
    wait_until_idle(server)
    state = server.http.get("/health").json()
    assert state == {
        "status": "ok",
        "model": "tiny",
        "version": None,
        "strategy": "vanilla_sd",
        "tuned": {"greedy": "vanilla_sd", "sampled": "vanilla_sd"},
        "draft_length_by_batch": {},
        "slots": 3,
        "running": 0,
        "waiting": 0,
        "switches": 0,
        "last_switch_error": None,
    }
    ready = server.http.get("/ready")
    assert (ready.status_code, ready.json()) == (200, {"ready": True})
