"""Drift of another engine, by counts of drafts alone."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftwell.components.drift.acceptance import AcceptanceLine, compare_acceptance, read_lines
from draftwell.components.drift.report import drift_markdown, drift_table
from draftwell.components.drift.schema import DriftReport
from draftwell.components.engines.port import Acceptance
from draftwell.flows.steps.monitor import load_limits
from tests.support.errors import raises_code

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
SERVED = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3}
TUNED = Acceptance(
    rounds=1200, accepted_at=(720, 40, 30, 15, 5), each=((58, 100), (60, 100), (62, 100)) * 4
)


def line(minute: int, kept: int, drafts: int = 50, **changes: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "begun": BEGIN.timestamp() + 60 * minute,
        "bundle": "tiny/2-cpu",
        "method": "ngram",
        "num_speculative_tokens": 5,
        "rounds": drafts,
        "accepted_at": [kept, 1, 0, 0, 0],
        "model": "mine",
        **changes,
    }


def check(
    rows: list[dict[str, Any]],
    *,
    hours: float = 1.0,
    tuned: Acceptance = TUNED,
    served: Any = SERVED,
) -> Any:
    lines = [AcceptanceLine.model_validate(row) for row in rows]
    return compare_acceptance(
        lines,
        tuned,
        served,
        load_limits(),
        pair="tiny",
        fingerprint="f" * 64,
        bundle="tiny/2-cpu",
        now=BEGIN + timedelta(hours=hours),
    )


def traffic(share: float, minutes: int = 30, seed: int = 0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    return [line(minute, int(rng.binomial(50, share))) for minute in range(minutes)]


def test_traffic_that_fares_as_it_did_is_steady_and_other_traffic_is_drift() -> None:
    for seed in range(20):
        assert check(traffic(0.6, seed=seed)).verdict == "steady"
    worse, better = check(traffic(0.4)), check(traffic(0.8))
    assert (worse.verdict, better.verdict) == ("drift", "drift")
    assert worse.reference.acceptance == 0.6
    [found] = worse.checks
    assert (found.name, found.drifted, found.limit) == ("first_tokens", True, 0.05)
    assert found.p_value <= found.p_needed == load_limits().false_alarm_rate
    assert found.value == pytest.approx(0.6 - worse.feedback.acceptance)
    assert "kept 0.600 when it was tuned" in worse.why
    assert check(traffic(0.57, minutes=180), hours=4).verdict == "steady", (
        "a change below the limit does not count, however sure"
    )


def test_of_a_rule_that_learns_while_it_serves_only_a_fall_is_drift() -> None:
    served = {**SERVED, "method": "custom_class"}
    better, worse = (
        [{**row, "method": "custom_class"} for row in traffic(share)] for share in (0.8, 0.4)
    )
    assert [check(rows, served=served).verdict for rows in (better, worse)] == ["steady", "drift"]


def test_of_a_head_that_fares_worse_the_command_that_trains_it_is_named() -> None:
    """Tuning again would only make its drafts shorter."""
    served = {**SERVED, "method": "eagle3"}
    worse, better = (
        check([{**row, "method": "eagle3"} for row in traffic(share)], served=served)
        for share in (0.4, 0.8)
    )
    assert "`draftwell step train --kind eagle3_head --pair tiny`" in worse.why
    assert "draftwell step train" not in better.why
    assert "draftwell step train" not in check(traffic(0.4)).why, "n-grams are not trained"


def test_one_bad_minute_is_no_drift() -> None:
    rows = traffic(0.6, minutes=14)
    rows[3] = line(3, 0, 400)
    assert check(rows).verdict == "steady"


@pytest.mark.parametrize(
    ("rows", "options", "why"),
    [
        (traffic(0.3, minutes=11), {}, "11 minutes with 550 drafts"),
        ([line(i, 2, 20) for i in range(12)], {}, "12 minutes with 240 drafts"),
        (traffic(0.3), {"hours": 30.0}, "more than 24 hours ago"),
        (traffic(0.3), {"tuned": Acceptance()}, "nothing to compare"),
        (traffic(0.3), {"served": None}, "0 minutes"),
        (traffic(0.3), {"tuned": TUNED.model_copy(update={"each": ()})}, "tune and deploy again"),
    ],
)
def test_too_little_or_too_old_traffic_decides_nothing(
    rows: list[dict[str, Any]], options: dict[str, Any], why: str
) -> None:
    found = check(rows, **options)
    assert (found.verdict, found.drifted) == ("not enough yet", False)
    assert why in found.why


def test_lines_of_other_settings_are_left_out_and_the_newest_count() -> None:
    for other in ({"num_speculative_tokens": 3}, {"bundle": "tiny/1-cpu"}, {"bundle": None}):
        found = check([*traffic(0.6), *({**row, **other} for row in traffic(0.1))])
        assert (found.verdict, found.feedback.prompts) == ("steady", 30)
        assert found.notes[0] == (
            "30 lines of other bundles or settings than those that are served (tiny/2-cpu) "
            "are left out"
        )
    window = load_limits().window
    old = [line(minute, 5) for minute in range(100)]
    new = [line(100 + minute, 30) for minute in range(window)]
    assert check([*old, *new], hours=6).feedback.acceptance == 0.6


def test_a_line_that_is_being_written_or_foreign_is_passed_over(tmp_path: Path) -> None:
    with raises_code("spool_empty", "DRAFTWELL_SPOOL"):
        read_lines(tmp_path)
    (tmp_path / "acceptance-20260102-b-1.ndjson").write_text(
        json.dumps(line(9, 1)) + "\n" + json.dumps(line(10, 1))[:30]
    )
    newer = json.dumps({**line(1, 1), "version": 2})
    (tmp_path / "acceptance-20260103-a-1.ndjson").write_text(
        f"{json.dumps(line(2, 1))}\n[]\n{newer}\n"
    )
    (tmp_path / "requests-1.jsonl").write_text(json.dumps(line(3, 1)))
    assert [one.begun - BEGIN.timestamp() for one in read_lines(tmp_path)] == [120.0, 540.0]


def test_a_file_that_is_removed_while_it_is_read_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "acceptance-20260101-a-1.ndjson").symlink_to(tmp_path / "removed")
    (tmp_path / "acceptance-20260102-a-1.ndjson").write_text(json.dumps(line(2, 1)))
    assert len(read_lines(tmp_path)) == 1


def test_what_the_plug_in_writes_is_read(tmp_path: Path) -> None:
    from draftwell.registry.bundles.vllm.plugin.draftwell_vllm.spool import AcceptanceSpool

    spool = AcceptanceSpool(
        tmp_path, {"engine": "vllm", "method": "ngram", "num_speculative_tokens": 5}
    )
    spool.add(rounds=2, drafted=8, accepted=3, accepted_at=[2, 1], tokens=5, running=1)
    spool.write()
    (found,) = read_lines(tmp_path)
    assert (found.first, found.method, found.num_speculative_tokens) == ((2, 2), "ngram", 5)


def tuning_of(seed: int, share: float = 0.6, prompts: int = 12) -> Acceptance:
    """Prompts differ: a fifth of a share from one to the next, and thirty drafts each."""
    rng = np.random.default_rng(seed)
    shares = rng.beta(5 * share, 5 * (1 - share), prompts)
    each = tuple((int(rng.binomial(30, one)), 30) for one in shares)
    return Acceptance(rounds=30 * prompts, accepted_at=(sum(kept for kept, _ in each),), each=each)


def test_few_prompts_of_a_tuning_raise_no_alarm_where_traffic_is_as_it_was() -> None:
    """Taken as exact, a tuning on a dozen prompts that differ said drift of unchanged traffic again
    and again."""
    cases = [(traffic(0.6, seed=seed), tuning_of(seed)) for seed in range(60)]
    found = [check(rows, tuned=tuned) for rows, tuned in cases]
    assert sum(one.checks[0].value >= 0.05 for one in found) > 10
    assert sum(one.drifted for one in found) == 0
    small = sum(one.checks[0].p_value <= 0.5 for one in found)
    assert 15 <= small <= 45, "p below one half in half of the trials, more or less"
    worse = check(traffic(0.1), tuned=tuning_of(0))
    assert (worse.verdict, worse.checks[0].drifted) == ("drift", True)


def test_the_check_is_one_of_the_same_report() -> None:
    report = check(traffic(0.4))
    assert drift_table(report).row_count == 1
    assert "first tokens of drafts" in drift_markdown(report)
    assert "tiny/2-cpu; calibrated on 12 prompts, 1200 positions" in drift_markdown(report)
    assert DriftReport.model_validate_json(report.model_dump_json()) == report


def test_a_tuning_that_drafted_for_one_prompt_only_decides_nothing() -> None:
    tuned = Acceptance(rounds=30, accepted_at=(27,), each=((27, 30), (0, 0)))
    found = check(traffic(0.2), tuned=tuned)
    assert found.verdict == "not enough yet"
    assert "of one prompt or minute" in found.why
    assert found.checks == (), "JSON has no NaN"
