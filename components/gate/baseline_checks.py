"""Checks of counts: float32 greedy counts compared with recorded ones.

They are the same on every machine, so a fresh clone in CI can check them without trusting its
clock.
"""

from __future__ import annotations

from draftwell.components.gate.baseline_counts import CountsReport, StrategyCounts
from draftwell.serving.bundle.verdict import Check, GateVerdict
from draftwell.serving.errors import DraftwellError

COUNT_TOLERANCE = 0.01
"""Share by which counts may differ from the baseline's: a flipped near-tie changes the rest of one
output and no more."""
FEW_TOKENS = 2.0
"""Tokens by which counts may differ however few there are: one flipped near-tie moves as many."""
COUNTS = ("target_calls", "judged", "accepted")


def compare_with_baseline(report: CountsReport, baseline: CountsReport) -> GateVerdict:
    """Judge float32 greedy counts against the recorded ones.

    Counts must agree within 1 %, and so do acceptance rates then. An output digest that differs is
    noted, not failed: another CPU's kernels may flip a near-tie, which changes the rest of that
    output and hardly the counts; a broken strategy changes the counts.

    Raises:
        DraftwellError: the reports are about different models, prompts or lengths, so that nothing
            can be compared.
    """
    for key, name in (
        ("fingerprint", "models"),
        ("prompts_digest", "prompts"),
        ("max_tokens", "max_tokens"),
    ):
        if getattr(report, key) != getattr(baseline, key):
            raise DraftwellError(
                f"the baseline of pair {baseline.pair} was recorded with other {name}: "
                "record it again with `draftwell "
                f"gate --pair {baseline.pair} --set record_counts=true`, or use the same",
                code="baseline_of_other_inputs",
            )
    parts: list[Check | str] = []
    for strategy, recorded in baseline.strategies.items():
        found = report.strategies.get(strategy)
        if found is None:
            why = f"{strategy} is in the baseline but was not run"
            parts.append(Check(f"{strategy}: present", 0, 1, False, why))
            continue
        parts += count_checks(strategy, found, recorded)
        if found.output_digest != recorded.output_digest:
            parts.append(f"{strategy}: outputs differ from the recorded ones; the counts decide")
    new = [strategy for strategy in report.strategies if strategy not in baseline.strategies]
    return GateVerdict.of([*parts, *(f"{strategy}: not in the baseline" for strategy in new)])


def count_checks(strategy: str, found: StrategyCounts, recorded: StrategyCounts) -> list[Check]:
    """Each count within 1 % of the recorded one, and at least within two."""
    checks = []
    for count in COUNTS:
        now, then, name = getattr(found, count), getattr(recorded, count), count.replace("_", " ")
        allowed = max(FEW_TOKENS, COUNT_TOLERANCE * then)
        detail = f"{now} {name}, recorded {then} (± {allowed:.0f})"
        checks.append(Check(f"{strategy}: {name}", now, then, abs(now - then) <= allowed, detail))
    return checks
