"""What is made for a counted cell before it decodes: CSD's memory, and SPRINTER's verifier with the
thresholds at which it and the draft's confidence have runs of one length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from draftwell.components.bench.interleaved import Progress
from draftwell.components.collect.collect import collect_traces
from draftwell.components.collect.decoding import read_text
from draftwell.components.collect.settings import CollectionSettings
from draftwell.components.collect.work import work_of
from draftwell.components.papers.cells import CONFIDENCE, MEMORY, Cell
from draftwell.components.papers.trained import SETTINGS, training_settings
from draftwell.components.prompts.overlap import hash_of
from draftwell.components.prompts.prompt import Prompt, ids_of
from draftwell.components.report.provenance import provenance
from draftwell.components.results import Results
from draftwell.components.train.operating_points import (
    compare,
    confidence_rule,
    difference,
    scored_tokens,
)
from draftwell.components.train.verifier import train_verifier
from draftwell.serving.artifacts.correction_memory import CorrectionMemory
from draftwell.serving.files import json_digest
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import StrategyChoice, StrategyResources

ETA_FP = 0.1
"""Share of the tokens to be rejected that both scores keep where they are compared at one share."""
Rejection = tuple[int, int]


class Point(NamedTuple):
    """A score's threshold at a run length and what it does there; then, at one η_FP, its run length
    and how far that is from the confidence's, with the ends of its 95 % interval. All along texts
    that draft and target wrote in turn, of prompts that nothing was trained on."""

    threshold: float
    run_length: float
    eta_fp: float | None
    at_eta_fp: float
    gain: tuple[float, float, float]


@dataclass(frozen=True)
class Calibrated:
    """What contenders decode with.

    Args:
        digests: kind of an artifact, or label of a contender → what it was made from.
        further: label → contenders with artifacts of their own.
    """

    resources: StrategyResources
    digests: dict[str, str] = field(default_factory=dict)
    further: dict[str, tuple[StrategyChoice, StrategyResources]] = field(default_factory=dict)
    points: dict[str, Point] = field(default_factory=dict)


def calibrated(
    cell: Cell,
    pair: LoadedPair,
    training: Mapping[str, Sequence[Prompt]],
    resources: StrategyResources,
    folder: Path,
    progress: Progress | None = None,
) -> Calibrated:
    """Make what a cell asks for, from the prompts under its names in `training`."""
    made = Calibrated(resources)
    if cell.memory:
        memory = read_memory(pair, training[MEMORY], folder / "counts", progress)
        made.digests[MEMORY] = json_digest([[*pair, n] for pair, n in memory.counts.items()])
        artifacts = {**resources.artifacts, CorrectionMemory.kind: memory}
        made = replace(made, resources=replace(resources, artifacts=artifacts))
    for role in cell.verifiers:
        _add_verifier(made, role, cell, pair, training[role], folder)
    return made


def read_memory(
    pair: LoadedPair,
    prompts: Sequence[Prompt],
    folder: Path,
    progress: Progress | None = None,
) -> CorrectionMemory:
    """A memory of what greedy decoding would reject along the prompts' own references: the draft's
    first choice and the target's, wherever they differ. Both models read each text once, which
    takes a tenth of the time that decoding takes."""
    found = Results[list[Rejection]](
        folder / f"memory-{pair.fingerprint[:12]}.jsonl", [pair.fingerprint], list[Rejection]
    )
    memory = CorrectionMemory.empty(provenance(pair))
    for done, prompt in enumerate(prompts, 1):
        for rejection in found.get(hash_of(prompt), partial(rejections_along, pair, prompt)):
            memory.update(*rejection)
        if progress:
            progress(done, len(prompts), MEMORY)
    return memory


def rejections_along(pair: LoadedPair, prompt: Prompt) -> list[Rejection]:
    """The draft's and the target's first choices that differ along a prompt's reference."""
    ids, answer = ids_of(pair, prompt), pair.encode(prompt.reference or "", special=False)
    draft, target = (
        read_text(pair.models[role], role, [*ids, *answer], len(answer) + 1).logits.argmax(-1)
        for role in ("draft", "target")
    )
    return [
        (one, other)
        for one, other in zip(draft.tolist(), target.tolist(), strict=True)
        if one != other
    ]


def _add_verifier(
    made: Calibrated,
    role: str,
    cell: Cell,
    pair: LoadedPair,
    prompts: Sequence[Prompt],
    folder: Path,
) -> None:
    """Train a verifier on three quarters of its prompts, and choose thresholds on the others."""
    settings = training_settings(cell)
    cut = len(prompts) * 3 // 4
    trace = traced(pair, prompts[:cut], folder, settings)
    verifier, _ = train_verifier(trace, provenance(pair), SETTINGS)
    mixed = settings.model_copy(update={"prefix_kinds": ("mixed",)})
    scores = {role: verifier, CONFIDENCE: confidence_rule(provenance(pair))}
    tokens = scored_tokens(traced(pair, prompts[cut:], folder, mixed), scores)
    assert cell.run_length is not None
    found = compare(tokens, run_length=cell.run_length, eta_fp=ETA_FP)
    plain = tokens[CONFIDENCE], found.at_eta_fp[CONFIDENCE]
    for name, score in scores.items():
        point = found.at_run_length[name]
        mine = tokens[name], found.at_eta_fp[name]
        made.points[name] = Point(
            point.threshold,
            point.run_length,
            point.eta_fp,
            mine[1].run_length,
            difference("run_length", mine, plain),
        )
        artifacts = {**made.resources.artifacts, "verifier": score}
        made.further[name] = (
            StrategyChoice("sprinter", {"tau": point.threshold}),
            replace(made.resources, artifacts=artifacts),
        )
        made.digests[name] = json_digest([score.weight.tolist(), score.bias])


def traced(
    pair: LoadedPair, prompts: Sequence[Prompt], folder: Path, settings: CollectionSettings
) -> TraceSet:
    """A trace, in a folder of its own: a collection that was cut short resumes there."""
    name = f"verifier-{work_of(pair, prompts, settings).plan.inputs[:12]}"
    return collect_traces(pair, prompts, folder / "traces" / name, settings)
