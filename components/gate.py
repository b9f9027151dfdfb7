"""The gate: may a candidate be released? Figures and thresholds in, a verdict out; nothing is run, read or written.

Two forms. `judge` reads an entry of a bench report: speed with intervals, identity, quality, all measured on this
machine now. `compare_with_baseline` reads float32 greedy counts, which are the same on every machine: what a fresh
clone in CI can check without trusting its clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from components.statistics import paired_bootstrap_ratio
from serving.runtime.types import DraftwellError

COUNT_TOLERANCE = 0.01
"""Share by which counts may leave the baseline's: a flipped near-tie changes the rest of one output and no more."""
COUNTS = ("target_calls", "judged", "accepted")


@dataclass(frozen=True)
class Check:
    """One value against its threshold; `detail` says it in words."""

    name: str
    value: float
    threshold: float
    passed: bool
    detail: str


@dataclass(frozen=True)
class GateVerdict:
    """All checks, and what could not be checked."""

    checks: tuple[Check, ...]
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether there were checks and none failed."""
        return bool(self.checks) and all(check.passed for check in self.checks)


def judge(candidate: Mapping[str, Any], champion: Mapping[str, Any] | None, baseline: Mapping[str, Any] | None,
          thresholds: Mapping[str, Any]) -> GateVerdict:
    """Judge a candidate.

    Args:
        candidate: its entry in the `strategies` of a bench report.
        champion: the champion's entry in the same report (measured interleaved, on the same prompts), if there is one.
        baseline: a report of `deterministic_report` that holds the candidate's strategy, or the entry of an earlier bench;
            the candidate's acceptance is held against its.
        thresholds: of registry/gates.yaml: min_speedup_lower_bound, max_regression, lossless_identical,
            min_acceptance_ratio, min_quality_ratio, max_p95_tpot_ratio. A threshold that is absent is not checked.
    Raises:
        DraftwellError: champion and candidate were measured on different prompts.
    """
    judging = _Judging(candidate, thresholds)
    judging.speed()
    if champion is not None:
        judging.regression(champion)
    judging.identity()
    judging.acceptance(baseline)
    judging.quality()
    judging.latency()
    return judging.verdict()


class _Judging:
    """Collects checks and notes about one candidate."""

    def __init__(self, candidate: Mapping[str, Any], thresholds: Mapping[str, Any]):
        self.candidate, self.thresholds = candidate, thresholds
        self.checks: list[Check] = []
        self.notes: list[str] = []

    def verdict(self) -> GateVerdict:
        return GateVerdict(tuple(self.checks), tuple(self.notes))

    def check(self, name: str, value: float, threshold: float, passed: bool, detail: str) -> None:
        self.checks.append(Check(name, float(value), float(threshold), passed, detail))

    def speed(self) -> None:
        """The lower end of the speedup's interval; plain decoding need not be faster than itself."""
        floor = self.thresholds.get("min_speedup_lower_bound")
        if floor is None:
            return
        if self.candidate["strategy"] == "autoregressive":
            self.check("speedup", 1.0, min(1.0, floor), True, "autoregressive decoding is the reference itself")
            return
        low = self.candidate["speedup_low"]
        self.check("speedup", low, floor, low >= floor,
                   f"{self.candidate['speedup']:.2f} x autoregressive, lower bound {low:.2f} (at least {floor:.2f})")

    def regression(self, champion: Mapping[str, Any]) -> None:
        """Fails once even the upper end of the interval says: slower than allowed."""
        allowed = self.thresholds.get("max_regression")
        if allowed is None:
            return
        mine, theirs = self.candidate["per_prompt"], champion["per_prompt"]
        if [row["prompt_id"] for row in mine] != [row["prompt_id"] for row in theirs]:
            raise DraftwellError("candidate and champion were measured on different prompts: bench both in one run")
        ratio, low, high = paired_bootstrap_ratio(*columns(theirs), *columns(mine))
        self.check("regression", high, 1 - allowed, high >= 1 - allowed,
                   f"{ratio:.2f} x the champion [{low:.2f}, {high:.2f}] (upper end at least {1 - allowed:.2f})")

    def identity(self) -> None:
        """A lossless strategy gives autoregressive's tokens; where it does not, the target stood at a near-tie."""
        c = self.candidate
        if not self.thresholds.get("lossless_identical") or not c["lossless"]:
            return
        if c["identical_outputs"] is None:
            self.notes.append("identity not checked: sampled outputs cannot be compared token by token")
            return
        total = len(c["per_prompt"])
        wrong = total - c["identical_outputs"] - c["near_ties"]
        words = f"{c['identical_outputs']} of {total} outputs identical, {c['near_ties']} first differ at near-ties"
        if c["dtype"] != "float32":
            self.notes.append(f"{words} in {c['dtype']}; identity is judged in float32")
            return
        self.check("identical outputs", wrong, 0, wrong == 0, f"{words}, {wrong} differ for no reason")

    def acceptance(self, baseline: Mapping[str, Any] | None) -> None:
        """Accepted over judged tokens, against the recorded share."""
        floor, mine = self.thresholds.get("min_acceptance_ratio"), self.candidate.get("acceptance_rate")
        if floor is None or mine is None:
            return
        recorded = recorded_acceptance(baseline, self.candidate["strategy"])
        if recorded is None:
            self.notes.append(f"acceptance not checked: no baseline of {self.candidate['strategy']}")
            return
        ratio = mine / recorded if recorded else 1.0
        self.check("acceptance", ratio, floor, ratio >= floor,
                   f"{mine:.3f} of judged tokens accepted, baseline {recorded:.3f} (at least {floor:.0%} of it)")

    def quality(self) -> None:
        """How often a lossy strategy still says what the target would."""
        floor = self.thresholds.get("min_quality_ratio")
        if floor is None or self.candidate["lossless"]:
            return
        kept = self.candidate.get("quality_ratio")
        if kept is None:
            self.check("quality", 0.0, floor, False, "the quality of a lossy strategy was not measured")
            return
        self.check("quality", kept, floor, kept >= floor,
                   f"{kept:.1%} of autoregressive's share of target-argmax tokens (at least {floor:.0%})")

    def latency(self) -> None:
        """The slowest twentieth of requests, against autoregressive's."""
        limit, ratio = self.thresholds.get("max_p95_tpot_ratio"), self.candidate.get("tpot_p95_ratio")
        if limit is None or ratio is None:
            return
        self.check("p95 time per token", ratio, limit, ratio <= limit,
                   f"{ratio:.2f} x autoregressive's 95th percentile (at most {limit:.2f})")


def columns(rows: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[int]]:
    """Seconds and tokens of the prompts of an entry."""
    return [row["seconds"] for row in rows], [row["tokens"] for row in rows]


def recorded_acceptance(baseline: Mapping[str, Any] | None, strategy: str) -> float | None:
    """Acceptance rate of a strategy in a baseline of either form; None where it has none."""
    if baseline is None:
        return None
    if "strategies" not in baseline:
        found = baseline.get("acceptance_rate")
        return None if found is None else float(found)
    counts = baseline["strategies"].get(strategy)
    return counts["accepted"] / counts["judged"] if counts and counts["judged"] else None


def compare_with_baseline(report: Mapping[str, Any], baseline: Mapping[str, Any],
                          thresholds: Mapping[str, Any]) -> GateVerdict:
    """Judge float32 greedy counts against the recorded ones.

    Counts must agree within 1 %, acceptance may be higher but not below `min_acceptance_ratio` of the recorded one. An
    output digest that differs is noted, not failed: another CPU's kernels may turn a near-tie round, which changes the
    rest of that output and hardly the counts; a broken strategy changes the counts.

    Raises:
        DraftwellError: the reports are about different models, prompts or lengths, so that nothing can be compared.
    """
    for key, name in (("fingerprint", "models"), ("prompts_digest", "prompts"), ("max_tokens", "max_tokens")):
        if report[key] != baseline[key]:
            raise DraftwellError(f"the baseline of pair {baseline['pair']} was recorded with other {name}: record it again, "
                                 "or run with the same")
    checks: list[Check] = []
    notes: list[str] = []
    for strategy, recorded in baseline["strategies"].items():
        found = report["strategies"].get(strategy)
        if found is None:
            checks.append(Check(f"{strategy}: present", 0, 1, False, f"{strategy} is in the baseline but was not run"))
            continue
        checks += count_checks(strategy, found, recorded, float(thresholds.get("min_acceptance_ratio", 0.98)))
        if found["output_digest"] != recorded["output_digest"]:
            notes.append(f"{strategy}: outputs differ from the recorded ones; the counts decide")
    notes += [f"{strategy}: not in the baseline" for strategy in report["strategies"] if strategy not in baseline["strategies"]]
    return GateVerdict(tuple(checks), tuple(notes))


def count_checks(strategy: str, found: Mapping[str, Any], recorded: Mapping[str, Any], floor: float) -> list[Check]:
    """Each count within 1 % of the recorded one (and at least within two), and the acceptance rate above its floor."""
    checks = []
    for count in COUNTS:
        allowed = max(2.0, COUNT_TOLERANCE * recorded[count])
        off = abs(found[count] - recorded[count])
        words = count.replace("_", " ")
        checks.append(Check(f"{strategy}: {words}", found[count], recorded[count], off <= allowed,
                            f"{found[count]} {words}, recorded {recorded[count]} (± {allowed:.0f})"))
    if recorded["judged"] and recorded["accepted"]:
        rate = found["accepted"] / found["judged"] if found["judged"] else 0.0
        ratio = rate / (recorded["accepted"] / recorded["judged"])
        checks.append(Check(f"{strategy}: acceptance", ratio, floor, ratio >= floor,
                            f"{ratio:.1%} of the recorded acceptance rate (at least {floor:.0%})"))
    return checks
