"""Our server as an engine at an address: what it says of a request is what its counters gained."""

from __future__ import annotations

import time

import httpx

from draftwell.components.engines.port import EngineSettings
from draftwell.components.engines.remote.address import parse_address
from draftwell.components.engines.remote.remote import RemoteEngine
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.server.model.served_model import ServedModel


def test_it_decodes_with_and_without_drafts(http: httpx.Client, served: ServedModel) -> None:
    prompts = [served.pair.encode(text) for text in ("hello there", "the inn")]
    sampling = Sampling(max_tokens=24, logprobs=1, stop_token_ids=served.stop_tokens)
    address = parse_address(str(http.base_url))
    engine = RemoteEngine("engine", address)
    plain = RemoteEngine("plain", address, speculate=False)
    try:
        assert engine.start(EngineSettings()).version.startswith("draftwell ")
        plain.start(EngineSettings())
        assert engine.dialect.tokens_of(engine.client, "the inn") == served.pair.encode("the inn")
        before = engine.dialect.counters(engine.client)
        found = engine.decode(prompts, sampling)
        deadline = time.monotonic() + 30
        while True:  # a request is counted after its answer has gone
            gained = engine.dialect.counters(engine.client).since(before)
            if time.monotonic() > deadline or (gained is not None and gained.requests == 2):
                break
        without = plain.decode(prompts, sampling)
    finally:
        engine.stop()
        plain.stop()
    assert gained is not None
    assert gained.new_tokens == found.tokens
    assert gained.rounds == sum(answer.acceptance.rounds for answer in found.answers) > 0
    places = range(len(gained.accepted_at))
    assert list(gained.accepted_at) == [
        sum(
            one.acceptance.accepted_at[i]
            for one in found.answers
            if i < len(one.acceptance.accepted_at)
        )
        for i in places
    ]
    for answer, other in zip(found.answers, without.answers, strict=True):
        assert answer.tokens == other.tokens
        assert other.acceptance.drafted == 0
        assert answer.top_logprobs is not None
        assert [row[0][0] for row in answer.top_logprobs] == answer.tokens
