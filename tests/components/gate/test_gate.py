"""The gate: every planted regression is caught, an unchanged candidate passes."""

import random

import pytest

from draftwell.components.bench.schema import BenchEntry, PromptRow
from draftwell.components.gate.baseline_checks import compare_with_baseline
from draftwell.components.gate.baseline_counts import (
    CountsReport,
    StrategyCounts,
    deterministic_report,
)
from draftwell.components.gate.bench_checks import judge_release
from draftwell.components.gate.evidence import Interval, at_least, at_most, prompts_to_decide
from draftwell.components.gate.footprint import Footprint, judge_footprint
from draftwell.components.gate.settings import ROUNDS
from draftwell.components.prompts.prompt import Prompt
from draftwell.registry.gates import load_gates
from draftwell.serving.bundle.verdict import (
    FAILED,
    PASSED,
    UNDECIDED,
    Check,
    GateVerdict,
    Skipped,
    Thresholds,
    is_called,
    settled,
)
from draftwell.serving.runtime.strategies import PLAIN, StrategyChoice
from tests.support.errors import raises_code
from tests.support.models.tiny import llama_pair, table_pair

THRESHOLDS = Thresholds(
    min_speedup_lower_bound=1.0,
    max_regression=0.05,
    lossless_identical=True,
    min_quality_ratio=0.9,
    max_tpot_ratio=1.1,
)


def rows(
    pace: float,
    *,
    noise: float = 0.02,
    seed: int = 0,
    prompts: int = 20,
    matching: float | None = None,
) -> list[PromptRow]:
    """Prompts of very different lengths, decoded at a pace that wavers; `matching`: share of tokens
    that are the target's argmax."""
    drawn = random.Random(seed)
    lengths = random.Random(99)
    return [
        PromptRow(
            prompt_id=f"p{i}",
            tokens=n,
            seconds=n * pace * (1 + noise * drawn.gauss(0, 1)),
            target_argmax=None
            if matching is None
            else sum(drawn.random() < matching for _ in range(n)),
        )
        for i, n in enumerate(lengths.choices([8, 40, 128], k=prompts))
    ]


def entry(**changes) -> BenchEntry:
    return BenchEntry(
        **{
            "strategy": "spide",
            "parameters": {"tau": 0.7},
            "lossless": True,
            "dtype": "float32",
            "identical_outputs": 19,
            "near_ties": 1,
            "acceptance_rate": 0.6,
            "per_prompt": rows(0.03),
            **changes,
        }
    )


PLAIN_ENTRY = entry(
    strategy="autoregressive",
    parameters={},
    acceptance_rate=None,
    per_prompt=rows(0.039, seed=50, matching=1.0),
)


def judge(
    candidate: BenchEntry,
    champion: BenchEntry | None = None,
    thresholds: Thresholds = THRESHOLDS,
    reference: BenchEntry | None = PLAIN_ENTRY,
) -> GateVerdict:
    return judge_release(candidate, champion, champion, thresholds, reference=reference)


def named(verdict: GateVerdict, result: str) -> list[str]:
    return [check.name for check in verdict.checks if check.result == result]


def failed(verdict: GateVerdict) -> list[str]:
    return named(verdict, FAILED)


def undecided(verdict: GateVerdict) -> list[str]:
    return named(verdict, UNDECIDED)


def test_a_good_candidate_passes_every_check():
    verdict = judge(entry(), entry(per_prompt=rows(0.031, seed=1)))
    assert verdict.passed
    assert {check.name for check in verdict.checks} == {
        "speedup",
        "regression",
        "identical outputs",
        "time per token",
    }


@pytest.mark.parametrize(("pace", "result"), [(0.036, PASSED), (0.039, UNDECIDED), (0.042, FAILED)])
def test_the_speedups_interval_decides_and_what_it_leaves_open_is_not_passed(pace, result):
    only = Thresholds(min_speedup_lower_bound=1.0)
    verdict = judge(entry(per_prompt=rows(pace, noise=0.05)), thresholds=only)
    assert verdict.result == result, verdict
    assert verdict.passed is (result == PASSED)


def test_plain_decoding_must_have_been_measured_to_judge_a_speed():
    assert failed(judge(entry(), reference=None)) == ["speedup"]


def test_autoregressive_need_not_be_faster_than_itself():
    assert judge(
        PLAIN_ENTRY, thresholds=THRESHOLDS.model_copy(update={"min_speedup_lower_bound": 1.1})
    ).passed


@pytest.mark.parametrize("seed", range(10))
def test_a_config_15_percent_slower_than_the_champion_is_caught_every_time(seed):
    champion = entry(per_prompt=rows(0.03, seed=100 + seed))
    assert failed(judge(entry(per_prompt=rows(0.0345, seed=seed)), champion)) == ["regression"]


@pytest.mark.parametrize("seed", range(10))
def test_an_unchanged_candidate_passes(seed):
    champion = entry(per_prompt=rows(0.03, seed=100 + seed, noise=0.03))
    assert judge(entry(per_prompt=rows(0.03, seed=seed, noise=0.03)), champion).passed


def test_champion_and_candidate_must_have_run_on_the_same_prompts():
    with raises_code("different_prompts"):
        judge(entry(), entry(per_prompt=rows(0.03, prompts=19)))


def test_one_prompt_decides_nothing():
    plain = entry(strategy="autoregressive", per_prompt=rows(0.06, prompts=1))
    verdict = judge(
        entry(per_prompt=rows(0.03, prompts=1)),
        reference=plain,
        thresholds=Thresholds(min_speedup_lower_bound=1.0),
    )
    assert (verdict.result, verdict.prompts_needed) == (UNDECIDED, None)


def test_more_prompts_decide_what_few_leave_open():
    """A candidate that is 3 % faster, each side with a noise of 10 % a prompt."""

    def verdict(prompts: int, seed: int) -> GateVerdict:
        plain = entry(
            strategy="autoregressive",
            per_prompt=rows(0.0309, prompts=prompts, seed=50 + seed, noise=0.1),
        )
        return judge(
            entry(per_prompt=rows(0.03, prompts=prompts, seed=seed, noise=0.1)),
            reference=plain,
            thresholds=Thresholds(min_speedup_lower_bound=1.0),
        )

    few = [verdict(16, seed) for seed in range(10)]
    left_open = [found for found in few if found.result == UNDECIDED]
    assert len(left_open) >= 5
    for found in left_open:
        assert found.prompts_needed is None or found.prompts_needed > 16
        assert (
            found.prompts_needed is None
            or f"{found.prompts_needed} prompts" in found.checks[0].detail
        )
    assert all(verdict(800, seed).passed for seed in range(3))


def test_a_value_at_the_threshold_gets_no_number_of_prompts():
    found = Interval(1.0001, 0.9, 1.1, 16)
    assert prompts_to_decide(found, 1.0) is None
    check = at_least("speedup", found, 1.0, "1.00 x")
    assert (check.result, check.prompts_needed) == (UNDECIDED, None)


@pytest.mark.parametrize(
    ("low", "high", "most", "least"),
    [
        (0.8, 0.9, PASSED, FAILED),
        (0.8, 1.0, PASSED, UNDECIDED),
        (0.8, 1.1, UNDECIDED, UNDECIDED),
        (1.0, 1.2, UNDECIDED, PASSED),
        (1.01, 1.2, FAILED, PASSED),
    ],
)
def test_both_directions_of_a_threshold(low, high, most, least):
    found = Interval((low + high) / 2, low, high, 16)
    assert at_most("x", found, 1.0, "").result == most
    assert at_least("x", found, 1.0, "").result == least


def test_three_verdicts_add_up():
    good, open_, bad = (
        GateVerdict((Check("x", 1, 1, passed, "", enough=enough, prompts_needed=needed),))
        for passed, enough, needed in ((True, True, None), (False, False, 40), (False, True, None))
    )
    assert [(good + other).result for other in (good, open_, bad)] == [PASSED, UNDECIDED, FAILED]
    assert (open_ + bad).result == FAILED
    assert (good + open_).prompts_needed == 40
    assert GateVerdict(()).result == FAILED, "nothing checked is nothing passed"


def test_a_lossy_config_called_lossless_is_caught():
    assert failed(judge(entry(identical_outputs=17, near_ties=1))) == ["identical outputs"]
    lossy = entry(
        identical_outputs=17, near_ties=1, lossless=False, per_prompt=rows(0.03, matching=0.97)
    )
    assert not failed(judge(lossy))


def test_identity_is_judged_in_any_format_whose_passes_are_exact():
    same = entry(identical_outputs=20, near_ties=0, dtype="bfloat16", exact=True)
    assert judge(same).passed
    assert judge(same).skipped == ()
    other = entry(identical_outputs=19, near_ties=0, dtype="bfloat16", exact=True)
    assert failed(judge(other)) == ["identical outputs"]


def test_identity_of_other_passes_is_judged_in_float32_only_and_said_otherwise():
    verdict = judge(entry(identical_outputs=10, near_ties=3, dtype="bfloat16"))
    assert verdict.passed
    [inexact] = verdict.skipped
    assert inexact.name == "identical outputs in bfloat16"
    assert "10 of 20" in inexact.why
    assert "float32" in inexact.why
    sampled = judge(entry(identical_outputs=None, near_ties=None))
    assert sampled.passed
    [unlike] = sampled.skipped
    assert (unlike.name, unlike.applies) == ("identical outputs", False)


def test_acceptance_explains_and_does_not_judge():
    """A candidate that accepts a third less and is faster all the same is better."""
    verdict = judge(entry(acceptance_rate=0.4), entry(per_prompt=rows(0.031, seed=1)))
    assert verdict.passed
    assert any(
        "acceptance, not judged: 0.400" in note and "0.600" in note for note in verdict.notes
    )


@pytest.mark.parametrize(("matching", "result"), [(0.97, PASSED), (0.9, UNDECIDED), (0.8, FAILED)])
def test_a_lossy_strategys_quality_is_judged_by_its_interval(matching, result):
    only = Thresholds(min_quality_ratio=0.9)
    assert (
        judge(
            entry(lossless=False, per_prompt=rows(0.03, matching=matching, seed=2)), thresholds=only
        ).result
        == result
    )


def test_a_lossy_strategy_needs_a_measured_quality():
    assert failed(judge(entry(lossless=False))) == ["quality"]


def spending(nats: list[float | None], **changes) -> GateVerdict:
    texts = [
        PromptRow(prompt_id=f"p{i}", tokens=40, seconds=1.0, divergence=one)
        for i, one in enumerate(nats)
    ]
    facts = {"strategy": "asd", "lossless": False, "parameters": {"budget": 2.0}} | changes
    return judge(entry(per_prompt=texts, **facts), thresholds=Thresholds(), reference=None)


def test_no_text_costs_more_regret_than_the_budget():
    assert spending([0.0, 2.0, 1.4]).passed
    assert failed(spending([0.0, 2.1, 0.0])) == ["regret"], "each text, not their mean"
    assert spending([7.9], parameters={}).passed, "the default is 8 nats"
    assert failed(spending([8.1], parameters={})) == ["regret"]


@pytest.mark.parametrize(
    ("nats", "changes", "skipped"),
    [
        ([1.0, None], {}, ["the target did not read the texts"]),
        ([9.0], {"dtype": "bfloat16"}, ["its forward passes in bfloat16 are not exact"]),
        ([9.0], {"greedy": False}, []),
        ([9.0], {"strategy": "lossy_sd", "parameters": {}}, []),
    ],
    ids=str,
)
def test_regret_is_judged_where_it_was_read_and_means_something(nats, changes, skipped):
    verdict = spending(nats, **changes)
    assert not verdict.checks
    assert [one.why for one in verdict.skipped if one.name == "regret"] == skipped
    assert not verdict.passed, "nothing checked is nothing passed"


def test_regret_in_exact_passes_is_judged_in_any_dtype():
    assert failed(spending([9.0], dtype="bfloat16", exact=True)) == ["regret"]


def test_slow_requests_are_caught():
    slow = [
        row.model_copy(update={"seconds": row.seconds * (1 if row.tokens > 8 else 3)})
        for row in rows(0.03)
    ]
    assert sum(row.tokens == 8 for row in slow) > 4
    verdict = judge(entry(per_prompt=slow))
    assert "speedup" not in failed(verdict) + undecided(verdict), "all of them together are faster"
    assert "time per token" in failed(verdict) + undecided(verdict)
    assert failed(
        judge(entry(per_prompt=rows(0.045)), thresholds=Thresholds(max_tpot_ratio=1.1))
    ) == ["time per token"]


def test_thresholds_are_data():
    assert failed(judge(entry(), thresholds=Thresholds(min_speedup_lower_bound=1.5))) == ["speedup"]
    assert not judge(entry(), thresholds=Thresholds()).passed  # nothing checked is nothing passed


PROMPTS = [Prompt(f"p{i}", None, [text]) for i, text in enumerate(["abcab cabinet", "hello hello"])]
CONFIGS = [
    PLAIN,
    StrategyChoice("vanilla_sd"),
    StrategyChoice("spide"),
    StrategyChoice("sprinter"),
    StrategyChoice("csd"),
    StrategyChoice("prompt_lookup"),
]


def counts(**changes) -> CountsReport:
    return CountsReport(
        **{
            "pair": "tiny",
            "fingerprint": "f",
            "prompts_digest": "d",
            "prompts": 2,
            "max_tokens": 8,
            "strategies": {
                "vanilla_sd": {
                    "target_calls": 1000,
                    "judged": 2000,
                    "accepted": 1200,
                    "output_digest": "a",
                }
            },
            **changes,
        }
    )


def changed(**values) -> CountsReport:
    return counts(
        strategies={"vanilla_sd": counts().strategies["vanilla_sd"].model_copy(update=values)}
    )


def test_counts_repeat_exactly_and_need_no_calibrated_artifact():
    first = deterministic_report(llama_pair(slots=1), CONFIGS, PROMPTS, 16)
    second = deterministic_report(llama_pair(slots=1), CONFIGS, PROMPTS, 16)
    assert first == second
    assert compare_with_baseline(first, second).passed
    lossless = {
        first.strategies[name].output_digest
        for name in ("autoregressive", "vanilla_sd", "spide", "prompt_lookup")
    }
    assert len(lossless) == 1
    plain = first.strategies["autoregressive"]
    assert plain == StrategyCounts(
        target_calls=30, judged=0, accepted=0, output_digest=plain.output_digest
    )


def test_a_recorded_report_is_what_the_registry_reads():
    report = deterministic_report(table_pair(), CONFIGS[:2], PROMPTS, 8).model_dump()
    assert CountsReport.model_validate(report).model_dump() == report


def test_counts_in_bfloat16_are_refused():
    pair = table_pair()
    pair.dtype = "bfloat16"
    with raises_code("needs_float32", "bfloat16", "--set dtype=float32"):
        deterministic_report(pair, CONFIGS[:1], PROMPTS, 8)


def test_a_flipped_near_tie_is_noted_and_the_counts_decide():
    verdict = compare_with_baseline(
        changed(output_digest="b", target_calls=1008, accepted=1193), counts()
    )
    assert verdict.passed
    assert any("outputs differ" in note for note in verdict.notes)


def test_counts_that_moved_are_caught():
    assert failed(compare_with_baseline(changed(target_calls=1030), counts())) == [
        "vanilla_sd: target calls"
    ]
    dropped = failed(compare_with_baseline(changed(accepted=1164), counts()))
    assert dropped == ["vanilla_sd: accepted"]


def test_one_flipped_near_tie_among_few_tokens_is_no_drop():
    recorded = changed(judged=98, accepted=41)
    for accepted in (39, 40, 43):
        assert compare_with_baseline(changed(judged=98, accepted=accepted), recorded).passed
    assert compare_with_baseline(changed(judged=100, accepted=40), recorded).passed
    assert failed(compare_with_baseline(changed(judged=98, accepted=38), recorded)) == [
        "vanilla_sd: accepted",
    ]
    assert "vanilla_sd: accepted" in failed(
        compare_with_baseline(changed(judged=0, accepted=0), recorded)
    )
    assert failed(
        compare_with_baseline(changed(judged=140, accepted=97), changed(judged=140, accepted=100))
    ) == ["vanilla_sd: accepted"], "3 % of enough tokens is a drop"


def test_a_strategy_that_was_not_run_fails_and_a_new_one_is_noted():
    report = counts(strategies={"spide": counts().strategies["vanilla_sd"]})
    verdict = compare_with_baseline(report, counts())
    assert failed(verdict) == ["vanilla_sd: present"]
    assert verdict.notes == ("spide: not in the baseline",)


@pytest.mark.parametrize(
    ("other", "value"), [("fingerprint", "g"), ("prompts_digest", "e"), ("max_tokens", 7)]
)
def test_reports_about_different_things_are_not_compared(other, value):
    with raises_code(
        "baseline_of_other_inputs", "pair tiny", "gate --pair tiny --set record_counts=true"
    ):
        compare_with_baseline(counts(**{other: value}), counts())


# What is planted, and what never fails: ten runs each, with clocks that waver as real ones do.

PAIRS_OF_SEEDS = [(seed, 100 + seed) for seed in range(10)]


def clock(
    pace: float,
    seed: int,
    *,
    runs: int = 1,
    prompts: int = 16,
    noise: float = 0.04,
    hiccup: float = 0.05,
) -> list[PromptRow]:
    """Prompts decoded at a pace (seconds a token): every run has noise of its own, and now and then
    another process had the core."""
    drawn, lengths = random.Random(seed), random.Random(7)
    rows = []
    for i in range(prompts):
        n = lengths.choice([24, 64, 128])
        # the prompt's difficulty is the same for everybody
        work = n * pace * lengths.uniform(0.6, 1.4)
        times = sorted(
            work
            * (1 + noise * drawn.gauss(0, 1))
            * (drawn.uniform(1.2, 1.6) if drawn.random() < hiccup else 1)
            for _ in range(runs)
        )
        rows.append(
            PromptRow(
                prompt_id=f"p{i}", tokens=n, seconds=times[(runs - 1) // 2], ttft_ms=pace * 1e3
            )
        )
    return rows


def judged(seeds: tuple[int, int], *, pace: float = 0.03) -> GateVerdict:
    """A candidate beside a champion of pace .03 and autoregressive decoding of .04, in as many
    rounds as the gate measures."""
    runs = ROUNDS
    plain = entry(
        strategy="autoregressive", per_prompt=clock(0.04, 1000 * runs + seeds[0], runs=runs)
    )
    champion = entry(
        per_prompt=clock(0.03, 10 * runs + seeds[1], runs=runs), identical_outputs=16, near_ties=0
    )
    candidate = entry(
        per_prompt=clock(pace, seeds[0], runs=runs), identical_outputs=16, near_ties=0
    )
    return judge(candidate, champion, reference=plain)


def test_ten_runs_of_an_unchanged_candidate_never_fail():
    verdicts = [judged(seeds) for seeds in PAIRS_OF_SEEDS]
    assert [failed(verdict) for verdict in verdicts] == [[]] * 10
    assert sum(verdict.passed for verdict in verdicts) >= 9, (
        "where all rounds were disturbed, it is left open"
    )


@pytest.mark.parametrize("seeds", PAIRS_OF_SEEDS)
def test_planted_15_percent_slower(seeds):
    assert "regression" in failed(judged(seeds, pace=0.03 * 1.15))


@pytest.mark.parametrize("seeds", PAIRS_OF_SEEDS)
def test_a_slow_tail_does_not_pass_and_a_single_slow_request_is_none(seeds):
    plain = entry(strategy="autoregressive", per_prompt=clock(0.04, 1000 + seeds[0], hiccup=0))
    fast = clock(0.03, seeds[0], hiccup=0)

    def result(slow: int) -> str:
        tail = [
            row.model_copy(update={"seconds": row.seconds * (3 if i < slow else 1)})
            for i, row in enumerate(fast)
        ]
        return judge(
            entry(per_prompt=tail), reference=plain, thresholds=Thresholds(max_tpot_ratio=1.1)
        ).result

    assert [result(slow) for slow in (0, 1, 3)] == [PASSED, PASSED, UNDECIDED]
    assert result(10) == FAILED


@pytest.mark.parametrize(
    ("found", "bad"),
    [
        (Footprint(12.0, 30.0), []),
        (Footprint(300.0, 30.0), ["bundle size"]),
        (Footprint(12.0, 130.0), ["start-up"]),
        (Footprint(12.0, 3.0, failure="the bundle does not start: no memory"), ["start-up"]),
        (Footprint(12.0, unmeasured="there is no cuda device here"), []),
    ],
)
def test_size_and_start_of_a_bundle(found, bad):
    verdict = judge_footprint(found, Thresholds(max_bundle_mb=250, max_startup_seconds=120))
    assert failed(verdict) == bad
    assert [one.why for one in verdict.skipped] == ([found.unmeasured] if found.unmeasured else [])
    if found.failure:
        assert verdict.checks[-1].detail == found.failure


def test_only_a_start_that_took_too_long_may_be_another_days():
    """A slow minute of the machine; what is too large, or does not start, is so each week."""
    limits = Thresholds(max_bundle_mb=250, max_startup_seconds=120)
    for found, transient in (
        (Footprint(12.0, 130.0), True),
        (Footprint(12.0, 240.0, failure="the bundle was not ready after 240 s"), True),
        (Footprint(12.0, 3.0, failure="the bundle does not start"), False),
        (Footprint(300.0, 30.0), False),
    ):
        assert [
            check.transient for check in judge_footprint(found, limits).checks if not check.passed
        ] == [transient], found


def test_a_check_that_did_not_run_is_a_note_or_not_enough_evidence_where_it_is_required():
    limits = Thresholds(required={"cpu": ("speedup", "predicts", "identical outputs", "start-up")})
    found = GateVerdict(
        (Check("sampled speedup", 1.2, 1.0, True, "fast"),),
        ("noted",),
        (
            Skipped("verifier predicts", "no traces"),
            Skipped("identical outputs", "it is lossy", applies=False),
            Skipped("likelihood", "it was not read"),
        ),
    )
    verdict = settled(found, limits, "cpu")
    assert [(check.name, check.result) for check in verdict.checks] == [
        ("sampled speedup", PASSED),
        ("verifier predicts", UNDECIDED),
        ("start-up", UNDECIDED),
    ], "nobody said why there was no start-up"
    assert all(check.transient for check in verdict.checks[1:])
    assert verdict.notes == (
        "noted",
        "identical outputs not checked: it is lossy",
        "likelihood not checked: it was not read",
    )
    assert verdict.skipped == ()
    assert settled(found, limits, "cuda").passed, "nothing is required there"
    let = settled(found, limits, "cpu", "measured on another machine")
    assert let.passed
    assert sum(note.endswith("; let pass: measured on another machine") for note in let.notes) == 2


def test_what_gates_yaml_requires_is_what_the_gate_checks():
    """A mistyped name would be required of every release, and none could pass."""
    limits = load_gates()
    both = judge(entry(), entry(), limits) + judge_footprint(Footprint(1.0, 1.0), limits)
    made = [*(check.name for check in both.checks), "verifier predicts"]
    for device, names in load_gates().required.items():
        assert device in ("cpu", "cuda", "vllm")
        assert [name for name in names if not any(is_called(one, name) for one in made)] == []


def test_verdicts_add_up():
    good, bad = (
        judge_footprint(found, Thresholds(max_bundle_mb=2))
        for found in (Footprint(1.0), Footprint(3.0, unmeasured="n"))
    )
    assert (good + good).passed
    assert failed(good + bad) == ["bundle size"]
    assert (good + bad).skipped == (Skipped("start-up", "n"),)
