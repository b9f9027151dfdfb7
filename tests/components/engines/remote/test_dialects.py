"""Every dialect: found out by itself, the engine's own tokens, what became of drafts, likeliest
tokens, counters; and what each of them cannot say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftwell.components.engines.port import Acceptance, EngineSettings
from draftwell.components.engines.remote.counters import Counters
from draftwell.components.engines.remote.dialects.collected import Collected
from draftwell.components.engines.remote.dialects.draftwell import DraftwellDialect
from draftwell.components.engines.remote.dialects.sglang import read
from draftwell.components.engines.remote.dialects.vllm import VllmDialect
from draftwell.components.engines.remote.metrics import Names, read_counters
from draftwell.serving.runtime.requests import Sampling
from tests.components.engines.remote.conftest import EngineAt
from tests.support.engines.server import EngineServer, serving
from tests.support.engines.simulated import SimulatedEngine, letters
from tests.support.errors import raises_code
from tests.support.own_plugin import installed, write_distribution

PROMPTS = [[5, 9, 3], [7, 1], [2, 2, 2, 8]]
TOKENS = 24
SPEAKING = ("vllm", "sglang", "llama.cpp", "draftwell")
"""Dialects that say what became of drafts."""


def expected(engine: SimulatedEngine) -> Acceptance:
    """What the simulated engine has counted."""
    return Acceptance(
        rounds=engine.rounds,
        drafted=engine.drafted,
        accepted=engine.accepted,
        accepted_at=tuple(engine.accepted_at),
    )


@pytest.mark.parametrize("speaks", [*SPEAKING, "openai"])
def test_each_is_found_and_says_its_version(speaks: str, engine_at: EngineAt) -> None:
    with serving(EngineServer(SimulatedEngine(version="9.8.7"), speaks)) as url:
        engine = engine_at(f"{url}/v1/")
        about = engine.start(EngineSettings())
        assert engine.dialect.name == speaks
        assert ("9.8.7" in about.version) == (speaks != "openai")
        told = engine.dialect.tokens_of(engine.client, "abc")
        assert told == (None if speaks == "openai" else letters("abc"))


OWN = """
    from draftwell.components.engines.remote.dialects.vllm import VllmDialect


    class OwnDialect(VllmDialect):
        name = "own"


    def recognise(client):
        version = (client.find("/version") or {}).get("version", "")
        return OwnDialect() if version.startswith("own-") else None
    """


def test_an_engine_of_a_plugin_is_asked_first(tmp_path: Path, engine_at: EngineAt) -> None:
    points = {"draftwell.engines": {"own": "own_engine:recognise"}}
    with installed(write_distribution(tmp_path, points, {"own_engine": OWN})):
        for version, name in (("own-1", "own"), ("0.20", "vllm")):
            with serving(EngineServer(SimulatedEngine(version=version), "vllm")) as url:
                engine = engine_at(url)
                assert engine.dialect.name == name
                assert engine.decode(PROMPTS, Sampling(max_tokens=4)).tokens == 12


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("speaks", SPEAKING)
def test_tokens_and_acceptance_of_requests_at_once(
    speaks: str, counted: bool, engine_at: EngineAt
) -> None:
    simulated = SimulatedEngine()
    with serving(EngineServer(simulated, speaks, counted=counted)) as url:
        engine = engine_at(url)
        found = engine.decode(PROMPTS, Sampling(max_tokens=TOKENS, logprobs=2))
        assert [answer.tokens for answer in found.answers] == [
            simulated.text(ids, TOKENS) for ids in PROMPTS
        ]
        total = Acceptance.total(answer.acceptance for answer in found.answers)
        assert total.model_copy(update={"each": ()}) == expected(simulated)
        assert simulated.accepted_at[0] > simulated.accepted_at[2] > 0
        unrated = 0
        for answer in found.answers:
            assert answer.top_logprobs is not None
            for token, row in zip(answer.tokens, answer.top_logprobs, strict=True):
                assert row in ([], [(token, -0.1), (token + 1, -2.5)])
                unrated += not row
            assert 0 < answer.first_token_seconds < answer.seconds <= found.seconds
        assert unrated == (simulated.accepted if speaks == "llama.cpp" else 0)


@pytest.mark.parametrize("speaks", SPEAKING)
def test_others_requests_are_not_taken_for_ours(speaks: str, engine_at: EngineAt) -> None:
    """Where answers say nothing, counters that gained more than these answers say nothing
    either."""
    simulated = SimulatedEngine()
    plays = EngineServer(simulated, speaks, counted=False)
    with serving(plays) as url:
        engine = engine_at(url)
        before = engine.dialect.counters(engine.client)
        first = engine.decode(PROMPTS[:1], Sampling(max_tokens=TOKENS))
        own = first.answers[0].acceptance.accepted_at
        decode = plays.engine.decode

        def with_another(ids: Any, *more: Any, **named: Any) -> Any:
            decode([1, 2, 3, 4], 40)
            return decode(ids, *more, **named)

        simulated.decode = with_another  # type: ignore[method-assign, assignment]
        again = engine.decode(PROMPTS[:1], Sampling(max_tokens=TOKENS))
        gained = engine.dialect.counters(engine.client).since(before)
    assert gained is not None
    assert gained.new_tokens == 2 * TOKENS + 40
    said = again.answers[0].acceptance.accepted_at
    assert said == (own if speaks in ("sglang", "draftwell") else ())


def test_plain_decoding_by_request(engine_at: EngineAt) -> None:
    sampling = Sampling(max_tokens=TOKENS)
    for plays, off in (
        (EngineServer(SimulatedEngine(), "draftwell"), True),
        (EngineServer(SimulatedEngine(), "llama.cpp", lengths_by_request=True), True),
        (EngineServer(SimulatedEngine(), "llama.cpp"), False),
        (EngineServer(SimulatedEngine(), "vllm"), False),
        (EngineServer(SimulatedEngine(), "sglang"), False),
    ):
        with serving(plays) as url:
            assert engine_at(url).dialect.switches_off == off
            if not off:
                with raises_code("engine_always_speculates", "--set plain=", url):
                    engine_at(url, speculate=False)
                continue
            [answer] = engine_at(url, speculate=False).decode(PROMPTS[:1], sampling).answers
            assert (answer.tokens, plays.engine.drafted) == (
                plays.engine.text(PROMPTS[0], TOKENS),
                0,
            )


def test_an_api_without_token_ids_is_one_line(engine_at: EngineAt) -> None:
    with (
        serving(EngineServer(SimulatedEngine(), "openai")) as url,
        raises_code("engine_no_tokens", url),
    ):
        engine_at(url).decode(PROMPTS[:1], Sampling(max_tokens=4))


def test_a_text_that_ends_early(engine_at: EngineAt) -> None:
    for speaks in SPEAKING:
        simulated = SimulatedEngine()
        simulated.stop = simulated.text(PROMPTS[0], 6)[5]
        wanted = simulated.text(PROMPTS[0], TOKENS)
        assert len(wanted) < TOKENS
        sampling = Sampling(max_tokens=TOKENS, stop_token_ids=frozenset({simulated.stop}))
        with serving(EngineServer(simulated, speaks)) as url:
            [answer] = engine_at(url).decode(PROMPTS[:1], sampling).answers
        assert answer.tokens == wanted


@pytest.mark.parametrize("speaks", SPEAKING)
def test_counters(speaks: str, engine_at: EngineAt) -> None:
    simulated = SimulatedEngine(cached=0.5)
    with serving(EngineServer(simulated, speaks)) as url:
        engine = engine_at(url)
        before = engine.dialect.counters(engine.client)
        engine.decode(PROMPTS, Sampling(max_tokens=TOKENS))
        gained = engine.dialect.counters(engine.client).since(before)
        simulated.running = 4
        after = engine.dialect.counters(engine.client)
    assert gained is not None
    assert gained.new_tokens == len(PROMPTS) * TOKENS
    assert (gained.rounds, gained.accepted is not None) == (simulated.rounds, True)
    # SGLang's follows from other counts; here a last token that needs no draft is no verification
    slack = len(PROMPTS) if speaks == "sglang" else 0
    assert 0 <= (gained.accepted or 0) - simulated.accepted <= slack
    assert gained.cached_prompt_tokens == simulated.cached_tokens
    assert gained.requests == (None if speaks == "llama.cpp" else len(PROMPTS))
    assert gained.accepted_at == (() if speaks == "sglang" else tuple(simulated.accepted_at))
    assert gained.decode_seconds == pytest.approx(simulated.decode_seconds)
    assert (after.running, after.waiting) == (4, 0)
    assert after.started == (simulated.start_seconds if speaks in ("vllm", "draftwell") else None)


def test_ids_of_sglang_are_read_once_where_its_count_runs_ahead() -> None:
    sampling = Sampling(max_tokens=8)
    for events in (
        [([1, 2, 3], 3), ([1, 2, 3, 4, 5], 6), ([1, 2, 3, 4, 5, 6], 6)],
        [([1, 2, 3], 3), ([4, 5], 5), ([6], 6)],
        [([1, 2, 3], 3), ([1, 2, 3, 4], 7), ([1, 2, 3, 4, 5, 6], 6)],
    ):
        found = Collected()
        for ids, count in events:
            read(
                {"output_ids": ids, "meta_info": {"completion_tokens": count}}, 1.0, found, sampling
            )
        assert found.tokens[:6] == [1, 2, 3, 4, 5, 6]


def test_prompts_are_counted_when_hits_are() -> None:
    """vLLM counts both when it reads a prompt, ours when a request ends."""
    text = (
        "vllm:prompt_tokens_total 500\nvllm:request_prompt_tokens_sum 200.0\n"
        "vllm:prefix_cache_hits_total 150\n"
    )
    for dialect, tokens in ((VllmDialect, 500), (DraftwellDialect, 200)):
        assert read_counters(text, dialect.names).prompt_tokens == tokens


def test_counters_of_another_model_are_left_out_and_those_behind_an_alias_are_not() -> None:
    names = Names(sums={"new_tokens": ("tokens",)})
    text = 'tokens{model_name="a"} 3\ntokens{model_name="b"} 4\n'
    assert read_counters(text, names, model="a").new_tokens == 3
    assert read_counters(text, names, model="lora").new_tokens == 7


def test_what_follows_from_other_counts_may_fall_alone() -> None:
    """SGLang's accepted tokens do, of counts that are not raised at one moment."""
    before = Counters(at=1.0, rounds=10, new_tokens=40, accepted=20)
    gained = Counters(at=2.0, rounds=12, new_tokens=41, accepted=19).since(before)
    assert gained is not None
    assert (gained.rounds, gained.accepted) == (2, 0)


def test_prompts_are_read_again_and_defaults_undone(engine_at: EngineAt) -> None:
    """Else a prompt that comes twice is faster the second time, and a model's own defaults would
    sample greedy requests with penalties."""
    for speaks in ("vllm", "sglang", "draftwell"):
        plays = EngineServer(SimulatedEngine(), speaks)
        with serving(plays) as url:
            engine = engine_at(url)
            for _ in range(2):
                engine.decode(PROMPTS[:1], Sampling(max_tokens=4))
        (_, first), (_, second) = plays.asked
        salt = "extra_key" if speaks == "sglang" else "cache_salt"
        assert first[salt] != second[salt]
        settings = first.get("sampling_params", first)
        assert (settings["temperature"], settings["repetition_penalty"]) == (0.0, 1.0)
    plays = EngineServer(SimulatedEngine(), "llama.cpp")
    with serving(plays) as url:
        engine_at(url).decode(PROMPTS[:1], Sampling(max_tokens=4))
    assert plays.asked[0][1]["cache_prompt"] is False


def test_a_difference_is_none_after_a_restart() -> None:
    before = Counters(at=1.0, started=5.0, rounds=10, accepted_at=(4, 2), running=3)
    later = before.model_copy(
        update={"at": 2.0, "rounds": 15, "accepted_at": (6, 3, 1), "running": 1}
    )
    gained = later.since(before)
    assert gained is not None
    assert (gained.rounds, gained.accepted_at, gained.running) == (5, (2, 1, 1), 1)
    assert later.model_copy(update={"started": 6.0}).since(before) is None
    assert later.model_copy(update={"version": "2"}).since(before) is None
    assert before.since(later) is None
    unsaid = later.model_copy(update={"rounds": None, "accepted_at": ()}).since(before)
    assert unsaid is not None
    assert (unsaid.rounds, unsaid.accepted_at) == (None, ())
