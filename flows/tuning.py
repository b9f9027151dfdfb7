"""The station that chooses: traces and measurements → strategy and parameters, or plain decoding instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flows.stations import Station

if TYPE_CHECKING:
    from components.prompts import Prompt
    from serving.runtime.artifacts.decoding_config import DecodingConfig
    from serving.runtime.trace import TraceSet


def tune(station: Station, traces: TraceSet, prompts: Sequence[Prompt], *, max_tokens: int = 64, trials: int = 60,
         lossless_only: bool = True, quality_floor: float = 0.9) -> Any:
    """Choose strategy and parameters by replay and measurement; the choice and its evidence go into the workspace."""
    from components.evaluation import config_quality
    from components.measuring import measure
    from components.provenance import provenance
    from components.tuning import tune as run
    from serving.runtime.artifacts.decoding_config import DecodingConfig
    from serving.runtime.strategies import STRATEGIES

    kit = station.workspace.kit(station.pair, STRATEGIES)

    def evaluate(configs: Sequence[tuple[str, dict[str, Any]]], rows: Sequence[Prompt]) -> Any:
        return list(measure(station.pair, kit, configs, rows, max_tokens=max_tokens, progress=station.bar).values())

    def quality(config: tuple[str, dict[str, Any]]) -> float:
        return config_quality(station.pair, kit, config, prompts, max_tokens=max_tokens)

    profile: Any = kit.artifacts["hardware_profile"]
    tuned = run(station.pair, traces, prompts, kit, profile, trials=trials, max_tokens=max_tokens, lossless_only=lossless_only,
                quality_floor=quality_floor, evaluate=evaluate, quality=None if lossless_only else quality)
    made_of = provenance(station.pair, trace_digest=traces.digest(), device_class=profile.provenance.device_class,
                         parents=station.parents("acceptance_table", "hardware_profile", "verifier", "correction_memory",
                                                 "acceptance_head"))
    save_choice(station, DecodingConfig(tuned.strategy, tuned.parameters, tuned.evidence, made_of))
    return tuned


def save_choice(station: Station, config: DecodingConfig) -> None:
    """Put a choice into the workspace, with its evidence as JSON and as an HTML report."""
    from components.html_report import write_tuning_report

    choice = {"strategy": config.strategy, "parameters": config.parameters}
    station.workspace.save(config)
    station.report("tuning", {"pair": station.workspace.spec.name, **choice, "config_digest": config.digest, **config.evidence})
    write_tuning_report({**config.evidence, "choice": choice}, station.workspace.reports, pair=station.workspace.spec.name)


def choose_plain(station: Station, reason: str) -> dict[str, Any]:
    """Make plain decoding the workspace's choice, keeping the evidence of the tuning; returns the choice."""
    from components.provenance import provenance
    from serving.runtime.artifacts.decoding_config import DecodingConfig

    tuned = DecodingConfig.load(station.workspace.artifacts / "decoding_config", fingerprint=station.pair.fingerprint)
    old = tuned.provenance
    made_of = provenance(station.pair, trace_digest=old.trace_digest, device_class=old.device_class, parents=old.parents)
    save_choice(station, DecodingConfig("autoregressive", {}, {**tuned.evidence, "reason": reason}, made_of))
    return {"strategy": "autoregressive", "parameters": {}, "reason": reason}
