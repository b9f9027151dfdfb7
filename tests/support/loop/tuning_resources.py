"""Artifacts and a scripted hardware profile for tests that tune."""

from __future__ import annotations

from serving.artifacts.acceptance_table import AcceptanceTable
from serving.artifacts.base import Provenance
from serving.artifacts.correction_memory import CorrectionMemory
from serving.artifacts.hardware_profile import HardwareProfile
from serving.runtime.strategies import StrategyResources

ORIGIN = Provenance(pair="tiny", fingerprint="f" * 64, device_class="cpu-test")

PROFILE = HardwareProfile(1.0, {1: 10.0, 4: 11.0, 8: 12.0}, 0.1, ORIGIN)

RESOURCES = StrategyResources({"acceptance_table": AcceptanceTable.empty(ORIGIN), "hardware_profile": PROFILE,
           "correction_memory": CorrectionMemory.empty(ORIGIN)}, deterministic=True)
