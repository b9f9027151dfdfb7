"""Medusa's heads learn what comes after the next token, from the texts that the target wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftwell.components.prompts.prompt import Prompt
from draftwell.components.train.medusa import (
    UNKNOWN,
    Places,
    labels_of,
    read_target,
    train_medusa_heads,
)
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.medusa_heads import MedusaHeads
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import StrategyResources, build_strategy
from tests.support.collecting import collect_traces
from tests.support.errors import raises_code
from tests.support.models.tiny import llama_pair

ORIGIN = Provenance(pair="tiny", fingerprint="f" * 64, trace_digest="d")
PROMPTS = [Prompt(f"p{i}", None, [f"some words about {i}, and {i * i} more"]) for i in range(24)]
TRAINING = {"epochs": 30, "seed": 1}


@pytest.fixture(scope="module")
def pair() -> LoadedPair:
    return llama_pair()


@pytest.fixture(scope="module")
def trace(pair: LoadedPair, tmp_path_factory: pytest.TempPathFactory) -> TraceSet:
    return collect_traces(
        pair,
        PROMPTS,
        tmp_path_factory.mktemp("trace"),
        max_tokens=24,
        rollout=1,
        prefix_kinds=("target",),
    )


def test_labels_are_the_tokens_after_the_next_one() -> None:
    ahead = torch.tensor([5, 7, 9, 5, *[UNKNOWN] * 3]).unfold(0, 4, 1)
    places = Places(np.array(["p"] * 4), torch.zeros(4, 2), ahead)
    assert labels_of(places, torch.tensor([5, 9])).tolist() == [
        [UNKNOWN, 1, 0],
        [1, 0, UNKNOWN],
        [0, UNKNOWN, UNKNOWN],
        [UNKNOWN] * 3,
    ]


def test_states_are_those_that_predict_the_outputs_tokens(
    pair: LoadedPair, trace: TraceSet
) -> None:
    """And the tokens ahead are those of the same text."""
    target: Any = pair.models["target"]
    places = read_target(pair, 2, trace)
    said = (places.states @ target.head_rows(torch.arange(target.vocab_size)).T).argmax(-1)
    assert said.tolist() == places.ahead[:, 0].tolist()
    for k in (1, 2):
        same = torch.from_numpy(places.prompt[k:] == places.prompt[:-k])
        wanted = torch.where(same, places.ahead[k:, 0], UNKNOWN)
        assert torch.equal(places.ahead[:-k, k], wanted)


@pytest.mark.slow
def test_trained_heads_raise_what_is_accepted(
    pair: LoadedPair, trace: TraceSet, tmp_path: Path
) -> None:
    heads, report = train_medusa_heads(pair, trace, ORIGIN, **TRAINING)
    assert len(report.prompts["train"]) == 19
    assert len(report.prompts["test"]) == 5
    assert not set(report.prompts["train"]) & set(report.prompts["test"])
    assert heads.provenance.metrics["top1_1"] == report.top1[0]
    assert all(one <= three for one, three in zip(report.top1, report.top3, strict=True))
    heads.save(tmp_path / "heads")
    loaded = MedusaHeads.load(tmp_path / "heads", fingerprint="f" * 64)
    assert torch.equal(loaded.weight, heads.weight)
    untrained = MedusaHeads(
        torch.zeros_like(heads.weight), torch.zeros_like(heads.bias), heads.tokens, ORIGIN
    )
    accepted = []
    for used in (loaded, untrained):
        strategy = build_strategy("medusa", {}, StrategyResources({"medusa_heads": used}))
        ids = [pair.encode_prompt(prompt.turns[0]) for prompt in PROMPTS]
        jobs = [
            Engine(pair.models).generate(prompt, Sampling(max_tokens=20), strategy)
            for prompt in ids
        ]
        plain = [
            Engine(pair.models).generate(
                prompt, Sampling(max_tokens=20), build_strategy("autoregressive")
            )
            for prompt in ids
        ]
        assert [job.output for job in jobs] == [job.output for job in plain]
        accepted.append(sum(job.session.stats.accepted for job in jobs))
    assert accepted[0] > 1.2 * accepted[1]
    again, _ = train_medusa_heads(pair, trace, ORIGIN, **TRAINING)
    assert torch.equal(again.weight, heads.weight), "a seed gives the same heads"


def test_a_test_trace_shares_no_prompt_with_the_training(
    pair: LoadedPair, trace: TraceSet, tmp_path: Path
) -> None:
    other = collect_traces(
        pair,
        [Prompt("new", None, ["something else"]), Prompt("known", None, PROMPTS[3].turns)],
        tmp_path / "t",
        max_tokens=24,
        rollout=1,
        prefix_kinds=("target",),
    )
    _, report = train_medusa_heads(pair, trace, ORIGIN, test=other, epochs=1)
    assert (report.prompts["test"], report.left_out) == (["new"], ["known"])
    assert report.prompts["train"] == sorted(prompt.id for prompt in PROMPTS)
    with raises_code("test_prompts_known", "other prompts"):
        train_medusa_heads(pair, trace, ORIGIN, test=trace)
    few = collect_traces(pair, PROMPTS[:2], tmp_path / "few", max_tokens=4, rollout=1)
    with raises_code("too_few_prompts", "at least 3"):
        train_medusa_heads(pair, few, ORIGIN)
