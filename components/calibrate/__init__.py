"""Calibration: SPIDE's acceptance table, CSD's correction memory, and the hardware profile."""
