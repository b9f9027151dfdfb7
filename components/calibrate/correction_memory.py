"""CSD's correction memory, counted in standard speculative decoding of prompts (CSD, section 4.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from components.collect.decoding import decode_all, encode_all, room
from components.prompts.prompt import Prompt, prompts_digest
from serving.artifacts.base import Provenance
from serving.artifacts.correction_memory import CorrectionMemory
from serving.errors import DraftwellError
from serving.runtime.acceptance.exact import Exact
from serving.runtime.commands import Step
from serving.runtime.drafting.draft_model import DraftModel
from serving.runtime.drafting.stopping import FixedLength
from serving.runtime.pair import LoadedPair
from serving.runtime.schedules.serial import serial
from serving.runtime.session.session import Session
from serving.runtime.strategies import StrategyResources
from serving.runtime.strategies.lossless.vanilla_sd import VanillaSD
from serving.runtime.types import Draft, Verdict

Log = Callable[[str, float, int], None]
Progress = Callable[[int, int, str], None]


class MemorySettings(BaseModel):
    """How the prompts are decoded whose rejections are counted."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    max_tokens: int = Field(96, ge=1, description="new tokens per prompt")
    temperature: float = Field(0.6, ge=0, description=".6 in the paper; at 0 a correction is the target's argmax")
    gamma: int = Field(6, ge=1, description="draft tokens per round; 6 in the paper")
    seed: int = Field(0, description="of the first prompt; the following prompts count up")
    batch: int = Field(1, ge=1, description="concurrent requests, as far as the pair has slots; except for near-ties the counts do not "
                                            "depend on it")


class RecordingSD(VanillaSD):
    """Standard speculative decoding that records every (rejected token, token sampled instead)."""

    def __init__(self, config: Any, resources: StrategyResources):
        super().__init__(config, resources)
        self.rejections: list[tuple[int, int]] = []

    def run(self, session: Session) -> Step[None]:
        def learn(draft: Draft, verdict: Verdict) -> None:
            if verdict.rejected and verdict.token is not None:
                self.rejections.append((draft.tokens[verdict.accepted], verdict.token))

        yield from serial(session, DraftModel(FixedLength(self.config.num_speculative_tokens)), Exact(), learn)


def build_correction_memory(pair: LoadedPair, prompts: Sequence[Prompt], provenance: Provenance, settings: MemorySettings | None = None,
                            *, log: Log | None = None, progress: Progress | None = None) -> CorrectionMemory:
    """Count (draft token, target's correction) in standard speculative decoding of prompts.

    Args:
        provenance: of the memory; parameters and metrics are filled in.
        settings: default: `MemorySettings()`.
    Raises:
        DraftwellError: no prompts (`no_prompts`), or a pair without draft.
        ContextTooLong: a prompt is too long; nothing has been decoded then.
    """
    if not prompts:
        raise DraftwellError("there are no prompts to learn corrections from: name a file with at least one", code="no_prompts")
    settings = settings or MemorySettings()
    encoded = encode_all(pair, prompts, settings.max_tokens, RecordingSD.roles)
    config = VanillaSD.Config(num_speculative_tokens=settings.gamma)
    base = pair.sampling(max_tokens=settings.max_tokens, temperature=settings.temperature, seed=settings.seed)
    recorders = [RecordingSD(config, StrategyResources()) for _ in prompts]
    requests = [(ids, replace(base, seed=settings.seed + i)) for i, ids in enumerate(encoded)]
    engine = pair.engine()
    decode_all(engine, requests, recorders, room(engine, settings.batch),
               (lambda done: progress(done, len(requests), "correction memory")) if progress else None)
    rejections = [rejection for one in recorders for rejection in one.rejections]
    metrics = {"rejections": float(len(rejections)), "patterns": float(len(set(rejections)))}
    if log:
        for name, value in metrics.items():
            log(name, value, 0)
    parameters = {"temperature": settings.temperature, "gamma": settings.gamma, "max_tokens": settings.max_tokens,
                  "prompts": len(prompts), "prompts_digest": prompts_digest(prompts), "seed": settings.seed}
    memory = CorrectionMemory.empty(provenance.model_copy(update={
        "parameters": {**provenance.parameters, **parameters}, "metrics": {**provenance.metrics, **metrics}}))
    for drafted, correction in rejections:
        memory.update(drafted, correction)
    return memory
