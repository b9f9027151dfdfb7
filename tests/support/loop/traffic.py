"""Served traffic of the tiny pair: prompts of one sort, of another, and a champion that was
calibrated on the first."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from draftwell.components.calibrate.settings import MemorySettings
from draftwell.components.collect.settings import CollectionSettings
from draftwell.components.prompts.prompt import Prompt
from draftwell.components.report.provenance import provenance
from draftwell.components.tune.evidence import TuningEvidence
from draftwell.flows import context
from draftwell.flows.context import StepContext
from draftwell.flows.loading import open_pair
from draftwell.flows.steps import (
    collect as collect_step,
    publish as publish_step,
    train as train_step,
)
from draftwell.registry.gates import GateRecord, thresholds_digest
from draftwell.registry.promotion import promote
from draftwell.registry.releases import ReleaseVersion, record_gate
from draftwell.registry.store import Store
from draftwell.serving.artifacts.decoding_config import DecodingConfig
from draftwell.serving.bundle.verdict import Check
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.recording.trace_schema import HEADER, TraceHeader
from draftwell.serving.runtime.strategies import StrategyChoice
from tests.support.collecting import small

WORDS = ("man", "inn", "onion", "hand", "end", "hour", "other", "men", "hen", "ten", "none", "one")
OTHERS = (
    "qué",
    "año",
    "niño",
    "mañana",
    "señor",
    "peña",
    "cuñado",
    "viña",
    "leña",
    "moño",
    "piña",
    "caña",
)
TOKENS = 24


def prompts(count: int, seed: int, words: Sequence[str] = WORDS) -> list[Prompt]:
    """Different prompts of some words."""
    chosen = np.random.default_rng(seed).choice(len(words) ** 3, count, replace=False)
    parts = (
        (words[i // len(words) ** 2], words[i // len(words) % len(words)], words[i % len(words)])
        for i in chosen.tolist()
    )
    return [Prompt(f"s{seed}/{i}", None, [f"{a} {b} {c}"]) for i, (a, b, c) in enumerate(parts)]


def station_of(pair_file: Path) -> StepContext:
    """The tiny pair, loaded."""
    return open_pair(str(pair_file), say=lambda line: None)


def serve(step: StepContext, folder: Path, asked: Sequence[Prompt]) -> TraceSet:
    """Traces of the target's greedy answers, as a server would spool them."""
    return collect_step.run_collect(
        step, asked, small(max_tokens=TOKENS, rollout=1, batch=16), folder=folder
    )


def some(rows: pa.Table, count: int, seed: int) -> pa.Table:
    """The rows of a few prompts."""
    import pyarrow.compute as pc

    names = sorted(set(rows.column("prompt_id").to_pylist()))
    chosen = np.random.default_rng(seed).choice(names, count, replace=False)
    return rows.filter(pc.is_in(rows.column("prompt_id"), pa.array(chosen.tolist())))


def elsewhere(rows: pa.Table) -> pa.Table:
    """What the rows would say of traffic that the draft knows little of."""
    n = rows.num_rows
    changes = {
        "confidence": np.asarray(rows.column("confidence")) * 0.5,
        "draft_p": (np.arange(n) % 4 == 0).astype(np.float32),
        "ratio": np.full(n, 3.0),
        "correction": np.asarray(rows.column("correction")) + 1,
    }
    for name, values in changes.items():
        place = rows.schema.get_field_index(name)
        rows = rows.set_column(
            place, rows.schema.field(name), pa.array(values).cast(rows.schema.field(name).type)
        )
    return rows


def sampled(rows: pa.Table, temperature: float = 1.0) -> pa.Table:
    """The rows as if they had been sampled."""
    header = TraceHeader.model_validate_json(rows.schema.metadata[HEADER]).model_copy(
        update={"temperature": temperature}
    )
    place = rows.schema.get_field_index("temperature")
    rows = rows.set_column(
        place, rows.schema.field(place), pa.array(np.full(rows.num_rows, temperature, np.float32))
    )
    return rows.replace_schema_metadata({HEADER: header.model_dump_json().encode()})


def of_kind(rows: pa.Table, kind: str) -> pa.Table:
    """The rows as if their texts had been written in another way."""
    place = rows.schema.get_field_index("kind")
    return rows.set_column(place, rows.schema.field(place), pa.array([kind] * rows.num_rows))


def spool(folder: Path, rows: pa.Table, asked: Sequence[Prompt] = ()) -> Path:
    """A spool of one shard, with the request bodies of some prompts."""
    TraceSet(folder).write_shard(0, rows)
    if asked:
        bodies = [
            {"model": "tiny", "messages": [{"role": "user", "content": prompt.prompt}]}
            for prompt in asked
        ]
        (folder / "requests.jsonl").write_text("".join(json.dumps(body) + "\n" for body in bodies))
    return folder


def scripted(strategy: str, **parameters: Any) -> Callable[..., Any]:
    """In the place of `draftwell.flows.steps.tune.run_tune`: a tuner whose choice stands before it
    begins."""

    def tune(
        step: StepContext, traces: TraceSet, asked: Sequence[Prompt], *settings: Any, **more: Any
    ) -> TuningEvidence:
        made = provenance(
            step.pair, trace_digest=traces.digest(), parents=step.parents("acceptance_table")
        )
        step.workspace.save(
            DecodingConfig(strategy, parameters, {"reason": "a script chose it"}, made)
        )
        return TuningEvidence(
            choice=StrategyChoice(strategy, parameters), reason="a script chose it"
        )

    return tune


def calibrate(step: StepContext) -> TraceSet:
    """Traces of 16 prompts, and all that is made of them, in the workspace."""
    asked = prompts(16, seed=1)
    traces = collect_step.run_collect(step, asked, CollectionSettings(max_tokens=TOKENS))
    train_step.run_train(step, traces)
    train_step.run_calibrate(step, traces, prompts(4, seed=11), MemorySettings(max_tokens=TOKENS))
    return traces


def crown(step: StepContext, out: Path, strategy: str = "vanilla_sd") -> ReleaseVersion:
    """A calibrated champion with a config that is slow here: its draft costs as much as the
    target."""
    from draftwell.registry.bundles.build import build_bundle

    traces = calibrate(step)
    scripted(strategy, num_speculative_tokens=5)(step, traces, [])
    release, store = publish_step.run_publish(step, {"by": "hand"}), Store()
    check = Check(name="by hand", value=1, threshold=1, passed=True)
    record_gate(
        store,
        GateRecord(
            pair=release.pair,
            device="cpu",
            release_version=release.version,
            pins=release.pins,
            passed=True,
            checks=(check,),
            thresholds=thresholds_digest(),
            created=context.now(),
        ),
    )
    champion = promote(store, release.pair, "cpu", release.version)
    build_bundle(store, step.workspace.spec, step.workspace.files(), out=out)
    return champion
