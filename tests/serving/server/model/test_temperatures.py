"""A server decodes greedy and sampled requests with what was tuned for each."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from draftwell.serving.artifacts.decoding_config import DecodingConfig, SampledChoice
from draftwell.serving.device import device_class
from draftwell.serving.runtime.commands import Role
from draftwell.serving.runtime.strategies import PLAIN, StrategyChoice, served_choice
from draftwell.serving.server.model.strategy_pool import EVERYBODY
from tests.support.models.resources import ORIGIN
from tests.support.server.bundles import load_bundle, make_bundle
from tests.support.server.pools import decode, pool
from tests.support.server.served_pair import serving

SAMPLED = SampledChoice(0.7, "vanilla_sd", {"num_speculative_tokens": 2})


@pytest.mark.parametrize(
    ("greedy", "sampled", "chosen"),
    [
        ("svip", SAMPLED, StrategyChoice("vanilla_sd", {"num_speculative_tokens": 2})),
        ("svip", None, PLAIN),  # lossless, but nobody measured that it is no slower there
        ("csd", None, PLAIN),  # nobody measured its quality on sampled texts
        ("csd", SAMPLED, StrategyChoice("vanilla_sd", {"num_speculative_tokens": 2})),
    ],
)
def test_sampled_requests_get_their_own_choice_or_a_safe_one(
    greedy: str, sampled: SampledChoice | None, chosen: StrategyChoice
) -> None:
    config = DecodingConfig(greedy, {}, {}, ORIGIN, sampled)
    assert served_choice(config, 0) == StrategyChoice(greedy)
    assert served_choice(config, 0.2) == served_choice(config, 1.0) == chosen


@pytest.mark.parametrize(
    ("as_greedy", "used"), [(True, "prompt_lookup"), (False, "autoregressive")]
)
def test_the_greedy_choice_serves_sampled_requests_only_where_the_gate_measured_it(
    tmp_path: Path, tiny_models: dict[Role, Path], as_greedy: bool, used: str
) -> None:
    bundle = make_bundle(
        tmp_path / "bundle",
        tiny_models,
        "prompt_lookup",
        machine=device_class("cpu"),
        as_greedy=as_greedy,
    )
    pool = load_bundle(bundle, slots=1, max_context=64).strategies
    assert (pool.get(temperature=0.0).name, pool.get(temperature=1.0).name) == (
        "prompt_lookup",
        used,
    )


@pytest.mark.parametrize("strategy", ["svip", "vanilla_sd"])
def test_tuned_choices_bring_their_draft_lengths_by_batch(strategy: str) -> None:
    tables = {1: 4, 2: 3}, {1: 8, 4: 0}
    sampled = SampledChoice(0.7, strategy, {}, {}, tables[1])
    it = pool("vanilla_sd", sampled=sampled, draft_length_by_batch=tables[0])
    found = [it.get(temperature=temperature) for temperature in (0.0, 0.7)]
    assert [strategy.draft_length_by_batch for strategy in found] == list(tables)
    assert it.get("hf_dynamic").draft_length_by_batch == {}, "nobody tuned it"
    greedy = DecodingConfig("svip", {}, {}, ORIGIN, None, tables[0]).with_greedy_for_sampled()
    assert served_choice(greedy, 0.7).draft_length_by_batch == tables[0]


def test_what_was_tuned_for_sampled_requests_is_not_replaced_by_the_greedy_choice() -> None:
    tuned = DecodingConfig("svip", {"max_draft": 3}, {}, ORIGIN, SAMPLED)
    assert tuned.with_greedy_for_sampled() is tuned
    untuned = DecodingConfig("svip", {"max_draft": 3}, {}, ORIGIN)
    assert served_choice(untuned.with_greedy_for_sampled(), 0.7) == StrategyChoice(
        "svip", {"max_draft": 3}
    )
    assert untuned.sampled is None, "the artifact itself keeps its bytes"


def test_one_strategy_tuned_for_both_classes_has_both_parameters_and_two_states() -> None:
    parameters, own = (
        {"heuristic": True, "max_draft": 3},
        SampledChoice(0.7, "hf_dynamic", {"heuristic": True}),
    )
    it = pool("hf_dynamic", parameters=parameters, sampled=own)
    greedy, sampled = it.get(temperature=0.0), it.get(temperature=0.7)
    assert (greedy.config.max_draft, sampled.config.max_draft) == (3, 20)  # type: ignore[attr-defined]
    assert it.get("hf_dynamic", temperature=1.0) is sampled is it.get(temperature=2.0), (
        "also where a request names it"
    )
    assert it.get("hf_dynamic") is greedy
    decode(sampled)
    [learnt] = it.learnt().values()
    assert (
        learnt.strategies["sampled:hf_dynamic"]
        != learnt.strategies["hf_dynamic"]
        == greedy.learnt()
    ), "each class learns for itself"
    again = pool("hf_dynamic", parameters=parameters, sampled=own)
    again.resume(EVERYBODY, learnt)
    assert again.get(temperature=0.7).learnt() == sampled.learnt() != again.get().learnt()


def test_what_was_tuned_for_one_class_alone_serves_the_other_by_name() -> None:
    it = pool("spide", sampled=SAMPLED)
    assert it.names()[:3] == ("spide", "vanilla_sd", "autoregressive")
    assert it.get("vanilla_sd", temperature=0.0) is it.get(temperature=0.7)
    assert it.get("spide", temperature=0.7) is it.get(temperature=0.0)


def test_a_bundle_serves_both_and_says_so(tmp_path: Path, tiny_models: dict[Role, Path]) -> None:
    bundle = make_bundle(
        tmp_path / "bundle",
        tiny_models,
        "prompt_lookup",
        machine=device_class("cpu"),
        sampled=SAMPLED,
    )
    served = load_bundle(bundle, slots=1, max_context=64)
    tuned = {"greedy": "prompt_lookup", "sampled": "vanilla_sd"}
    with serving(served) as (url, _), httpx.Client(base_url=url, timeout=60) as http:

        def used(**change: Any) -> str:
            body = {
                "model": "tiny",
                "prompt": "hello",
                "max_tokens": 4,
                "speculation": {"stats": True},
                **change,
            }
            answer = http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            return str(answer.json()["speculation"]["strategy"])

        assert (used(temperature=0), used(temperature=0.7), used()) == (
            "prompt_lookup",
            "vanilla_sd",
            "vanilla_sd",
        )
        assert (
            used(temperature=0.7, speculation={"stats": True, "strategy": "prompt_lookup"})
            == "prompt_lookup"
        )
        assert (
            http.get("/health").json()["tuned"]
            == http.get("/v1/speculation").json()["tuned"]
            == tuned
        )


def test_a_table_of_the_other_class_is_named_when_a_bundle_is_loaded(
    tmp_path: Path, tiny_models: dict[Role, Path], caplog: pytest.LogCaptureFixture
) -> None:
    bundle = make_bundle(
        tmp_path / "bundle",
        tiny_models,
        "vanilla_sd",
        machine=device_class("cpu"),
        sampled=SampledChoice(0.7, "spide", {}),
    )
    with caplog.at_level(logging.WARNING, "draftwell.serving.server.model.loading"):
        load_bundle(bundle, slots=1, max_context=64)
    [line] = [
        record.getMessage()
        for record in caplog.records
        if "acceptance_table" in record.getMessage()
    ]
    assert all(word in line for word in ("spide", "greedy"))
