"""Checks of a bench: speed with intervals, identity, acceptance and quality of a candidate, all measured on this machine now.

Nothing is run, read or written here. A check that depends on a clock fails only where the interval leaves no doubt.
"""

from __future__ import annotations

from collections.abc import Sequence

from components.bench.schema import BenchEntry, PromptRow
from components.gate.verdict import Check, GateVerdict, Thresholds
from components.report.intervals import paired_bootstrap_quantile_ratio, paired_bootstrap_ratio
from serving.errors import DraftwellError

CLOCKED = ("speedup", "regression", "p95 time per token")
"""Checks that depend on a clock."""


def judge_release(candidate: BenchEntry, champion: BenchEntry | None, baseline: BenchEntry | None, thresholds: Thresholds, *,
                  reference: BenchEntry | None = None) -> GateVerdict:
    """Judge a candidate by its bench.

    Args:
        candidate: its entry in the `strategies` of a bench report.
        champion: the champion's entry in the same report (measured interleaved, on the same prompts), if there is one.
        baseline: an entry with the same strategy and parameters, whose acceptance the candidate's is compared with.
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


def leaves_doubt(verdict: GateVerdict, candidate: BenchEntry, champion: BenchEntry | None, thresholds: Thresholds) -> bool:
    """Whether a short bench is no clear pass: a check of speed failed, or a champion may be faster by more than is allowed.

    Then all is measured again, for longer, and only that counts: a candidate is refused for its speed, or let through just so, by
    medians of several runs, which another process that took the core for a moment does not move.
    """
    if any(check.name in CLOCKED and not check.passed for check in verdict.checks):
        return True
    if champion is None:
        return False
    _, low, _ = paired_bootstrap_ratio(*columns(champion.per_prompt), *columns(candidate.per_prompt))
    return low < 1 - (1.0 if thresholds.max_regression is None else thresholds.max_regression)


class _Judging:
    """Collects checks and notes about one candidate."""

    def __init__(self, candidate: BenchEntry, thresholds: Thresholds):
        self.candidate, self.thresholds = candidate, thresholds
        self.checks: list[Check] = []
        self.notes: list[str] = []

    def verdict(self) -> GateVerdict:
        return GateVerdict(tuple(self.checks), tuple(self.notes))

    def check(self, name: str, value: float, threshold: float, passed: bool, detail: str) -> None:
        self.checks.append(Check(name, float(value), float(threshold), passed, detail))

    def speed(self) -> None:
        """The lower end of the speedup's interval; plain decoding need not be faster than itself."""
        floor = self.thresholds.min_speedup_lower_bound
        if floor is None:
            return
        if self.candidate.strategy == "autoregressive":
            self.check("speedup", 1.0, min(1.0, floor), True, "autoregressive decoding is the reference itself")
            return
        low, speedup = self.candidate.speedup_low, self.candidate.speedup
        assert low is not None
        assert speedup is not None
        self.check("speedup", low, floor, low >= floor,
                   f"{speedup:.2f} x autoregressive, lower bound {low:.2f} (at least {floor:.2f})")

    def regression(self, champion: BenchEntry) -> None:
        """Fails where even the upper end of the interval is slower than allowed."""
        allowed = self.thresholds.max_regression
        if allowed is None:
            return
        mine, theirs = self.candidate.per_prompt, champion.per_prompt
        if [row.prompt_id for row in mine] != [row.prompt_id for row in theirs]:
            raise DraftwellError("candidate and champion were measured on different prompts: bench both in one run",
                                 code="different_prompts")
        ratio, low, high = paired_bootstrap_ratio(*columns(theirs), *columns(mine))
        self.check("regression", high, 1 - allowed, high >= 1 - allowed,
                   f"{ratio:.2f} x the champion [{low:.2f}, {high:.2f}] (upper end at least {1 - allowed:.2f})")

    def identity(self) -> None:
        """A lossless strategy gives autoregressive's tokens; where it does not, the target stood at a near-tie.

        And it keeps no token that the target did not choose: a lossy one may have been right by chance in all outputs.
        """
        c = self.candidate
        if not self.thresholds.lossless_identical or not c.lossless:
            return
        if c.identical_outputs is None:
            self.notes.append("identity not checked: sampled outputs cannot be compared token by token")
            return
        total = len(c.per_prompt)
        wrong = total - c.identical_outputs - (c.near_ties or 0)
        text = f"{c.identical_outputs} of {total} outputs identical, {c.near_ties} first differ at near-ties"
        if c.dtype != "float32":
            self.notes.append(f"{text} in {c.dtype}; identity is judged in float32")
            return
        rescued = f", {c.rescued} tokens were kept that the target did not choose" if c.rescued else ""
        self.check("identical outputs", wrong + c.rescued, 0, wrong + c.rescued == 0, f"{text}, {wrong} differ otherwise{rescued}")

    def acceptance(self, baseline: BenchEntry | None) -> None:
        """Accepted over judged tokens, compared with the baseline's share."""
        floor, mine = self.thresholds.min_acceptance_ratio, self.candidate.acceptance_rate
        if floor is None or mine is None:
            return
        recorded = baseline.acceptance_rate if baseline else None
        if recorded is None:
            self.notes.append(f"acceptance not checked: no baseline of {self.candidate.strategy}")
            return
        ratio = mine / recorded if recorded else 1.0
        self.check("acceptance", ratio, floor, ratio >= floor,
                   f"{mine:.3f} of judged tokens accepted, baseline {recorded:.3f} (at least {floor:.0%} of it)")

    def quality(self) -> None:
        """How often a lossy strategy still emits what the target would."""
        floor = self.thresholds.min_quality_ratio
        if floor is None or self.candidate.lossless:
            return
        kept = self.candidate.quality_ratio
        if kept is None:
            self.check("quality", 0.0, floor, False, "the quality of a lossy strategy was not measured")
            return
        self.check("quality", kept, floor, kept >= floor,
                   f"{kept:.1%} of autoregressive's share of target-argmax tokens (at least {floor:.0%})")

    def latency(self, reference: BenchEntry | None) -> None:
        """The slowest twentieth of requests, against autoregressive's; with its entry, fails once even the interval's lower end does."""
        limit, ratio = self.thresholds.max_p95_tpot_ratio, self.candidate.tpot_p95_ratio
        if limit is None or ratio is None:
            return
        low, bound = ratio, ""
        if reference is not None:
            mine, theirs = paces(self.candidate.per_prompt), paces(reference.per_prompt)
            both = [name for name in theirs if name in mine]
            if both:
                ratio, low, _ = paired_bootstrap_quantile_ratio([theirs[name] for name in both], [mine[name] for name in both])
                bound = f", lower bound {low:.2f}"
        self.check("p95 time per token", low, limit, low <= limit,
                   f"{ratio:.2f} x autoregressive's 95th percentile{bound} (at most {limit:.2f})")


def paces(rows: Sequence[PromptRow]) -> dict[str, float]:
    """Prompt → milliseconds per token after the first, of those that have more than one."""
    return {row.prompt_id: (row.seconds * 1e3 - row.ttft_ms) / (row.tokens - 1) for row in rows if row.tokens > 1}


def columns(rows: Sequence[PromptRow]) -> tuple[list[float], list[int]]:
    """Seconds and tokens of the prompts of an entry."""
    return [row.seconds for row in rows], [row.tokens for row in rows]
