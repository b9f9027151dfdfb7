"""The gate: may a candidate be released? Figures and thresholds in, a verdict out; nothing is run, read or written.

`judge_release` reads an entry of a bench report: speed with intervals, identity, quality, all measured on this machine now.
`judge_predictions` reads how well artifacts foretell the target, `judge_footprint` how large a bundle is and how fast it
starts. `compare_with_baseline` reads float32 greedy counts, which are the same on every machine: what a fresh clone in CI can
check without trusting its clock. What rests on a clock fails only where the interval leaves no doubt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from components.report.intervals import paired_bootstrap_quantile_ratio, paired_bootstrap_ratio
from serving.errors import DraftwellError

COUNT_TOLERANCE = 0.01
"""Share by which counts may leave the baseline's: a flipped near-tie changes the rest of one output and no more."""
FEW_TOKENS = 2.0
"""By as many tokens counts may differ however few there are: one flipped near-tie moves so many."""
COUNTS = ("target_calls", "judged", "accepted")
CLOCKED = ("speedup", "regression", "p95 time per token")
"""Checks that rest on a clock."""


@dataclass(frozen=True)
class Check:
    """One value against its threshold; `detail` says it in words.

    Args:
        transient: it failed for what the machine lacked at that moment (memory, traces, time) and says nothing of the candidate.
    """

    name: str
    value: float
    threshold: float
    passed: bool
    detail: str
    transient: bool = False


@dataclass(frozen=True)
class GateVerdict:
    """All checks, and what could not be checked."""

    checks: tuple[Check, ...]
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether there were checks and none failed."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    def __add__(self, other: GateVerdict) -> GateVerdict:
        """Both together."""
        return GateVerdict((*self.checks, *other.checks), (*self.notes, *other.notes))


def judge_release(candidate: Mapping[str, Any], champion: Mapping[str, Any] | None, baseline: Mapping[str, Any] | None,
          thresholds: Mapping[str, Any], *, reference: Mapping[str, Any] | None = None) -> GateVerdict:
    """Judge a candidate by its bench.

    Args:
        candidate: its entry in the `strategies` of a bench report.
        champion: the champion's entry in the same report (measured interleaved, on the same prompts), if there is one.
        baseline: a report of `deterministic_report` that holds the candidate's strategy, or the entry of an earlier bench;
            the candidate's acceptance is held against its.
        thresholds: of registry/gates.yaml: min_speedup_lower_bound, max_regression, lossless_identical,
            min_acceptance_ratio, min_quality_ratio, max_p95_tpot_ratio. A threshold that is absent is not checked.
        reference: autoregressive's entry in the same report, which gives the slowest requests an interval.
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
    judging.latency(reference)
    return judging.verdict()


def leaves_doubt(verdict: GateVerdict, candidate: Mapping[str, Any], champion: Mapping[str, Any] | None,
                 thresholds: Mapping[str, Any]) -> bool:
    """Whether a short bench is no clear pass: a check of speed failed, or a champion may be faster by more than is allowed.

    Then all is measured again, for longer, and only that counts: a candidate is refused for its speed, or let through just so, by
    medians of several runs, which another process that took the core for a moment does not move.
    """
    if any(check.name in CLOCKED and not check.passed for check in verdict.checks):
        return True
    if champion is None:
        return False
    _, low, _ = paired_bootstrap_ratio(*columns(champion["per_prompt"]), *columns(candidate["per_prompt"]))
    return low < 1 - float(thresholds.get("max_regression", 1.0))


@dataclass(frozen=True)
class PredictiveLoss:
    """How well an artifact foretells the target's verdicts on some traces, prompt by prompt.

    Args:
        losses: log loss of the candidate's, nats, summed over each prompt's tokens.
        reference: that of what it is held against, on the same tokens.
        tokens: how many each prompt has.
        against: what it is held against, in words.
    """

    kind: str
    losses: tuple[float, ...]
    reference: tuple[float, ...]
    tokens: tuple[int, ...]
    against: str


def judge_predictions(predictions: Sequence[PredictiveLoss], thresholds: Mapping[str, Any]) -> GateVerdict:
    """Judge artifacts that predict: fails once even the lower end of the paired bootstrap's interval says that they predict worse.

    An artifact that is the champion's own has a ratio of just 1, with no interval: no clock has a part in this.
    """
    limit = thresholds.get("max_prediction_loss_ratio")
    if limit is None:
        return GateVerdict(())
    checks = []
    for p in predictions:
        better, low, high = paired_bootstrap_ratio(p.reference, p.tokens, p.losses, p.tokens)
        checks.append(Check(f"{p.kind} foretells", 1 / high, limit, 1 / high <= limit,
                            f"log loss {sum(p.losses) / sum(p.tokens):.4f} a token, {1 / better:.2f} x {p.against} "
                            f"[{1 / high:.2f}, {1 / low:.2f}] (lower end at most {limit:.2f})"))
    return GateVerdict(tuple(checks))


@dataclass(frozen=True)
class Footprint:
    """What it takes to serve a bundle.

    Args:
        bundle_mb: size in 10^6 bytes, without the models that are fetched.
        startup_seconds: from the start of a process to its first tokens; None where that was not measured.
        failure: why the bundle did not start, in a line.
        note: why the start was not measured.
    """

    bundle_mb: float
    startup_seconds: float | None = None
    failure: str | None = None
    note: str | None = None


def judge_footprint(found: Footprint, thresholds: Mapping[str, Any]) -> GateVerdict:
    """Judge size and start of a bundle; one that does not start fails, however long it tried.

    A start that took too long may have been a slow minute: it is one measurement without an interval. So that failure is transient.
    """
    checks = []
    size, start = thresholds.get("max_bundle_mb"), thresholds.get("max_startup_seconds")
    if size is not None:
        checks.append(Check("bundle size", found.bundle_mb, size, found.bundle_mb <= size,
                            f"{found.bundle_mb:.1f} MB without fetched models (at most {size:g})"))
    if start is not None and found.startup_seconds is not None:
        took = f"{found.startup_seconds:.1f} s to the first tokens of a new process (at most {start:g})"
        slow = found.startup_seconds > start
        checks.append(Check("start-up", found.startup_seconds, start, not found.failure and not slow, found.failure or took, slow))
    return GateVerdict(tuple(checks), (found.note,) if found.note else ())


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
        """A lossless strategy gives autoregressive's tokens; where it does not, the target stood at a near-tie.

        And it keeps none that the target has not agreed to: a lossy one may have been right in all that was looked at.
        """
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
        unasked = c.get("rescued", 0)
        told = f", {unasked} tokens were kept without the target's consent" if unasked else ""
        self.check("identical outputs", wrong + unasked, 0, wrong + unasked == 0, f"{words}, {wrong} differ for no reason{told}")

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

    def latency(self, reference: Mapping[str, Any] | None) -> None:
        """The slowest twentieth of requests, against autoregressive's; with its entry, fails once even the interval's lower end does."""
        limit, ratio = self.thresholds.get("max_p95_tpot_ratio"), self.candidate.get("tpot_p95_ratio")
        if limit is None or ratio is None:
            return
        low, words = ratio, ""
        if reference is not None:
            mine, theirs = paces(self.candidate["per_prompt"]), paces(reference["per_prompt"])
            both = [name for name in theirs if name in mine]
            if both:
                ratio, low, _ = paired_bootstrap_quantile_ratio([theirs[name] for name in both], [mine[name] for name in both])
                words = f", lower bound {low:.2f}"
        self.check("p95 time per token", low, limit, low <= limit,
                   f"{ratio:.2f} x autoregressive's 95th percentile{words} (at most {limit:.2f})")


def paces(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Prompt → milliseconds a token behind the first, of those that have more than one."""
    return {row["prompt_id"]: (row["seconds"] * 1e3 - row.get("ttft_ms", 0.0)) / (row["tokens"] - 1)
            for row in rows if row["tokens"] > 1}


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
    """Each count within 1 % of the recorded one (and at least within two), and the acceptance rate above its floor.

    A rate below its floor passes too where it is no more than two accepted tokens below the recorded one: of 41 accepted tokens a
    single one is more than 2 %.
    """
    checks = []
    for count in COUNTS:
        allowed = max(FEW_TOKENS, COUNT_TOLERANCE * recorded[count])
        off = abs(found[count] - recorded[count])
        words = count.replace("_", " ")
        checks.append(Check(f"{strategy}: {words}", found[count], recorded[count], off <= allowed,
                            f"{found[count]} {words}, recorded {recorded[count]} (± {allowed:.0f})"))
    if recorded["judged"] and recorded["accepted"]:
        share = recorded["accepted"] / recorded["judged"]
        ratio = found["accepted"] / found["judged"] / share if found["judged"] else 0.0
        short = share * found["judged"] - found["accepted"]
        passed = ratio >= floor or (found["judged"] > 0 and short <= FEW_TOKENS)
        checks.append(Check(f"{strategy}: acceptance", ratio, floor, passed,
                            f"{ratio:.1%} of the recorded acceptance rate (at least {floor:.0%}, or {FEW_TOKENS:.0f} tokens fewer)"))
    return checks
