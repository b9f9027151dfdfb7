"""The default pair in float32: every lossless strategy gives transformers' own greedy tokens."""

import pytest

from components.counting import fixed_kit
from components.evaluation import bench
from components.prompts import demo_prompts
from serving.runtime.strategies import STRATEGIES

LOSSLESS = [(name, {}) for name, strategy in STRATEGIES.items() if strategy.lossless and name != "autoregressive"]


@pytest.mark.slow
def test_lossless_strategies_equal_transformers_generate_on_20_prompts_of_64_tokens():
    from registry.pairs import fetch, find_pair
    from serving.runtime.pair import load_pair

    pair = load_pair(fetch(find_pair("default")), dtype="float32", max_context=1024)
    prompts = demo_prompts(20)
    report = bench(pair, LOSSLESS, prompts, fixed_kit(pair), max_tokens=64, peers=["transformers"], warmup=False)
    entries = {**report["strategies"], "transformers": report["peers"]["transformers"]["autoregressive"]}
    for name, entry in entries.items():
        unexplained = [d for d in entry["differences"] if not d["near_tie"]]
        assert not unexplained, (name, unexplained)
        assert entry["near_ties"] <= 1, (name, entry["differences"])  # rare, and each is listed
