"""The gate: every planted regression is caught, an unchanged candidate passes."""

import random
from dataclasses import replace

import pytest

from components.bench.schema import BenchEntry, PromptRow
from components.gate.baseline_checks import compare_with_baseline
from components.gate.baseline_counts import CountsReport, StrategyCounts, deterministic_report
from components.gate.bench_checks import columns, judge_release, leaves_doubt, paces
from components.gate.footprint import Footprint, judge_footprint
from components.gate.verdict import GateVerdict, Thresholds
from components.prompts.prompt import Prompt
from components.report.intervals import paired_bootstrap_ratio
from serving.runtime.strategies import PLAIN, StrategyChoice
from tests.support.errors import raises_code
from tests.support.models.tiny import llama_pair, table_pair

THRESHOLDS = Thresholds(min_speedup_lower_bound=1.0, max_regression=0.05, lossless_identical=True, min_acceptance_ratio=0.98,
                        min_quality_ratio=0.9, max_p95_tpot_ratio=1.1)


def rows(pace: float, *, noise: float = 0.02, seed: int = 0, prompts: int = 20) -> list[PromptRow]:
    """Prompts of very different lengths, decoded at a pace that wavers."""
    drawn = random.Random(seed)
    lengths = random.Random(99)
    return [PromptRow(prompt_id=f"p{i}", tokens=n, seconds=n * pace * (1 + noise * drawn.gauss(0, 1)))
            for i, n in enumerate(lengths.choices([8, 40, 128], k=prompts))]


def entry(**changes) -> BenchEntry:
    return BenchEntry(**{
            "strategy": "spide", "parameters": {"tau": 0.7}, "lossless": True, "dtype": "float32", "speedup": 1.3, "speedup_low": 1.2,
            "identical_outputs": 19, "near_ties": 1, "acceptance_rate": 0.6, "quality_ratio": None, "tpot_p95_ratio": 0.9,
            "per_prompt": rows(0.03), **changes})


def failed(verdict: GateVerdict) -> list[str]:
    return [check.name for check in verdict.checks if not check.passed]


def test_a_good_candidate_passes_every_check():
    verdict = judge_release(entry(), entry(per_prompt=rows(0.031, seed=1)), entry(), THRESHOLDS)
    assert verdict.passed
    assert {check.name for check in verdict.checks} == {"speedup", "regression", "identical outputs", "acceptance", "p95 time per token"}


def test_the_lower_bound_of_the_speedup_counts_and_not_the_speedup():
    assert failed(judge_release(entry(speedup=1.08, speedup_low=0.97), None, None, THRESHOLDS)) == ["speedup"]
    assert not failed(judge_release(entry(speedup=1.08, speedup_low=1.0), None, None, THRESHOLDS))


def test_autoregressive_need_not_be_faster_than_itself():
    plain = entry(strategy="autoregressive", speedup=1.0, speedup_low=1.0, acceptance_rate=None, tpot_p95_ratio=1.0)
    assert judge_release(plain, None, None, replace(THRESHOLDS, min_speedup_lower_bound=1.1)).passed


@pytest.mark.parametrize("seed", range(10))
def test_a_config_15_percent_slower_than_the_champion_is_caught_every_time(seed):
    champion = entry(per_prompt=rows(0.03, seed=100 + seed))
    assert failed(judge_release(entry(per_prompt=rows(0.0345, seed=seed)), champion, None, THRESHOLDS)) == ["regression"]


@pytest.mark.parametrize("seed", range(10))
def test_an_unchanged_candidate_never_fails(seed):
    champion = entry(per_prompt=rows(0.03, seed=100 + seed, noise=0.05))
    assert judge_release(entry(per_prompt=rows(0.03, seed=seed, noise=0.05)), champion, entry(), THRESHOLDS).passed


def test_champion_and_candidate_must_have_run_on_the_same_prompts():
    with raises_code("different_prompts"):
        judge_release(entry(), entry(per_prompt=rows(0.03, prompts=19)), None, THRESHOLDS)


def test_a_lossy_config_called_lossless_is_caught():
    assert failed(judge_release(entry(identical_outputs=17, near_ties=1), None, None, THRESHOLDS)) == ["identical outputs"]
    assert not failed(judge_release(entry(identical_outputs=17, near_ties=1, lossless=False, quality_ratio=0.95), None, None, THRESHOLDS))


def test_identity_is_judged_in_float32_only_and_said_otherwise():
    verdict = judge_release(entry(identical_outputs=10, near_ties=3, dtype="bfloat16"), None, None, THRESHOLDS)
    assert verdict.passed
    assert any("10 of 20" in note and "float32" in note for note in verdict.notes)
    sampled = judge_release(entry(identical_outputs=None, near_ties=None), None, None, THRESHOLDS)
    assert sampled.passed
    assert any("sampled" in note for note in sampled.notes)


def test_an_acceptance_drop_of_3_percent_is_caught_and_a_rise_is_not():
    recorded = entry(acceptance_rate=0.6)
    assert failed(judge_release(entry(acceptance_rate=0.6 * 0.97), None, recorded, THRESHOLDS)) == ["acceptance"]
    assert not failed(judge_release(entry(acceptance_rate=0.6 * 0.985), None, recorded, THRESHOLDS))
    assert not failed(judge_release(entry(acceptance_rate=0.7), None, recorded, THRESHOLDS))


def test_what_has_no_baseline_is_noted():
    verdict = judge_release(entry(), None, None, THRESHOLDS)
    assert any("no baseline" in note for note in verdict.notes)


@pytest.mark.parametrize(("kept", "bad"), [(0.91, []), (0.89, ["quality"]), (None, ["quality"])])
def test_a_lossy_strategy_needs_its_quality_floor_and_a_measurement(kept, bad):
    assert failed(judge_release(entry(lossless=False, quality_ratio=kept), None, None, THRESHOLDS)) == bad


def test_slow_requests_are_caught():
    assert failed(judge_release(entry(tpot_p95_ratio=1.2), None, None, THRESHOLDS)) == ["p95 time per token"]


def test_thresholds_are_data():
    assert failed(judge_release(entry(speedup_low=1.2), None, None, Thresholds(min_speedup_lower_bound=1.5))) == ["speedup"]
    assert not judge_release(entry(), None, None, Thresholds()).passed  # nothing checked is nothing passed


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
    return CountsReport(**{"pair": "tiny", "fingerprint": "f", "prompts_digest": "d", "prompts": 2, "max_tokens": 8,
            "strategies": {"vanilla_sd": {"target_calls": 1000, "judged": 2000, "accepted": 1200, "output_digest": "a"}}, **changes})


def changed(**values) -> CountsReport:
    return counts(strategies={"vanilla_sd": counts().strategies["vanilla_sd"].model_copy(update=values)})


def test_counts_repeat_exactly_and_need_no_calibrated_artifact():
    first = deterministic_report(llama_pair(slots=1), CONFIGS, PROMPTS, 16)
    second = deterministic_report(llama_pair(slots=1), CONFIGS, PROMPTS, 16)
    assert first == second
    assert compare_with_baseline(first, second, THRESHOLDS).passed
    lossless = {first.strategies[name].output_digest for name in ("autoregressive", "vanilla_sd", "spide", "prompt_lookup")}
    assert len(lossless) == 1
    plain = first.strategies["autoregressive"]
    assert plain == StrategyCounts(target_calls=30, judged=0, accepted=0, output_digest=plain.output_digest)


def test_a_recorded_report_is_what_the_registry_reads():
    from registry.gates import Baseline

    report = deterministic_report(table_pair(), CONFIGS[:2], PROMPTS, 8).model_dump()
    assert Baseline.model_validate(report).model_dump() == report


def test_counts_in_bfloat16_are_refused():
    pair = table_pair()
    pair.dtype = "bfloat16"
    with raises_code("needs_float32", "bfloat16", "--dtype float32"):
        deterministic_report(pair, CONFIGS[:1], PROMPTS, 8)


def test_a_flipped_near_tie_is_noted_and_the_counts_decide():
    verdict = compare_with_baseline(changed(output_digest="b", target_calls=1008, accepted=1193), counts(), THRESHOLDS)
    assert verdict.passed
    assert any("outputs differ" in note for note in verdict.notes)


def test_counts_that_moved_are_caught():
    assert failed(compare_with_baseline(changed(target_calls=1030), counts(), THRESHOLDS)) == ["vanilla_sd: target calls"]
    dropped = failed(compare_with_baseline(changed(accepted=1164), counts(), THRESHOLDS))
    assert dropped == ["vanilla_sd: accepted", "vanilla_sd: acceptance"]


def test_one_flipped_near_tie_among_few_tokens_is_no_drop():
    recorded = changed(judged=98, accepted=41)
    for accepted in (39, 40, 43):
        assert compare_with_baseline(changed(judged=98, accepted=accepted), recorded, THRESHOLDS).passed
    assert compare_with_baseline(changed(judged=100, accepted=40), recorded, THRESHOLDS).passed
    assert failed(compare_with_baseline(changed(judged=98, accepted=38), recorded, THRESHOLDS)) == [
        "vanilla_sd: accepted", "vanilla_sd: acceptance"]
    assert "vanilla_sd: acceptance" in failed(compare_with_baseline(changed(judged=0, accepted=0), recorded, THRESHOLDS))
    assert failed(compare_with_baseline(changed(judged=140, accepted=97), changed(judged=140, accepted=100), THRESHOLDS)) == [
        "vanilla_sd: accepted", "vanilla_sd: acceptance"], "3 % of enough tokens is a drop"


def test_a_strategy_that_was_not_run_fails_and_a_new_one_is_noted():
    report = counts(strategies={"spide": counts().strategies["vanilla_sd"]})
    verdict = compare_with_baseline(report, counts(), THRESHOLDS)
    assert failed(verdict) == ["vanilla_sd: present"]
    assert verdict.notes == ("spide: not in the baseline",)


@pytest.mark.parametrize(("other", "value"), [("fingerprint", "g"), ("prompts_digest", "e"), ("max_tokens", 7)])
def test_reports_about_different_things_are_not_compared(other, value):
    with raises_code("baseline_of_other_inputs", "pair tiny", "gate --pair tiny --record"):
        compare_with_baseline(counts(**{other: value}), counts(), THRESHOLDS)


# What is planted, and what never fails: ten runs each, with clocks that waver as real ones do.

PAIRS_OF_SEEDS = [(seed, 100 + seed) for seed in range(10)]


def clock(pace: float, seed: int, *, runs: int = 1, prompts: int = 16, noise: float = 0.04, hiccup: float = 0.05) -> list[PromptRow]:
    """Prompts decoded at a pace (seconds a token): every run has noise of its own, and now and then another process had the core."""
    drawn, lengths = random.Random(seed), random.Random(7)
    rows = []
    for i in range(prompts):
        n = lengths.choice([24, 64, 128])
        work = n * pace * lengths.uniform(0.6, 1.4)  # the prompt's difficulty is the same for everybody
        times = sorted(work * (1 + noise * drawn.gauss(0, 1)) * (drawn.uniform(1.2, 1.6) if drawn.random() < hiccup else 1)
                       for _ in range(runs))
        rows.append(PromptRow(prompt_id=f"p{i}", tokens=n, seconds=times[(runs - 1) // 2], ttft_ms=pace * 1e3))
    return rows


def measured(rows: list[PromptRow], reference: list[PromptRow], **changes) -> BenchEntry:
    """An entry as a bench makes it of a clock: speedup with its interval, and the slowest requests."""
    speedup, low, _ = paired_bootstrap_ratio(*columns(reference), *columns(rows))
    slowest = max(paces(rows).values()) / max(paces(reference).values())
    same = {"identical_outputs": len(rows), "near_ties": 0}
    return entry(per_prompt=rows, speedup=speedup, speedup_low=low, tpot_p95_ratio=slowest, **same, **changes)


def judged(seeds: tuple[int, int], *, pace: float = 0.03, **changes) -> GateVerdict:
    """A candidate beside a champion of pace .03 and autoregressive decoding of .04, measured again where that leaves doubt."""
    for runs in (1, 3):
        plain = clock(0.04, 1000 * runs + seeds[0], runs=runs)
        champion = measured(clock(0.03, 10 * runs + seeds[1], runs=runs), plain)
        candidate = measured(clock(pace, seeds[0], runs=runs), plain, **changes)
        verdict = judge_release(candidate, champion, champion, THRESHOLDS, reference=BenchEntry(per_prompt=plain))
        if not leaves_doubt(verdict, candidate, champion, THRESHOLDS):
            break
    return verdict


@pytest.mark.parametrize("seeds", PAIRS_OF_SEEDS)
def test_ten_runs_of_an_unchanged_candidate_never_fail(seeds):
    assert failed(judged(seeds)) == []


@pytest.mark.parametrize("seeds", PAIRS_OF_SEEDS)
def test_planted_15_percent_slower(seeds):
    assert "regression" in failed(judged(seeds, pace=0.03 * 1.15))


@pytest.mark.parametrize("seeds", PAIRS_OF_SEEDS)
def test_planted_acceptance_drop_of_3_percent(seeds):
    assert failed(judged(seeds, acceptance_rate=0.6 * 0.97)) == ["acceptance"]


@pytest.mark.parametrize("seeds", PAIRS_OF_SEEDS)
def test_a_slow_tail_is_caught_and_a_single_slow_request_is_none(seeds):
    plain = clock(0.04, 1000 + seeds[0], hiccup=0)
    rows = clock(0.03, seeds[0], hiccup=0)

    def verdict(slow: int) -> list[str]:
        tail = [row.model_copy(update={"seconds": row.seconds * (3 if i < slow else 1)}) for i, row in enumerate(rows)]
        return failed(judge_release(entry(per_prompt=tail, tpot_p95_ratio=9.9), None, None, Thresholds(max_p95_tpot_ratio=1.1),
                            reference=BenchEntry(per_prompt=plain)))

    assert verdict(1) == []
    assert verdict(2) == [], "where a twentieth is slow, two of sixteen are with a probability of 19 %"
    assert verdict(3) == ["p95 time per token"]


def test_one_word_for_the_acceptance_of_another_config():
    """The gate's caller gives no reference where the champion decodes otherwise; then acceptance is noted, not judged."""
    plain = clock(0.04, 1)
    candidate, champion = measured(clock(0.03, 2), plain, acceptance_rate=0.3), measured(clock(0.03, 3), plain)
    verdict = judge_release(candidate, champion, None, THRESHOLDS, reference=BenchEntry(per_prompt=plain))
    assert verdict.passed
    assert any("acceptance not checked" in note for note in verdict.notes)


@pytest.mark.parametrize(("found", "bad"), [
    (Footprint(12.0, 30.0), []), (Footprint(300.0, 30.0), ["bundle size"]), (Footprint(12.0, 130.0), ["start-up"]),
    (Footprint(12.0, 3.0, failure="the bundle does not start: no memory"), ["start-up"]),
    (Footprint(12.0, note="start-up not measured: cuda"), [])])
def test_size_and_start_of_a_bundle(found, bad):
    verdict = judge_footprint(found, Thresholds(max_bundle_mb=250, max_startup_seconds=120))
    assert failed(verdict) == bad
    assert verdict.notes == ((found.note,) if found.note else ())
    if found.failure:
        assert verdict.checks[-1].detail == found.failure


def test_only_a_start_that_took_too_long_may_be_another_days():
    """A slow minute of the machine; what is too large, or does not start, is so each week."""
    limits = Thresholds(max_bundle_mb=250, max_startup_seconds=120)
    for found, transient in ((Footprint(12.0, 130.0), True), (Footprint(12.0, 240.0, failure="the bundle was not ready after 240 s"), True),
                             (Footprint(12.0, 3.0, failure="the bundle does not start"), False), (Footprint(300.0, 30.0), False)):
        assert [check.transient for check in judge_footprint(found, limits).checks if not check.passed] == [transient], found


def test_verdicts_add_up():
    good, bad = (judge_footprint(found, Thresholds(max_bundle_mb=2)) for found in (Footprint(1.0), Footprint(3.0, note="n")))
    assert (good + good).passed
    assert failed(good + bad) == ["bundle size"]
    assert (good + bad).notes == ("n",)


def test_doubt_is_what_is_no_clear_pass():
    plain, champion = rows(0.04, noise=0), entry(per_prompt=rows(0.03, noise=0))
    for pace, doubt in ((0.03, False), (0.0312, False), (0.033, True), (0.06, True)):
        candidate = entry(per_prompt=rows(pace, noise=0))
        verdict = judge_release(candidate, champion, None, THRESHOLDS, reference=BenchEntry(per_prompt=plain))
        assert leaves_doubt(verdict, candidate, champion, THRESHOLDS) is doubt, pace
    slow = entry(speedup_low=0.9, per_prompt=rows(0.03, noise=0))
    assert leaves_doubt(judge_release(slow, champion, None, THRESHOLDS), slow, champion, THRESHOLDS)
    assert leaves_doubt(judge_release(slow, None, None, THRESHOLDS), slow, None, THRESHOLDS), "a first release is measured again too"
    assert not leaves_doubt(judge_release(entry(), None, None, THRESHOLDS), entry(), None, THRESHOLDS)
    lossy = entry(acceptance_rate=0.1, per_prompt=rows(0.03, noise=0))  # no clock will mend that
    assert not leaves_doubt(judge_release(lossy, champion, champion, THRESHOLDS), lossy, champion, THRESHOLDS)
