"""How many prompts and tokens a loop takes in its minutes, by how fast the target writes here."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from draftwell.components.bench.runner import StrategyContender
from draftwell.components.prompts.overlap import hashes_of
from draftwell.components.prompts.prompt import ids_of
from draftwell.flows.context import StepContext
from draftwell.flows.loading import prompts_of
from draftwell.flows.settings import PLACES, PipelineSettings
from draftwell.flows.workspace import Workspace
from draftwell.serving.artifacts.pair_files import fingerprint
from draftwell.serving.device import device_class
from draftwell.serving.files import json_digest, write_json
from draftwell.serving.runtime.strategies import PLAIN, StrategyResources

if TYPE_CHECKING:
    from draftwell.components.prompts.prompt import Prompt

PLAN = "plan.json"
"""In a workspace: what was planned, so that a run that continues takes the same prompts."""
TRIED_PROMPTS, TRIED_TOKENS = 3, 16
"""That the target's speed is measured on."""
FIXED = 90.0
"""Seconds that a loop takes with a target that needs no time: starts, training, a bundle."""
WORK = 8000.0
"""Tokens that a target writes, one at a time, in the time of everything else of a loop with the
counts of `PipelineSettings`."""
SLOWEST, FASTEST = 0.4, 2.0
"""Bounds of what the counts are multiplied by."""
ENOUGH = 2.0
"""Up to this multiple of the time that the counts need, the rest is left to the gate's
interval."""
MOST_CONFIRMING = 64
"""Prompts of the gate; there is time for all of them where a model is small."""
FEWEST: Mapping[str, int] = {
    **{"collect_prompts": 8, "sampled_prompts": 4, "calibrate_prompts": 4, "tune_prompts": 8},
    "max_tokens": 24,
}
"""Setting → count that is worth measuring."""


def planned(step: StepContext, settings: PipelineSettings) -> PipelineSettings:
    """The settings with counts for their minutes, where none were named; those of an earlier run of
    the same, which it may have stopped in, where there are some.

    Args:
        step: the loaded pair.
    """
    space, rows = step.workspace, prompts_of(settings)
    subject = subject_of(space, settings, rows)
    counts = None if settings.fresh else kept_counts(space, subject)
    if counts is None:
        pace = measure_pace(step, rows["tune"])
        total = sum(map(len, rows.values()))
        counts = counts_for(settings, pace, total)
        space.begin()
        write_json(space.root / PLAN, {"subject": subject, "pace": pace, "counts": counts})
    asked = {name: getattr(settings, name) for name in settings.model_fields_set}
    return PipelineSettings.model_validate({**asked, **counts})


def subject_of(
    space: Workspace, settings: PipelineSettings, rows: Mapping[str, Sequence[Prompt]]
) -> str:
    """Digest of what a plan is for."""
    everything = [prompt for prompts in rows.values() for prompt in prompts]
    asked = settings.model_dump(mode="json", exclude=PLACES | {"fresh"})
    return json_digest(
        {
            "settings": {name: asked[name] for name in asked if name in settings.model_fields_set},
            "prompts": hashes_of(everything),
            "pair": fingerprint(space.files(), space.dtype),
            "machine": device_class(settings.device),
        }
    )


def kept_counts(space: Workspace, subject: str) -> dict[str, int] | None:
    """The counts of an earlier run of the same."""
    try:
        kept = json.loads((space.root / PLAN).read_text(encoding="utf-8"))
        return dict(kept["counts"]) if kept["subject"] == subject else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def measure_pace(step: StepContext, prompts: Sequence[Prompt]) -> float:
    """Seconds that plain decoding takes for a token, the prompt's share with it."""
    contender = StrategyContender(step.pair, StrategyResources({}), PLAIN, PLAIN.name)
    sampling = step.pair.sampling(max_tokens=TRIED_TOKENS)
    runs = [
        contender.generate(ids_of(step.pair, prompt), sampling)
        for prompt in prompts[:TRIED_PROMPTS]
    ]
    return median(run.pace for run in runs)


def counts_for(settings: PipelineSettings, pace: float, prompts: int) -> dict[str, int]:
    """Setting → count, of those that were not named.

    Args:
        pace: seconds a token.
        prompts: that there are for all steps.

    >>> slow = counts_for(PipelineSettings(minutes=10, device="cpu"), 0.5, 120)
    >>> slow["collect_prompts"], slow["tune_prompts"], slow["max_tokens"]
    (8, 8, 24)
    >>> fast = counts_for(PipelineSettings(minutes=10, device="cpu"), 0.04, 120)
    >>> fast["collect_prompts"], fast["max_tokens"], fast["bench_prompts"]
    (16, 40, 64)
    """
    times = (60 * (settings.minutes or math.inf) - FIXED) / (WORK * pace)
    scale = math.sqrt(max(0.0, times if times < 1 else max(1.0, times / ENOUGH)))
    scale = min(FASTEST, max(SLOWEST, scale))
    counts: dict[str, Any] = {
        name: max(fewest, round(scale * PipelineSettings.model_fields[name].default))
        for name, fewest in FEWEST.items()
    }
    counts |= {name: getattr(settings, name) for name in settings.model_fields_set & counts.keys()}
    steps = ("collect", "tune", *(("calibrate",) if settings.takes_lossy else ()))
    others = sum(counts[f"{name}_prompts"] for name in steps)
    if "bench_prompts" not in settings.model_fields_set:
        counts["bench_prompts"] = min(MOST_CONFIRMING, max(16, prompts - others))
    return counts
