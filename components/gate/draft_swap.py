"""Whether a draft whose weights were replaced in a running engine is the one that was judged: by
first tokens of drafts over the prompts of its tuning, and by greedy outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from draftwell.components.engines.port import Answer, Engine
from draftwell.components.gate.engine_checks import NEAR_TIES, parting
from draftwell.components.report.intervals import TAIL, jackknife, student_reach
from draftwell.serving.bundle.verdict import Check
from draftwell.serving.number_format import dtype_of
from draftwell.serving.runtime.requests import Sampling

Counts = tuple[int, int]
"""Drafts whose first token was kept, and drafts."""


def acceptance_check(probed: Sequence[Counts], tuned: Sequence[Counts], tolerance: float) -> Check:
    """Is the share of first tokens that are kept the one of the tuning?

    A jackknife over prompts of the difference, with Student's t: both sides are of the same
    prompts.

    Args:
        probed, tuned: of the same prompts, in the same order if it is known.
        tolerance: a smaller change does not matter.
    """
    if not all(sum(drafts for _, drafts in side) for side in (probed, tuned)):
        said = "no drafts were counted: ask when less else is asked"
        return Check("acceptance", math.inf, tolerance, False, said)
    columns = np.array([*zip(*probed, strict=True), *zip(*tuned, strict=True)], dtype=float)
    moved, variance = jackknife(lambda sums: sums[0] / sums[1] - sums[2] / sums[3], columns)
    reach = student_reach(variance, len(probed) - 1, TAIL / 2)
    now, then = (
        sum(kept for kept, _ in side) / sum(n for _, n in side) for side in (probed, tuned)
    )
    return Check(
        "acceptance",
        abs(moved),
        max(tolerance, reach),
        abs(moved) <= max(tolerance, reach),
        f"the target keeps {now:.3f} of first draft tokens, and kept {then:.3f} when it was tuned, "
        f"a change of {moved - reach:+.3f} to {moved + reach:+.3f}",
    )


def outputs_check(
    prompts: Sequence[Sequence[int]],
    before: Sequence[Answer],
    after: Sequence[Answer],
    engine: Engine,
    dtype: str,
    sampling: Sampling,
) -> Check:
    """Are greedy outputs those of before but for near-ties?

    Args:
        engine: is asked for its likeliest tokens where outputs part.
    """
    ties, real = 0, 0
    for ids, one, other in zip(prompts, before, after, strict=True):
        found = parting(ids, one.tokens, other.tokens, engine, NEAR_TIES[dtype_of(dtype)], sampling)
        for _, _, near_tie in found:
            ties, real = ties + near_tie, real + (not near_tie)
    return Check(
        "outputs",
        real,
        0,
        not real,
        f"{len(prompts)} greedy outputs beside those before: {real} differ"
        + (f", {ties} near-ties" if ties else ""),
    )
