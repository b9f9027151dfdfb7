"""The default pair in float32: every lossless strategy gives the tokens of transformers' own greedy
`generate`, alone and in a batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from draftwell.components.bench.target_agreement import difference
from draftwell.serving.runtime.pair import LoadedPair
from tests.support.models.default_pair import (
    LOSSLESS,
    PROMPTS,
    TOKENS,
    WHOLE,
    default_pair,
    generated,
    strategy_of,
    two_threads,
)

LONG = {"autoregressive", "vanilla_sd", "prompt_lookup", "spide"}
"""Strategies that decode all of the reference; the others a part of it."""
PART_PROMPTS, PART_TOKENS = (6, 48) if WHOLE else (4, 32)
BATCH, BATCH_TOKENS = 8, 24 if WHOLE else 16


@pytest.fixture(scope="module")
def pair() -> Iterator[LoadedPair]:
    with two_threads():
        yield default_pair()


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSLESS)
def test_tokens_equal_those_of_transformers_generate(pair, name):
    count, length = (PROMPTS, TOKENS) if name in LONG else (PART_PROMPTS, PART_TOKENS)
    strategy = strategy_of(pair, name)
    differences = []
    for prompt_id, ids, tokens in generated()[:count]:
        output = pair.engine().generate(ids, pair.sampling(max_tokens=length), strategy).output
        if found := difference(pair, prompt_id, ids, output, tokens[:length], exact=False):
            differences.append(found)
    print(
        f"{name}: {count - len(differences)} of {count} outputs identical; differences: "
        f"{differences}"
    )
    assert all(d.near_tie for d in differences), differences
    assert len(differences) <= 1, "near-ties are rare"


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSLESS)
def test_eight_at_once_give_what_each_gives_alone(pair, name):
    prompts = generated()[:BATCH]
    sampling = pair.sampling(max_tokens=BATCH_TOKENS)
    engine = pair.engine()
    jobs = [engine.submit(ids, sampling, strategy_of(pair, name)) for _, ids, _ in prompts]
    engine.run(jobs)
    differences = []
    for (prompt_id, ids, _), job in zip(prompts, jobs, strict=True):
        alone = pair.engine().generate(ids, sampling, strategy_of(pair, name)).output
        if found := difference(pair, prompt_id, ids, job.output, alone, exact=pair.exact):
            differences.append(found)
    print(
        f"{name}: {BATCH - len(differences)} of {BATCH} outputs identical in a batch; "
        f"differences: {differences}"
    )
    assert all(d.near_tie for d in differences), differences
    assert len(differences) <= 1, "near-ties are rare"
