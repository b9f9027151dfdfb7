"""Made traffic: prompts whose tokens are alike, as those of real prompts are, in the schema of
traces."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from draftwell.components.drift.drift import Subject, WatchedArtifacts, compare_traffic
from draftwell.components.drift.schema import DriftLimits, DriftReport
from draftwell.components.drift.traffic import Traffic, read_traffic
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.verifier import Verifier
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.recording.trace_schema import TraceHeader, trace_schema

FINGERPRINT = "f" * 64
HEADER = TraceHeader(
    pair="tiny",
    fingerprint=FINGERPRINT,
    dtype="float32",
    rollout=8,
    max_tokens=48,
    temperature=0.0,
    stop_token_ids=(2,),
)
LIMITS = DriftLimits(
    false_alarm_rate=0.001,
    resamples=6000,
    min_prompts=24,
    min_reference=12,
    min_positions=300,
    window=200,
    confidence_psi=0.1,
    acceptance=0.05,
    table=0.05,
    verifier=0.05,
    novelty=0.1,
    repeat_after_hours=12,
)
LOOSE = LIMITS.model_copy(
    update={
        "false_alarm_rate": 0.05,
        "resamples": 399,
        "confidence_psi": 0.0,
        "acceptance": 0.0,
        "table": 0.0,
        "verifier": 0.0,
        "novelty": 0.0,
    }
)
"""No limit on how much it matters: what remains is the tests, at a rate that a hundred trials can
see."""


def verifier(trace_digest: str | None = None) -> Verifier:
    """One whose score is a made position's confidence: made traffic keeps the logit of that in the
    place of the entropy."""
    made = Provenance(
        pair="tiny", fingerprint=FINGERPRINT, trace_digest=trace_digest, parameters={"seed": 0}
    )
    return Verifier(torch.tensor([0.0, 0.0, 1.0, 0.0]), 0.0, ("scalars",), 0.5, 1.2, made)


def rows(
    seed: int,
    prompts: int = 40,
    tokens: int = 48,
    *,
    sure: float = 0.0,
    kept: float = 1.0,
    label: float = 1.0,
    vocabulary: int = 0,
    first: int = 0,
    header: TraceHeader = HEADER,
    **columns: Any,
) -> pa.Table:
    """Rows of target texts.

    Args:
        sure: shift of the draft's confidence, in logits.
        kept, label: by which the chance of acceptance, and that of a label 1, is multiplied at
            every confidence.
        vocabulary: shift of the tokens that rejections are about.
        first: number of the first prompt.
        columns: values that replace whole columns.
    """
    random = np.random.default_rng([seed, 3])
    mood = random.normal(0.3, 0.7, prompts)[:, None]  # what makes tokens of one prompt alike
    z = (mood + sure + random.normal(0, 1.2, (prompts, tokens))).ravel()
    confidence = 1 / (1 + np.exp(-z))
    accepted = random.random(len(z)) < kept * confidence
    good = random.random(len(z)) < label * confidence
    drafted = vocabulary + np.minimum(random.zipf(1.4, len(z)), 400)
    n = len(z)
    values: dict[str, Any] = {
        "prompt_id": np.repeat([f"p{first + i}" for i in range(prompts)], tokens),
        "turn": np.zeros(n, np.int32),
        "kind": ["target"] * n,
        "temperature": np.full(n, header.temperature),
        "position": np.tile(np.arange(tokens), prompts),
        "prompt_tokens": [
            [seed, first + i // tokens] if i % tokens == 0 else None for i in range(n)
        ],
        "token": np.where(accepted, drafted, drafted + 1),
        "draft_token": drafted,
        "draft_q": np.ones(n),
        "draft_p": accepted.astype(float),
        "draft_raw_q": confidence,
        "ratio": np.where(good, 1.0, 3.0),
        "rank": np.zeros(n, np.int32),
        "confidence": confidence,
        "entropy": z,
        "correction": drafted + 1 + random.integers(0, 3, n),
        **columns,
    }
    schema = trace_schema(header)
    return pa.table(
        [
            pa.array(values[field.name]).cast(field.type)
            if field.name in values
            else pa.nulls(n, field.type)
            for field in schema
        ],
        schema=schema,
    )


def traffic(table: pa.Table, **settings: Any) -> Traffic:
    """Rows as `compare_traffic` takes them."""
    return read_traffic(
        table, **{"kinds": ("target",), "temperature": 0.0, "max_tokens": 48, **settings}
    )


def compared(
    then: pa.Table, now: pa.Table, limits: DriftLimits = LIMITS, **more: Any
) -> DriftReport:
    """A report with a verifier that has learnt from the first two thirds of the reference."""
    reference, feedback = traffic(then), traffic(now)
    subject = Subject("tiny", FINGERPRINT, ("target",), ("a" * 64, "b" * 64), "a release")
    watched = WatchedArtifacts(
        verifier=verifier(), untouched=reference.names[2 * len(reference.names) // 3 :]
    )
    about, of_champion = (
        {field.name: more.pop(field.name) for field in fields(part) if field.name in more}
        for part in (subject, watched)
    )
    return compare_traffic(
        reference,
        feedback,
        limits,
        replace(subject, **about),
        replace(watched, **of_champion),
        **more,
    )


def spool(folder: Path, tables: list[pa.Table]) -> Path:
    """Shards in a folder."""
    traces = TraceSet(folder)
    for index, table in enumerate(tables):
        traces.write_shard(index, table)
    return folder
