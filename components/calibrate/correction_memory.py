"""CSD's correction memory, counted in standard speculative decoding of prompts (CSD, section 4.2).

The paper counts 2,000 to 8,000 prompts, which takes hours on a CPU. So prompts are decoded in parts
of `PART`, and what is counted is kept in a file: a run that was killed resumes with the part that
it was killed in. Which requests run together depends on the part alone, so a resumed run gives the
same counts to the last one, in bfloat16 too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from draftwell.components.calibrate.settings import MemorySettings
from draftwell.components.collect.decoding import decode_all, encode_all, room
from draftwell.components.prompts.prompt import Prompt, prompts_digest
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.correction_memory import CorrectionMemory
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import json_digest, write_atomically
from draftwell.serving.runtime.acceptance.exact import Exact
from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.drafting.draft_model import DraftModel
from draftwell.serving.runtime.drafting.stopping import FixedLength
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.schedules.serial import serial
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.strategies import StrategyResources
from draftwell.serving.runtime.strategies.lossless.vanilla_sd import VanillaSD
from draftwell.serving.runtime.types import Draft, Verdict

Log = Callable[[str, float, int], None]
Progress = Callable[[int, int, str], None]
Rejection = tuple[int, int]
"""(draft token, what the target sampled instead)."""

PART = 128
"""Prompts of a part, after each of which the counts are kept."""


class RecordingSD(VanillaSD):
    """Standard speculative decoding that records every (rejected token, token sampled instead)."""

    def __init__(self, config: Any, resources: StrategyResources):
        super().__init__(config, resources)
        self.rejections: list[tuple[int, int]] = []

    def run(self, session: Session) -> Step[None]:
        def learn(draft: Draft, verdict: Verdict) -> None:
            if verdict.rejected and verdict.token is not None:
                self.rejections.append((draft.tokens[verdict.accepted], verdict.token))

        yield from serial(
            session, DraftModel(FixedLength(self.config.num_speculative_tokens)), Exact(), learn
        )


def build_correction_memory(
    pair: LoadedPair,
    prompts: Sequence[Prompt],
    provenance: Provenance,
    settings: MemorySettings | None = None,
    *,
    partial: Path | None = None,
    log: Log | None = None,
    progress: Progress | None = None,
) -> CorrectionMemory:
    """Count (draft token, target's correction) in standard speculative decoding of prompts.

    Args:
        provenance: of the memory; parameters and metrics are filled in.
        settings: default: `MemorySettings()`.
        partial: folder for the counts of an unfinished run, which a further call with the same
            pair, prompts and settings resumes; None keeps nothing. The file is left there: who
            saved the memory removes it (`partial_file`).
    Raises:
        DraftwellError: no prompts (`no_prompts`), or a pair without draft.
        ContextTooLong: a prompt is too long; nothing has been decoded then.
    """
    if not prompts:
        raise DraftwellError(
            "there are no prompts to learn corrections from: name a file with at least one",
            code="no_prompts",
        )
    settings = settings or MemorySettings()
    encoded = encode_all(pair, prompts, settings.max_tokens, RecordingSD.roles)
    file = None if partial is None else partial_file(partial, pair, prompts, settings)
    rejections = _all_rejections(pair, encoded, settings, file, progress)
    metrics = {"rejections": float(len(rejections)), "patterns": float(len(set(rejections)))}
    if log:
        for name, value in metrics.items():
            log(name, value, 0)
    parameters = {
        **settings.model_dump(exclude={"batch"}),
        "prompts": len(prompts),
        "prompts_digest": prompts_digest(prompts),
    }
    memory = CorrectionMemory.empty(provenance.extended(parameters, metrics))
    for drafted, correction in rejections:
        memory.update(drafted, correction)
    memory.counts = {
        seen: count for seen, count in memory.counts.items() if count >= settings.smallest_count
    }
    return memory


def _all_rejections(
    pair: LoadedPair,
    encoded: Sequence[Sequence[int]],
    settings: MemorySettings,
    file: Path | None,
    progress: Progress | None,
) -> list[Rejection]:
    """The rejections of all prompts, part by part; those of finished parts are kept in a file."""
    parts, total = read_parts(file), len(encoded)

    def report(done: int, start: int = 0) -> None:
        if progress:
            progress(min(start + done, total), total, "correction memory")

    report(len(parts) * PART)
    for start in range(len(parts) * PART, total, PART):
        part = encoded[start : start + PART]
        parts.append(count_rejections(pair, part, settings, start, partial(report, start=start)))
        if file is not None:
            write_atomically(file, json.dumps(parts).encode())
    return [rejection for part in parts for rejection in part]


def count_rejections(
    pair: LoadedPair,
    encoded: Sequence[Sequence[int]],
    settings: MemorySettings,
    start: int,
    finished: Callable[[int], None] | None = None,
) -> list[Rejection]:
    """The rejections of some prompts, prompt by prompt.

    Args:
        encoded: token ids of the prompts.
        start: number of the first one among all prompts, which gives it its seed.
        finished: as in `decode_all`.
    """
    config = VanillaSD.Config(num_speculative_tokens=settings.gamma)
    base = pair.sampling(
        max_tokens=settings.max_tokens, temperature=settings.temperature, seed=settings.seed + start
    )
    recorders = [RecordingSD(config, StrategyResources()) for _ in encoded]
    requests = [(ids, replace(base, seed=base.seed + i)) for i, ids in enumerate(encoded)]
    engine = pair.engine()
    decode_all(engine, requests, recorders, room(engine, settings.batch), finished)
    return [rejection for one in recorders for rejection in one.rejections]


def partial_file(
    folder: Path, pair: LoadedPair, prompts: Sequence[Prompt], settings: MemorySettings
) -> Path:
    """Where the counts of an unfinished run are kept: a file for each pair, prompts and settings,
    so that no run ends another one's.

    `smallest_count` is not part of them: it is applied to the finished counts.
    """
    key = json_digest(
        [
            pair.fingerprint,
            prompts_digest(prompts),
            settings.model_dump(exclude={"smallest_count"}),
            PART,
        ]
    )
    return folder / f"rejections-{key[:16]}.json"


def read_parts(file: Path | None) -> list[list[Rejection]]:
    """The parts that an unfinished run has counted; none where there is no such file, or it cannot
    be read."""
    try:
        parts = [] if file is None else json.loads(file.read_text())
        return [[(int(drafted), int(correction)) for drafted, correction in part] for part in parts]
    except (OSError, ValueError, TypeError):
        return []
