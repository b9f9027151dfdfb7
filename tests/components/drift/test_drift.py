"""Drift: no false alarms at the stated rate, found where it is real, and nothing said of too
little."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError
from scipy.stats import ks_2samp, permutation_test

from draftwell.components.calibrate.acceptance_table import build_acceptance_table
from draftwell.components.drift.comparison import BINS, by_bin
from draftwell.components.drift.prompts import untouched_prompts
from draftwell.components.drift.report import (
    drift_json,
    drift_markdown,
    drift_plots,
    drift_table,
    headline,
)
from draftwell.components.drift.schema import CHECKS, DriftLimits, DriftReport
from draftwell.components.drift.statistics import exchange, rate_change, share
from draftwell.components.drift.traffic import COLUMNS
from draftwell.components.prompts.prompt import Prompt
from draftwell.components.report.intervals import bootstrap_of_sums
from draftwell.components.train.verifier import train_verifier
from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.correction_memory import CorrectionMemory
from draftwell.serving.recording.trace import TraceSet
from tests.support.collecting import collect_traces
from tests.support.errors import raises_code
from tests.support.loop.drift_traffic import LIMITS, LOOSE, compared, rows, traffic, verifier
from tests.support.models.tiny import llama_pair

ORIGIN = Provenance(pair="tiny", fingerprint="f" * 64)
TRIALS = 60


def test_exchanging_prompts_equals_scipys_permutation_test() -> None:
    """Few prompts, so that scipy goes through all exchanges."""
    random = np.random.default_rng(4)
    then, now = (
        np.stack([random.integers(0, 20, 5), np.full(5, 20)], axis=1).astype(float)
        for _ in range(2)
    )
    pooled = np.concatenate([then, now])

    def statistic(a: np.ndarray, b: np.ndarray, axis: int) -> np.ndarray:
        return rate_change(pooled[a.astype(int)].sum(-2), pooled[b.astype(int)].sum(-2))

    slow = permutation_test(
        (np.arange(5), np.arange(5, 10)),
        statistic,
        vectorized=True,
        alternative="greater",
        n_resamples=np.inf,
        axis=-1,
    )
    fast = exchange(then, now, rate_change, resamples=20_000)
    assert fast.value == pytest.approx(float(slow.statistic))
    assert fast.p_value == pytest.approx(float(slow.pvalue), abs=0.02)
    assert fast.chance == pytest.approx(float(np.median(slow.null_distribution)), abs=0.02)


def test_p_values_of_unchanged_traffic_are_even() -> None:
    """Each check by itself: p below one half in half of the trials, more or less."""
    small: dict[str, int] = dict.fromkeys(CHECKS, 0)
    for seed in range(TRIALS):
        for check in compared(rows(2 * seed, 24), rows(2 * seed + 1, 24), LOOSE).checks:
            small[check.name] += check.p_value <= 0.5
    for name, count in small.items():
        assert 15 <= count <= 45, name  # mean 30, four standard deviations


def test_false_alarms_keep_to_the_stated_rate() -> None:
    """At 5 % and without limits on what matters; 60 trials have 10 alarms by chance once in a
    thousand times."""
    alarms = sum(
        compared(rows(1000 + 2 * seed, 24), rows(1001 + 2 * seed, 24), LOOSE).drifted
        for seed in range(TRIALS)
    )
    assert alarms <= 9


def test_a_test_that_takes_tokens_for_independent_would_cry_wolf() -> None:
    """The naive mistake, on the same made traffic: in 20 trials several p values that should come
    once in thousands."""
    needed = LIMITS.false_alarm_rate / len(CHECKS)
    naive = []
    for seed in range(20):
        then, now = (traffic(rows(2000 + 2 * seed + side, 24)).confidence for side in (0, 1))
        naive.append(ks_2samp(then, now).pvalue <= needed)
    assert sum(naive) >= 2


def test_ten_checks_on_unchanged_traffic_raise_nothing() -> None:
    reference = rows(1)
    reports = [compared(reference, rows(100 + day)) for day in range(10)]
    assert [report.verdict for report in reports] == ["steady"] * 10
    assert {len(report.checks) for report in reports} == {len(CHECKS)}


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"sure": -1.5}, {"confidence_psi", "acceptance"}),
        ({"kept": 0.5}, {"acceptance", "table"}),
        ({"label": 0.5}, {"verifier"}),
        ({"vocabulary": 10_000}, {"novelty"}),
        (
            {"sure": -1.5, "kept": 0.6, "label": 0.6, "vocabulary": 10_000},
            {"confidence_psi", "acceptance", "novelty"},
        ),
    ],
    ids=["confidence", "acceptance", "verifier", "novelty", "all"],
)
def test_a_real_change_is_found_and_named(change: dict[str, float], found: set[str]) -> None:
    for seed in range(5):
        report = compared(rows(3000 + seed), rows(4000 + seed, **change))
        assert report.verdict == "drift"
        drifted = {check.name for check in report.checks if check.drifted}
        assert found <= drifted
        assert len(report.reasons) == len(drifted)


def test_a_heavy_prior_hides_no_change_and_makes_none() -> None:
    """A table's weight smooths what it says. On the traffic's side it would leave a sixth of a
    change of 94 tokens a bin; and a draft that is half as often right as it is sure, then as now,
    is no drift, however far off the table is."""
    heavy = AcceptanceTable([96] * 20, [60] * 20, ORIGIN, prior_weight=1000)
    changed = compared(rows(3000), rows(4000, kept=0.5), table=heavy)
    steady = compared(rows(3000, kept=0.5), rows(4000, kept=0.5), table=heavy)
    (found, same) = (
        next(check for check in report.checks if check.name == "table")
        for report in (changed, steady)
    )
    assert found.drifted
    assert not same.drifted
    assert same.value > same.limit, "off, but no more than by chance"


def test_other_conditions_stay_quiet() -> None:
    """What has not changed is not blamed."""
    report = compared(rows(1), rows(2, vocabulary=10_000))
    assert {check.name for check in report.checks if check.drifted} == {"novelty"}
    assert report.novelty is not None
    assert report.novelty.now == 1.0


@pytest.mark.slow
def test_a_small_change_that_is_certain_is_no_drift() -> None:
    """Thousands of prompts make anything significant; the limits say what matters."""
    report = compared(rows(1, 2000, 12), rows(2, 2000, 12, kept=0.95))
    accepted = next(check for check in report.checks if check.name == "acceptance")
    assert accepted.p_value <= accepted.p_needed
    assert accepted.value < accepted.limit
    assert report.verdict == "steady"


def test_too_little_is_not_enough_yet() -> None:
    """However far apart they look."""
    few = compared(rows(1), rows(2, 23, sure=-3, kept=0.1))
    assert (few.verdict, few.checks) == ("not enough yet", ())
    assert few.reasons == (
        "the feedback has 23 different prompts, 24 are needed: wait for more traffic",
    )
    short = compared(rows(1), rows(2, 30, 5, sure=-3))
    assert "150 drafted positions" in short.reasons[0]
    reference = compared(rows(1, 11), rows(2, sure=-3))
    assert reference.verdict == "not enough yet"
    assert "calibrate on more prompts" in reference.reasons[0]


def test_what_is_said_again_and_again_is_one_prompt() -> None:
    """A probe that asks the same every minute is no traffic of hundreds."""
    same = rows(2, 40, sure=-3, prompt_tokens=[None if i % 48 else [7, 7] for i in range(40 * 48)])
    assert len(traffic(same).names) == 1
    assert compared(rows(1), same).verdict == "not enough yet"


def test_other_temperatures_and_longer_texts_are_left_out() -> None:
    table = rows(2, 30, 60)
    assert len(traffic(table)) == 30 * 48
    assert traffic(table).others == 30 * 12
    sampled = rows(2, 30, temperature=np.full(30 * 48, 0.7))
    assert (len(traffic(sampled)), traffic(sampled).others) == (0, 30 * 48)


def test_positions_that_were_not_drafted_say_nothing() -> None:
    holes = rows(2, 30, draft_token=[5 if i % 3 else None for i in range(30 * 48)])
    assert len(traffic(holes)) == 30 * 48 * 2 // 3
    assert traffic(holes).undrafted == 30 * 48 // 3


def test_what_a_strategy_chose_to_draft_is_no_fair_sample() -> None:
    """Positions where the draft is sure, and no others, would look like another traffic."""
    table = rows(2)
    sure = np.asarray(table.column("confidence")) > 0.4
    tokens = [
        token if known else None
        for token, known in zip(table.column("draft_token").to_pylist(), sure, strict=True)
    ]
    report = compared(rows(1), rows(2, draft_token=tokens))
    assert report.verdict == "not enough yet"
    assert "let the server record every position" in report.reasons[0]


def test_nan_is_refused() -> None:
    with raises_code("nan_in_traces"):
        traffic(rows(2, 30, confidence=np.full(30 * 48, np.nan)))


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> TraceSet:
    """A real trace of a tiny pair, with all kinds of prefixes."""
    letters = np.random.default_rng(0)
    prompts = [
        Prompt(f"p{i}", None, ["".join(letters.choice(list("abcdefgh"), 12))]) for i in range(8)
    ]
    return collect_traces(
        llama_pair(noise=0.1),
        prompts,
        tmp_path_factory.mktemp("traced"),
        max_tokens=24,
        rollout=5,
        batch=4,
        prefix_kinds=("bare", "draft", "target", "mixed"),
    )


def test_positions_are_counted_as_an_acceptance_table_counts_them(traced: TraceSet) -> None:
    """Without looking at a single rollout."""
    table = build_acceptance_table(traced, ORIGIN)
    found = traffic(traced.read(COLUMNS), max_tokens=24)
    sums = by_bin(found).sum(0)
    assert sums[:BINS].tolist() == table.accepted
    assert sums[BINS:].tolist() == table.total
    assert 0 < sum(table.accepted) < sum(table.total)


def test_the_verifiers_untouched_prompts_are_those_of_its_report(traced: TraceSet) -> None:
    _, report = train_verifier(traced, ORIGIN, seed=3)
    ids = traced.read(["prompt_id"]).column("prompt_id").to_pylist()
    assert untouched_prompts(sorted(set(ids)), 3) == report.prompts["test"]


def test_a_memory_that_knows_its_own_prompts_by_heart_raises_no_alarm() -> None:
    """Against the memory alone every new prompt looks new."""
    then, now = rows(1), rows(2)
    known = traffic(then)
    pairs = {tuple(pattern): 1 for pattern in known.pattern[known.kept < 1].tolist()}
    report = compared(then, now, memory=CorrectionMemory(pairs, ORIGIN))
    assert report.novelty is not None
    assert report.novelty.memory is not None
    assert report.novelty.memory > 0.02  # of the reference's own rejections it is 0
    assert report.verdict == "steady"


def test_a_verifier_without_its_features_is_not_checked() -> None:
    needs_states = verifier()
    needs_states.features = ("before",)
    report = compared(rows(1), rows(2), verifier=needs_states)
    assert report.verifier is None
    assert [check.name for check in report.checks] == [
        name for name in CHECKS if name != "verifier"
    ]
    assert any("verifier not checked" in note for note in report.notes)
    assert {check.p_needed for check in report.checks} == {LIMITS.false_alarm_rate / 4}


def test_intervals_are_wider_than_those_of_independent_tokens() -> None:
    """Two kinds of prompts, all kept or none: 40 prompts, not 1,920 tokens, are what is known."""
    kept = np.repeat(np.arange(40) % 2, 48).astype(float)
    report = compared(rows(1), rows(2, draft_p=kept))
    widest = max(b.now_high - b.now_low for b in report.bins if b.positions > 100)
    naive = 2 * 1.96 * np.sqrt(0.25 / 100)
    assert widest > naive
    for b in report.bins:
        assert b.now is None or b.now_low <= b.now <= b.now_high


def test_the_bootstrap_covers() -> None:
    """The share of kept tokens lies in its 95 % interval in most of 60 trials."""
    inside = 0
    for seed in range(TRIALS):
        found = traffic(rows(seed, 40))
        sums = found.sums(found.kept, np.ones(len(found)))
        low, high = bootstrap_of_sums(sums, lambda s: share(s[:, :1], s[:, 1:]), resamples=300)
        inside += bool(low[0] <= 0.556 <= high[0])
    assert inside >= 48


def test_equal_inputs_give_an_equal_report() -> None:
    first, again = (compared(rows(1), rows(2, sure=-1.5)) for _ in range(2))
    assert first.digest == again.digest
    assert compared(rows(1), rows(3, sure=-1.5)).digest != first.digest
    assert DriftReport.model_validate_json(first.model_dump_json()).digest == first.digest


def test_limits_are_strict() -> None:
    fields = LIMITS.model_dump()
    with pytest.raises(ValidationError, match="resamples must be at least 5000"):
        DriftLimits(**{**fields, "resamples": 999})
    with pytest.raises(ValidationError, match="Extra inputs"):
        DriftLimits(**fields, psi=0.2)


def test_a_report_for_people(tmp_path: Path) -> None:
    report = compared(rows(1), rows(2, sure=-1.5, kept=0.5), notes=("one shard left out",))
    words = drift_markdown(report)
    assert words.startswith("# Drift of tiny: drift\n")
    for reason in report.reasons:
        assert reason in words
        assert reason in headline(report)
    assert "- one shard left out" in words
    assert drift_table(report).row_count == len(report.checks)
    data = json.loads(json.dumps(drift_json(report), allow_nan=False))
    assert (data["schema_version"], data["digest"]) == (1, report.digest)
    assert sum(data["confidence_now"]) == pytest.approx(1)
    plots = drift_plots(report, tmp_path)
    assert [path.read_bytes()[:4] for path in plots] == [b"\x89PNG"] * 2
