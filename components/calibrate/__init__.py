"""Calibration: `acceptance_table` (SPIDE), `correction_memory` (CSD) and `hardware_profile` each
make one artifact; `plots` draws them.

Only what needs no torch is imported here, so that the command line starts fast.
"""

from draftwell.components.calibrate.settings import MemorySettings

__all__ = ["MemorySettings"]
