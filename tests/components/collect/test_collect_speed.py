"""How fast a collection is compared with the target's own batched generation, on the default
pair."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from draftwell.components.collect.continuations import room_for_prompts, write_texts
from draftwell.components.prompts.prompt import demo_prompts
from draftwell.serving.recording.trace_schema import KINDS
from draftwell.serving.runtime.pair import LoadedPair
from tests.support.collecting import collect_traces, small
from tests.support.models.default_pair import two_threads

BATCH, PROMPTS, TOKENS, ROLLOUT = 16, 16, 48, 16


def written_per_second(pair: LoadedPair) -> float:
    """Tokens a second of the target alone: the same prompts, the same batch."""
    sampling = pair.sampling(max_tokens=TOKENS)
    requests = [
        (prompt, replace(sampling, seed=i)) for i, prompt in enumerate(demo_prompts(PROMPTS))
    ]
    started = time.perf_counter()
    texts = write_texts(pair, requests, small(batch=BATCH), room_for_prompts(pair, TOKENS, ROLLOUT))
    return sum(len(text.tokens) for text in texts) / (time.perf_counter() - started)


@pytest.mark.slow
@pytest.mark.timed
def test_a_collection_is_at_least_half_as_fast_as_the_target_writes(tmp_path: Path) -> None:
    """All four kinds, both passes, rollouts and the files, in bfloat16; the target writes before
    and after, and the faster counts."""
    from draftwell.registry.pairs import fetch, find_pair
    from draftwell.serving.runtime.pair import LoadSettings, load_pair

    pair = load_pair(
        fetch(find_pair("default")), LoadSettings(dtype="bfloat16", slots=BATCH, max_context=512)
    )
    with two_threads():
        written_per_second(pair)  # the first forward passes are slower
        before = written_per_second(pair)
        started = time.perf_counter()
        traces = collect_traces(
            pair,
            demo_prompts(PROMPTS),
            tmp_path,
            max_tokens=TOKENS,
            rollout=ROLLOUT,
            prefix_kinds=KINDS,
            batch=BATCH,
        )
        rate = traces.read(["position"]).num_rows / (time.perf_counter() - started)
        alone = max(before, written_per_second(pair))
    print(
        f"collected {rate:.0f} tokens/s, the target alone writes {alone:.0f} tokens/s at a "
        f"batch of {BATCH}: {rate / alone:.2f}"
    )
    assert rate >= 0.5 * alone
