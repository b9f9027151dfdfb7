"""The gate: may a release be promoted?

settings: how a release is measured. verdict: checks, verdicts, thresholds. bench_checks: speed,
identity, acceptance, quality. baseline_counts, baseline_checks: deterministic counts and their
comparison with recorded ones. losslessness: outputs against the target's own choices. own_prompts:
the prompts to judge on. temperatures: sampled requests. predictions: how well artifacts predict.
footprint: size and start-up of a bundle. verdict_report: tables and JUnit.

Only what needs no torch is imported here, so that the command line starts fast.
"""

from draftwell.components.gate.settings import GateSettings
from draftwell.components.gate.verdict import Check, GateVerdict, Thresholds

__all__ = ["Check", "GateSettings", "GateVerdict", "Thresholds"]
