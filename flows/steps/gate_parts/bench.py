"""The measured part of the gate: candidate, champion and plain decoding on the same prompts in one
run, for greedy and sampled requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftwell.components.bench.bench import run_bench
from draftwell.components.bench.schema import BenchEntry, BenchReport
from draftwell.components.bench.settings import BenchSettings
from draftwell.components.bench.until import Until
from draftwell.components.gate.bench_checks import judge_release
from draftwell.components.gate.settings import ROUNDS, GateSettings
from draftwell.components.gate.temperatures import (
    greedy_on_trial,
    judge_sampled,
    passes_trial,
    sampled_temperature,
    untuned,
)
from draftwell.components.prompts.prompt import Prompt
from draftwell.flows.context import StepContext
from draftwell.flows.settings import quality_floor
from draftwell.flows.steps.gate_parts.champion import ChampionComparison
from draftwell.serving.artifacts.decoding_config import DecodingConfig
from draftwell.serving.bundle.verdict import GateVerdict, Thresholds
from draftwell.serving.number_format import dtype_of
from draftwell.serving.runtime.strategies import (
    PLAIN,
    StrategyChoice,
    StrategyResources,
    served_choice,
)
from draftwell.serving.temperature import SERVED_TEMPERATURE


@dataclass(frozen=True)
class BenchJudge:
    """Reads a candidate's row, and the champion's, out of a bench and judges them."""

    strategy: str
    parameters: dict[str, Any]
    thresholds: Thresholds

    def entry(self, entries: dict[str, BenchEntry]) -> BenchEntry:
        """The candidate's row."""
        return next(entry for entry in entries.values() if self.is_of(entry))

    def is_of(self, entry: BenchEntry) -> bool:
        """Whether a row is of the candidate's strategy and parameters."""
        return (entry.strategy, entry.parameters) == (self.strategy, self.parameters)

    def of(self, report: BenchReport) -> GateVerdict:
        """The verdict; acceptance is reported with that of a champion of the same strategy and
        parameters only."""
        entries = report.strategies
        entry, rival = self.entry(entries), entries.get("champion")
        same = rival if rival is not None and self.is_of(rival) else None
        thresholds = self.thresholds
        if entry.exact or (entry.dtype is not None and dtype_of(entry.dtype) == "float32"):
            # `identity_check` judges it, on longer texts
            thresholds = thresholds.model_copy(update={"lossless_identical": False})
        return judge_release(entry, rival, same, thresholds, reference=entries["autoregressive"])


def measured(
    step: StepContext,
    prompts: Sequence[Prompt],
    judging: BenchJudge,
    resources: StrategyResources,
    rival: ChampionComparison,
    settings: GateSettings,
    temperature: float = 0.0,
    until: Until | None = None,
) -> tuple[BenchReport, GateVerdict]:
    """The bench of a candidate in interleaved rounds, and the verdict on it.

    Args:
        until: as `run_bench` takes it; then only what is judged is measured.
    """
    judged = StrategyChoice(judging.strategy, judging.parameters)
    wanted = BenchSettings(
        max_tokens=settings.max_tokens,
        temperature=temperature,
        runs=ROUNDS,
    )
    report = run_bench(
        step.pair,
        list(dict.fromkeys((PLAIN, judged))),
        prompts,
        resources,
        wanted,
        extra=rival.contenders,
        until=until,
        # no verdict on sampled requests asks for them
        cost_ratios=temperature == 0 and until is None,
        floor=quality_floor(),
        progress=step.bar,
    )
    return report, judging.of(report)


def held_to(thresholds: Thresholds, evidence: Mapping[str, Any]) -> Thresholds:
    """The thresholds, with the loss that a choice was tuned for where that allows less: a choice at
    2 % does not pass because it loses less than 10 %.

    Args:
        evidence: of the choice (`DecodingConfig.evidence`), whose `constraints` name it.
    """
    allowed = (evidence.get("constraints") or {}).get("max_quality_loss")
    least = thresholds.min_quality_ratio
    if allowed is None or (least is not None and 1 - allowed <= least):
        return thresholds
    return thresholds.model_copy(update={"min_quality_ratio": round(1 - allowed, 9)})


@dataclass(frozen=True)
class SampledVerdict:
    """What was found out about sampled requests.

    Args:
        verdict: on what serves them.
        low: where nothing was tuned for them: lower end of the greedy choice's speedup over plain
            decoding for them, if it was measured.
        as_greedy: whether that is enough for the greedy choice to serve them.
    """

    verdict: GateVerdict
    low: float | None = None
    as_greedy: bool = False


def sampled_verdict(
    step: StepContext,
    prompts: Sequence[Prompt],
    config: DecodingConfig,
    thresholds: Thresholds,
    resources: StrategyResources,
    rival: ChampionComparison,
    settings: GateSettings,
) -> SampledVerdict:
    """The verdict on what serves sampled requests: what was tuned for them, else the greedy choice
    if it is lossless and measured to be no slower than plain decoding, else plain decoding.

    It is measured at the temperature of the candidate's choice, else of the champion's, else at the
    default of requests, and each side decodes what it would serve then. A greedy choice that is too
    slow there is no reason to refuse a release: plain decoding takes its place. Texts are not
    compared token by token: the target's own samples differ, too.
    """
    trial, temperature = greedy_on_trial(config), sampled_temperature(config, rival.config)
    if trial is not None and temperature is None:
        temperature = SERVED_TEMPERATURE
    if temperature is None:
        return SampledVerdict(GateVerdict((), untuned(config, None)))
    choice = trial or served_choice(config, temperature)
    tuned = config.sampled.evidence if config.sampled is not None else config.evidence
    relaxed = held_to(thresholds, tuned).model_copy(update={"lossless_identical": False})
    judging = BenchJudge(choice.name, dict(choice.parameters), relaxed)
    report, verdict = measured(
        step, prompts, judging, resources, rival.at(temperature), settings, temperature
    )
    step.report("bench_sampled", report.to_json(), per_device=True)
    low = judging.entry(report.strategies).speedup_low if trial else None
    as_greedy = trial is not None and passes_trial(verdict)
    if trial is not None and not as_greedy:
        choice, judging = PLAIN, BenchJudge(PLAIN.name, {}, relaxed)
        verdict = judging.of(report) if rival.contenders else GateVerdict(())
    entry, plain = judging.entry(report.strategies), report.strategies["autoregressive"]
    noted = GateVerdict((), untuned(config, temperature, choice, low))
    judged = judge_sampled(verdict, entry, plain, temperature, thresholds)
    return SampledVerdict(noted + judged, low, as_greedy)
