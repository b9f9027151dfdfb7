"""The stations of the loop as plain functions: what one needs, makes and hands on.

collect → train → calibrate → tune → release. Each reads and writes the pair's workspace and returns what it made; none knows
Prefect. `publish` alone talks to the registry.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.workspace import Workspace
from serving.runtime.artifacts.base import digest_of, write_atomically
from serving.runtime.types import DraftwellError

if TYPE_CHECKING:
    from components.prompts import Prompt
    from registry.releases import ReleaseVersion
    from serving.runtime.pair import LoadedPair
    from serving.runtime.trace import TraceSet

Bar = Callable[..., None]
KINDS = ("bare", "draft", "target", "mixed")
"""SPRINTER's prefix kinds (a) to (d)."""


@dataclass(frozen=True)
class Station:
    """What all stations work with."""

    workspace: Workspace
    pair: LoadedPair
    bar: Bar | None = None

    def report(self, name: str, value: Any) -> Path:
        """Write a JSON report into the workspace."""
        path = self.workspace.reports / f"{name}.json"
        write_atomically(path, (json.dumps(value, indent=2) + "\n").encode())
        return path

    def parents(self, *kinds: str) -> dict[str, str]:
        """kind → digest of artifacts in the workspace that something is made from."""
        return {k: digest_of(self.workspace.artifacts / k) for k in kinds if (self.workspace.artifacts / k).is_dir()}


def open_trace(station: Station, folder: Path | None = None) -> TraceSet:
    """The trace set to learn from."""
    from components.collection import is_complete
    from serving.runtime.trace import TraceSet

    traces = TraceSet(folder or station.workspace.traces, fingerprint=station.pair.fingerprint)
    if not traces.shards:
        raise DraftwellError(f"no traces in {traces.folder}: run `draftwell collect --pair {station.workspace.spec.name}` first")
    if not is_complete(traces.folder):
        raise DraftwellError(f"the collection in {traces.folder} is unfinished: run the same `draftwell collect` again, it goes on "
                             "where it stopped")
    return traces


def collect(station: Station, prompts: Sequence[Prompt], *, max_tokens: int = 96, folder: Path | None = None, fresh: bool = False,
            rollout: int = 16, kinds: Sequence[str] = KINDS) -> TraceSet:
    """Collect traces of the pair on prompts; a collection that was cut short goes on where it stopped.

    Args:
        fresh: forget traces of other prompts or settings in the folder.
        kinds: prefix kinds in equal parts; a verifier learns from all, replay and table from the target's own texts.
    """
    from components.collection import ForeignTrace, forget
    from components.collection import collect as run

    where = folder or station.workspace.traces
    options: dict[str, Any] = {"max_tokens": max_tokens, "rollout": rollout, "prefix_kinds": tuple(kinds), "progress": station.bar}
    try:
        return run(station.pair, prompts, where, **options)
    except ForeignTrace:
        if not fresh:
            raise
        forget(where)
        return run(station.pair, prompts, where, **options)


def train(station: Station, traces: TraceSet) -> dict[str, Any]:
    """Train a SPRINTER verifier, put it into the workspace and return its report."""
    from components.plots import verifier_plots
    from components.provenance import provenance
    from components.verifier_training import train_verifier

    verifier, report = train_verifier(traces, provenance(station.pair, trace_digest=traces.digest()))
    station.workspace.save(verifier)
    verifier_plots(report, station.workspace.reports)
    station.report("verifier", report)
    return report


def train_head(station: Station, traces: TraceSet) -> dict[str, Any]:
    """Train a SpecDec++ acceptance head, put it into the workspace and return its report."""
    from components.acceptance_head_training import train_acceptance_head
    from components.provenance import provenance

    head, report = train_acceptance_head(station.pair, traces, provenance(station.pair, trace_digest=traces.digest()))
    station.workspace.save(head)
    station.report("acceptance_head", report)
    return report


def calibrate(station: Station, traces: TraceSet, prompts: Sequence[Prompt], *, max_tokens: int = 96) -> dict[str, Any]:
    """Make acceptance table, correction memory and hardware profile, put them into the workspace and say what is in them."""
    from components.calibration import build_acceptance_table, build_correction_memory
    from components.plots import acceptance_plot, rejection_tail
    from components.profiling import profile
    from components.provenance import provenance

    made_of = provenance(station.pair, trace_digest=traces.digest())
    table = build_acceptance_table(traces, made_of)
    memory = build_correction_memory(station.pair, prompts, made_of, max_tokens=max_tokens, progress=station.bar)
    times = profile(station.pair, provenance(station.pair))
    for artifact in (table, memory, times):
        station.workspace.save(artifact)
    acceptance_plot(table, station.workspace.reports / "acceptance_by_confidence.png")
    rejection_tail(list(memory.counts.values()), station.workspace.reports / "rejections.png")
    report = {"judged": sum(table.total), "accepted": sum(table.accepted), "memory_pairs": len(memory.counts),
              "t_draft_ms": times.t_draft * 1e3, "t_verify_ms": {str(k): v * 1e3 for k, v in times.t_verify.items()}}
    station.report("calibration", report)
    return report


def tune(station: Station, traces: TraceSet, prompts: Sequence[Prompt], *, max_tokens: int = 64, trials: int = 60,
         lossless_only: bool = True, quality_floor: float = 0.9) -> Any:
    """Choose strategy and parameters by replay and measurement; the choice and its evidence go into the workspace."""
    from components.evaluation import config_quality
    from components.measuring import measure
    from components.provenance import provenance
    from components.tuning import tune as run
    from serving.runtime.artifacts.decoding_config import DecodingConfig
    from serving.runtime.strategies import STRATEGIES

    kit = station.workspace.kit(station.pair, STRATEGIES)

    def evaluate(configs: Sequence[tuple[str, dict[str, Any]]], rows: Sequence[Prompt]) -> Any:
        return list(measure(station.pair, kit, configs, rows, max_tokens=max_tokens, progress=station.bar).values())

    def quality(config: tuple[str, dict[str, Any]]) -> float:
        return config_quality(station.pair, kit, config, prompts, max_tokens=max_tokens)

    profile: Any = kit.artifacts["hardware_profile"]
    tuned = run(station.pair, traces, prompts, kit, profile, trials=trials, max_tokens=max_tokens, lossless_only=lossless_only,
                quality_floor=quality_floor, evaluate=evaluate, quality=None if lossless_only else quality)
    made_of = provenance(station.pair, trace_digest=traces.digest(), device_class=profile.provenance.device_class,
                         parents=station.parents("acceptance_table", "hardware_profile", "verifier", "correction_memory",
                                                 "acceptance_head"))
    station.workspace.save(DecodingConfig(tuned.strategy, tuned.parameters, tuned.evidence, made_of))
    station.report("tuning", {"strategy": tuned.strategy, "parameters": tuned.parameters, **tuned.evidence})
    return tuned


def choose_plain(station: Station, reason: str) -> dict[str, Any]:
    """Make plain decoding the workspace's choice, keeping the evidence of the tuning; returns the choice."""
    from components.provenance import provenance
    from serving.runtime.artifacts.decoding_config import DecodingConfig

    tuned = DecodingConfig.load(station.workspace.artifacts / "decoding_config", fingerprint=station.pair.fingerprint)
    old = tuned.provenance
    made_of = provenance(station.pair, trace_digest=old.trace_digest, device_class=old.device_class, parents=old.parents)
    station.workspace.save(DecodingConfig("autoregressive", {}, {**tuned.evidence, "reason": reason}, made_of))
    return {"strategy": "autoregressive", "parameters": {}, "reason": reason}


def publish(station: Station, evidence: Mapping[str, Any], *, device: str = "cpu") -> ReleaseVersion:
    """Publish every artifact of the workspace and pin them in a new release, which becomes `candidate`."""
    from registry.pairs import model_records
    from registry.releases import create_release
    from registry.store import Store

    space, store = station.workspace, Store()
    files = space.files()
    folders = {p.name: p for p in sorted(space.artifacts.iterdir())} if space.artifacts.is_dir() else {}
    if "decoding_config" not in folders:
        raise DraftwellError(f"nothing to release: run `draftwell tune --pair {space.spec.name}` first")
    if files.draft is not None and (files.draft / "artifact.json").is_file():
        folders["distilled_draft"] = files.draft
    plots = sorted(space.reports.glob("*.png"))
    chosen = {"verifier": ("roc", "reliability"), "acceptance_table": ("acceptance",), "correction_memory": ("rejections",)}
    pins = {}
    for kind, folder in folders.items():
        pictures = [p for p in plots if p.stem.startswith(chosen.get(kind, ("-",)))]
        pins[kind] = store.publish(folder, pair=space.spec.name, plots=pictures).version
    return create_release(store, space.spec.name, device, pins, model_records(space.spec, files), dict(evidence))


def now() -> str:
    """This moment, ISO 8601, UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
