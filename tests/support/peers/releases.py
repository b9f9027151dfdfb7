"""What was tuned and judged for a fake engine: in the workspace, and in the registry."""

from __future__ import annotations

from pathlib import Path

from draftwell.registry.gates import GateRecord
from draftwell.registry.releases import ReleaseVersion, find_release, gate_record
from draftwell.registry.store import Store
from draftwell.serving.artifacts.engine_config import EngineConfig


def config_folder(folder: Path, *, sampled: bool = False) -> Path:
    """Folder of the choice, from the engine's folder in a workspace."""
    return folder.parent / "artifacts" / f"engine_config{'_sampled' * sampled}"


def tuned(folder: Path, *, sampled: bool = False) -> EngineConfig:
    """What was tuned last."""
    return EngineConfig.load(config_folder(folder, sampled=sampled))


def released(alias: str | int = "candidate", device: str = "cpu-vllm") -> ReleaseVersion:
    """A release of the tiny pair."""
    return find_release(Store(), "tiny", device, alias)


def verdict(alias: str | int = "candidate", device: str = "cpu-vllm") -> GateRecord | None:
    """The last verdict about a release."""
    return gate_record(released(alias, device))
