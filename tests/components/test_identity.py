"""The default pair in float32: every lossless strategy gives the tokens of transformers' own greedy `generate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from components.counting import fixed_kit
from components.prompts import demo_prompts
from components.quality import difference
from serving.runtime.device import usable_cores
from serving.runtime.strategies import STRATEGIES, build_strategy

LOSSLESS = [name for name, strategy in STRATEGIES.items() if strategy.lossless]
PROMPTS, TOKENS = 20, 64


@pytest.fixture(scope="module")
def pair() -> Any:
    from registry.pairs import fetch, find_pair
    from serving.runtime.pair import load_pair

    before = torch.get_num_threads()
    torch.set_num_threads(max(before, min(2, usable_cores())))  # a real model, unlike the other tests'
    yield load_pair(fetch(find_pair("default")), dtype="float32", max_context=1024)
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def expected(pair: Any) -> list[tuple[str, list[int], list[int]]]:
    """(id, prompt, greedy tokens of transformers) of 20 prompts, from the same weights with transformers' own attention and cache."""
    module, ours = pair.modules["target"], pair.modules["target"].config._attn_implementation
    module.set_attn_implementation("sdpa")
    rows = []
    for prompt in demo_prompts(PROMPTS):
        ids = torch.tensor([pair.encode_prompt(prompt.prompt)])
        with torch.inference_mode():
            out = module.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False)[0]
        rows.append((prompt.id, ids[0].tolist(), out[ids.shape[1] :].tolist()))
    module.set_attn_implementation(ours)
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSLESS)
def test_20_prompts_of_64_tokens_equal_transformers_generate(pair, expected, name):
    strategy = build_strategy(name, {}, fixed_kit(pair))
    differences = []
    for prompt_id, ids, tokens in expected:
        output = pair.engine().generate(ids, pair.sampling(max_tokens=TOKENS), strategy).output
        if found := difference(pair, prompt_id, ids, output, tokens):
            differences.append(found)
    print(f"{name}: {PROMPTS - len(differences)} of {PROMPTS} outputs identical; differences: {differences}")
    assert all(d.near_tie for d in differences), differences
    assert len(differences) <= 1, "near-ties are rare"
