"""The gate: every planted regression is caught, an unchanged candidate passes."""

import random

import pytest

from components.counting import deterministic_report
from components.gate import GateVerdict, compare_with_baseline, judge
from components.prompts import Prompt
from serving.runtime.types import DraftwellError
from tests.components.tiny import llama_pair, table_pair

THRESHOLDS = {"min_speedup_lower_bound": 1.0, "max_regression": 0.05, "lossless_identical": True, "min_acceptance_ratio": 0.98,
              "min_quality_ratio": 0.9, "max_p95_tpot_ratio": 1.1}


def rows(pace: float, *, noise: float = 0.02, seed: int = 0, prompts: int = 20) -> list[dict]:
    """Prompts of very different lengths, decoded at a pace that wavers."""
    drawn = random.Random(seed)
    lengths = random.Random(99)
    return [{"prompt_id": f"p{i}", "tokens": n, "seconds": n * pace * (1 + noise * drawn.gauss(0, 1))}
            for i, n in enumerate(lengths.choices([8, 40, 128], k=prompts))]


def entry(**changes) -> dict:
    return {"strategy": "spide", "parameters": {"tau": 0.7}, "lossless": True, "dtype": "float32", "speedup": 1.3, "speedup_low": 1.2,
            "identical_outputs": 19, "near_ties": 1, "acceptance_rate": 0.6, "quality_ratio": None, "tpot_p95_ratio": 0.9,
            "per_prompt": rows(0.03), **changes}


def failed(verdict: GateVerdict) -> list[str]:
    return [check.name for check in verdict.checks if not check.passed]


def test_a_good_candidate_passes_every_check():
    verdict = judge(entry(), entry(per_prompt=rows(0.031, seed=1)), {"acceptance_rate": 0.6}, THRESHOLDS)
    assert verdict.passed
    assert {check.name for check in verdict.checks} == {"speedup", "regression", "identical outputs", "acceptance", "p95 time per token"}


def test_the_lower_bound_of_the_speedup_counts_and_not_the_speedup():
    assert failed(judge(entry(speedup=1.08, speedup_low=0.97), None, None, THRESHOLDS)) == ["speedup"]
    assert not failed(judge(entry(speedup=1.08, speedup_low=1.0), None, None, THRESHOLDS))


def test_autoregressive_need_not_be_faster_than_itself():
    plain = entry(strategy="autoregressive", speedup=1.0, speedup_low=1.0, acceptance_rate=None, tpot_p95_ratio=1.0)
    assert judge(plain, None, None, THRESHOLDS | {"min_speedup_lower_bound": 1.1}).passed


@pytest.mark.parametrize("seed", range(10))
def test_a_config_15_percent_slower_than_the_champion_is_caught_every_time(seed):
    champion = entry(per_prompt=rows(0.03, seed=100 + seed))
    assert failed(judge(entry(per_prompt=rows(0.0345, seed=seed)), champion, None, THRESHOLDS)) == ["regression"]


@pytest.mark.parametrize("seed", range(10))
def test_an_unchanged_candidate_never_fails(seed):
    champion = entry(per_prompt=rows(0.03, seed=100 + seed, noise=0.05))
    assert judge(entry(per_prompt=rows(0.03, seed=seed, noise=0.05)), champion, {"acceptance_rate": 0.6}, THRESHOLDS).passed


def test_champion_and_candidate_must_have_run_on_the_same_prompts():
    with pytest.raises(DraftwellError, match="different prompts"):
        judge(entry(), entry(per_prompt=rows(0.03, prompts=19)), None, THRESHOLDS)


def test_a_lossy_config_called_lossless_is_caught():
    assert failed(judge(entry(identical_outputs=17, near_ties=1), None, None, THRESHOLDS)) == ["identical outputs"]
    assert not failed(judge(entry(identical_outputs=17, near_ties=1, lossless=False, quality_ratio=0.95), None, None, THRESHOLDS))


def test_identity_is_judged_in_float32_only_and_said_otherwise():
    verdict = judge(entry(identical_outputs=10, near_ties=3, dtype="bfloat16"), None, None, THRESHOLDS)
    assert verdict.passed
    assert any("10 of 20" in note and "float32" in note for note in verdict.notes)
    sampled = judge(entry(identical_outputs=None, near_ties=None), None, None, THRESHOLDS)
    assert sampled.passed
    assert any("sampled" in note for note in sampled.notes)


def test_an_acceptance_drop_of_3_percent_is_caught_and_a_rise_is_not():
    recorded = {"strategies": {"spide": {"accepted": 600, "judged": 1000, "target_calls": 1, "output_digest": ""}}}
    assert failed(judge(entry(acceptance_rate=0.6 * 0.97), None, recorded, THRESHOLDS)) == ["acceptance"]
    assert not failed(judge(entry(acceptance_rate=0.6 * 0.985), None, recorded, THRESHOLDS))
    assert not failed(judge(entry(acceptance_rate=0.7), None, recorded, THRESHOLDS))


def test_what_has_no_baseline_is_noted():
    verdict = judge(entry(), None, None, THRESHOLDS)
    assert any("no baseline" in note for note in verdict.notes)


@pytest.mark.parametrize(("kept", "bad"), [(0.91, []), (0.89, ["quality"]), (None, ["quality"])])
def test_a_lossy_strategy_needs_its_quality_floor_and_a_measurement(kept, bad):
    assert failed(judge(entry(lossless=False, quality_ratio=kept), None, None, THRESHOLDS)) == bad


def test_slow_requests_are_caught():
    assert failed(judge(entry(tpot_p95_ratio=1.2), None, None, THRESHOLDS)) == ["p95 time per token"]


def test_thresholds_are_data():
    assert failed(judge(entry(speedup_low=1.2), None, None, {"min_speedup_lower_bound": 1.5})) == ["speedup"]
    assert not judge(entry(), None, None, {}).passed  # nothing checked is nothing passed


PROMPTS = [Prompt(f"p{i}", None, [text]) for i, text in enumerate(["abcab cabinet", "hello hello"])]
CONFIGS = [("autoregressive", {}), ("vanilla_sd", {}), ("spide", {}), ("sprinter", {}), ("csd", {}), ("prompt_lookup", {})]


def counts() -> dict:
    return {"pair": "tiny", "fingerprint": "f", "prompts_digest": "d", "prompts": 2, "max_tokens": 8,
            "strategies": {"vanilla_sd": {"target_calls": 1000, "judged": 2000, "accepted": 1200, "output_digest": "a"}}}


def changed(**values) -> dict:
    report = counts()
    report["strategies"]["vanilla_sd"].update(values)
    return report


def test_counts_repeat_exactly_and_need_no_calibrated_artifact():
    first = deterministic_report(llama_pair(slots=1), CONFIGS, PROMPTS, 16)
    second = deterministic_report(llama_pair(slots=1), CONFIGS, PROMPTS, 16)
    assert first == second
    assert compare_with_baseline(first, second, THRESHOLDS).passed
    lossless = {first["strategies"][name]["output_digest"] for name in ("autoregressive", "vanilla_sd", "spide", "prompt_lookup")}
    assert len(lossless) == 1
    assert first["strategies"]["autoregressive"] | {"output_digest": ""} == {
        "target_calls": 30, "judged": 0, "accepted": 0, "output_digest": ""}


def test_a_recorded_report_is_what_the_registry_reads():
    from registry.gates import Baseline

    report = deterministic_report(table_pair(), CONFIGS[:2], PROMPTS, 8)
    assert Baseline.model_validate(report).model_dump() == report


def test_counts_in_bfloat16_are_refused():
    pair = table_pair()
    pair.dtype = "bfloat16"
    with pytest.raises(DraftwellError, match="float32"):
        deterministic_report(pair, CONFIGS[:1], PROMPTS, 8)


def test_a_flipped_near_tie_is_noted_and_the_counts_decide():
    verdict = compare_with_baseline(changed(output_digest="b", target_calls=1008, accepted=1193), counts(), THRESHOLDS)
    assert verdict.passed
    assert any("outputs differ" in note for note in verdict.notes)


def test_counts_that_moved_are_caught():
    assert failed(compare_with_baseline(changed(target_calls=1030), counts(), THRESHOLDS)) == ["vanilla_sd: target calls"]
    dropped = failed(compare_with_baseline(changed(accepted=1164), counts(), THRESHOLDS))
    assert dropped == ["vanilla_sd: accepted", "vanilla_sd: acceptance"]


def test_a_strategy_that_was_not_run_fails_and_a_new_one_is_noted():
    report = counts()
    report["strategies"]["spide"] = report["strategies"].pop("vanilla_sd")
    verdict = compare_with_baseline(report, counts(), THRESHOLDS)
    assert failed(verdict) == ["vanilla_sd: present"]
    assert verdict.notes == ("spide: not in the baseline",)


@pytest.mark.parametrize("other", ["fingerprint", "prompts_digest", "max_tokens"])
def test_reports_about_different_things_are_not_compared(other):
    with pytest.raises(DraftwellError, match="record it again"):
        compare_with_baseline(counts() | {other: 7}, counts(), THRESHOLDS)
