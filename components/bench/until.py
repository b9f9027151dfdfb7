"""When a comparison has prompts enough: it begins with a few, and takes more while its intervals
are wide and there is time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from draftwell.components.bench.interleaved import REFERENCE
from draftwell.components.bench.runner import Measurement
from draftwell.components.bench.settings import BenchSettings
from draftwell.components.prompts.prompt import Prompt
from draftwell.components.report.intervals import ratio_of

FEWEST_MORE = 4
"""Prompts that are worth another round."""


@dataclass(frozen=True)
class Until:
    """How sure a comparison is to be, and how long it may take.

    The rule looks at the width of an interval and never at its place, so that whoever stops by it
    favours neither side.

    Args:
        fewest: prompts to begin with.
        half_width: half of an interval's width that suffices, as a share of the ratio.
        deadline: by `time.monotonic`.
    """

    fewest: int
    half_width: float
    deadline: float

    def narrowed(
        self,
        measured: dict[str, Measurement],
        labels: Sequence[str],
        prompts: Sequence[Prompt],
        measure: Callable[[Sequence[Prompt], BenchSettings], dict[str, Measurement]],
        settings: BenchSettings,
    ) -> dict[str, Measurement]:
        """What was measured on the first few prompts, and on as many others as it takes.

        Args:
            labels: contenders whose intervals are looked at.
            prompts: all that there are.
            measure: measures some of them.
            settings: that the first were measured with; each further prompt has the next seed.
        """
        while True:
            done = len(measured[REFERENCE].prompt_ids)
            if not (others := prompts[done : done + self.further(measured, labels)]):
                return measured
            seeded = settings.model_copy(update={"seed": settings.seed + done})
            measured = joined(measured, measure(others, seeded))

    def further(self, measured: Mapping[str, Measurement], labels: Sequence[str]) -> int:
        """How many more prompts are to be measured; 0: none.

        Args:
            labels: contenders whose intervals are looked at.
        """
        plain = measured[REFERENCE]
        count = len(plain.prompt_ids)
        ratios = [ratio_of(plain, measured[label]) for label in labels if label != REFERENCE]
        widest = max(((one.high - one.low) / 2 / one.ratio for one in ratios), default=0.0)
        if widest <= self.half_width:
            return 0
        # an interval narrows with the square root of the number of prompts
        lacking = math.ceil(count * (widest / self.half_width) ** 2) - count
        spent = sum(run.seconds for one in measured.values() for runs in one.runs for run in runs)
        affordable = int((self.deadline - time.monotonic()) / (spent / count))
        return max(0, min(max(lacking, FEWEST_MORE), affordable))


def joined(
    first: Mapping[str, Measurement], second: Mapping[str, Measurement]
) -> dict[str, Measurement]:
    """What was measured on some prompts, and then on others, of those that did both."""
    return {
        label: Measurement(
            one.contender,
            [*one.prompt_ids, *second[label].prompt_ids],
            [*one.runs, *second[label].runs],
        )
        for label, one in first.items()
        if label in second
    }
