"""Whether a release's artifacts fit the temperatures that its choices are for, and checks of its sampled choice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from components.bench.schema import BenchEntry
from components.gate.verdict import Check, GateVerdict, Thresholds
from serving.artifacts.base import Artifact
from serving.artifacts.decoding_config import DecodingConfig
from serving.artifacts.kinds import other_temperature
from serving.runtime.strategies import StrategyChoice, find_strategy, served_choice


def tuned_classes(config: DecodingConfig) -> Iterator[tuple[StrategyChoice, float]]:
    """The choices of a config, each with the temperature that it was tuned at."""
    yield served_choice(config, 0.0), 0.0
    if config.sampled is not None:
        yield served_choice(config, config.sampled.temperature), config.sampled.temperature


def objections(config: DecodingConfig, artifacts: Mapping[str, Artifact]) -> list[str]:
    """For each choice the first artifact it reads that was made for the other class of temperatures, in words; none where all fit."""
    found = []
    for choice, temperature in tuned_classes(config):
        used = [artifacts[kind] for kind in find_strategy(choice.name).artifacts if kind in artifacts]
        if why := other_temperature(used, temperature):
            found.append(f"{choice} serves requests of temperature {temperature:g}, and {why}")
    return found


def judge_artifacts(config: DecodingConfig, artifacts: Mapping[str, Artifact]) -> GateVerdict:
    """A check that fails where an artifact is for the other class of temperatures, and a note where sampled requests were not tuned for."""
    wrong = objections(config, artifacts)
    check = Check("temperature", len(wrong), 0, not wrong, "; ".join(wrong) or "every artifact is for the temperature it serves")
    if config.sampled is not None:
        return GateVerdict((check,))
    return GateVerdict((check,), (f"sampled requests are not judged: nothing was tuned for them, and {served_choice(config, 1.0)} decodes "
                                  "them (`draftwell tune --temperature`)",))


def judge_sampled(verdict: GateVerdict, entry: BenchEntry, temperature: float, thresholds: Thresholds) -> GateVerdict:
    """The verdict on a sampled choice under names of its own, with a check of how likely the target finds what a lossy one writes."""
    checks, limit = verdict.checks, thresholds.max_surprisal_shift
    if not entry.lossless and limit is not None:
        shift = entry.kl
        detail = "how likely the target finds its samples was not measured" if shift is None else (
            f"the target finds its samples {shift:+.3f} nats a token less likely than its own (at most {limit:g} either way)")
        checks = (*checks, Check("likelihood", limit + 1 if shift is None else abs(shift), limit,
                                 shift is not None and abs(shift) <= limit, detail))
    return GateVerdict(tuple(replace(check, name=f"sampled {check.name}") for check in checks),
                       tuple(f"at temperature {temperature:g}: {note}" for note in verdict.notes))
