"""Sampled texts replay exactly in law: proved by enumeration on tables, then on average against
real runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from draftwell.components.prompts.prompt import Prompt
from draftwell.components.replay.replay import replay_strategy
from draftwell.components.replay.sampled import SampledTexts, read_sampled, settled
from draftwell.components.replay.texts import Texts, read_texts
from draftwell.components.replay.trace_model import TracedText
from draftwell.components.tune.search.space import REPLAYED
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.recording.trace_schema import TraceError
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.sampling import residual, warp
from draftwell.serving.runtime.session.stats import Stats
from draftwell.serving.runtime.strategies import StrategyResources, build_strategy
from tests.support.collecting import collect_traces
from tests.support.errors import raises_code
from tests.support.expected_replay import replay_expected
from tests.support.models import tiny
from tests.support.models.enumeration import Oracle, law_of, run_once
from tests.support.models.resources import table_pair, table_resources
from tests.support.models.table_model import TableModel

PROMPT, EOS = [1, 2], 0
COUNTED = ("target_calls", "draft_calls", "drafted", "judged", "accepted", "sampled")
STRATEGIES: list[tuple[str, dict[str, Any]]] = [
    ("vanilla_sd", {"num_speculative_tokens": 2}),
    ("svip", {"threshold": 0.35}),
    ("draft_verify", {}),
    ("draft_verify", {"threshold": 0.3}),
    ("adaedl", {"threshold": 0.55, "max_draft": 6}),
    ("hf_dynamic", {"threshold": 0.4}),
    ("spide", {"tau": 0.4, "parallel": False}),
    ("spide", {"tau": 0.4}),
    ("spide", {"tau": 0.4, "overlap_tau": 0.5}),
    ("pearl", {"num_speculative_tokens": 2}),
    ("pearl", {"num_speculative_tokens": 1}),
    ("prompt_lookup", {}),
]

Law = dict[Hashable, float]
First = Callable[[Tensor, Tensor], Tensor]
"""(p, q) → what a rejected token is drawn from."""


def rejected_of(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """norm(max(0, q − p)), what a token follows that the exact rule rejects."""
    return residual(draft_probs, target_probs)


def drafted_of(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """The naive mistake: any token that the draft draws."""
    return draft_probs


def outcome(output: list[int], stats: Stats) -> Hashable:
    return (tuple(output), *(getattr(stats, name) for name in COUNTED))


def traced_text(
    models: dict[str, TableModel], sampling: Sampling, oracle: Any, first: First
) -> tuple[TracedText, list[bool], list[float]]:
    """What a collection at temperature > 0 records of one text, and the lots: every decision by the
    oracle."""
    target, draft = models["target"], models["draft"]
    ids, tokens, confidence, entropy, raw, mine, lots = list(PROMPT), [], [], [], [], [], []
    while len(tokens) < sampling.max_tokens and ids[-1] != EOS:
        p, q = warp(target.next_logits(ids), sampling), warp(draft.next_logits(ids), sampling)
        token = oracle.draw(p)
        kept = min(1.0, float(q[token]) / float(p[token]))
        lots.append(oracle.decide([kept, 1.0 - kept]) == 0)
        rollout, rows = [], []
        # where the lot is for the text, nothing else counts
        while len(rollout) < (1 if lots[-1] else sampling.max_tokens - len(tokens)):
            logits = draft.next_logits(ids + rollout)
            rows.append(logits.softmax(-1))
            rollout.append(
                token
                if lots[-1]
                else oracle.draw(warp(logits, sampling) if rollout else first(p, q))
            )
        tokens.append(rollout)
        confidence.append([float(row.max()) for row in rows])
        entropy.append([float(-(row * row.log()).sum()) for row in rows])
        raw.append([float(row[t]) for row, t in zip(rows, rollout, strict=True)])
        mine.append(float(draft.next_logits(ids).softmax(-1)[token]))
        ids.append(token)
    return TracedText("text", ids, len(PROMPT), tokens, confidence, entropy, raw), lots, mine


def laws(
    name: str, parameters: dict[str, Any], sampling: Sampling, first: First = rejected_of
) -> tuple[Law, Law]:
    """The laws of text and counters of a real run and of its replay."""
    models, resources = table_pair(vocab=3, seed=3), table_resources(vocab=3)
    profile = resources.artifacts["hardware_profile"]
    assert isinstance(profile, HardwareProfile)

    def real(oracle: Oracle) -> Hashable:
        job = run_once(
            build_strategy(name, parameters, resources), models, PROMPT, sampling, oracle
        )
        return outcome(job.output, job.session.stats)

    def replayed(oracle: Oracle) -> Hashable:
        text, lots, mine = traced_text(models, sampling, oracle, first)
        texts = Texts(
            [settled(text, lots, mine)],
            sampling.max_tokens,
            sampling.stop_token_ids,
            3,
            sampling.temperature,
        )
        return outcome(
            text.output, replay_strategy(texts, name, parameters, resources, profile).stats
        )

    return law_of(real), law_of(replayed)


def distance(one: Law, other: Law) -> float:
    """Total variation distance."""
    return (
        sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in one.keys() | other.keys()) / 2
    )


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize(("name", "parameters"), STRATEGIES)
def test_replay_has_the_law_of_a_real_run(
    name: str, parameters: dict[str, Any], temperature: float
) -> None:
    sampling = Sampling(
        max_tokens=3, temperature=temperature, top_k=2, stop_token_ids=frozenset({EOS})
    )
    real, replayed = laws(name, parameters, sampling)
    assert sum(real.values()) == pytest.approx(1.0)
    assert len(real) > 5
    assert distance(real, replayed) < 1e-5


@pytest.mark.parametrize(("name", "parameters"), STRATEGIES)
def test_replay_has_the_law_of_a_real_run_without_top_k(
    name: str, parameters: dict[str, Any]
) -> None:
    real, replayed = laws(
        name, parameters, Sampling(max_tokens=3, temperature=1.0, stop_token_ids=frozenset({EOS}))
    )
    assert distance(real, replayed) < 1e-5


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("vanilla_sd", {"num_speculative_tokens": 2}),
        ("spide", {"tau": 0.4}),
        ("pearl", {"num_speculative_tokens": 2}),
    ],
)
def test_rollouts_of_any_drafted_token_are_seen(name: str, parameters: dict[str, Any]) -> None:
    """A collection that starts them from q instead of the residual writes the text's own token into
    some of them."""
    sampling = Sampling(max_tokens=3, temperature=1.0, top_k=2, stop_token_ids=frozenset({EOS}))
    assert distance(*laws(name, parameters, sampling, drafted_of)) > 0.01


def sampled_texts(count: int) -> SampledTexts:
    """Many texts of two tokens whose first token the draft gives the same, the second half the
    target's probability."""
    text = TracedText(
        "t",
        [5, 6, 7],
        1,
        [[8, 8], [9, 9]],
        [[0.5, 0.5], [0.5, 0.5]],
        [[0.0, 0.0]] * 2,
        [[0.2, 0.2], [0.3, 0.3]],
    )
    return SampledTexts(
        Texts([text] * count, 2, frozenset(), 2, 0.7),
        [np.array([1.0, 0.5])] * count,
        [[0.6, 0.7]] * count,
    )


def test_lots_follow_the_ratio_and_the_seed() -> None:
    texts = sampled_texts(1000)
    drawn = texts.draw(0)
    assert drawn == texts.draw(0)
    assert drawn != texts.draw(1)
    assert all(
        text.tokens[0] == [6] and text.raw is not None and text.raw[0] == [0.6]
        for text in drawn.texts
    )
    second = [text.tokens[1] for text in drawn.texts]
    assert {tuple(tokens) for tokens in second} == {(7,), (9, 9)}
    assert second.count([7]) == pytest.approx(500, abs=3 * math.sqrt(250))
    assert all(
        (text.raw or [])[1] == ([0.7] if text.tokens[1] == [7] else [0.3, 0.3])
        for text in drawn.texts
    )


def test_a_trace_at_temperature_0_is_refused(tmp_path: Path) -> None:
    pair = tiny.table_pair()
    greedy = collect_traces(
        pair, [Prompt("a", None, ["hello"])], tmp_path / "g", max_tokens=4, rollout=2
    )
    with raises_code("greedy_trace", "temperature 0", error=TraceError):
        read_sampled(greedy)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("vanilla_sd", {"num_speculative_tokens": 4}),
        ("svip", {"threshold": 0.55}),
        ("spide", {"tau": 0.3, "parallel": False}),
        ("spide", {"tau": 0.3}),
        ("pearl", {"num_speculative_tokens": 3}),
    ],
)
def test_collected_texts_replay_to_the_means_of_real_runs(
    tmp_path: Path, name: str, parameters: dict[str, Any], temperature: float
) -> None:
    """400 texts, collected and replayed once each, beside 400 real runs of the same prompt with
    other seeds."""
    runs, length = 400, 16
    pair = tiny.table_pair()
    prompts = [Prompt(f"p{i}", None, ["hello world"]) for i in range(runs)]
    resources = StrategyResources(table_resources(ratio=3.0).artifacts, deterministic=True)
    profile = resources.artifacts["hardware_profile"]
    assert isinstance(profile, HardwareProfile)
    texts = read_sampled(
        collect_traces(
            pair,
            prompts,
            tmp_path,
            max_tokens=length,
            rollout=length,
            temperature=temperature,
            hidden=False,
        )
    )
    told = [
        one.stats
        for one in replay_expected(texts, name, parameters, resources, profile, seeds=[0])
        .runs[0]
        .per_prompt
    ]
    sampling = pair.sampling(max_tokens=length, temperature=temperature)
    real = [
        pair.engine()
        .generate(
            pair.encode_prompt("hello world"),
            replace(sampling, seed=10_000 + i),
            build_strategy(name, parameters, resources),
        )
        .session.stats
        for i in range(runs)
    ]
    for counter in ("target_calls", "accepted", "draft_calls"):
        a, b = (
            np.array([getattr(stats, counter) for stats in part], dtype=float)
            for part in (told, real)
        )
        error = math.sqrt((a.var(ddof=1) + b.var(ddof=1)) / runs)
        assert abs(a.mean() - b.mean()) <= 3 * error, (counter, a.mean(), b.mean(), error)


def test_a_collected_trace_is_read_and_read_texts_refuses_it(tmp_path: Path) -> None:
    pair = tiny.table_pair()
    trace = collect_traces(
        pair,
        [Prompt(f"p{i}", None, ["hello world"]) for i in range(4)],
        tmp_path,
        max_tokens=8,
        rollout=6,
        temperature=0.7,
    )
    texts = read_sampled(trace, limit=3)
    assert len(texts.rejected.texts) == len(texts.kept) == len(texts.raw) == 3
    for text, kept, raw in zip(texts.rejected.texts, texts.kept, texts.raw, strict=True):
        assert len(text.output) == len(kept) == len(raw)
        assert ((kept >= 0) & (kept <= 1)).all()
        rejectable = [i for i, chance in enumerate(kept) if chance < 1]
        assert all(text.tokens[i][0] != text.output[i] for i in rejectable)
    with raises_code("sampled_trace", "temperature 0.7"):
        read_texts(trace)


def test_every_replayed_strategy_is_compared_with_real_runs() -> None:
    assert {name for name, *_ in STRATEGIES} - {"autoregressive"} == set(REPLAYED)
