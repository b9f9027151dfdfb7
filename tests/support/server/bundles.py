"""Bundles of the tiny pair, and loading them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.base import Artifact, Provenance
from draftwell.serving.artifacts.decoding_config import DecodingConfig, SampledChoice
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.artifacts.pair_files import PairFiles, fingerprint, weights_digest
from draftwell.serving.bundle.bundle import FileRecord, Manifest, ModelRecord
from draftwell.serving.files import sha256_file
from draftwell.serving.runtime.commands import Role
from draftwell.serving.runtime.strategies import find_strategy
from draftwell.serving.server.model.loading import from_bundle
from draftwell.serving.server.model.served_model import ServedModel
from draftwell.serving.server.settings import ServerSettings
from tests.support.server.served_pair import MAX_CONTEXT, tiny_pair


def save_tiny_models(root: Path, context: int = MAX_CONTEXT) -> dict[Role, Path]:
    """The tiny pair as model folders."""
    pair = tiny_pair(1, context=context)
    for role, module in pair.modules.items():
        module.set_attn_implementation("eager")
        module.save_pretrained(root / role)
        pair.tokenizer.save_pretrained(root / role)
    return {role: root / role for role in pair.modules}


def make_bundle(
    folder: Path,
    models: dict[Role, Path],
    strategy: str | None,
    parameters: dict[str, Any] | None = None,
    machine: str | None = None,
    leave_out: str = "",
    sampled: SampledChoice | None = None,
    as_greedy: bool = True,
    chat: bool = False,
    more: Callable[[Provenance], list[Artifact]] = lambda provenance: [],
) -> Path:
    """A bundle with weights; its profile and its config were made on `machine`; `more` gives
    further artifacts.

    Args:
        as_greedy: the gate measured a lossless choice for sampled requests, too.
    """
    records = {}
    for role, source in models.items():
        shutil.copytree(source, folder / "models" / role, ignore=shutil.ignore_patterns(".*"))
        records[role] = ModelRecord(
            source="bundled", weights_sha256=weights_digest(source), folder=f"models/{role}"
        )
    mark = fingerprint(PairFiles("tiny", models["target"], models["draft"]), "float32")
    provenance = Provenance(pair="tiny", fingerprint=mark, device_class=machine)
    greedy = provenance.extended({"temperature": 0.0}, {})
    made: list[Artifact] = [
        AcceptanceTable([50] * 20, [25] * 20, greedy),
        HardwareProfile(1.0, {1: 4.0}, 0.1, provenance),
        *more(provenance),
    ]
    if strategy:
        made.append(DecodingConfig(strategy, parameters or {}, {}, provenance, sampled))
    made = [artifact for artifact in made if artifact.kind != leave_out]
    for artifact in made:
        artifact.save(folder / "artifacts" / artifact.kind)
    files = {
        p.relative_to(folder).as_posix(): FileRecord(sha256=sha256_file(p), size=p.stat().st_size)
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }
    manifest = Manifest(
        pair="tiny",
        device="cpu",
        dtype="float32",
        chat=chat,
        fingerprint=mark,
        release_version=1,
        release_digest="r",
        gated=True,
        sampled_as_greedy=as_greedy and strategy is not None and find_strategy(strategy).lossless,
        models=records,
        versions={artifact.kind: 1 for artifact in made},
        runs={},
        files=files,
    )
    (folder / "manifest.json").write_text(
        manifest.model_copy(update={"digest": manifest.computed_digest()}).to_json()
    )
    return folder


def load_bundle(
    bundle: Path, serving_now: ServedModel | None = None, **options: Any
) -> ServedModel:
    """Load a bundle with some settings of the server."""
    return from_bundle(ServerSettings(bundle=bundle, **options), serving_now)
