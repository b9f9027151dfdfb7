"""What is made for a counted cell before it decodes: CSD's memory, and SPRINTER's verifier with the
thresholds at which it and the draft's confidence have runs of one length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from draftwell.components.bench.interleaved import REFERENCE, Progress
from draftwell.components.collect.decoding import read_text
from draftwell.components.papers.cells import CONFIDENCE, MEMORY, Cell
from draftwell.components.papers.plan import Planned
from draftwell.components.papers.verifiers import SETTINGS, traced
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
from draftwell.serving.artifacts.base import Artifact
from draftwell.serving.artifacts.correction_memory import CorrectionMemory
from draftwell.serving.artifacts.verifier import Verifier
from draftwell.serving.files import json_digest
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


class Calibrated(NamedTuple):
    """What a contender decodes with.

    Args:
        digests: kind of an artifact, or the contender's label → what was made for the cell.
        point: of a score.
    """

    choice: StrategyChoice
    resources: StrategyResources
    digests: dict[str, str]
    point: Point | None = None


def calibrated(
    cell: Cell,
    planned: Planned,
    pair: LoadedPair,
    resources: StrategyResources,
    progress: Progress | None = None,
) -> dict[str, Calibrated]:
    """Label → contender, plain decoding first; what a cell asks for is made from the prompts under
    its names in the plan's `training`."""
    digests: dict[str, str] = {}
    if cell.memory:
        learnt = planned.training[MEMORY].prompts
        memory = read_memory(pair, learnt, planned.folder / "counts", progress)
        digests[MEMORY] = json_digest([[*pair, n] for pair, n in memory.counts.items()])
        resources = with_artifact(resources, MEMORY, memory)
    choices = {REFERENCE: StrategyChoice(REFERENCE), **cell.by_label}
    found = {label: Calibrated(one, resources, digests) for label, one in choices.items()}
    for role in cell.verifiers:
        scores = scores_of(cell, role, planned, pair)
        for name, (score, point) in scores.items():
            found[name] = Calibrated(
                StrategyChoice("sprinter", {"tau": point.threshold}),
                with_artifact(resources, "verifier", score),
                {**digests, name: json_digest([score.weight.tolist(), score.bias])},
                point,
            )
    return found


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


def scores_of(
    cell: Cell, role: str, planned: Planned, pair: LoadedPair
) -> dict[str, tuple[Verifier, Point]]:
    """A verifier that is trained on three quarters of its prompts, and the draft's confidence, with
    thresholds that are chosen on the other prompts."""
    prompts = planned.training[role].prompts
    cut = len(prompts) * 3 // 4
    trace = traced(cell, pair, prompts[:cut], planned.folder)
    verifier, _ = train_verifier(trace, provenance(pair), SETTINGS)
    scores = {role: verifier, CONFIDENCE: confidence_rule(provenance(pair))}
    mixed = traced(cell, pair, prompts[cut:], planned.folder, ("mixed",))
    tokens = scored_tokens(mixed, scores)
    assert cell.run_length is not None
    found = compare(tokens, run_length=cell.run_length, eta_fp=ETA_FP)
    plain = tokens[CONFIDENCE], found.at_eta_fp[CONFIDENCE]
    points = {}
    for name, score in scores.items():
        at_length, at_eta = found.at_run_length[name], found.at_eta_fp[name]
        gain = difference("run_length", (tokens[name], at_eta), plain)
        points[name] = score, Point(*at_length[:3], at_eta.run_length, gain)
    return points


def with_artifact(resources: StrategyResources, kind: str, made: Artifact) -> StrategyResources:
    """Resources with an artifact that was made for the cell."""
    return replace(resources, artifacts={**resources.artifacts, kind: made})
