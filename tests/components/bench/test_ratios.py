"""Ratios, the quality floor and equal cores, on tiny pairs; and the target padded under all
of them."""

import copy
import json

import pytest

from draftwell.components.bench.bench import run_bench
from draftwell.components.bench.metrics import BenchMetrics, time_share
from draftwell.components.bench.peak_memory import reset_peak
from draftwell.components.bench.report.tables import bench_markdown
from draftwell.components.bench.runner import core_plan, labels_of, measure
from draftwell.components.bench.schema import BenchReport
from draftwell.components.bench.settings import BenchSettings, QualityFloor
from draftwell.components.prompts.prompt import Prompt
from draftwell.serving.runtime.models.padding import pad_to, parameter_count
from draftwell.serving.runtime.models.transformers_model import TransformersModel
from draftwell.serving.runtime.session.stats import Stats
from draftwell.serving.runtime.strategies import StrategyChoice, StrategyResources
from tests.support.errors import raises_code
from tests.support.models.resources import table_resources
from tests.support.models.tiny import llama, llama_pair, near, pair_of, table_pair

PROMPTS = [
    Prompt(f"p{i}", None, [text], reference="jq jq")
    for i, text in enumerate(["abcab cabinet", "hello hello", "zebra"])
]
FLOOR = QualityFloor(min_argmax_share=0.9, max_rouge_l_loss=2.0, max_surprisal_shift=0.1)


@pytest.fixture(scope="module")
def report() -> dict:
    configs = [
        StrategyChoice("vanilla_sd", {"num_speculative_tokens": "2"}),
        StrategyChoice("vanilla_sd", {"num_speculative_tokens": "4"}),
        StrategyChoice("prompt_lookup"),
        StrategyChoice("vanilla_sd@1+1", {"num_speculative_tokens": "2"}),
        StrategyChoice("spide", {"tau": "0.5"}),
        StrategyChoice("csd", {"tau": "1e-6", "use_memory": "false"}),
        StrategyChoice("csd", {"tau": "0.5", "use_memory": "false"}),
    ]
    resources = StrategyResources(table_resources(vocab=24).artifacts)
    return run_bench(
        llama_pair(slots=1),
        configs,
        PROMPTS,
        resources,
        BenchSettings(max_tokens=24, peers=("transformers",), threads=1),
        memory=True,
        floor=FLOOR,
    ).to_json()


@pytest.mark.slow
def test_every_ratio_of_the_bench_is_there(report):
    rows = {row["name"]: row for row in report["headlines"]}
    assert {
        "autoregressive / transformers generate",
        "vanilla_sd / transformers assisted, same gamma",
        "best lossless / autoregressive",
        "best lossless with the draft model / autoregressive",
        "spide / fastest vanilla_sd, equal cores",
        "spide / fastest vanilla_sd, unrestricted",
    } <= set(rows)
    for row in rows.values():
        assert 0 < row["low"] <= row["ratio"] <= row["high"], row
    assisted = rows["vanilla_sd / transformers assisted, same gamma"]
    assert assisted["contender"] == "vanilla_sd(num_speculative_tokens=2)", (
        "the draft length that assisted generation had"
    )
    entries, peers = report["strategies"], report["peers"]["transformers"]
    assert assisted["ratio"] == pytest.approx(
        entries[assisted["contender"]]["tokens_per_second"] / peers["assisted"]["tokens_per_second"]
    )
    assert assisted["cost_ratio"] is None
    best = rows["best lossless with the draft model / autoregressive"]
    assert entries[best["contender"]]["draft_calls"] > 0
    equal = rows["spide / fastest vanilla_sd, equal cores"]
    assert equal["against"] == "vanilla_sd@1+1"
    base = entries["vanilla_sd@1+1"]
    assert equal["cost_ratio"] == pytest.approx(
        entries["spide"]["target_calls"]
        / entries["spide"]["emitted"]
        / (base["target_calls"] / base["emitted"])
    )


@pytest.mark.slow
def test_equal_cores_change_the_plan_and_not_the_tokens(report):
    entries = report["strategies"]
    assert entries["vanilla_sd@1+1"]["split_cores"]
    assert not entries["vanilla_sd(num_speculative_tokens=2)"]["split_cores"]
    assert entries["vanilla_sd@1+1"]["strategy"] == "vanilla_sd"
    for key in ("target_calls", "draft_calls", "emitted", "acceptance_rate"):
        assert (
            entries["vanilla_sd@1+1"][key] == entries["vanilla_sd(num_speculative_tokens=2)"][key]
        )
    assert entries["spide"]["over_vanilla"]["against"] == "vanilla_sd@1+1"
    assert entries["prompt_lookup"]["over_vanilla"]["against"].startswith("vanilla_sd(")
    assert report["cost_reference"].startswith("vanilla_sd("), (
        "cost ratios are against the unrestricted one"
    )


@pytest.mark.slow
def test_memory_and_prefill_are_reported(report):
    for label, entry in report["strategies"].items():
        assert (entry["peak_memory_mb"] is not None) is reset_peak(), (
            "measured wherever the system reports it"
        )
        assert (entry["peak_memory_mb"] or 0) >= 0
        # of both models, so it may well be above the time to the first token
        assert entry["prefill_ms"] > 0, label
        assert entry["decode_tokens_per_second"] > 0
        assert sum(entry["time_share"].values()) == pytest.approx(1.0)
        assert [len(row["run_seconds"]) for row in entry["per_prompt"]] == [1] * len(PROMPTS)
    assert report["peers"]["transformers"]["assisted"]["prefill_ms"] is None
    assert report["peers"]["transformers"]["assisted"]["ttft_ms"] > 0


@pytest.mark.slow
def test_parameters_are_shown_where_a_label_leaves_them_out(report):
    text = bench_markdown(BenchReport.model_validate(report))
    assert "vanilla_sd@1+1(num_speculative_tokens=2)" in text


@pytest.mark.slow
def test_a_report_says_what_it_was_made_with(report):
    assert report["padded_to"] is None
    assert set(report["machine"]) >= {
        "device_name",
        "cuda",
        "commit",
        "libraries",
        "device_class",
        "threads",
    }
    assert report["cpu_check"] is None
    assert json.loads(json.dumps(report, allow_nan=False)) == report


@pytest.mark.slow
def test_the_floor_is_argmax_share_and_rouge_together(report):
    entries = report["strategies"]
    for label, entry in entries.items():
        if entry["lossless"]:
            assert entry["holds_floor"] is None, label
            assert entry["rouge_l_difference"] == pytest.approx(0.0), (
                "lossless outputs are vanilla's in float32"
            )
        else:
            held = entry["target_argmax_share"] >= 0.9 and entry["rouge_l_difference"] >= -2
            assert entry["holds_floor"] is held
    strict, lax = (
        entries[f"csd(tau={tau}, use_memory=false)"]["target_argmax_share"]
        for tau in ("0.5", "1e-6")
    )
    assert strict >= lax
    assert any(
        row["name"].startswith("csd at the quality floor") for row in report["headlines"]
    ) is any(entry["holds_floor"] for entry in entries.values())


def test_a_quality_floor_is_held_at_both_ends_or_not():
    assert FLOOR.max_share_loss == 0.1
    assert FLOOR.held(0.9, -2.0)
    assert not FLOOR.held(0.89, 1.0)
    assert not FLOOR.held(1.0, -2.1)


def test_without_references_nobody_knows_whether_the_floor_holds():
    bare = [Prompt("p", None, ["abc"])]
    measured = measure(
        table_pair(),
        table_resources(vocab=24),
        [StrategyChoice("autoregressive"), StrategyChoice("csd")],
        bare,
        BenchSettings(max_tokens=8),
    )
    entry = BenchMetrics(table_pair(), bare, measured).entry("csd").model_dump()
    assert (entry["rouge_l"], entry["rouge_l_difference"], entry["holds_floor"]) == (
        None,
        None,
        None,
    )
    assert entry["target_argmax_share"] is not None


def test_plans_of_cores():
    assert core_plan("spide") == ("spide", None)
    assert core_plan("vanilla_sd@1+1") == ("vanilla_sd", True)
    with raises_code("unknown_core_plan", "vanilla_sd@2+2", "@1+1"):
        core_plan("vanilla_sd@2+2")
    assert labels_of([StrategyChoice("vanilla_sd"), StrategyChoice("vanilla_sd@1+1")]) == [
        "vanilla_sd",
        "vanilla_sd@1+1",
    ]


def test_time_in_which_two_models_ran_is_counted_once():
    both = Stats(
        target_seconds=4.0,
        draft_seconds=3.0,
        prefill_seconds=1.0,
        wall_seconds=8.0,
        busy_seconds=6.0,
    )
    parts = time_share(both)
    assert sum(parts.values()) == pytest.approx(1.0)
    assert (parts["overlap"], parts["draft"], parts["target"], parts["prefill"], parts["rest"]) == (
        0.25,
        0.125,
        0.25,
        0.125,
        0.25,
    )


def test_a_padded_pair_says_so_and_gives_the_same_outputs_to_peers_too():
    target = llama(2)
    wide = copy.deepcopy(target)
    count = pad_to(wide, 300_000)
    draft = near(target, 0.06)
    plain = pair_of(
        TransformersModel(target, slots=1),
        TransformersModel(draft, slots=1),
        {"target": target, "draft": draft},
    )
    padded = pair_of(
        TransformersModel(wide, slots=1),
        TransformersModel(draft, slots=1),
        {"target": wide, "draft": draft},
    )
    padded.padded_to = count
    reports = [
        run_bench(
            pair,
            [StrategyChoice("vanilla_sd")],
            PROMPTS,
            StrategyResources(),
            BenchSettings(max_tokens=16, peers=("transformers",)),
            cost_ratios=False,
        ).to_json()
        for pair in (plain, padded)
    ]
    assert [r["padded_to"] for r in reports] == [None, parameter_count(wide)]
    assert reports[0]["fingerprint"] == reports[1]["fingerprint"]
    for one, other in zip(*(r["strategies"].values() for r in reports), strict=True):
        assert [(p["tokens"], p["target_calls"], p["accepted"]) for p in one["per_prompt"]] == [
            (p["tokens"], p["target_calls"], p["accepted"]) for p in other["per_prompt"]
        ]
    for entry in reports[1]["peers"]["transformers"].values():
        if isinstance(entry, dict):
            assert entry["identical_outputs"] + entry["near_ties"] == len(PROMPTS)
    again = measure(
        padded,
        StrategyResources(),
        [StrategyChoice("vanilla_sd")],
        PROMPTS,
        BenchSettings(max_tokens=16),
    )["vanilla_sd"]
    base = measure(
        plain,
        StrategyResources(),
        [StrategyChoice("vanilla_sd")],
        PROMPTS,
        BenchSettings(max_tokens=16),
    )["vanilla_sd"]
    assert [r.tokens for r in again.typical] == [r.tokens for r in base.typical], (
        "peers left the modules attending over slots"
    )
