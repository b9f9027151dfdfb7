"""Naming a pair's weights so that another machine can find and check them."""

from __future__ import annotations

import re

from draftwell.registry.pairs.catalogue import ModelSource, PairSpec
from draftwell.serving.artifacts.pair_files import PairFiles, is_artifact, model_digest, models_root
from draftwell.serving.bundle.bundle import ModelRecord


def model_records(spec: PairSpec, files: PairFiles) -> dict[str, ModelRecord]:
    """Role → where the weights come from, their digest, and the folder name under
    `$DRAFTWELL_MODELS`.

    Local folders get a name made of pair, role and digest; distilled drafts travel inside the
    bundle.
    """
    records: dict[str, ModelRecord] = {}
    for role, folder in files.roles().items():
        digest = model_digest(folder)
        if is_artifact(folder):
            records[role] = ModelRecord(
                source="bundled", weights_sha256=digest, folder="artifacts/distilled_draft"
            )
            continue
        source = spec.sources().get(role)
        kept = (
            folder.name if folder.parent == models_root() else f"{spec.name}-{role}-{digest[:12]}"
        )
        revision = source.revision or "main" if source and source.hub else None
        if revision and re.fullmatch(r"[0-9a-f]{40}", folder.resolve().name):
            revision = folder.resolve().name
        records[role] = ModelRecord(
            source=_words(source), revision=revision, weights_sha256=digest, folder=kept
        )
    return records


def _words(source: ModelSource | None) -> str:
    if source is not None and source.hub is not None:
        return f"hub:{source.hub}"
    if source is not None and source.package is not None:
        return f"package:{source.package.package}=={source.package.version}/{source.package.file}"
    return "local"
