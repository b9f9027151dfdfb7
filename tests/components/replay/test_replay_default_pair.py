"""Replay on the default pair: round by round in float32, within bounds in bfloat16 and at
temperature > 0, in time, and fast.

Everything here is slow; the trace of a dtype is collected once. What is printed (`pytest -s`) are
figures such as those of the docs (taken over 32 tokens a text). DRAFTWELL_WHOLE=1 takes longer
texts and every config, and the better part of an hour.

What bfloat16 counts depends on a processor's instructions (near-ties fall otherwise), so those
tests run where figures are taken, with the timed ones: a change of machine must not turn CI red.
"""

from __future__ import annotations

import functools
import math
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftwell.components.calibrate.hardware_profile import measure_profile
from draftwell.components.prompts.prompt import demo_prompts
from draftwell.components.replay.replay import replay_strategy
from draftwell.components.replay.sampled import read_sampled
from draftwell.components.replay.texts import Texts, read_texts
from draftwell.components.report.provenance import provenance
from draftwell.components.tune.search.space import REPLAYED, replayable
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import StrategyChoice, StrategyResources, build_strategy
from tests.support.collecting import collect_traces
from tests.support.expected_replay import replay_expected
from tests.support.models.counters import counters, rounds_of
from tests.support.models.default_pair import WHOLE, default_pair, resources_of, two_threads
from tests.support.replay_check import Prediction, check_prediction, median_error, tiled

pytestmark = pytest.mark.slow

PROMPTS = {"float32": 40 if WHOLE else 24, "bfloat16": 40}
TOKENS = {"float32": 64 if WHOLE else 16, "bfloat16": 64}
"""New tokens of a text, and drafted from each position: no draft is longer than what is left."""
BATCH = 8
TIE = 1e-3
"""Logits, or log probabilities, nearer than this may fall either way when the same numbers are
added in another order."""

CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("vanilla_sd", {"num_speculative_tokens": 5}),
    ("svip", {}),
    ("draft_verify", {}),
    ("adaedl", {"threshold": 0.5, "max_draft": 8}),
    ("hf_dynamic", {}),
    ("hf_dynamic", {"heuristic": True}),
    ("prompt_lookup", {}),
    ("spide", {"parallel": False}),
    ("spide", {}),
    ("spide", {"tau": 0.3, "max_draft": 16, "overlap_tau": 0.2}),
    ("pearl", {}),
    ("pearl", {"num_speculative_tokens": 8}),
]
"""Every replayed strategy (test_search_spaces.py)."""
REPLAYED_CONFIGS = (
    CONFIGS
    if WHOLE
    else [
        config
        for config in CONFIGS
        if config
        in (
            ("vanilla_sd", {"num_speculative_tokens": 5}),
            ("svip", {}),
            ("prompt_lookup", {}),
            ("spide", {"parallel": False}),
            ("spide", {}),
            ("pearl", {}),
        )
    ]
)
"""One of every drafter and schedule, or all."""
IDS = [f"{name}-{'-'.join(map(str, parameters.values()))}" for name, parameters in REPLAYED_CONFIGS]


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    with two_threads():
        yield


@functools.cache
def pair_in(dtype: str) -> LoadedPair:
    from draftwell.registry.pairs import fetch, find_pair
    from draftwell.serving.runtime.pair import LoadSettings, load_pair

    if dtype == "float32":
        return default_pair()
    return load_pair(
        fetch(find_pair("default")),
        LoadSettings(dtype=dtype, slots=8, max_context=512),
        keep_modules=True,
    )


@functools.cache
def folder_of_traces() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="draftwell-replay-")


@functools.cache
def collected(dtype: str, temperature: float = 0.0) -> TraceSet:
    """In bfloat16 one text at a time: what a batch does to near-ties is not replay's error."""
    folder = Path(folder_of_traces().name) / f"{dtype}-{temperature}"
    return collect_traces(
        pair_in(dtype),
        demo_prompts(PROMPTS[dtype]),
        folder,
        max_tokens=TOKENS[dtype],
        rollout=TOKENS[dtype],
        hidden=False,
        temperature=temperature,
        batch=BATCH if dtype == "float32" else 1,
    )


@functools.cache
def resources_in(dtype: str) -> StrategyResources:
    return resources_of(pair_in(dtype))


@functools.cache
def texts_in(dtype: str) -> Texts:
    return read_texts(collected(dtype))


def profile_of(resources: StrategyResources) -> HardwareProfile:
    found = resources.artifacts["hardware_profile"]
    assert isinstance(found, HardwareProfile)
    return found


def real_runs(
    pair: LoadedPair,
    resources: StrategyResources,
    name: str,
    parameters: dict[str, Any],
    requests: list[tuple[list[int], Sampling]],
) -> list[Any]:
    """Every request on the real models, eight at once: what one does depends on the others by
    rounding alone. Returns the jobs."""
    engine, jobs = pair.engine(), []
    strategy = build_strategy(name, parameters, resources)
    for start in range(0, len(requests), BATCH):
        together = [
            engine.submit(ids, sampling, strategy)
            for ids, sampling in requests[start : start + BATCH]
        ]
        engine.run(together)
        jobs += together
    return jobs


def closest(trace: TraceSet) -> dict[str, float]:
    """Prompt → the smallest lead, in logits, of a token over the second likeliest, of either model
    along the text."""
    rows = trace.read(["prompt_id", "target_gap", "candidate_q"]).to_pylist()
    leads: dict[str, float] = {}
    for row in rows:
        first, second = row["candidate_q"][:2]
        lead = min(row["target_gap"], math.log(first / second) if second > 0 else math.inf)
        leads[row["prompt_id"]] = min(lead, leads.get(row["prompt_id"], math.inf))
    return leads


@pytest.mark.parametrize(("name", "parameters"), REPLAYED_CONFIGS, ids=IDS)
def test_every_round_is_that_of_a_real_run(
    monkeypatch: pytest.MonkeyPatch, name: str, parameters: dict[str, Any]
) -> None:
    pair, resources, texts = pair_in("float32"), resources_in("float32"), texts_in("float32")
    rounds, leads, differing = rounds_of(monkeypatch), closest(collected("float32")), []
    sampling = pair.sampling(max_tokens=TOKENS["float32"])
    jobs = real_runs(
        pair, resources, name, parameters, [(text.prompt, sampling) for text in texts.texts]
    )
    ran = [rounds.of(job.session.stats) for job in jobs]
    rounds.take()
    for text, job, real in zip(texts.texts, jobs, ran, strict=True):
        result = replay_strategy(
            replace(texts, texts=[text]), name, parameters, resources, profile_of(resources)
        )
        if (job.output, real, counters(job.session.stats)) != (
            text.output,
            rounds.take(),
            counters(result.stats),
        ):
            differing.append((text.name, leads[text.name]))
    print(
        f"{name} {parameters}: {len(differing)} of {len(texts.texts)} prompts differ: {differing}"
    )
    assert all(lead < TIE for _, lead in differing), differing
    assert len(differing) <= 1


@functools.cache
def predictions() -> list[Prediction]:
    """Every measured config on all prompts, one at a time, interleaved, under a profile that was
    taken just before."""
    pair = pair_in("bfloat16")
    times = measure_profile(pair, provenance(pair))
    resources = replace(
        resources_in("bfloat16"),
        artifacts={**resources_in("bfloat16").artifacts, "hardware_profile": times},
    )
    return check_prediction(
        pair,
        texts_in("bfloat16"),
        resources,
        times,
        [StrategyChoice(*config) for config in REPLAYED_CONFIGS],
        demo_prompts(PROMPTS["bfloat16"]),
    )


@pytest.mark.timed
@pytest.mark.parametrize("number", range(len(REPLAYED_CONFIGS)), ids=IDS)
def test_bfloat16_counts_are_within_two_percent(number: int) -> None:
    row = predictions()[1 + number]
    assert (row.strategy, row.parameters) == REPLAYED_CONFIGS[number]
    print(f"{row.label}: (replayed, real) {row.counts}")
    assert row.exact
    assert row.count_error <= 0.02


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("vanilla_sd", {}),
        ("svip", {}),
        ("spide", {"tau": 0.3, "max_draft": 16}),
        ("pearl", {"num_speculative_tokens": 8}),
    ],
)
def test_sampled_counts_are_those_of_real_runs_on_average(
    name: str, parameters: dict[str, Any]
) -> None:
    pair, resources = pair_in("float32"), resources_in("float32")
    told = replay_expected(
        read_sampled(collected("float32", 0.7)), name, parameters, resources, profile_of(resources)
    )
    sampling = pair.sampling(max_tokens=TOKENS["float32"], temperature=0.7)
    requests = [
        (pair.encode_prompt(prompt.prompt), replace(sampling, seed=5000 + i))
        for i, prompt in enumerate(demo_prompts(PROMPTS["float32"]))
    ]
    real = [job.session.stats for job in real_runs(pair, resources, name, parameters, requests)]
    for counter in ("target_calls", "accepted", "draft_calls"):
        replayed = np.mean(
            [
                [getattr(one.stats, counter) / one.stats.emitted for one in run.per_prompt]
                for run in told.runs
            ],
            axis=0,
        )
        ran = np.array([getattr(stats, counter) / stats.emitted for stats in real])
        apart = replayed - ran
        print(
            f"{name} {parameters} {counter} a token: {replayed.mean():.4f} replayed, "
            f"{ran.mean():.4f} real"
        )
        assert abs(apart.mean()) <= 3 * apart.std(ddof=1) / math.sqrt(len(apart))


@pytest.mark.timed
def test_predicted_times_are_within_ten_percent() -> None:
    rows = predictions()
    for row in rows:
        print(
            f"{row.label}: {row.predicted * 1e3:.2f} ms a token predicted, "
            f"{row.scaled * 1e3:.2f} at the run's pace, "
            f"{row.measured * 1e3:.2f} measured, {row.scaled_error:+.1%}"
        )
    print(
        f"median error {median_error(rows):.1%}, without scaling "
        f"{median_error(rows, scaled=False):.1%}"
    )
    assert median_error(rows) <= 0.10


@pytest.mark.timed
def test_a_minute_holds_a_hundred_replays_of_ten_thousand_positions() -> None:
    resources, texts = resources_in("bfloat16"), tiled(texts_in("bfloat16"), 10_000)
    space = [
        (name, parameters)
        for name in REPLAYED
        for parameters in random.Random(name).sample(
            replayable(name, TOKENS["bfloat16"], profile_of(resources)), 4
        )
    ]
    started = time.perf_counter()
    for name, parameters in space:
        replay_strategy(texts, name, parameters, resources, profile_of(resources), extend=True)
    rate = 60 * len(space) / (time.perf_counter() - started)
    print(f"{rate:.0f} configurations a minute")
    assert rate >= 100


def test_every_replayed_strategy_is_compared_with_real_runs() -> None:
    assert {name for name, *_ in CONFIGS} - {"autoregressive"} == set(REPLAYED)
