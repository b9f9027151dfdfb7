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
from draftwell.components.report.intervals import (
    TAIL,
    bootstrap_of_sums,
    expanded_tail,
    ratio_of,
    resamples_for,
)
from draftwell.serving.bundle.verdict import Check, GateVerdict, Skipped, Thresholds
from draftwell.serving.errors import DraftwellError
from draftwell.serving.number_format import dtype_of
from draftwell.serving.runtime.strategies import find_strategy

PLAIN = "autoregressive"
ADDED_UP = 1e-2
"""Nats by which two sums over a text's tokens differ at most, of the same logits in another order
of addition."""


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
    floor, allowed = thresholds.min_speedup_lower_bound, thresholds.max_regression
    plain = candidate if candidate.strategy == PLAIN else reference
    return GateVerdict.of(
        [
            None if floor is None else speed("speedup", candidate, plain, floor, "autoregressive"),
            None
            if allowed is None or champion is None
            else speed("regression", candidate, champion, 1 - allowed, "the champion"),
            identity(candidate) if thresholds.lossless_identical else None,
            quality(candidate, reference, thresholds.min_quality_ratio),
            regret(candidate),
            pace(candidate, reference, thresholds.max_tpot_ratio),
            acceptance(candidate, baseline),
        ]
    )


def speed(
    name: str, candidate: BenchEntry, base: BenchEntry | None, floor: float, against: str
) -> Check:
    """The lower end of the interval of a candidate's speed over another entry's; plain decoding
    need not be faster than itself, by the clock's noise."""
    if base is None:
        return Check(name, 0.0, floor, False, f"the speed of {against} was not measured")
    if candidate.strategy == base.strategy == PLAIN:
        return Check(name, 1.0, min(1.0, floor), True, f"it decodes plainly, as {against} does")
    return speed_check(name, speed_over(candidate, base), floor, against)


def speed_check(name: str, found: Interval, floor: float, against: str) -> Check:
    """The lower end of how many times as fast something is as something else."""
    detail = f"{found.value:.2f} x {against} {found} (lower end at least {floor:.2f})"
    return at_least(name, found, floor, detail)


def identity(candidate: BenchEntry) -> Check | Skipped | None:
    """A lossless strategy gives autoregressive's tokens; where it does not, forward passes are not
    exact, and the target stood at a near-tie. And it keeps no token that the target did not
    choose: a lossy one may have been right
    by chance in all outputs."""
    if not candidate.lossless:
        return None
    if candidate.identical_outputs is None:
        why = "sampled outputs cannot be compared token by token"
        return Skipped("identical outputs", why, applies=False)
    total, same = len(candidate.per_prompt), candidate.identical_outputs
    wrong, text = total - same, f"{same} of {total} outputs identical"
    if not candidate.exact:
        wrong -= candidate.near_ties or 0
        text += f", {candidate.near_ties} first differ at near-ties"
        if candidate.dtype is None or dtype_of(candidate.dtype) != "float32":
            why = f"its forward passes are not exact; identity is judged in float32 ({text})"
            return Skipped(f"identical outputs in {candidate.dtype}", why)
    if candidate.rescued:
        wrong += candidate.rescued
        text += f", {candidate.rescued} tokens were kept that the target did not choose"
    return Check("identical outputs", wrong, 0, wrong == 0, f"{text}, {wrong} are wrong")


def quality(
    candidate: BenchEntry, reference: BenchEntry | None, floor: float | None
) -> Check | None:
    """How often a lossy strategy still emits what the target would."""
    if floor is None or candidate.lossless:
        return None
    found = share_kept(candidate, reference) if reference is not None else None
    if found is None:
        why = "the quality of a lossy strategy was not measured"
        return Check("quality", 0.0, floor, False, why)
    detail = (
        f"{found.value:.1%} of autoregressive's share of target-argmax tokens {found} "
        f"(lower end at least {floor:.0%})"
    )
    return at_least("quality", found, floor, detail)


def regret(candidate: BenchEntry) -> Check | Skipped | None:
    """Whether every greedy text of a strategy with a budget of regret keeps it, as the target finds
    when it reads the text: no interval, because the strategy promises it of each."""
    found = find_strategy(candidate.strategy or PLAIN)
    if found.regret_field is None or not candidate.greedy:  # sampled requests are judged exactly
        return None
    budget = float(getattr(found.Config(**candidate.parameters), found.regret_field))
    spent = [row.divergence for row in candidate.per_prompt if row.divergence is not None]
    if len(spent) < len(candidate.per_prompt):
        return Skipped("regret", "the target did not read the texts")
    if not candidate.exact and dtype_of(candidate.dtype or "float32") != "float32":
        return Skipped("regret", f"its forward passes in {candidate.dtype} are not exact")
    most, texts = max(spent, default=0.0), len(spent)
    detail = f"at most {most:.2f} nats in {texts} texts (each at most {budget:g})"
    return Check("regret", most, budget, most <= budget + ADDED_UP, detail)


def pace(
    candidate: BenchEntry, reference: BenchEntry | None, limit: float | None
) -> Check | Skipped | None:
    """The time per token of a request over plain decoding's, in the mean over requests.

    Every request counts the same, however short, and a slow one for as much as it is slower. A 95th
    percentile of sixteen requests would be the slowest of them; distribution-free, it needs 59.
    """
    if limit is None or reference is None or candidate.strategy == PLAIN:
        return None
    found = mean_pace_ratio(candidate.per_prompt, reference.per_prompt)
    if found is None:
        return Skipped("time per token", "no output has two tokens")
    detail = (
        f"{found.value:.2f} x autoregressive's, the mean over requests {found} "
        f"(upper end at most {limit:.2f})"
    )
    return at_most("time per token", found, limit, detail)


def acceptance(candidate: BenchEntry, baseline: BenchEntry | None) -> str | None:
    """What explains a speed and is not judged."""
    if candidate.acceptance_rate is None:
        return None
    theirs = baseline.acceptance_rate if baseline else None
    compared = "" if theirs is None else f", the champion's {theirs:.3f} with the same parameters"
    return f"acceptance, not judged: {candidate.acceptance_rate:.3f} of judged tokens{compared}"


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
    return interval(*ratio_of(base, entry), len(mine))


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
