"""The bench: definitions of docs/methods.md on real counters, the protocol, identity, peers."""

import json

import pytest
import torch

from draftwell.components.bench.bench import gamma_of, run_bench
from draftwell.components.bench.metrics import is_baseline, latencies
from draftwell.components.bench.runner import (
    Generation,
    Measurement,
    StrategyContender,
    labels_of,
    measure,
)
from draftwell.components.bench.settings import BenchSettings
from draftwell.components.bench.target_agreement import (
    agreement,
    difference,
    first_difference,
    near_tie_gap,
)
from draftwell.components.prompts.prompt import Prompt
from draftwell.components.report.machine import Others
from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.pair import over_slots
from draftwell.serving.runtime.session.stats import Stats
from draftwell.serving.runtime.strategies import (
    PLAIN,
    StrategyChoice,
    StrategyResources,
    build_strategy,
)
from tests.support.errors import raises_code
from tests.support.models.resources import ORIGIN, table_resources
from tests.support.models.tiny import llama_pair, pair_of, table_pair
from tests.support.models.unbatched_families import module_of

PROMPTS = [
    Prompt(f"p{i}", None, [text])
    for i, text in enumerate(["abcab cabinet", "hello hello", "zebra", "one two"])
]
QUICK = BenchSettings(max_tokens=4, warmup=False)
FIGURES = {
    "tokens_per_second",
    "speedup",
    "target_calls",
    "cost_ratio",
    "acceptance_rate",
    "draft_efficiency",
    "mat",
    "mean_acceptance_length",
    "ttft_ms",
    "tpot_ms",
    "identical_outputs",
    "near_ties",
}


@pytest.fixture(scope="module")
def report() -> dict:
    configs = [
        StrategyChoice("vanilla_sd", {"num_speculative_tokens": 2}),
        StrategyChoice("vanilla_sd", {"num_speculative_tokens": 6}),
        StrategyChoice("prompt_lookup"),
    ]
    return run_bench(
        llama_pair(slots=1),
        configs,
        PROMPTS,
        StrategyResources(),
        BenchSettings(max_tokens=24, runs=2, peers=("transformers",), threads=1),
    ).to_json()


def test_a_report_has_every_figure_and_is_json(report):
    assert set(report) >= {"pair", "machine", "prompts", "strategies", "peers"}
    assert report["machine"]["others"] is None, "a peer's process is no disturbance"
    for entry in report["strategies"].values():
        assert set(entry) >= FIGURES
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert report["prompts"] == len(PROMPTS)
    assert report["machine"]["threads"] == 1


def test_autoregressive_is_measured_without_being_asked_for_and_is_its_own_measure(report):
    plain = report["strategies"]["autoregressive"]
    assert (plain["speedup"], plain["speedup_low"], plain["speedup_high"]) == (1.0, 1.0, 1.0)
    assert plain["acceptance_rate"] is None
    assert plain["mat"] is None
    # the prefill gives a token and is no call
    assert plain["target_calls"] == plain["emitted"] - len(PROMPTS)


def test_speedup_is_of_totals_and_not_a_mean_of_ratios(report):
    rows = {name: entry["per_prompt"] for name, entry in report["strategies"].items()}

    def pace(name):
        return sum(row["seconds"] for row in rows[name]) / sum(row["tokens"] for row in rows[name])

    entry = report["strategies"]["prompt_lookup"]
    assert entry["speedup"] == pytest.approx(pace("autoregressive") / pace("prompt_lookup"))
    assert entry["speedup_low"] <= entry["speedup"] <= entry["speedup_high"]
    assert entry["tokens_per_second"] == pytest.approx(1 / pace("prompt_lookup"))


def test_cost_ratio_is_against_the_fastest_vanilla_sd(report):
    entries = report["strategies"]
    vanillas = [entry for name, entry in entries.items() if name.startswith("vanilla_sd")]
    assert len(vanillas) == 2
    fastest = max(vanillas, key=lambda entry: entry["tokens_per_second"])
    assert fastest["cost_ratio"] == 1.0
    for entry in entries.values():
        per_token = entry["target_calls"] / entry["emitted"]
        assert entry["cost_ratio"] == pytest.approx(
            per_token / (fastest["target_calls"] / fastest["emitted"])
        )


def test_a_run_without_vanilla_sd_measures_it_for_the_cost_ratio():
    report = run_bench(
        table_pair(),
        [StrategyChoice("prompt_lookup")],
        PROMPTS[:1],
        StrategyResources(),
        BenchSettings(max_tokens=4),
    ).to_json()
    reference = report["cost_reference"]
    assert list(report["strategies"]) == ["autoregressive", "prompt_lookup", reference]
    assert report["strategies"][reference]["cost_ratio"] == 1
    assert all(entry["cost_ratio"] is not None for entry in report["strategies"].values())


def test_without_the_reference_there_is_no_cost_ratio(monkeypatch):
    monkeypatch.setattr(Others, "cores", lambda self: 0.7)
    report = run_bench(
        table_pair(),
        [StrategyChoice("prompt_lookup")],
        PROMPTS[:1],
        StrategyResources(),
        BenchSettings(max_tokens=4),
        cost_ratios=False,
    ).to_json()
    assert all(entry["cost_ratio"] is None for entry in report["strategies"].values())
    assert report["machine"]["others"] == 0.7


def test_lossless_strategies_and_transformers_give_the_same_tokens(report):
    peers = report["peers"]["transformers"]
    assert set(peers) == {"autoregressive", "assisted", "prompt_lookup"}
    entries = [
        *report["strategies"].values(),
        *peers.values(),
    ]
    for entry in entries:
        assert entry["identical_outputs"] + entry["near_ties"] == len(PROMPTS)
        assert entry["tokens_per_second"] > 0
        assert entry["ttft_ms"] > 0
        assert entry["tpot_ms"] > 0
    assert any("constant" in note for note in report["peer_notes"])


def test_peers_leave_the_modules_attending_over_slots(report):
    pair = llama_pair(slots=1)
    before = (
        pair.engine()
        .generate([5, 6, 7], pair.sampling(max_tokens=12), build_strategy("vanilla_sd"))
        .output
    )
    run_bench(
        pair,
        [],
        PROMPTS[:1],
        StrategyResources(),
        BenchSettings(max_tokens=4, peers=("transformers",), warmup=False),
    ).to_json()
    assert (
        pair.engine()
        .generate([5, 6, 7], pair.sampling(max_tokens=12), build_strategy("vanilla_sd"))
        .output
        == before
    )


def test_peers_of_a_model_with_attention_of_its_own_say_so():
    target = module_of("gpt_neo")
    pair = pair_of(over_slots(target), over_slots(target), {"target": target, "draft": target})
    report = run_bench(
        pair,
        [StrategyChoice("vanilla_sd")],
        PROMPTS[:2],
        StrategyResources(),
        BenchSettings(max_tokens=6, peers=("transformers",), warmup=False),
    ).to_json()
    assert "attention: eager, the model's own; cache: transformers' default" in report["peer_notes"]
    assert report["strategies"]["vanilla_sd"]["identical_outputs"] == 2


def test_sampled_outputs_are_not_compared():
    report = run_bench(
        table_pair(),
        [StrategyChoice("vanilla_sd")],
        PROMPTS[:2],
        StrategyResources(),
        BenchSettings(max_tokens=8, temperature=1.0),
    ).to_json()
    assert all(
        entry["identical_outputs"] is None and entry["near_ties"] is None
        for entry in report["strategies"].values()
    )


def test_sampled_runs_repeat_the_same_requests():
    runs = measure(
        table_pair(),
        StrategyResources(),
        [StrategyChoice("vanilla_sd")],
        PROMPTS[:2],
        BenchSettings(max_tokens=12, temperature=1.0, runs=2),
    )["vanilla_sd"].runs
    assert [run[0].tokens for run in runs] == [run[1].tokens for run in runs]
    assert runs[0][0].tokens != runs[1][0].tokens


def test_the_median_run_counts():
    runs = [Generation([1, 2], Stats(emitted=2, wall_seconds=s)) for s in (5.0, 1.0, 2.0)]
    contender = StrategyContender(table_pair(), StrategyResources(), PLAIN, "x")
    m = Measurement(contender, ["p"], [runs])
    assert m.seconds == [2.0]
    assert m.tokens == [2]


def test_the_95th_percentile_of_twenty_prompts_is_not_the_slowest():
    runs = [[Generation([1, 2], Stats(emitted=2, wall_seconds=s / 1e3))] for s in range(1, 21)]
    contender = StrategyContender(table_pair(), StrategyResources(), PLAIN, "x")
    found = latencies(Measurement(contender, [f"p{i}" for i in range(20)], runs))
    assert found["tpot_ms"] == pytest.approx(10.5)
    assert found["tpot_p95_ms"] == pytest.approx(19.05)


def test_contenders_do_not_share_online_state_nor_write_to_the_artifacts():
    pair, resources = table_pair(), table_resources(vocab=24)
    resources = StrategyResources(resources.artifacts, deterministic=False)
    configs = [
        StrategyChoice("spide", {"parallel": False, "tau": 0.5}),
        StrategyChoice("spide", {"parallel": False, "tau": 0.9}),
    ]
    both = measure(pair, resources, configs, PROMPTS, BenchSettings(max_tokens=32))
    alone = measure(pair, resources, configs[1:], PROMPTS, BenchSettings(max_tokens=32))
    assert list(both.values())[1].stats.draft_calls == next(iter(alone.values())).stats.draft_calls
    assert sum(resources.artifacts["acceptance_table"].total) == 0


def test_a_lossy_strategy_is_measured_by_the_targets_argmax():
    pair, resources = table_pair(), table_resources(vocab=24)
    entry = run_bench(
        pair,
        [StrategyChoice("csd", {"use_memory": False, "tau": 1e-6})],
        PROMPTS,
        resources,
        BenchSettings(max_tokens=24),
    ).to_json()["strategies"]["csd"]
    outputs = measure(
        pair,
        resources,
        [StrategyChoice("csd", {"use_memory": False, "tau": 1e-6})],
        PROMPTS,
        BenchSettings(max_tokens=24),
    )["csd"]
    matches = total = 0
    for prompt, run in zip(PROMPTS, outputs.typical, strict=True):
        context = pair.encode_prompt(prompt.prompt)
        for token in run.tokens:
            matches += token == int(pair.models["target"].next_logits(context).argmax())
            total += 1
            context.append(token)
    assert entry["target_argmax_share"] == pytest.approx(matches / total)
    assert entry["target_argmax_share"] < 1
    assert entry["rescued_share"] > 0
    assert entry["identical_outputs"] < len(PROMPTS)


def test_overhead_and_parts_of_the_time_add_up(report):
    parts = report["strategies"]["prompt_lookup"]["time_share"]
    assert sum(parts.values()) == pytest.approx(1.0)
    assert parts["draft"] == 0.0


def test_first_difference():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 9, 3], [1, 2, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_a_difference_is_a_near_tie_only_if_both_tokens_are_nearly_the_best():
    pair = table_pair()
    table = pair.models["target"].table
    table[:] = 0.0
    table[..., 4], table[..., 5], table[..., 6] = 3.0, 3.0 - 5e-4, 1.0
    assert difference(pair, "p", [7, 8], [4, 4], [4, 4], exact=False) is None
    tie = difference(pair, "p", [7, 8], [4, 5, 4], [4, 4, 4], exact=False)
    assert (tie.position, tie.near_tie) == (1, True)
    assert tie.gap == pytest.approx(5e-4, abs=1e-6)
    exact = difference(pair, "p", [7, 8], [4, 5, 4], [4, 4, 4], exact=True)
    assert (exact.position, exact.near_tie) == (1, False)
    # the gap is small, yet 6 is nowhere near
    wrong = difference(pair, "p", [7, 8], [4, 6, 4], [4, 4, 4], exact=False)
    assert (wrong.position, wrong.near_tie) == (1, False)
    assert wrong.gap == tie.gap


def test_a_near_tie_in_bfloat16_is_as_wide_as_its_numbers():
    row = torch.tensor([20.0, 3.0, -1.0])
    assert near_tie_gap("float32", row) == 1e-3
    step = (
        float(
            torch.tensor(20.0, dtype=torch.bfloat16).nextafter(
                torch.tensor(99.0, dtype=torch.bfloat16)
            )
        )
        - 20.0
    )
    assert near_tie_gap("bfloat16", row) == 4 * step


def test_argmax_matches_of_greedy_output_are_all():
    pair = table_pair()
    tokens = (
        pair.engine()
        .generate([3, 4], pair.sampling(max_tokens=10), build_strategy("autoregressive"))
        .output
    )
    assert agreement(pair, [3, 4], tokens).matches == len(tokens)


def test_labels_tell_configs_apart():
    assert labels_of([StrategyChoice("spide", {"tau": 0.5}), StrategyChoice("vanilla_sd")]) == [
        "spide",
        "vanilla_sd",
    ]
    assert labels_of(
        [StrategyChoice("spide", {"tau": 0.5}), StrategyChoice("spide", {"tau": 0.7})]
    ) == ["spide(tau=0.5)", "spide(tau=0.7)"]
    with raises_code("named_twice", "spide"):
        labels_of([StrategyChoice("spide"), StrategyChoice("spide")])


def test_peers_draft_as_many_tokens_as_vanilla_sd():
    assert (
        gamma_of(
            [StrategyChoice("spide"), StrategyChoice("vanilla_sd", {"num_speculative_tokens": "3"})]
        )
        == 3
    )
    assert gamma_of([]) == 5


def test_a_champion_is_measured_with_artifacts_of_its_own():
    pair, resources = table_pair(), table_resources(vocab=24)
    sure = AcceptanceTable([1000] * 20, [1000] * 20, ORIGIN)
    theirs = StrategyResources(
        {"acceptance_table": sure, "hardware_profile": HardwareProfile(1.0, {1: 2.0}, 0.0, ORIGIN)},
        deterministic=True,
    )
    champion = StrategyContender(
        pair, theirs, StrategyChoice("spide", {"parallel": False}), "champion"
    )
    entries = run_bench(
        pair,
        [StrategyChoice("spide", {"parallel": False})],
        PROMPTS,
        resources,
        BenchSettings(max_tokens=24),
        extra=[champion],
    ).to_json()["strategies"]
    assert entries["champion"]["strategy"] == "spide"
    # it trusts its draft
    assert entries["champion"]["draft_calls"] > entries["spide"]["draft_calls"]


@pytest.mark.parametrize(
    ("arguments", "code", "name"),
    [
        ({"prompts": []}, "no_prompts", "no prompts"),
        (
            {"settings": QUICK.model_copy(update={"peers": ("llamacpp",)})},
            "unknown_peer",
            "llamacpp",
        ),
        ({"strategies": [StrategyChoice("vanila_sd")]}, None, "vanilla_sd"),
        ({"strategies": [StrategyChoice("spide")]}, None, "acceptance_table"),
        (
            {"settings": QUICK.model_copy(update={"max_tokens": 600})},
            "context_too_long",
            "prompt p0",
        ),
    ],
)
def test_mistakes_are_named_in_a_line(arguments, code, name):
    defaults = {
        "strategies": [],
        "prompts": PROMPTS,
        "resources": StrategyResources(),
        "settings": QUICK,
    }
    with pytest.raises(DraftwellError) as error:
        run_bench(table_pair(), **(defaults | arguments)).to_json()
    assert code in (None, error.value.code)
    assert name in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "wrong",
    [{"runs": 0}, {"max_tokens": 0}, {"concurrency": 1}, {"temperature": -1.0}, {"tokens": 4}],
)
def test_settings_out_of_bounds_are_refused(wrong):
    with raises_code("bad_settings", next(iter(wrong))):
        BenchSettings(**wrong)


def test_threads_are_set_for_the_run_only():
    before = torch.get_num_threads()
    report = run_bench(
        table_pair(),
        [],
        PROMPTS[:1],
        StrategyResources(),
        BenchSettings(max_tokens=2, threads=before + 1),
    ).to_json()
    assert report["machine"]["threads"] == before + 1
    assert torch.get_num_threads() == before


def test_vanilla_sd_that_drafts_otherwise_is_no_baseline():
    """Peers and cost ratios are compared with the draft model's, behind the prompt."""
    kinds = [{}, {"num_speculative_tokens": "3"}, {"drafter": "qualifier"}, {"draft_first": "true"}]
    assert [is_baseline("vanilla_sd", kind) for kind in kinds] == [True, True, False, False]
    assert not is_baseline("svip", {})
    report = run_bench(
        table_pair(),
        [
            StrategyChoice("vanilla_sd", {"num_speculative_tokens": 2}),
            StrategyChoice("vanilla_sd", {"num_speculative_tokens": 2, "draft_first": True}),
        ],
        PROMPTS[:2],
        StrategyResources(),
        BenchSettings(max_tokens=12),
    )
    against = [
        entry.over_vanilla.against for entry in report.strategies.values() if entry.over_vanilla
    ]
    assert against
    assert [label for label in against if "draft_first" in label] == []
