"""Judging a release for another engine, beside the engine's plain decoding."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from draftwell.components.bench.engines.measure import measurements_of
from draftwell.components.engines.vllm_methods import OFF, Method
from draftwell.components.gate.engine_checks import differences, judge_engine, null_of
from draftwell.components.gate.verdict_report import verdict_markdown
from draftwell.components.prompts.overlap import hashes_of
from draftwell.components.tune.engines.lab import Lab
from draftwell.flows.context import now
from draftwell.flows.steps.engine.release import EngineRelease, refuse_elsewhere
from draftwell.flows.steps.engine.space import EngineSpace
from draftwell.registry.releases import GateRecord, record_gate
from draftwell.registry.store import Store
from draftwell.serving.files import json_digest, write_json

if TYPE_CHECKING:
    from draftwell.components.bench.engines.figures import Figure
    from draftwell.components.gate.engine_checks import Difference, Null
    from draftwell.components.gate.verdict import GateVerdict, Thresholds
    from draftwell.components.prompts.prompt import Prompt


def gate_on_engine(
    space: EngineSpace,
    released: EngineRelease,
    prompts: Sequence[Prompt],
    thresholds: Thresholds,
    max_tokens: int,
    *,
    keep: bool = True,
) -> tuple[GateVerdict, list[Figure]]:
    """Judge a release beside the engine's plain decoding, at the temperature that it was tuned for;
    outputs are compared at 0.

    Args:
        keep: whether the verdict is recorded with the release.
    Returns:
        the verdict, and the figures that speed was judged by, one for each load.
    Raises:
        DraftwellError: it was tuned on something else than is here (`tuned_elsewhere`).
    """
    refuse_elsewhere(space, released.config, "tune")
    verdict, figures = judge(space, released, prompts, thresholds, max_tokens)
    if keep:
        keep_verdict(released, verdict, figures, judged_digest(prompts, max_tokens))
    return verdict, figures


def judge(
    space: EngineSpace,
    released: EngineRelease,
    prompts: Sequence[Prompt],
    thresholds: Thresholds,
    max_tokens: int,
) -> tuple[GateVerdict, list[Figure]]:
    """The verdict and its figures; nothing is kept."""

    choice, temperature = released.choice, released.config.contents.temperature
    ids, context = space.encoded(prompts, max_tokens)
    levels = tuple(level.at_once for level in choice.levels) or (1,)
    sampling = space.pair.sampling(max_tokens=max_tokens, temperature=temperature)
    lab = Lab(
        space.engine,
        space.files,
        ids,
        sampling,
        max(levels),
        context,
        8,
        measurements_of({}),
        space.bar,
    )
    with lab.open():
        figures = lab.measure(choice.chosen, "gate", levels) if choice.method != OFF else []
        unlike, null = (
            compare_outputs(lab, choice.chosen, levels, space.workspace.dtype)
            if figures and not temperature
            else (None, None)
        )
    idle = frozenset(level.at_once for level in choice.levels if level.k == 0)
    settings = choice.chosen.speculative_config(space.files)
    return judge_engine(figures, unlike, thresholds, null, settings, idle), figures


def keep_verdict(
    released: EngineRelease, verdict: GateVerdict, figures: Sequence[Figure], judged: str
) -> None:
    """Record a verdict with its release, with the figures as a file."""
    store, release = Store(), released.release
    record = GateRecord(
        pair=release.pair,
        device=release.device,
        release_version=release.version,
        pins=release.pins,
        passed=verdict.passed,
        checks=verdict.checks,
        baseline_version=store.get_aliases("release", f"{release.pair}.{release.device}").get(
            "champion"
        ),
        judged=judged,
        created=now(),
    )
    with tempfile.TemporaryDirectory() as place:
        file = write_json(
            Path(place) / "figures.json", [figure.model_dump(mode="json") for figure in figures]
        )
        record_gate(store, record, words=verdict_markdown(verdict), files=[file])


def judged_digest(prompts: Sequence[Prompt], max_tokens: int) -> str:
    """Digest of what a gate judges with."""
    return json_digest([sorted(hashes_of(prompts)), max_tokens])


def compare_outputs(
    lab: Lab, method: Method, levels: Sequence[int], dtype: str
) -> tuple[list[Difference], Null | None]:
    """Differences at every level, and where near-ties are among them how often plain decoding
    differs from itself.

    Another width is that of a pass over a draft.
    """

    unlike = [
        one
        for level in levels
        for one in differences(
            lab.found(method, "gate", level), lab.groups_at(level), lab.plain(), dtype, lab.sampling
        )
    ]
    if not any(one.near_tie for one in unlike):
        return unlike, None
    width = method.k + 1
    with lab.wide(width) as engine:
        return unlike, null_of(
            lab.found(method, "gate", levels[0]),
            lab.groups_at(levels[0]),
            engine,
            width,
            lab.sampling,
        )
