"""Small models, artifacts and verdicts to test the registry with."""

import shutil
import sqlite3
from collections.abc import Callable, Hashable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file

from draftwell.registry.connection import SQLITE
from draftwell.registry.gates import GateRecord, thresholds_digest
from draftwell.registry.moved import ARTIFACTS, follow_move
from draftwell.registry.pairs import fetch, find_pair, model_records
from draftwell.registry.releases import ReleaseVersion, create_release
from draftwell.registry.store import Published, Store
from draftwell.serving.artifacts.acceptance_head import AcceptanceHead
from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.base import Artifact, Provenance
from draftwell.serving.artifacts.correction_memory import CorrectionMemory
from draftwell.serving.artifacts.datastore import Datastore
from draftwell.serving.artifacts.decoding_config import DecodingConfig
from draftwell.serving.artifacts.distilled_draft import DistilledDraft
from draftwell.serving.artifacts.eagle3_head import Eagle3Head
from draftwell.serving.artifacts.engine_config import EngineConfig, EngineConfigFile
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.artifacts.medusa_heads import MedusaHeads
from draftwell.serving.artifacts.pair_files import fingerprint
from draftwell.serving.artifacts.verifier import Verifier
from draftwell.serving.bundle.verdict import Check

Make = Callable[..., Any]
"""A fixture that makes something with the registry of its test."""


def model_folder(folder: Path, seed: int = 1) -> Path:
    """What the registry looks at of a model: config.json, weights, tokenizer."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}\n")
    (folder / "tokenizer.json").write_text('{"vocab": ["a", "b"]}\n')
    weights = np.random.default_rng(seed).normal(size=(4, 4)).astype(np.float32)
    save_file({"weight": weights}, folder / "model.safetensors")
    return folder


def table(print_of_pair: str, accepted: int = 3) -> AcceptanceTable:
    made = Provenance(
        pair="tiny",
        fingerprint=print_of_pair,
        trace_digest="7" * 64,
        git_commit="c" * 40,
        metrics={"brier": 0.25},
        parameters={"prompts": 12},
    )
    return AcceptanceTable([5] * 20, [accepted] * 20, made)


def config(
    print_of_pair: str, parents: dict[str, str] | None = None, strategy: str = "spide"
) -> DecodingConfig:
    made = Provenance(pair="tiny", fingerprint=print_of_pair, parents=parents or {})
    return DecodingConfig(strategy, {"gamma": 4}, {"speedup": 1.2}, made)


def engine_config(print_of_pair: str) -> EngineConfig:
    contents = EngineConfigFile(
        engine="vllm",
        version="0.32.0",
        distribution=None,
        dtype="float32",
        threads=2,
        plugin=None,
        temperature=0.0,
        label="ngram(k=4,n=3)",
        settings={"method": "ngram", "num_speculative_tokens": 4},
        exports={},
        subject="s" * 64,
        choice={"method": "ngram"},
    )
    made = Provenance(pair="tiny", fingerprint=print_of_pair, metrics={"speedup": 1.4})
    return EngineConfig(contents, made)


def verifier(print_of_pair: str) -> Verifier:
    made = Provenance(pair="tiny", fingerprint=print_of_pair, metrics={"auc": 0.8})
    return Verifier(torch.ones(4), 0.5, ("scalars",), 0.5, 1.2, made)


def head(print_of_pair: str) -> AcceptanceHead:
    made = Provenance(pair="tiny", fingerprint=print_of_pair, metrics={"loss": 0.5})
    return AcceptanceHead(
        torch.zeros(3), torch.ones(3), [(torch.eye(3), torch.zeros(3))], torch.ones(3), 0.5, made
    )


def medusa_heads(print_of_pair: str) -> MedusaHeads:
    made = Provenance(pair="tiny", fingerprint=print_of_pair, metrics={"top1_1": 0.5})
    return MedusaHeads(torch.zeros(2, 3, 3), torch.zeros(2, 3), torch.tensor([0, 2, 5]), made)


def distilled(donor: str = "d" * 64) -> DistilledDraft:
    state = {
        "model.norm.weight": torch.ones(4),
        "model.layers.0.mlp.up_proj.weight": torch.ones(4, 4),
    }
    made = Provenance(pair="tiny", fingerprint="")
    return DistilledDraft(state, {"num_hidden_layers": 1}, torch.tensor([0, 1]), donor, made)


def eagle(print_of_pair: str) -> Eagle3Head:
    config = {"hidden_size": 4, "vocab_size": 6, "draft_vocab_size": 2, "num_hidden_layers": 1}
    made = Provenance(pair="tiny", fingerprint=print_of_pair, metrics={"accepted_length": 1.5})
    state = {"fc.weight": torch.ones(4, 12), "norm.weight": torch.ones(4)}
    return Eagle3Head(state, config, torch.tensor([1, 3]), (2, 3, 4), "d" * 64, made)


def memory(print_of_pair: str) -> CorrectionMemory:
    made = Provenance(pair="tiny", fingerprint=print_of_pair, metrics={"patterns": 2.0})
    return CorrectionMemory({(3, 4): 2, (5, 6): 1}, made)


def profile(print_of_pair: str) -> HardwareProfile:
    made = Provenance(pair="tiny", fingerprint=print_of_pair, device_class="cpu-2-cores")
    return HardwareProfile(0.002, {1: 0.01, 8: 0.02}, 0.001, made)


def every_kind(print_of_pair: str) -> list[Artifact]:
    """One artifact of every kind but release."""
    return [
        verifier(print_of_pair),
        head(print_of_pair),
        table(print_of_pair),
        memory(print_of_pair),
        profile(print_of_pair),
        config(print_of_pair),
        engine_config(print_of_pair),
        distilled(),
        medusa_heads(print_of_pair),
        eagle(print_of_pair),
        Datastore.from_texts(
            [[5, 6, 7], [6, 7, 8]],
            Provenance(pair="tiny", fingerprint=print_of_pair, metrics={"found": 0.5}),
        ),
    ]


def publish(store: Store, artifact: Artifact, folder: Path, **more) -> Published:
    artifact.save(folder)
    return store.publish(folder, pair="tiny", **more)


def release(
    store: Store, spec, files, folder: Path, accepted: int = 3, device: str = "cpu"
) -> ReleaseVersion:
    """A release of a table and a config made from it."""
    mark = fingerprint(files, "float32")
    first = publish(store, table(mark, accepted), folder / "table")
    second = publish(store, config(mark, {"acceptance_table": first.digest}), folder / "config")
    pins = {"acceptance_table": first.version, "decoding_config": second.version}
    return create_release(
        store, "tiny", device, pins, model_records(spec, files), {"speedup": 1.2, "prompts": ["a"]}
    )


def verdict(of: ReleaseVersion, value: float = 1.1, beside: int | None = None) -> GateRecord:
    """What a gate says that held a release against the champion `beside`, if there was one."""
    check = Check(name="min_speedup_lower_bound", value=value, threshold=1.0, passed=value >= 1)
    return GateRecord(
        pair=of.pair,
        device=of.device,
        release_version=of.version,
        pins=of.pins,
        release_digest=of.published.digest,
        passed=check.passed,
        checks=(check,),
        baseline_version=beside,
        thresholds=thresholds_digest(),
        created="2026-11-21T10:00:00Z",
    )


def artifacts(pair_file: Path) -> Path:
    """What spide asks for, beside the pair."""
    folder = pair_file.parent / "artifacts"
    table(fingerprint(fetch(find_pair(str(pair_file))), "float32")).save(
        folder / "acceptance_table"
    )
    return folder


def forget_places() -> None:
    """Let MLflow look up where the files of a run are, which it remembers by the run alone."""
    from mlflow.tracking._tracking_service import utils

    utils._artifact_repos_cache.clear()


class KeptRegistry:
    """What several tests do to an empty registry first is done once for each process of the tests,
    and copied from then on: MLflow takes most of a second to publish a release."""

    def __init__(self, folder: Path, empty: Path):
        self.folder = folder
        self.known: dict[tuple[Hashable, ...], tuple[Path, Any]] = {}
        self.steps: dict[int, tuple[Hashable, ...]] = {hash(empty.read_bytes()): ()}

    def after(self, store: Store, step: Hashable, work: Callable[[], Any]) -> Any:
        """What some work gives back, done or copied. A registry to which a test has done something
        else meanwhile is never copied."""
        database = Path(store.uri.removeprefix(SQLITE))
        before = self.steps.get(hash(database.read_bytes()))
        if before is None:
            return work()
        steps = (*before, step)
        if steps not in self.known:
            result, kept = work(), self.folder / str(len(self.known))
            shutil.copytree(database.parent, kept)
            self.known[steps] = kept, result
        else:
            kept, result = self.known[steps]
            with (
                closing(sqlite3.connect(kept / database.name)) as source,
                closing(sqlite3.connect(database)) as target,
            ):
                source.backup(target)
            files = database.parent / ARTIFACTS
            shutil.copytree(kept / ARTIFACTS, files, dirs_exist_ok=True)
            follow_move(database)
            forget_places()
        self.steps[hash(database.read_bytes())] = steps
        return result
