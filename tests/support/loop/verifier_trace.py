"""A made trace whose labels depend on a known direction of the draft's hidden states."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.recording.trace_schema import KINDS

ORIGIN = Provenance(pair="tiny", fingerprint="f" * 64, trace_digest="d")

WIDTH = 12


def trace(
    rows: int = 3000,
    prompts: int = 30,
    *,
    informative: str = "before",
    shuffled: bool = False,
    seed: int = 0,
    hidden: bool = True,
    name: str = "p",
    width: int = WIDTH,
    tasks: tuple[str | None, ...] = (None,),
    turned: tuple[str, ...] = (),
    matches: float | None = None,
    temperature: float = 0.0,
) -> pa.Table:
    """Draft tokens whose ratio depends on one direction of one of the states, at scales far from 1.

    Args:
        name: what the prompts' ids begin with; their tokens are its letters and their number (of
            bare texts one and the same).
        tasks: prompts take them in turn.
        turned: tasks whose ratio depends on that direction the other way round.
        matches: about the share of draft tokens that the target keeps, which depends on the other
            state; None: not recorded.
    """
    rng = np.random.default_rng(seed)
    states = {
        name: rng.normal(3.0, 7.0, size=(rows, width)).astype(np.float16)
        for name in ("before", "after")
    }
    number = np.arange(rows) * prompts // rows
    task = [tasks[n % len(tasks)] for n in number]
    signal = (states[informative][:, 0].astype(float) - 3.0) / 7.0 * np.where(
        np.isin(task, turned), -1.0, 1.0
    ) + 0.6
    ratio = np.exp(-2.0 * signal + 0.3 * rng.normal(size=rows)).astype(np.float32) * 1.2
    if shuffled:
        rng.shuffle(ratio)
    confidence = rng.uniform(0.1, 1.0, size=rows).astype(np.float32)
    tokens = [
        ([*name.encode(), int(n)] if i % 4 else [1]) if i % 9 == 0 else None
        for i, n in enumerate(number)
    ]
    columns = {
        "prompt_id": [f"{name}{n}" for n in number],
        "task": pa.array(task, pa.string()),
        "kind": [KINDS[i % 4] for i in range(rows)],
        "prompt_tokens": tokens,
        "ratio": ratio,
        "draft_raw_q": confidence,
        "confidence": confidence,
        "entropy": rng.uniform(0, 3, rows).astype(np.float32),
        "rank": pa.array([0] * rows, pa.int32()),
    }
    if matches is not None:
        other = (
            states["after" if informative == "before" else "before"][:, 0].astype(float) - 3.0
        ) / 7.0
        chance = 1 / (1 + np.exp(-(3.0 * other + np.log(matches / (1 - matches)))))
        kept = chance if temperature else (chance > 0.5).astype(float)
        columns |= {
            "draft_p": kept.astype(np.float32),
            "draft_q": np.ones(rows, np.float32),
            "temperature": np.full(rows, temperature, np.float32),
        }
    if hidden:
        columns |= {
            f"hidden_{name}": pa.array(list(part), pa.list_(pa.float16()))
            for name, part in states.items()
        }
    return pa.table(columns)
