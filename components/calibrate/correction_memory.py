"""CSD's correction memory, counted in standard speculative decoding of prompts (CSD, section 4.2).

The paper counts 2,000 to 8,000 prompts, which takes hours on a CPU. So prompts are decoded in parts
of `PART`, and what is counted is kept in a file (`draftwell.components.results`): a run that was
killed resumes with the part that it was killed in. Which requests run together depends on the part
alone, so a resumed run gives the same counts to the last one, in bfloat16 too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from draftwell.components.calibrate.settings import MemorySettings
from draftwell.components.collect.decoding import decode_all, encode_all, room
from draftwell.components.prompts.prompt import Prompt, prompts_digest
from draftwell.components.results import Results
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.correction_memory import CorrectionMemory
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.acceptance.exact import Exact
from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.drafting.draft_model import DraftModel
from draftwell.serving.runtime.drafting.stopping import FixedLength
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.schedules.serial import serial
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.strategies import StrategyResources
from draftwell.serving.runtime.strategies.lossless.draft_lengths import VanillaSD
from draftwell.serving.runtime.types import Draft, Verdict

Progress = Callable[[int, int, str], None]
Rejection = tuple[int, int]
"""(draft token, what the target sampled instead)."""

TEMPERATURE, GAMMA = 0.6, 6
"""Of the texts, and draft tokens per round: those of CSD's paper."""
SEED = 0
"""Of the first prompt; the following prompts count up."""
DECODING: Mapping[str, float] = {"temperature": TEMPERATURE, "gamma": GAMMA, "seed": SEED}
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
    unfinished: Path | None = None,
    progress: Progress | None = None,
) -> CorrectionMemory:
    """Count (draft token, target's correction) in standard speculative decoding of prompts.

    Args:
        provenance: of the memory; parameters and metrics are filled in.
        settings: default: `MemorySettings()`.
        unfinished: file of the counts of an unfinished run, which a further call with the same
            pair, prompts and settings resumes; None keeps nothing. It is left there: who saved the
            memory removes it.
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
    # applied to the finished counts
    decoded: dict[str, float] = {"max_tokens": settings.max_tokens, **DECODING}
    parts = Results[list[Rejection]](
        unfinished,
        [pair.fingerprint, prompts_digest(prompts), {**decoded, "batch": settings.batch}, PART],
        list[Rejection],
    )

    def report(done: int, start: int = 0) -> None:
        if progress:
            progress(min(start + done, len(encoded)), len(encoded), "correction memory")

    report(parts.read * PART)
    rejections: list[Rejection] = []
    for start in range(0, len(encoded), PART):
        part, finished = encoded[start : start + PART], partial(report, start=start)
        count = partial(count_rejections, pair, part, settings, start, finished)
        rejections += parts.get(str(start), count)
    metrics = {"rejections": float(len(rejections)), "patterns": float(len(set(rejections)))}
    parameters: dict[str, Any] = {
        **decoded,
        "smallest_count": settings.smallest_count,
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
    config = VanillaSD.Config(num_speculative_tokens=GAMMA)
    base = pair.sampling(max_tokens=settings.max_tokens, temperature=TEMPERATURE, seed=SEED + start)
    recorders = [RecordingSD(config, StrategyResources()) for _ in encoded]
    requests = [(ids, replace(base, seed=base.seed + i)) for i, ids in enumerate(encoded)]
    engine = pair.engine()
    decode_all(engine, requests, recorders, room(engine, settings.batch), finished)
    return [rejection for one in recorders for rejection in one.rejections]
