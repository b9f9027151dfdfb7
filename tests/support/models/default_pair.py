"""The default pair as the slow tests share it: loaded once, in float32, with eight slots."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from components.gate.baseline_counts import fixed_resources
from components.prompts.prompt import demo_prompts
from serving.device import usable_cores
from serving.runtime.pair import LoadedPair
from serving.runtime.strategies import STRATEGIES, Strategy, StrategyResources, build_strategy
from tests.support.models.kits import NEEDED, random_head

LOSSLESS = [name for name, strategy in STRATEGIES.items() if strategy.lossless]
WHOLE = os.environ.get("DRAFTWELL_WHOLE") == "1"
"""Proofs at full length, for an hour or more; CI runs the same tests over fewer and shorter texts, configs and samples."""
PROMPTS, TOKENS = (20, 64) if WHOLE else (8, 48)


@contextmanager
def two_threads() -> Iterator[None]:
    """For a real model, unlike the tiny ones of other tests. One where tests run side by side: two teams on a core hinder each other."""
    before = torch.get_num_threads()
    beside = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(before, min(2, usable_cores() // beside)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


@functools.cache
def default_pair() -> LoadedPair:
    from registry.pairs import fetch, find_pair
    from serving.runtime.pair import load_pair

    return load_pair(fetch(find_pair("default")), dtype="float32", slots=8, max_context=512, keep_modules=True)


def kit_of(pair: LoadedPair) -> StrategyResources:
    """The artifacts that are the same on every machine, and a random acceptance head: losslessness asks nothing of it."""
    width = pair.modules["draft"].config.get_text_config().hidden_size
    kit = fixed_resources(pair)
    return replace(kit, artifacts={"acceptance_head": random_head(width), **kit.artifacts})


def strategy_of(pair: LoadedPair, name: str) -> Strategy:
    """A strategy as it comes, with what has no default."""
    return build_strategy(name, NEEDED.get(name, {}), kit_of(pair))


@functools.cache
def generated() -> list[tuple[str, list[int], list[int]]]:
    """(id, prompt, greedy tokens of transformers) of each prompt, from the same weights with transformers' own attention and cache."""
    pair = default_pair()
    module: Any = pair.modules["target"]
    ours = module.config._attn_implementation
    module.set_attn_implementation("sdpa")
    rows = []
    for prompt in demo_prompts(PROMPTS):
        ids = torch.tensor([pair.encode_prompt(prompt.prompt)])
        with torch.inference_mode():
            out = module.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False)[0]
        rows.append((prompt.id, ids[0].tolist(), out[ids.shape[1] :].tolist()))
    module.set_attn_implementation(ours)
    return rows
