"""Deterministic counts: what strategies do in float32 at temperature 0, the same on every machine
but for near-ties.

They are recorded in registry/baselines/ and compared by `baseline_checks.compare_with_baseline`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import torch
from pydantic import BaseModel, ConfigDict, Field

from draftwell.components.bench.interleaved import Progress
from draftwell.components.bench.runner import Config, labels_of
from draftwell.components.prompts.prompt import Prompt, ids_of, prompts_digest
from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.correction_memory import CorrectionMemory
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.artifacts.verifier import SCALAR_NAMES, Verifier
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.session.stats import Stats
from draftwell.serving.runtime.strategies import StrategyResources, build_strategy


class StrategyCounts(BaseModel):
    """Counts of one strategy over all prompts, greedy and in float32."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target_calls: int = Field(ge=0)
    judged: int = Field(ge=0, description="draft tokens that the target looked at")
    accepted: int = Field(ge=0)
    output_digest: str
    """Sha256 over the output tokens of all prompts."""


class CountsReport(BaseModel):
    """Counts of a pair, as registry/baselines/ keeps recorded ones: a fresh clone can be compared
    with them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pair: str
    fingerprint: str
    """Pair fingerprint in float32."""
    prompts_digest: str
    """Sha256 over the prompts."""
    prompts: int = Field(ge=1)
    max_tokens: int = Field(ge=1)
    strategies: dict[str, StrategyCounts]


def deterministic_report(
    pair: LoadedPair,
    strategies: Sequence[Config],
    prompts: Sequence[Prompt],
    max_tokens: int,
    progress: Progress | None = None,
    texts: dict[str, list[list[int]]] | None = None,
) -> CountsReport:
    """Greedy counts of strategies over prompts, with `fixed_resources`.

    Args:
        pair: loaded in float32.
        texts: filled with the outputs of every strategy: label → one for each prompt.
    Raises:
        DraftwellError: the pair is not in float32.
    """
    if pair.dtype != "float32":
        raise DraftwellError(
            (
                f"deterministic counts need the pair in float32, not {pair.dtype}: load it "
                "with --set dtype=float32"
            ),
            code="needs_float32",
        )
    resources = fixed_resources(pair)
    counts: dict[str, StrategyCounts] = {}
    for number, (label, config) in enumerate(zip(labels_of(strategies), strategies, strict=True)):
        strategy = build_strategy(config.name, dict(config.parameters), resources)
        outputs: list[list[int]] = []
        parts: list[Stats] = []
        for prompt in prompts:
            job = pair.engine().generate(
                ids_of(pair, prompt), pair.sampling(max_tokens=max_tokens), strategy
            )
            outputs.append(job.output)
            parts.append(job.session.stats)
            if progress:
                progress(number * len(prompts) + len(parts), len(prompts) * len(strategies), label)
        total = Stats.total(parts)
        if texts is not None:
            texts[label] = outputs
        counts[label] = StrategyCounts(
            target_calls=total.target_calls,
            judged=total.judged,
            accepted=total.accepted,
            output_digest=hashlib.sha256(json.dumps(outputs).encode()).hexdigest(),
        )
    return CountsReport(
        pair=pair.name,
        fingerprint=pair.fingerprint,
        prompts_digest=prompts_digest(prompts),
        prompts=len(prompts),
        max_tokens=max_tokens,
        strategies=counts,
    )


def fixed_resources(pair: LoadedPair) -> StrategyResources:
    """Artifacts that need no calibration and are the same on every machine.

    An empty table and memory; a profile with the draft at a fifth of the target's time, of which
    two tokens are verified in about one pass, so that this bounds SPIDE's continuations (a
    measured one would make its counts depend on the machine); a verifier that keeps a token while
    C is at least one half.
    """
    origin = Provenance(pair=pair.name, fingerprint=pair.fingerprint)
    by_confidence = torch.tensor([20.0 if name == "confidence" else 0.0 for name in SCALAR_NAMES])
    artifacts = [
        AcceptanceTable.empty(origin),
        CorrectionMemory.empty(origin),
        HardwareProfile(1.0, {1: 5.0, 2: 6.0, 32: 9.0}, 0.0, origin),
        Verifier(by_confidence, -10.0, ("scalars",), 0.5, 1.2, origin),
    ]
    return StrategyResources(
        {artifact.kind: artifact for artifact in artifacts}, pair.special_tokens, deterministic=True
    )
