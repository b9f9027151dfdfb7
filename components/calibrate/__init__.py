"""Calibration: `acceptance_table` (SPIDE), `correction_memory` (CSD) and `hardware_profile` each make one artifact; `plots` draws them."""

from components.calibrate.acceptance_table import build_acceptance_table
from components.calibrate.correction_memory import MemorySettings, build_correction_memory
from components.calibrate.hardware_profile import measure_profile

__all__ = ["MemorySettings", "build_acceptance_table", "build_correction_memory", "measure_profile"]
