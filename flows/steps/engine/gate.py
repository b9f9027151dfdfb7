"""Judging what was tuned for another engine, beside its plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from draftwell.components.engines.vllm_methods import CASCADE, OFF, Method
from draftwell.flows.steps.engine.space import RECORD, EngineSpace, about, tuned_choice
from draftwell.registry.bundles.vllm.plugin_wheel import plugin_version
from draftwell.serving.files import json_digest, write_json

if TYPE_CHECKING:
    from draftwell.components.gate.engine_checks import Difference, EngineGateRecord, Null
    from draftwell.components.gate.verdict import GateVerdict, Thresholds
    from draftwell.components.prompts.prompt import Prompt
    from draftwell.components.tune.engines.lab import Lab


def gate_on_engine(
    space: EngineSpace,
    prompts: Sequence[Prompt],
    thresholds: Thresholds,
    max_tokens: int,
    *,
    temperature: float = 0.0,
    keep: bool = True,
) -> tuple[GateVerdict, EngineGateRecord]:
    """Judge what was tuned for the engine, beside its plain decoding; the record is written unless
    `keep` is False.

    Args:
        temperature: of the requests that it was tuned for, at which it is judged; outputs are
            compared at 0.

    Raises:
        DraftwellError: nothing was tuned (`not_tuned`), or for other models (`other_models`).
    """
    from draftwell.components.bench.engines.store import Measurements
    from draftwell.components.gate.engine_checks import EngineGateRecord, judge_engine
    from draftwell.components.tune.engines.lab import Lab

    choice, known = tuned_choice(space, temperature), about(space)
    if keep:
        # a gate that breaks off leaves no verdict of an earlier one
        space.file_of(RECORD, temperature).unlink(missing_ok=True)
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
        Measurements(None, {}),
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
        verdict = judge_engine(
            figures, unlike, thresholds, null, choice.chosen.speculative_config(space.files), idle
        )
    plugin = plugin_version() if choice.method == CASCADE else None
    names = (
        "engine",
        "version",
        "distribution",
        "device_class",
        "dtype",
        "fingerprint",
        "threads",
        "made",
    )
    record = EngineGateRecord(
        **{name: known[name] for name in names},
        temperature=temperature,
        plugin=plugin,
        passed=verdict.passed,
        judged=judged_digest(prompts, max_tokens),
        settings=choice.chosen.speculative_config(space.files),
        checks=[vars(check) for check in verdict.checks],
        figures=tuple(figures),
    )
    if keep:
        write_json(space.file_of(RECORD, temperature), record.model_dump(mode="json"))
    return verdict, record


def judged_digest(prompts: Sequence[Prompt], max_tokens: int) -> str:
    """Digest of what a gate judges with."""
    from draftwell.components.prompts.overlap import hashes_of

    return json_digest([sorted(hashes_of(prompts)), max_tokens])


def compare_outputs(
    lab: Lab, method: Method, levels: Sequence[int], dtype: str
) -> tuple[list[Difference], Null | None]:
    """Differences at every level, and where near-ties are among them how often plain decoding
    differs from itself.

    Another width is that of a pass over a draft.
    """
    from draftwell.components.gate.engine_checks import differences, null_of

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
