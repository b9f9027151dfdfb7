"""The gate for another engine's settings: are they faster than its plain decoding, no slower than
the champion's, and do they leave greedy outputs as they are?

A setting is judged on the engine, its version, the device and the models that it was measured with;
the release's `engine_config` names them, and gate and deployment refuse it elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import Field

from draftwell.components.bench.engines.figures import Figure
from draftwell.components.bench.engines.measure import Beside, Group
from draftwell.components.bench.target_agreement import first_difference
from draftwell.components.engines.port import Engine, Message
from draftwell.components.gate.bench_checks import speed_check
from draftwell.components.gate.evidence import Interval
from draftwell.components.report.intervals import FEWEST_PROMPTS
from draftwell.serving.bundle.verdict import Check, GateVerdict, Skipped, Thresholds
from draftwell.serving.errors import DraftwellError
from draftwell.serving.number_format import dtype_of
from draftwell.serving.runtime.requests import Sampling

NEAR_TIES = {"float32": 1e-3, "float16": 0.0625, "bfloat16": 0.5}
"""dtype → natural logarithm's distance of two tokens that passes of different widths may exchange:
four steps between neighbouring numbers where the largest logit is below 32 (`near_tie_gap`),
because engines give log-probabilities and no logits."""
TOP = 5


OUTPUTS, SETTINGS = "greedy outputs as plain decoding's", "lossless settings"
"""Checks of answers: names, of which that of outputs is followed by the load."""
LOSSLESS_REJECTION = "standard"
"""The one of vLLM's `rejection_sample_method` that keeps the target's distribution."""


class Difference(Message):
    """A token of a greedy output that is another one than plain decoding's after the same
    tokens."""

    prompt: int = Field(description="place among the distinct prompts, from 0")
    at: int = Field(description="place in the output, from 0")
    at_once: int = Field(1, description="requests that were decoded at once")
    gap: float | None = Field(
        description=(
            "between plain decoding's best token and the lower of both; None: not among its best"
        )
    )
    near_tie: bool


def differences(
    beside: Beside, groups: Sequence[Group], plain: Engine, dtype: str, sampling: Sampling
) -> list[Difference]:
    """Where outputs differ from plain decoding's; `plain` is asked for its likeliest tokens there.

    After a near-tie plain decoding continues behind the other token, so that the rest of the output
    is compared too.

    Args:
        beside: greedy, of these groups.
        plain: started, without speculation.
        sampling: that was measured with.
    """
    places: dict[tuple[int, ...], int] = {}
    found: list[Difference] = []
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    for group, ones, others in zip(groups, beside.plain.outputs, beside.other.outputs, strict=True):
        for ids, one, other in zip(group, ones, others, strict=True):
            prompt = places.setdefault(tuple(ids), len(places))
            if (case := (prompt, tuple(one), tuple(other))) not in seen:
                seen.add(case)
                found += [
                    Difference(
                        prompt=prompt, at=at, at_once=beside.at_once, gap=gap, near_tie=near_tie
                    )
                    for at, gap, near_tie in parting(
                        ids, one, other, plain, NEAR_TIES[dtype_of(dtype)], sampling
                    )
                ]
    return found


def parting(
    ids: Sequence[int],
    one: Sequence[int],
    other: Sequence[int],
    plain: Engine,
    tolerance: float,
    sampling: Sampling,
) -> Iterator[tuple[int, float | None, bool]]:
    """(place, gap, whether it is a near-tie) of every near-tie up to the first real difference,
    that included."""
    while (at := first_difference(other, one)) is not None:
        # one goes on where the other has ended, though a stop token would be part of both
        if at >= min(len(one), len(other)):
            yield at, None, False
            return
        row = (
            plain.decode([[*ids, *one[:at]]], Sampling(max_tokens=1, logprobs=TOP))
            .answers[0]
            .top_logprobs
        )
        rated = dict(row[0]) if row else {}
        gap = (
            max(rated.values()) - min(rated[one[at]], rated[other[at]])
            if one[at] in rated and other[at] in rated
            else None
        )
        yield at, gap, gap is not None and gap <= tolerance
        left = sampling.max_tokens - at - 1
        if gap is None or gap > tolerance:
            return
        kept = list(other[: at + 1])
        ended = left == 0 or other[at] in sampling.stop_token_ids
        one = (
            kept
            if ended
            else kept
            + plain.decode([[*ids, *kept]], replace(sampling, max_tokens=left)).answers[0].tokens
        )


def judge_engine(
    figures: Sequence[Figure],
    unlike: Sequence[Difference] | None,
    thresholds: Thresholds,
    settings: Mapping[str, Any] | None = None,
    idle: frozenset[int] = frozenset(),
) -> GateVerdict:
    """The verdict.

    Args:
        figures: of the setting at each load; empty for plain decoding, which has nothing to prove.
        unlike: of greedy outputs; None for sampled requests, whose outputs are not compared.
        settings: the speculative config.
        idle: loads at which nothing is drafted: there it must not be surely slower.
    Raises:
        DraftwellError: there is no threshold of speed (`no_threshold`).
    """
    least = thresholds.min_speedup_lower_bound
    if least is None:
        raise DraftwellError(
            "the gate of an engine needs min_speedup_lower_bound: add it to registry/gates.yaml",
            code="no_threshold",
        )
    if not figures:
        why = "plain decoding was chosen: nothing to compare"
        return GateVerdict((Check("plain decoding", 1.0, 1.0, True, why),))
    parts: list[Check | Skipped] = [
        engine_speed(figure, least, drafts=figure.at_once not in idle) for figure in figures
    ]
    rejection = (settings or {}).get("rejection_sample_method", LOSSLESS_REJECTION)
    if rejection != LOSSLESS_REJECTION:
        why = (
            f"rejection_sample_method is {rejection!r}, which changes what is sampled: only "
            f"{LOSSLESS_REJECTION!r} does not"
        )
        parts.append(Check(SETTINGS, 0, 1, False, why))
    if unlike is None:
        parts.append(Skipped(OUTPUTS, "sampled outputs are not compared"))
    else:
        parts += [
            output_check([one for one in unlike if one.at_once == figure.at_once], figure)
            for figure in figures
        ]
    return GateVerdict.of(parts)


def judge_regression(figures: Sequence[Figure], thresholds: Thresholds) -> GateVerdict:
    """The verdict on a setting beside the champion's, at each load; a threshold that is None is not
    checked."""
    allowed = thresholds.max_regression
    if allowed is None:
        return GateVerdict(())
    return GateVerdict(
        tuple(load_speed("regression", one, 1 - allowed, "the champion") for one in figures)
    )


def output_check(unlike: Sequence[Difference], figure: Figure) -> Check:
    """Whether greedy outputs of one load are plain decoding's but for near-ties."""
    wrong = {one.prompt: one for one in reversed(unlike) if not one.near_tie}
    close = {one.prompt for one in unlike} - wrong.keys()
    first = wrong[min(wrong)] if wrong else None
    where = f": the first in prompt {first.prompt} at token {first.at}" if first else ""
    return Check(
        f"{OUTPUTS}, {figure.at_once} at once",
        len(wrong),
        0,
        not wrong,
        f"outputs differ for {len(wrong)} of {figure.prompts} prompts, for {len(close)} at "
        f"near-ties only{where}",
    )


def engine_speed(figure: Figure, least: float, *, drafts: bool = True) -> Check:
    """Whether the lower bound of a setting's speed reaches the threshold; where nothing is drafted,
    whether the upper one does."""
    name, against = "speed over plain decoding", "plain decoding"
    return load_speed(name, figure, least, against, low=figure.low if drafts else figure.high)


def load_speed(
    name: str, figure: Figure, least: float, against: str, *, low: float | None = None
) -> Check:
    """Whether the lower bound of a figure's speed, or `low`, reaches a threshold.

    Fewer than `FEWEST_PROMPTS` distinct prompts are not enough evidence.
    """
    low = figure.low if low is None else low
    found = Interval(figure.ratio, low, figure.high, figure.prompts)
    check = speed_check(f"{name}, {figure.at_once} at once", found, least, against)
    return few_prompts(check, figure.prompts)


def few_prompts(check: Check, prompts: int, at_once: int = 1) -> Check:
    """A check of a comparison over so many prompts: fewer than `FEWEST_PROMPTS` times those that
    are decoded at once decide nothing."""
    if prompts >= (needed := FEWEST_PROMPTS * at_once):
        return check
    why = f"{check.detail}; fewer than {needed} prompts decide nothing"
    return replace(check, passed=False, detail=why, enough=False, prompts_needed=needed)
