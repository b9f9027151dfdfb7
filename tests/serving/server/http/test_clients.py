"""Clients that people already have, unchanged: curl, EleutherAI's lm-eval, and schemathesis with
the server's own document.

OpenAI's package is what test_server_api.py asks with.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from draftwell.serving.server.http.keys import Keys
from draftwell.serving.server.http.security import Security
from tests.support.server.served_pair import (
    MAX_CONTEXT,
    roomy_pair,
    served_pair,
    serving,
    tiny_module,
    tiny_tokenizer,
)

MODULES = {"schemathesis": "schemathesis", "lm_eval": "lm-eval"}


def needs(module: str) -> None:
    """Skip, with the reason, where a tool of the extra `dev` is missing."""
    pytest.importorskip(
        module,
        reason=f"{MODULES[module]} is not installed (make setup)",
        exc_type=ImportError,
    )


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Any]]:
    with serving(served_pair("vanilla_sd", slots=3, num_speculative_tokens=4)) as running:
        yield running


@pytest.fixture(scope="module")
def roomy() -> Iterator[tuple[str, Any]]:
    """In a short context most of what is made from the document is too long, and nothing but its
    length is looked at."""
    with serving(roomy_pair()) as running:
        yield running


def run(
    *command: str, folder: Path, seconds: int = 300, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def curl(url: str, *options: str) -> str:
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    done = subprocess.run(
        ["curl", "-sS", "--max-time", "60", *options, url],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_curl(server: tuple[str, Any]) -> None:
    url, _ = server
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Say hé!"}],
        "max_tokens": 8,
        "temperature": 0,
    }
    options = ["-H", "Content-Type: application/json", "-d"]
    answer = json.loads(curl(f"{url}/v1/chat/completions", *options, json.dumps(body)))
    streamed = curl(
        f"{url}/v1/chat/completions", "-N", *options, json.dumps(body | {"stream": True})
    )
    events = [line.removeprefix("data: ") for line in streamed.splitlines() if line]
    assert events.pop() == "[DONE]"
    text = "".join(
        c["delta"].get("content") or "" for event in events for c in json.loads(event)["choices"]
    )
    assert text == answer["choices"][0]["message"]["content"] != ""


def test_curl_without_a_content_type_is_told_which(server: tuple[str, Any]) -> None:
    told = json.loads(
        curl(f"{server[0]}/v1/completions", "-d", '{"model": "tiny", "prompt": "hi"}')
    )
    assert "Content-Type: application/json" in told["error"]["message"]


def test_curl_with_a_key() -> None:
    with serving(served_pair("autoregressive", slots=1), security=Security(keys=Keys.of("k"))) as (
        url,
        _,
    ):
        assert json.loads(curl(f"{url}/v1/models"))["error"]["code"] == "invalid_api_key"
        assert (
            json.loads(curl(f"{url}/v1/models", "-H", "Authorization: Bearer k"))["data"][0]["id"]
            == "tiny"
        )
        assert json.loads(curl(f"{url}/v1/models", "-u", "me:k"))["data"][0]["id"] == "tiny"


CHOICES = [
    {"question": "the cat in the", "options": [" hat", " then"], "gold": 0},
    {"question": "on and", "options": [" on", " ther"], "gold": 0},
    {"question": "in the end", "options": [" er", " an", " the"], "gold": 1},
]
TASKS = {
    "tiny_choice.yaml": """
task: tiny_choice
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{options}}"
doc_to_target: gold
target_delimiter: ""
metric_list: [{metric: acc}]
""",
    "tiny_writing.yaml": """
task: tiny_writing
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: gold
generation_kwargs: {until: ["zzz", "qqq"], max_gen_toks: 12}
process_results: !function measures.length
metric_list: [{metric: length, aggregation: mean, higher_is_better: true}]
""",
    "measures.py": "def length(doc, results):\n    return {'length': len(results[0])}\n",
    "questions.jsonl": "\n".join(map(json.dumps, CHOICES)),
}


@pytest.mark.slow
def test_lm_eval_runs_unchanged(server: tuple[str, Any], tmp_path: Path) -> None:
    """Log-likelihoods of options are the target's, and written texts those that the server gives to
    anybody."""
    needs("lm_eval")
    url, _ = server
    for name, text in TASKS.items():
        (tmp_path / name).write_text(text)
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    arguments = (
        f"model=tiny,base_url={url}/v1/completions,tokenizer_backend=huggingface,tokenizer={tmp_path / 'tokenizer'},"  # noqa: E501
        f"max_length={MAX_CONTEXT},num_concurrent=2,max_retries=1"
    )
    done = run(
        sys.executable,
        "-m",
        "lm_eval",
        "--model",
        "local-completions",
        "--model_args",
        arguments,
        "--tasks",
        "tiny_choice,tiny_writing",
        "--include_path",
        str(tmp_path),
        "--output_path",
        str(tmp_path / "out"),
        "--log_samples",
        "--batch_size",
        "2",
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]

    model, greedy = tiny_module(len(tokenizer), tokenizer.eos_token_id), []
    for sample in samples(tmp_path, "tiny_choice"):
        question, options = sample["doc"]["question"], sample["doc"]["options"]
        for option, [[told, is_greedy]] in zip(options, sample["resps"], strict=True):
            logprob, likeliest = likelihood(model, tokenizer, question, option)
            assert float(told) == pytest.approx(logprob, abs=2e-3)
            assert str(is_greedy) == str(likeliest)
            greedy.append(likeliest)
    assert len(greedy) == 7
    with httpx.Client(base_url=url, timeout=60) as http:
        for sample in samples(tmp_path, "tiny_writing"):
            body = {
                "model": "tiny",
                "prompt": sample["doc"]["question"],
                "max_tokens": 12,
                "temperature": 0,
            }
            assert sample["resps"] == [
                [http.post("/v1/completions", json=body).json()["choices"][0]["text"]]
            ]


def samples(folder: Path, task: str) -> list[dict[str, Any]]:
    (file,) = (folder / "out").rglob(f"samples_{task}_*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def likelihood(model: Any, tokenizer: Any, context: str, option: str) -> tuple[float, bool]:
    """Log-prob of an option behind a context, and whether it is the likeliest text, by transformers
    alone."""
    whole, known = tokenizer(context + option)["input_ids"], len(tokenizer(context)["input_ids"])
    with torch.no_grad():
        rows = model(torch.tensor([whole])).logits[0].float().log_softmax(-1)[known - 1 : -1]
    own = rows.gather(1, torch.tensor(whole[known:])[:, None])[:, 0]
    return float(own.sum()), bool((rows.argmax(-1) == torch.tensor(whole[known:])).all())


@pytest.mark.slow
@pytest.mark.parametrize("names_the_model", [False, True])
def test_schemathesis_finds_nothing(
    roomy: tuple[str, Any], tmp_path: Path, names_the_model: bool
) -> None:
    """Over a thousand requests made from the OpenAPI document; in the second run with the right
    model, so that they get through.

    All of its checks count but one: that whatever fits the document is taken. A document cannot say
    that a user's message needs content, or that a context has an end.
    """
    needs("schemathesis")
    url, scheduler = roomy
    document = httpx.get(f"{url}/openapi.json").json()
    if names_the_model:
        for schema in (
            "ChatRequest",
            "CompletionRequest",
            "ResponsesRequest",
            "MessagesRequest",
            "CountRequest",
        ):
            document["components"]["schemas"][schema]["properties"]["model"] = {"const": "tiny"}
        for schema in ("TokenizeText", "TokenizeMessages", "DetokenizeRequest"):  # these need none
            document["components"]["schemas"][schema]["properties"]["model"] = {
                "enum": ["tiny", None]
            }
    (tmp_path / "openapi.json").write_text(json.dumps(document))
    # and large bodies
    refusals = json.dumps([400, 401, 403, 404, 405, 406, 408, 409, 413, 415, 422, 428, 429, "5xx"])
    (tmp_path / "schemathesis.toml").write_text(
        f"[checks]\nnegative_data_rejection.expected-statuses = {refusals}\n"
    )
    done = run(
        sys.executable,
        "-c",
        "from schemathesis.cli import schemathesis; schemathesis()",
        "run",
        "openapi.json",
        "--url",
        url,
        "--exclude-checks",
        "positive_data_acceptance",
        "--max-examples",
        "40",
        "--seed",
        "1",
        "--no-color",
        "--request-timeout",
        "60",
        "--generation-database",
        "none",
        folder=tmp_path,
        seconds=600,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " 0 generated" not in done.stdout
    assert scheduler.running + scheduler.waiting == 0
