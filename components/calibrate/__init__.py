"""Calibration: `acceptance_table` (SPIDE), `correction_memory` (CSD) and `hardware_profile` each
make one artifact; `plots` draws them."""
