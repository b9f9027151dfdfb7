"""The default pair as the slow tests share it: loaded once, in float32, with eight slots."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from draftwell.components.gate.baseline_counts import fixed_resources
from draftwell.components.prompts.prompt import demo_prompts
from draftwell.serving.artifacts.datastore import Datastore
from draftwell.serving.artifacts.eagle3_head import Eagle3Head
from draftwell.serving.device import usable_cores
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import (
    STRATEGIES,
    Strategy,
    StrategyResources,
    build_strategy,
)
from tests.support.models.resources import NEEDED, random_head, random_medusa_heads
from tests.support.paths import REPO

LOSSLESS = [name for name, strategy in STRATEGIES.items() if strategy.lossless]
SHIPPED = REPO / "registry" / "pairs" / "smollm2_135m" / "artifacts" / "bfloat16"
WHOLE = os.environ.get("DRAFTWELL_WHOLE") == "1"
"""Proofs at full length, for an hour or more; CI runs the same tests over fewer and shorter texts,
configs and samples."""
PROMPTS, TOKENS = (20, 64) if WHOLE else (8, 48)


@contextmanager
def two_threads() -> Iterator[None]:
    """For a real model, unlike the tiny ones of other tests. One where tests run side by side: two
    teams on a core hinder each other."""
    before = torch.get_num_threads()
    beside = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(before, min(2, usable_cores() // beside)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


@functools.cache
def default_pair() -> LoadedPair:
    from draftwell.registry.pairs import fetch, find_pair
    from draftwell.serving.runtime.pair import LoadSettings, load_pair

    return load_pair(
        fetch(find_pair("default")),
        LoadSettings(dtype="float32", slots=8, max_context=512),
        keep_modules=True,
    )


def resources_of(pair: LoadedPair) -> StrategyResources:
    """Artifacts that are the same on every machine, the shipped EAGLE-3 head, and random ones:
    losslessness asks nothing of them."""
    width = pair.modules["draft"].config.get_text_config().hidden_size
    resources = fixed_resources(pair)
    head = Eagle3Head.load(SHIPPED / "eagle3_head").bound_to(pair.name, pair.fingerprint)
    datastore = Datastore.from_texts(
        [pair.encode_prompt(prompt.prompt) for prompt in demo_prompts(PROMPTS)]
    )
    made = {
        "acceptance_head": random_head(width),
        "eagle3_head": head,
        "datastore": datastore,
        "medusa_heads": random_medusa_heads(pair.modules["target"].config.hidden_size, tokens=64),
    }
    return replace(resources, artifacts={**made, **resources.artifacts})


def strategy_of(pair: LoadedPair, name: str) -> Strategy:
    """A strategy as it comes, with what has no default."""
    return build_strategy(name, NEEDED.get(name, {}), resources_of(pair))


@functools.cache
def generated() -> list[tuple[str, list[int], list[int]]]:
    """(id, prompt, greedy tokens of transformers) of each prompt, from the same weights with
    transformers' own attention and cache."""
    pair = default_pair()
    module: Any = pair.modules["target"]
    ours = module.config._attn_implementation
    module.set_attn_implementation("sdpa")
    rows = []
    for prompt in demo_prompts(PROMPTS):
        ids = torch.tensor([pair.encode_prompt(prompt.prompt)])
        with torch.inference_mode():
            out = module.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False
            )[0]
        rows.append((prompt.id, ids[0].tolist(), out[ids.shape[1] :].tolist()))
    module.set_attn_implementation(ours)
    return rows
