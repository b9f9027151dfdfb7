"""The part of the gate that needs no clock and no release: this checkout's deterministic counts,
compared with the recorded ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from draftwell.flows.workspace import Workspace
from draftwell.serving.errors import DraftwellError

if TYPE_CHECKING:
    from draftwell.components.gate.baseline_counts import CountsReport
    from draftwell.components.gate.verdict import GateVerdict

PROMPTS, TOKENS = 6, 32
COUNTED = ("autoregressive", "vanilla_sd", "prompt_lookup", "sprinter", "csd", "spide")
"""Strategies whose deterministic counts are recorded as a pair's baseline."""


def baseline_report(pair_name: str, say: Any, bar: Any = None) -> CountsReport:
    """Deterministic counts of the strategies in `COUNTED` on the shipped prompts, in float32."""
    return counted(pair_name, say, bar)[0]


def counted(pair_name: str, say: Any, bar: Any) -> tuple[CountsReport, GateVerdict]:
    """The counts, and whether every strategy that claims to be lossless gave the target's own
    tokens."""
    from draftwell.components.gate.baseline_counts import deterministic_report
    from draftwell.components.gate.losslessness import judge_texts
    from draftwell.components.prompts.prompt import demo_prompts
    from draftwell.serving.runtime.strategies import StrategyChoice

    pair, prompts = Workspace(pair_name, "float32", say).load(), demo_prompts(PROMPTS)
    texts: dict[str, list[list[int]]] = {}
    report = deterministic_report(
        pair, [StrategyChoice(name) for name in COUNTED], prompts, TOKENS, progress=bar, texts=texts
    )
    return report, judge_texts(pair, prompts, texts, TOKENS)


def judge_baseline(pair_name: str, say: Any, bar: Any = None) -> GateVerdict:
    """Compare this checkout's deterministic counts with the recorded ones, and lossless outputs
    with the target's own choices."""
    from draftwell.components.gate.baseline_checks import compare_with_baseline
    from draftwell.components.gate.baseline_counts import CountsReport
    from draftwell.components.gate.verdict import Thresholds
    from draftwell.registry.gates import load_baseline, load_gates
    from draftwell.registry.pairs import find_pair

    name, gates = find_pair(pair_name).name, load_gates()
    recorded = load_baseline(name)
    if recorded is None:
        raise DraftwellError(
            (
                f"pair {name} has no recorded baseline: record one with `draftwell gate --pair "
                f"{name} --record`"
            ),
            code="no_baseline",
        )
    report, identity = counted(pair_name, say, bar)
    verdict = compare_with_baseline(
        report,
        CountsReport.model_validate(recorded.model_dump()),
        Thresholds.of(gates.model_dump()),
    )
    return verdict + identity if gates.lossless_identical else verdict
