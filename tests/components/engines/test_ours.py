"""Our engine behind the port: the same tokens as without it, acceptance, log-probabilities, and
what is refused."""

from __future__ import annotations

from draftwell.components.engines.ours import OurEngine
from draftwell.components.engines.port import EngineSettings
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import build_strategy
from tests.support.errors import raises_code
from tests.support.models.tiny import table_pair

PROMPTS = [[5, 9, 3], [7, 7, 11], [4, 12]]


def test_it_decodes_what_the_runtime_does_and_counts_acceptance() -> None:
    pair = table_pair(slots=3)
    sampling = Sampling(max_tokens=12, stop_token_ids=pair.stop_tokens)
    alone = [
        pair.engine().generate(ids, sampling, build_strategy("autoregressive")).output
        for ids in PROMPTS
    ]
    engine = OurEngine("ours", pair)
    assert "float32" in engine.start(EngineSettings(slots=3)).version
    assert [answer.tokens for answer in engine.decode(PROMPTS, sampling).answers] == alone
    engine.start(
        EngineSettings(
            speculation={"strategy": "vanilla_sd", "parameters": {"num_speculative_tokens": 2}},
            slots=3,
        )
    )
    found = engine.decode(PROMPTS, sampling)
    assert [answer.tokens for answer in found.answers] == alone
    for answer in found.answers:
        assert (
            sum(answer.acceptance.accepted_at)
            == answer.acceptance.accepted
            <= answer.acceptance.drafted
        )
        assert answer.seconds <= found.seconds


def test_it_names_the_likeliest_tokens() -> None:
    engine = OurEngine("ours", table_pair())
    engine.start(EngineSettings())
    answer = engine.decode(PROMPTS[:1], Sampling(max_tokens=4, logprobs=2)).answers[0]
    assert answer.top_logprobs is not None
    assert [row[0][0] for row in answer.top_logprobs] == answer.tokens
    assert all(row[1][1] <= row[0][1] <= 0 for row in answer.top_logprobs)


def test_what_it_cannot_run_is_refused() -> None:
    engine = OurEngine("ours", table_pair(slots=2))
    with raises_code("engine_not_started", "ours"):
        engine.decode(PROMPTS, Sampling())
    with raises_code("too_few_slots", "3"):
        engine.start(EngineSettings(slots=3))
    with raises_code("bad_engine_setting", "method"):
        engine.start(EngineSettings(speculation={"method": "ngram"}))
    engine.start(EngineSettings())
    engine.stop()
    with raises_code("engine_not_started", "ours"):
        engine.decode(PROMPTS, Sampling())
