"""A bundle in a program: what `draftwell.load` gives answers as the server does, and as
transformers."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import draftwell
from draftwell.serving.artifacts.decoding_config import SampledChoice
from draftwell.serving.runtime.commands import Role
from tests.support.errors import raises_code
from tests.support.server.bundles import load_bundle, make_bundle
from tests.support.server.served_pair import serving

PROMPTS = ("the man in the inn", "ten men", "on the other hand")
CHAT = [{"role": "user", "content": "an onion is in there"}]
PARAMETERS = {"num_speculative_tokens": 4}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, tiny_models: dict[Role, Path]) -> Path:
    folder = tmp_path_factory.mktemp("library") / "bundle"
    return make_bundle(folder, tiny_models, "vanilla_sd", PARAMETERS)


@pytest.fixture(scope="module")
def model(bundle: Path) -> Iterator[draftwell.LoadedBundle]:
    with draftwell.load(bundle, slots=2) as loaded:
        yield loaded


def test_greedy_answers_are_those_of_the_server(
    bundle: Path, model: draftwell.LoadedBundle
) -> None:
    """Of plain text and of a conversation, whole and as a stream."""
    greedy: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 40}
    with serving(load_bundle(bundle)) as (url, _), httpx.Client(base_url=url) as client:
        plain = [
            client.post("/v1/completions", json={**greedy, "prompt": text}).json()
            for text in PROMPTS
        ]
        chat = client.post("/v1/chat/completions", json={**greedy, "messages": CHAT}).json()
    for text, answer in zip(PROMPTS, plain, strict=True):
        ours = model.generate(text, max_tokens=40)
        assert ours.text == answer["choices"][0]["text"]
        assert ours.finish_reason == answer["choices"][0]["finish_reason"]
        assert len(ours.tokens) == answer["usage"]["completion_tokens"]
        assert "".join(model.stream(text, max_tokens=40)) == ours.text
    said = model.generate(CHAT, max_tokens=40)
    assert said.text == chat["choices"][0]["message"]["content"]
    parts = [{**CHAT[0], "content": [{"type": "text", "text": CHAT[0]["content"]}]}]
    assert model.generate(parts, max_tokens=40).tokens == said.tokens
    assert said.text != model.generate(CHAT[0]["content"], max_tokens=40).text, "no template"


def test_greedy_answers_are_those_of_transformers(
    tiny_models: dict[Role, Path], model: draftwell.LoadedBundle
) -> None:
    folder = tiny_models["target"]
    target: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny_models["target"])
    for text in PROMPTS:
        ids = tokenizer(text, return_tensors="pt")
        expected = target.generate(**ids, do_sample=False, max_new_tokens=40)
        answer = model.generate(text, max_tokens=40)
        assert list(answer.tokens) == expected[0, ids["input_ids"].shape[1] :].tolist()
        assert answer.strategy == "vanilla_sd"
        assert answer.acceptance is not None
        assert 0 < answer.acceptance <= 1


def test_a_string_is_a_users_message_where_the_pair_is_for_chat(
    tmp_path: Path, tiny_models: dict[Role, Path], model: draftwell.LoadedBundle
) -> None:
    bundle = make_bundle(tmp_path / "chat", tiny_models, "vanilla_sd", PARAMETERS, chat=True)
    with draftwell.load(bundle) as loaded:
        said = loaded.generate(CHAT[0]["content"], max_tokens=24)
    assert said.text == model.generate(CHAT, max_tokens=24).text


def test_a_seed_gives_the_same_answer_again(model: draftwell.LoadedBundle) -> None:
    def sampled(seed: int | None) -> tuple[int, ...]:
        return model.generate("ten men", max_tokens=24, temperature=0.9, seed=seed).tokens

    assert sampled(3) == sampled(3)
    assert sampled(3) != sampled(4)
    assert len({sampled(None) for _ in range(3)}) == 3


def test_sampled_requests_get_the_strategy_that_was_tuned_for_them(
    tmp_path: Path, tiny_models: dict[Role, Path]
) -> None:
    sampled = SampledChoice(1.0, "prompt_lookup", {})
    bundle = make_bundle(tmp_path / "both", tiny_models, "vanilla_sd", PARAMETERS, sampled=sampled)
    with draftwell.load(bundle) as loaded:
        answers = {t: loaded.generate("ten men", max_tokens=8, temperature=t) for t in (0.0, 1.0)}
        seeded = loaded.generate("ten men", max_tokens=8, temperature=1.0, seed=1)
    assert [one.strategy for one in answers.values()] == ["vanilla_sd", "prompt_lookup"]
    assert seeded.strategy == "prompt_lookup", "whose answer is plain decoding's with that seed"


def test_an_answer_ends_at_a_stop_string(model: draftwell.LoadedBundle) -> None:
    whole = model.generate("ten men", max_tokens=40).text
    stop = whole[6:8]
    cut = model.generate("ten men", max_tokens=40, stop=stop)
    assert cut.text == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"
    assert "".join(model.stream("ten men", max_tokens=40, stop=[stop])) == cut.text


def test_without_a_limit_an_answer_fills_the_context(model: draftwell.LoadedBundle) -> None:
    answer, prompt = model.generate("one on one"), model._opened()[0].encode("one on one")
    assert answer.finish_reason == "length"
    assert len(prompt) + len(answer.tokens) == model.max_context


def test_threads_ask_at_once(model: draftwell.LoadedBundle) -> None:
    alone = [model.generate(text, max_tokens=24).tokens for text in PROMPTS]
    with ThreadPoolExecutor(6) as pool:
        together = list(
            pool.map(lambda text: model.generate(text, max_tokens=24).tokens, [*PROMPTS * 3])
        )
    assert together == alone * 3


def test_a_stream_that_is_left_frees_its_slot(model: draftwell.LoadedBundle) -> None:
    for _ in range(5):  # more than there are slots
        for piece in model.stream("the man in the inn"):
            assert piece
            break
    assert model.generate("ten men", max_tokens=4).tokens


@pytest.mark.parametrize(
    ("code", "prompt", "settings"),
    [
        ("empty_prompt", " ", {}),
        ("empty_prompt", [], {}),
        ("bad_messages", [{"text": "hello"}], {}),
        ("context_too_long", "the " * 400, {}),
        ("context_too_long", "the", {"max_tokens": 4000}),
        ("invalid_request", "the", {"max_tokens": 0}),
        ("invalid_request", "the", {"temperature": -1.0}),
        ("empty_stop", "the", {"stop": [""]}),
        ("invalid_request", "the", {"stop": 5}),
        ("invalid_request", "the", {"temperature": "x"}),
        ("invalid_request", "the", {"seed": -1}),
        ("bad_messages", ["the"], {}),
        ("bad_messages", [{"role": "user", "content": None}], {}),
        ("bad_messages", [{"role": "user", "content": [{"type": "image_url"}]}], {}),
        (
            "messages_refused",
            [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}],
            {},
        ),
    ],
)
def test_what_cannot_be_answered_is_one_line(
    model: draftwell.LoadedBundle, code: str, prompt: Any, settings: dict[str, Any]
) -> None:
    with raises_code(code):
        model.generate(prompt, **settings)
    with raises_code(code):
        list(model.stream(prompt, **settings))


def test_a_closed_bundle_answers_no_more_and_frees_its_models(bundle: Path) -> None:
    with draftwell.load(bundle) as loaded:
        models = weakref.ref(loaded._opened()[0].pair)
        begun = loaded.stream("the man in the inn")
        next(begun)
        ended = threading.Thread(target=loaded.close)
        ended.start()
        with raises_code("bundle_closed"):
            list(begun)
        ended.join(20)
    loaded.close()
    with raises_code("bundle_closed", "load it again"):
        loaded.generate("ten men")
    del begun
    gc.collect()
    assert models() is None


def test_one_that_is_forgotten_ends_its_thread(bundle: Path) -> None:
    def threads() -> int:
        return sum(one.name == "draftwell-scheduler" for one in threading.enumerate())

    before, loaded = threads(), draftwell.load(bundle)
    assert threads() == before + 1
    del loaded
    gc.collect()
    until = time.monotonic() + 20
    while threads() > before and time.monotonic() < until:
        time.sleep(0.02)
    assert threads() == before


def test_a_bundle_is_checked_as_the_server_checks_it(
    tmp_path: Path, tiny_models: dict[Role, Path]
) -> None:
    bundle = make_bundle(tmp_path / "bundle", tiny_models, "vanilla_sd", PARAMETERS)
    with raises_code("unsigned_bundle"):
        draftwell.load(bundle, signature_key=tmp_path / "key.pub")
    config = bundle / "artifacts" / "decoding_config" / "config.json"
    config.write_text(config.read_text().replace("4", "5"))
    with raises_code("changed_file", "decoding_config"):
        draftwell.load(bundle)
    with raises_code("no_bundle"):
        draftwell.load(tmp_path / "nowhere")
    with raises_code("invalid_option"):
        draftwell.load(bundle, slots=0)
