"""What the gate runs beside a bench: outputs read by the target, and a process that starts from a
bundle."""

from __future__ import annotations

from pathlib import Path

import pytest

import draftwell.components.bench.target_agreement
import draftwell.components.gate.footprint
import draftwell.serving.device
from draftwell.components.bench.target_agreement import departure
from draftwell.components.gate.baseline_counts import deterministic_report, fixed_resources
from draftwell.components.gate.bench_checks import judge_release
from draftwell.components.gate.footprint import (
    Footprint,
    footprint,
    judge_footprint,
    startup_seconds,
)
from draftwell.components.gate.losslessness import identity_entry, judge_texts
from draftwell.components.gate.verdict_report import verdicts_junit
from draftwell.components.prompts.prompt import Prompt, ids_of
from draftwell.serving.artifacts.pair_files import PairFiles
from draftwell.serving.bundle.verdict import PASSED, UNDECIDED, Thresholds, settled
from draftwell.serving.runtime.models.transformers_model import TransformersModel
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import STRATEGIES, StrategyChoice, build_strategy
from tests.support.models.tiny import llama, near, pair_of
from tests.support.patching import replace_everywhere

PROMPTS = [
    Prompt(f"p{i}", None, [text])
    for i, text in enumerate(["abcab cabinet", "hello hello", "zebra", "one two three", "banana"])
]
LOSSY = [("sprinter", {}), ("lossy_sd", {}), ("fuzzy_sd", {})]
"""Lossy at temperature 0 too, unlike mentored decoding."""
IDENTITY = Thresholds(lossless_identical=True)
SEEDS = [seed if seed < 4 else pytest.param(seed, marks=pytest.mark.slow) for seed in range(10)]
"""Each strategy once in the quick tier, all in the slow one."""


def noisy_pair(seed: int) -> LoadedPair:
    """A target and a draft that often disagrees with it."""
    target = llama(2)
    return pair_of(
        TransformersModel(target, slots=2),
        TransformersModel(near(target, 0.2, seed), slots=2),
        {"target": target},
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_a_lossy_config_called_lossless_is_caught_every_time(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = noisy_pair(seed)
    name, parameters = LOSSY[seed % len(LOSSY)]
    monkeypatch.setattr(STRATEGIES[name], "lossless", True)
    entry = identity_entry(
        pair, fixed_resources(pair), StrategyChoice(name, parameters), PROMPTS, 48
    )
    verdict = judge_release(entry, None, None, IDENTITY)
    assert [check.name for check in verdict.checks if not check.passed] == ["identical outputs"], (
        entry
    )


def test_a_lossy_config_that_was_right_in_all_that_was_looked_at_is_caught_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The draft is the target itself: whatever sprinter trusts is right."""
    target = llama(2)
    pair = pair_of(
        TransformersModel(target, slots=2), TransformersModel(llama(2), slots=2), {"target": target}
    )
    monkeypatch.setattr(STRATEGIES["sprinter"], "lossless", True)
    entry = identity_entry(
        pair,
        fixed_resources(pair),
        StrategyChoice("sprinter", {"tau": 0.0}),
        PROMPTS,
        48,
    )
    assert entry.identical_outputs + entry.near_ties == len(PROMPTS)
    (check,) = judge_release(entry, None, None, IDENTITY).checks
    assert not check.passed
    assert "tokens were kept that the target did not choose" in check.detail


@pytest.mark.parametrize("seed", SEEDS)
def test_a_lossless_config_never_fails(seed: int) -> None:
    pair = noisy_pair(seed)
    name = ("vanilla_sd", "svip", "prompt_lookup", "spide")[seed % 4]
    entry = identity_entry(pair, fixed_resources(pair), StrategyChoice(name), PROMPTS, 48)
    assert entry.identical_outputs + entry.near_ties == len(PROMPTS)
    assert judge_release(entry, None, None, IDENTITY).passed


def test_identity_decodes_as_many_at_once_as_there_are_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One at a time, four float32 requests take as many passes as tokens: most of the time that a
    gate takes."""
    pair = noisy_pair(1)
    target, sizes = pair.models["target"], []
    forward = target.forward
    monkeypatch.setattr(
        target, "forward", lambda commands: sizes.append(len(commands)) or forward(commands)
    )
    entry = identity_entry(pair, fixed_resources(pair), StrategyChoice("vanilla_sd"), PROMPTS, 48)
    assert judge_release(entry, None, None, IDENTITY).passed, entry
    assert len(PROMPTS) > 2
    assert max(sizes) == 2
    assert sizes.count(2) > sizes.count(1) - len(PROMPTS), "the outputs are read one by one"


def test_outputs_are_read_behind_all_that_was_asked() -> None:
    """Of served traffic: a system message, and a completion that goes to the model as it is."""
    pair = noisy_pair(1)
    system = ({"role": "system", "content": "be short and say what a quick fox says"},)
    asked = [
        Prompt("told", None, ["abcab cabinet"], messages=system),
        Prompt("bare", None, ["hello hello"], raw=True),
    ]
    assert ids_of(pair, asked[0]) != pair.encode_prompt("abcab cabinet")
    entry = identity_entry(pair, fixed_resources(pair), StrategyChoice("vanilla_sd"), asked, 48)
    assert judge_release(entry, None, None, IDENTITY).passed, entry
    assert [row.departure for row in entry.per_prompt] == ["none", "none"]


@pytest.mark.slow
def test_texts_of_the_deterministic_part_are_read_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """In CI, where no release is: what claims to be lossless and is not."""
    pair, texts = noisy_pair(3), {}
    names = ("autoregressive", "vanilla_sd", "lossy_sd")
    deterministic_report(pair, [StrategyChoice(name) for name in names], PROMPTS, 48, texts=texts)
    assert list(texts) == list(names)
    assert [check.name for check in judge_texts(pair, PROMPTS, texts, 48).checks] == [
        "vanilla_sd: identical outputs"
    ]
    assert judge_texts(pair, PROMPTS, texts, 48).passed
    monkeypatch.setattr(STRATEGIES["lossy_sd"], "lossless", True)
    verdict = judge_texts(pair, PROMPTS, texts, 48)
    assert [check.name for check in verdict.checks if not check.passed] == [
        "lossy_sd: identical outputs"
    ]


def test_how_an_output_leaves_the_targets_own(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = noisy_pair(0)
    ids = pair.encode_prompt("abcab cabinet")
    own = (
        pair.engine()
        .generate(ids, pair.sampling(max_tokens=12), build_strategy("autoregressive"))
        .output
    )
    assert departure(pair, ids, own, len(own), exact=False) == "none"
    assert departure(pair, ids, own[:-1], len(own), exact=False) == "cut"
    assert departure(pair, ids, [], 12, exact=False) == "cut"
    changed = [*own[:-1], (own[-1] + 1) % 24]
    assert departure(pair, ids, changed, len(own), exact=False) == "wrong"
    monkeypatch.setattr(
        draftwell.components.bench.target_agreement, "near_tie_gap", lambda dtype, row: 1e9
    )
    assert departure(pair, ids, changed, len(own), exact=False) == "near-tie"
    assert departure(pair, ids, changed, len(own), exact=True) == "wrong"
    assert departure(pair, ids, own, len(own), exact=False) == "none"


def test_a_start_is_timed_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        draftwell.components.gate.footprint,
        "CHILD",
        "import sys, time; time.sleep(0.3); assert sys.argv[1].endswith('bundle')",
    )
    seconds, failure = startup_seconds(tmp_path / "bundle", limit=60)
    assert failure is None
    assert 0.3 <= seconds < 60
    monkeypatch.setattr(
        draftwell.components.gate.footprint, "CHILD", "raise ValueError('the weights are cut')"
    )
    assert (
        startup_seconds(tmp_path, limit=60)[1]
        == "the bundle does not start: ValueError: the weights are cut"
    )
    monkeypatch.setattr(draftwell.components.gate.footprint, "CHILD", "import time; time.sleep(60)")
    seconds, failure = startup_seconds(tmp_path, limit=0.5)
    assert failure == "the bundle was not ready after 0.5 s"
    assert seconds < 30


def test_a_bundle_that_is_none_does_not_start(tmp_path: Path) -> None:
    """With the very function that the server calls."""
    _, failure = startup_seconds(tmp_path / "nowhere", limit=120)
    assert failure is not None
    assert "there is no bundle at" in failure


def test_a_start_that_cannot_be_measured_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(draftwell.components.gate.footprint, "CHILD", "pass")
    (tmp_path / "model.safetensors").write_bytes(b"0" * 1000)
    files = PairFiles("tiny", tmp_path)
    elsewhere = footprint(tmp_path, 5_000_000, files, "cuda", limit=60)
    assert (elsewhere.bundle_mb, elsewhere.startup_seconds) == (5.0, None)
    assert elsewhere.unmeasured == "there is no cuda device here"
    assert footprint(tmp_path, 1, files, "cpu", limit=60).startup_seconds is not None
    card = {"free": 10, "held": 20}
    replace_everywhere(monkeypatch, draftwell.serving.device, "cuda_available", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (card["free"], 80))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda: card["held"])
    assert "memory on cuda" in str(footprint(tmp_path, 1, files, "cuda", limit=60).unmeasured)
    card["free"] = 30
    assert footprint(tmp_path, 1, files, "cuda", limit=60).startup_seconds is not None
    monkeypatch.setattr(draftwell.components.gate.footprint, "free_memory", lambda: 2000)
    for device in ("cpu", "cuda"):
        assert "memory" in str(footprint(tmp_path, 1, files, device, limit=60).unmeasured)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_required_start_that_was_not_measured_is_not_enough_evidence(device: str) -> None:
    """A bundle that nobody has started must not be green."""
    limits = Thresholds(max_bundle_mb=250, required={"cpu": ("bundle size", "start-up")})
    verdict = settled(judge_footprint(Footprint(5.0, unmeasured="no room"), limits), limits, device)
    assert verdict.result == (UNDECIDED if device == "cpu" else PASSED)
    if device == "cuda":
        assert verdict.notes == ("start-up not checked: no room",)
    else:
        assert verdict.checks[-1].transient, "another day there is room"
        assert 'errors="1"' in verdicts_junit([("release 1", verdict)])
