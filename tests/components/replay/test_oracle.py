"""Hybrid's oracle: the cheapest of all ways through a text, and no way of hybrid's is cheaper."""

from __future__ import annotations

import re
from itertools import product

import numpy as np
import pytest

from draftwell.components.prompts.prompt import Prompt
from draftwell.components.replay import oracle as oracle_module
from draftwell.components.replay.oracle import (
    TEXT,
    Hearing,
    OracleShare,
    agreement_with,
    main,
    oracle_shares,
    oracle_time,
)
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.runtime.drafting.expected_gain import RoundCosts
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.requests import Sampling
from tests.support.models.resources import ORIGIN, decode, table_pair, table_resources
from tests.support.models.tiny import llama_pair
from tests.support.server.bundles import make_bundle, save_tiny_models

PROFILE = HardwareProfile(0.1, {1: 1.0, 4: 1.2, 9: 1.6}, 0.0, ORIGIN, t_head=0.05)


def every_way(
    kept: dict[str, list[int]], costs: dict[str, RoundCosts], longest: int, place: int = 0
) -> float:
    """The least of all ways, one after the other."""
    if place >= len(kept[TEXT]):
        return 0.0
    return min(
        costs[name].verify[length + 1]
        + length * costs[name].step
        + every_way(kept, costs, longest, place + length + 1)
        for name in kept
        for length in range(min(kept[name][place], longest) + 1)
    )


@pytest.mark.parametrize("seed", range(4))
def test_the_oracle_is_the_best_of_all_ways(seed):
    drawn = np.random.default_rng(seed)
    kept = {name: drawn.integers(0, 4, 9).tolist() for name in (TEXT, "head", "draft")}
    verify = [1.0, *np.sort(1 + drawn.random(5)).tolist()]
    steps = (0.0, 0.2, 0.4)
    costs = {name: RoundCosts(verify, step) for name, step in zip(kept, steps, strict=True)}
    assert oracle_time(kept, costs, 3) == pytest.approx(every_way(kept, costs, 3))
    assert oracle_time({TEXT: [0] * 9}, costs, 3) == pytest.approx(9 * verify[1])


def test_a_draft_that_reaches_beyond_the_text_counts_up_to_its_end():
    assert agreement_with([[5, 6, 7], [9], [7]], [4, 5, 6, 7]) == [3, 0, 1]
    assert agreement_with([[5], [6, 8]], [4, 5, 6]) == [1, 1]


@pytest.mark.parametrize("drafter", ["auto", "head", "draft", "none"])
def test_what_is_heard_is_what_each_drafter_would_propose_at_every_place(drafter):
    """Drafts of the draft model at a place, by an engine that decodes the text up to there."""
    models, resources = table_pair(8, noise=0.7), table_resources(8, hardware_profile=PROFILE)
    hearing = Hearing(Hearing.Config(drafter=drafter, max_draft=3), resources)
    job = Engine(models).generate([1, 2], Sampling(max_tokens=20), hearing)
    assert job.output == decode(models, [1, 2], "autoregressive", max_tokens=20).output
    assert all(len(heard) == 19 for heard in hearing.heard.values())
    if "draft" in hearing.heard:
        draft = {"target": models["draft"], "draft": models["draft"]}
        for place in (0, 7, 15):
            ids = [1, 2, *job.output[: place + 1]]
            own = decode(draft, ids, "autoregressive", max_tokens=3).output
            assert hearing.heard["draft"][place] == own


def test_a_bundles_share_is_printed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(oracle_module, "demo_prompts", lambda count: [Prompt("a", None, ["sum"])])
    monkeypatch.setattr(oracle_module, "TOKENS", 8)
    bundle = make_bundle(tmp_path / "bundle", save_tiny_models(tmp_path), "hybrid")
    main([str(bundle)])
    hybrid, best, share = map(float, re.findall(r"[0-9]+\.[0-9]+", capsys.readouterr().out))
    assert share == pytest.approx(hybrid / best, abs=0.02)
    assert 0 < share <= 1.1
    assert best >= 1


@pytest.mark.parametrize(("noise", "longest"), list(product((0.3, 1.0), (2, 5))))
def test_hybrid_is_never_faster_than_its_oracle(noise, longest):
    pair, resources = llama_pair(), table_resources(8, hardware_profile=PROFILE)
    pair.models.update(table_pair(8, noise=noise))
    prompts = [[1, 2], [3, 1, 3], [2, 2, 5, 1]]
    chains = {"max_draft": longest, "alternatives": 0}
    found = oracle_shares(pair, resources, prompts, 40, chains)
    assert sum(one.plain for one in found) > 60
    assert all(0 < one.oracle <= one.hybrid + 1e-9 for one in found)
    total = sum(found, OracleShare(0, 0, 0))
    assert 0.3 < total.share < 1.0
    assert total.oracle < 0.9 * total.plain, "something is drafted, or the bound shows nothing"
