"""Checks of a bench: speed, identity and quality of a candidate, all measured on this machine now.

Nothing is run, read or written here. Goodness is time and quality: acceptance is reported and not
judged, because a candidate that accepts less may be the faster one. Whatever is measured over
prompts decides by its interval, or reports that there is not enough evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from draftwell.components.bench.schema import BenchEntry, PromptRow
from draftwell.components.gate.evidence import Interval, at_least, at_most
from draftwell.components.gate.verdict import Check, GateVerdict, Thresholds
from draftwell.components.report.intervals import (
    bootstrap_of_sums,
    expanded_tail,
    paired_bootstrap_ratio,
    resamples_for,
)
from draftwell.serving.errors import DraftwellError
from draftwell.serving.number_format import dtype_of

CLOCKED = ("speedup", "regression", "time per token")
"""Checks that depend on a clock."""
TAIL = 0.05
"""Probability left out at each end of an interval."""


def judge_release(
    candidate: BenchEntry,
    champion: BenchEntry | None,
    baseline: BenchEntry | None,
    thresholds: Thresholds,
    *,
    reference: BenchEntry | None = None,
) -> GateVerdict:
    """Judge a candidate by its bench.

    Args:
        candidate: its entry in the `strategies` of a bench report.
        champion: the champion's entry in the same report (measured interleaved, on the same
            prompts), if there is one.
        baseline: an entry with the same strategy and parameters, whose acceptance is reported with
            the candidate's.
        reference: autoregressive's entry in the same report; needed to judge speed, time per token
            and quality.
    Raises:
        DraftwellError: the entries were measured on different prompts.
    """
    judging = _Judging(candidate, thresholds)
    judging.speed(reference)
    if champion is not None:
        judging.regression(champion)
    judging.identity()
    judging.quality(reference)
    judging.pace(reference)
    judging.diagnoses(baseline)
    return judging.verdict()


def leaves_doubt(verdict: GateVerdict) -> bool:
    """Whether a check of speed in a short bench is no clear pass.

    Then all is measured again, for longer, and only that counts: a candidate is refused for its
    speed, or let through just so, by medians of several runs, which another process that took the
    core for a moment does not move.
    """
    return any(check.name in CLOCKED and not check.passed for check in verdict.checks)


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

    def speed(self, reference: BenchEntry | None) -> None:
        """The lower end of the speedup's interval; plain decoding need not be faster than
        itself."""
        floor = self.thresholds.min_speedup_lower_bound
        if floor is None:
            return
        if self.candidate.strategy == "autoregressive":
            self.check(
                "speedup",
                1.0,
                min(1.0, floor),
                True,
                "autoregressive decoding is the reference itself",
            )
            return
        if reference is None:
            self.check("speedup", 0.0, floor, False, "plain decoding was not measured")
            return
        found = speed_over(self.candidate, reference)
        self.checks.append(
            at_least(
                "speedup",
                found,
                floor,
                f"{found.value:.2f} x autoregressive {found} (lower end at least {floor:.2f})",
            )
        )

    def regression(self, champion: BenchEntry) -> None:
        """At most so much slower than the champion."""
        allowed = self.thresholds.max_regression
        if allowed is None:
            return
        if self.candidate.strategy == champion.strategy == "autoregressive":
            self.check(
                "regression",
                1.0,
                1 - allowed,
                True,
                "both decode plainly: a difference would be the clock's",
            )
            return
        found = speed_over(self.candidate, champion)
        self.checks.append(
            at_least(
                "regression",
                found,
                1 - allowed,
                f"{found.value:.2f} x the champion {found} (lower end at least {1 - allowed:.2f})",
            )
        )

    def identity(self) -> None:
        """A lossless strategy gives autoregressive's tokens; where it does not, the target stood at
        a near-tie.

        And it keeps no token that the target did not choose: a lossy one may have been right by
        chance in all outputs.
        """
        c = self.candidate
        if not self.thresholds.lossless_identical or not c.lossless:
            return
        if c.identical_outputs is None:
            self.notes.append(
                "identity not checked: sampled outputs cannot be compared token by token"
            )
            return
        total = len(c.per_prompt)
        wrong = total - c.identical_outputs - (c.near_ties or 0)
        text = (
            f"{c.identical_outputs} of {total} outputs identical, {c.near_ties} first differ "
            "at near-ties"
        )
        if c.dtype is None or dtype_of(c.dtype) != "float32":
            self.notes.append(f"{text} in {c.dtype}; identity is judged in float32")
            return
        rescued = (
            f", {c.rescued} tokens were kept that the target did not choose" if c.rescued else ""
        )
        self.check(
            "identical outputs",
            wrong + c.rescued,
            0,
            wrong + c.rescued == 0,
            f"{text}, {wrong} differ otherwise{rescued}",
        )

    def quality(self, reference: BenchEntry | None) -> None:
        """How often a lossy strategy still emits what the target would."""
        floor = self.thresholds.min_quality_ratio
        if floor is None or self.candidate.lossless:
            return
        found = share_kept(self.candidate, reference) if reference is not None else None
        if found is None:
            self.check(
                "quality", 0.0, floor, False, "the quality of a lossy strategy was not measured"
            )
            return
        self.checks.append(
            at_least(
                "quality",
                found,
                floor,
                f"{found.value:.1%} of autoregressive's share of target-argmax tokens {found} "
                f"(lower end at least {floor:.0%})",
            )
        )

    def pace(self, reference: BenchEntry | None) -> None:
        """The time per token of a request over plain decoding's, in the mean over requests.

        Every request counts the same, however short, and a slow one for as much as it is slower. A
        95th percentile of sixteen requests would be the slowest of them; distribution-free, it
        needs 59.
        """
        limit = self.thresholds.max_tpot_ratio
        if limit is None or reference is None or self.candidate.strategy == "autoregressive":
            return
        found = mean_pace_ratio(self.candidate.per_prompt, reference.per_prompt)
        if found is None:
            self.notes.append("time per token not checked: no output has two tokens")
            return
        self.checks.append(
            at_most(
                "time per token",
                found,
                limit,
                f"{found.value:.2f} x autoregressive's, the mean over requests {found} "
                f"(upper end at most {limit:.2f})",
            )
        )

    def diagnoses(self, baseline: BenchEntry | None) -> None:
        """What explains a speed and is not judged: acceptance and the slowest requests."""
        mine, theirs = (
            self.candidate.acceptance_rate,
            baseline.acceptance_rate if baseline else None,
        )
        if mine is not None:
            compared = (
                "" if theirs is None else f", the champion's {theirs:.3f} with the same parameters"
            )
            self.notes.append(f"acceptance, not judged: {mine:.3f} of judged tokens{compared}")
        if (
            slowest := self.candidate.tpot_p95_ratio
        ) is not None and self.candidate.strategy != "autoregressive":
            self.notes.append(
                "slowest requests, not judged: 95th percentile of the time per token "
                f"{slowest:.2f} x autoregressive's"
            )


def speed_over(entry: BenchEntry, base: BenchEntry) -> Interval:
    """How many times as fast an entry is as another one over the same prompts.

    Raises:
        DraftwellError: they were measured on different prompts.
    """
    mine, theirs = entry.per_prompt, base.per_prompt
    if [row.prompt_id for row in mine] != [row.prompt_id for row in theirs]:
        raise DraftwellError(
            "candidate and champion were measured on different prompts: bench both in one run",
            code="different_prompts",
        )
    ratio, low, high = paired_bootstrap_ratio(
        *columns(theirs), *columns(mine), tail=expanded_tail(TAIL, len(mine))
    )
    return interval(ratio, low, high, len(mine))


def share_kept(entry: BenchEntry, reference: BenchEntry) -> Interval | None:
    """Share of target-argmax tokens over plain decoding's; None where it was not counted for every
    prompt."""
    rows = [
        (a.target_argmax, a.tokens, b.target_argmax, b.tokens)
        for a, b in zip(entry.per_prompt, reference.per_prompt, strict=True)
    ]
    if not rows or any(None in row for row in rows):
        return None
    return over_sums(
        rows, lambda sums: (sums[..., 0] / sums[..., 1]) / (sums[..., 2] / sums[..., 3])
    )


def surprisal_shift(entry: BenchEntry, reference: BenchEntry) -> Interval | None:
    """By how many nats a token the target finds an entry's samples less likely than plain
    decoding's on the same prompts; None where that was not read of every prompt.

    Both are noise around 0 for a lossless choice: what counts is the difference from plain decoding
    in the same run, as in the tuner.
    """
    rows = [
        (a.divergence, a.tokens, b.divergence, b.tokens)
        for a, b in zip(entry.per_prompt, reference.per_prompt, strict=True)
    ]
    if not rows or any(None in row for row in rows):
        return None
    return over_sums(rows, lambda sums: sums[..., 0] / sums[..., 1] - sums[..., 2] / sums[..., 3])


def mean_pace_ratio(rows: Sequence[PromptRow], reference: Sequence[PromptRow]) -> Interval | None:
    """Mean over prompts of the ratio of both times per token; None where no prompt has one on both
    sides."""
    mine, theirs = paces(rows), paces(reference)
    ratios = [(mine[name] / theirs[name], 1.0) for name in theirs if name in mine]
    return over_sums(ratios, lambda sums: sums[..., 0] / sums[..., 1]) if ratios else None


def over_sums(
    rows: Sequence[Sequence[float | None]], measure: Callable[[np.ndarray], np.ndarray]
) -> Interval:
    """A metric of sums over prompts, `[..., columns]` → `[...]`, with its interval."""
    table = np.array(rows, dtype=np.float64)
    tail = expanded_tail(TAIL, len(table))
    low, high = bootstrap_of_sums(
        table, measure, resamples=resamples_for(tail, len(table)), tail=tail
    )
    return interval(float(measure(table.sum(0))), float(low), float(high), len(table))


def interval(value: float, low: float, high: float, prompts: int) -> Interval:
    """An interval; one prompt says nothing about others."""
    return (
        Interval(value, low, high, prompts)
        if prompts > 1
        else Interval(value, -np.inf, np.inf, prompts)
    )


def paces(rows: Sequence[PromptRow]) -> dict[str, float]:
    """Prompt → milliseconds per token after the first, of those that have more than one."""
    return {
        row.prompt_id: (row.seconds * 1e3 - row.ttft_ms) / (row.tokens - 1)
        for row in rows
        if row.tokens > 1
    }


def columns(rows: Sequence[PromptRow]) -> tuple[list[float], list[int]]:
    """Seconds and tokens of the prompts of an entry."""
    return [row.seconds for row in rows], [row.tokens for row in rows]
