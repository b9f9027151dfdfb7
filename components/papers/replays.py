"""Cells that are replayed: target calls and accepted tokens counted on a trace, at a paper's own
ratio of costs, in minutes.

The target's greedy texts are collected once with the draft's continuations of every position
(`draftwell.components.collect`); a replay runs a strategy's own code over them. Padding a target
with zeros changes no token, so the pair is not padded. What is counted is exact for these texts;
seconds are predicted: a target pass takes as long as s draft passes and a quarter, whatever it
reads, and no pass slows another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftwell.components.bench.bench import subject
from draftwell.components.bench.interleaved import REFERENCE, Progress
from draftwell.components.bench.schema import (
    SCHEMA,
    BenchEntry,
    BenchReport,
    Machine,
    PromptRow,
    ReportSettings,
)
from draftwell.components.collect.collect import collect_traces
from draftwell.components.collect.settings import CollectionSettings
from draftwell.components.papers.cells import Cell
from draftwell.components.papers.plan import Planned
from draftwell.components.prompts.prompt import Prompt
from draftwell.components.replay import Texts, read_texts, replay_strategy
from draftwell.components.report.machine import describe_machine
from draftwell.components.report.provenance import provenance
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.files import json_digest
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import StrategyChoice, StrategyResources, find_strategy

ROLLOUT = 16
"""Draft tokens that are recorded behind every position; a longer draft continues as before the
record ended. Tokens behind a wrong one are never judged, so no count depends on them."""
SLOTS = 8
"""Texts that are written at once."""
PART = 0.25
"""By which a target pass is longer than s draft passes, so that rounding down gives s."""


def replayed(
    cell: Cell,
    planned: Planned,
    pair: LoadedPair,
    resources: StrategyResources,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Replay a cell's contenders, and plain decoding.

    Args:
        cell: with `replay`.
        progress: called with (done, total, label), a text or a replay each.
    Returns:
        fields of the cell's file.
    """
    prompts = planned.chosen.prompts
    settings = CollectionSettings(
        max_tokens=cell.max_tokens,
        rollout=ROLLOUT,
        batch=min(SLOTS, len(prompts)),
        hidden=False,
        prefix_kinds=("target",),
    )
    choices = {REFERENCE: StrategyChoice(REFERENCE), **cell.by_label}
    total = len(prompts) + len(choices)

    def collected(done: int, *_: object) -> None:
        if progress:
            progress(done, total, "trace")

    # contenders may change, and the same texts are replayed
    digest = json_digest([planned.made.fingerprint, planned.chosen.digest, cell.max_tokens])
    trace = planned.folder / "traces" / f"{cell.pair}-{cell.data}-{digest[:12]}"
    texts = read_texts(collect_traces(pair, prompts, trace, settings, progress=collected))
    profile = constant_costs(cell.replay or 1, pair)
    used = StrategyResources(
        {**resources.artifacts, "hardware_profile": profile}, pair.special_tokens
    )
    entries = {}
    for label, choice in choices.items():
        entries[label] = replayed_entry(choice, texts, used, profile)
        if progress:
            progress(len(prompts) + len(entries), total, label)
    return {"report": report_of(cell, pair, prompts, entries)}


def constant_costs(ratio: int, pair: LoadedPair) -> HardwareProfile:
    """Costs in draft passes: a target pass takes `ratio` of them and a quarter, however many tokens
    it reads."""
    return HardwareProfile(1.0, {1: ratio + PART}, 0.0, provenance(pair))


def replayed_entry(
    choice: StrategyChoice, texts: Texts, resources: StrategyResources, profile: HardwareProfile
) -> BenchEntry:
    """One contender; its seconds are draft passes, the prompt's reading one target pass."""
    result = replay_strategy(
        texts, choice.name, dict(choice.parameters), resources, profile, extend=True
    )
    first = profile.verify_seconds(1)
    rows = [
        PromptRow(
            prompt_id=one.name,
            seconds=max(one.seconds, first),
            tokens=one.stats.emitted,
            ttft_ms=first * 1e3,
            target_calls=one.stats.target_calls,
            accepted=one.stats.accepted,
            judged=one.stats.judged,
        )
        for one in result.per_prompt
    ]
    return entry_of(choice, rows, result.stats.drafted)


def entry_of(choice: StrategyChoice, rows: Sequence[PromptRow], drafted: int) -> BenchEntry:
    """A contender's counters in the form of a bench's entry."""
    accepted, judged = sum(row.accepted for row in rows), sum(row.judged for row in rows)
    seconds = sum(row.seconds - row.ttft_ms / 1e3 for row in rows)
    return BenchEntry(
        strategy=choice.name,
        parameters={name: str(value) for name, value in choice.parameters.items()},
        lossless=find_strategy(choice.name).lossless,
        per_prompt=tuple(rows),
        decode_tokens_per_second=sum(row.tokens - 1 for row in rows) / seconds if seconds else None,
        acceptance_rate=accepted / judged if judged else None,
        draft_efficiency=accepted / drafted if drafted else None,
    )


def report_of(
    cell: Cell, pair: LoadedPair, prompts: Sequence[Prompt], entries: Mapping[str, BenchEntry]
) -> BenchReport:
    """Contenders' entries in the form of a bench's report."""
    return BenchReport(
        **subject(pair, prompts),
        schema_version=SCHEMA,
        machine=Machine(**describe_machine(pair)),
        strategies=dict(entries),
        settings=ReportSettings(max_tokens=cell.max_tokens, temperature=cell.temperature, runs=1),
    )
