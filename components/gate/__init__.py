"""The gate: may a release be promoted?

settings: how a release is measured. bench_checks: speed, identity, acceptance, quality.
baseline_counts, baseline_checks: deterministic counts and their comparison with recorded ones.
losslessness: outputs against the target's own choices. own_prompts: the prompts to judge on.
temperatures: sampled requests. predictions: how well artifacts predict. footprint: size and
start-up of a bundle. verdict_report: tables and JUnit. Checks, verdict and thresholds are classes
of `draftwell.serving.bundle.verdict`.
"""
