"""Settings of the pipeline: strict, validated before anything runs, the same for the CLI, the flows
and deployments.

Prompts and tokens here are the demo's and the schedules'. Those of a single command are in
components/collect/settings.py and components/tune/settings.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from draftwell.components.bench.settings import QualityFloor
from draftwell.components.tune.settings import DEFAULTS
from draftwell.registry.gates import load_gates
from draftwell.serving.device import default_device
from draftwell.serving.temperature import SERVED_TEMPERATURE

PLACES = {"prompts", "spool", "reference", "out"}
"""Settings of all flows that name files and folders."""
BESIDES = {
    *("pair", "prompts", "spool", "source", "drift", "engine"),
    *("runner", "workers", "promote", "out", "step_hours"),
}
"""Settings that no result depends on: weights and prompts have digests of their own, and workers
change nothing."""


class PipelineSettings(BaseModel):
    """What the loop runs on and how long it may take. The defaults are the demo's: eight to ten
    minutes on two cores."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pair: str = Field("default", description="name, alias or YAML file of a pair")
    dtype: str | None = Field(
        None, pattern="^(float32|bfloat16)(-int8|-int4)?$", description="None takes the pair's own"
    )
    prompts: Path | None = Field(
        None, description="JSONL of prompts; None takes the shipped demo prompts"
    )
    source: Literal["prompts", "traffic", "drift"] = Field(
        "prompts",
        description="what the loop runs on: `prompts`; the newest served prompts, where there are "
        "enough of them; or those alone, in a folder of their own, as the answer to drift",
    )
    spool: Path | None = Field(
        None, description="folder of recorded requests; None takes $DRAFTWELL_HOME/spool/<pair>"
    )
    drift: str | None = Field(
        None,
        description="digest of the report of drift that is answered; None takes the one announced "
        "last",
    )
    engine: Literal["draftwell"] = "draftwell"
    collect_prompts: int = Field(16, ge=1, description="prompts to collect traces on")
    collect_tokens: int = Field(48, ge=8, description="tokens per collected prompt")
    sampled_temperature: float = Field(
        SERVED_TEMPERATURE,
        ge=0,
        le=2,
        description="temperature of the sampled requests that are tuned for "
        "and judged, as greedy ones are; 0: greedy ones only, and an earlier choice for "
        "sampled ones stays",
    )
    sampled_prompts: int = Field(
        8, ge=1, description="of `collect_prompts`, how many get a sampled text"
    )
    calibrate_prompts: int = Field(8, ge=1, description="prompts that fill the correction memory")
    tune_prompts: int = Field(
        8,
        ge=2,
        description="prompts that the shortlist is measured on; fewer than 8 choose plain decoding",
    )
    tune_tokens: int = Field(40, ge=8, description="tokens per measured prompt")
    trials: int | None = Field(
        DEFAULTS.trials,
        ge=1,
        description="configurations tried by replay, at most; None: all there are",
    )
    bench_prompts: int = Field(
        16,
        ge=2,
        description="prompts of the gate, disjoint from the others, as all steps' prompts are",
    )
    bench_tokens: int = Field(
        40, ge=8, description="tokens per prompt of the gate and of the final table"
    )
    lossless_only: bool = Field(
        DEFAULTS.constraints.lossless_only, description="choose among lossless strategies only"
    )
    max_quality_loss: float | None = Field(
        None,
        ge=0,
        le=1,
        description="of a lossy choice: relative loss, at most, in the share of "
        "tokens that are the target's argmax, compared with plain decoding; None: the gate's",
    )
    max_cost_ratio: float | None = Field(
        DEFAULTS.constraints.max_cost_ratio,
        gt=0,
        description="target calls per token of the choice, at "
        "most, over those of vanilla speculative decoding at its fastest gamma; None: no limit",
    )
    device: str = Field(
        default_factory=default_device,
        pattern="^(cpu|cuda)$",
        description="device of models, artifacts and release",
    )
    threads: int | None = Field(
        None, ge=1, description="CPU threads; None takes all cores; several workers share them"
    )
    step_hours: float = Field(
        12.0,
        gt=0,
        description="hours that a step of a flow may compute (collecting, training, calibrating, "
        "tuning, the gate) before it is stopped and its run fails",
    )
    promote: str | None = Field(
        None,
        pattern="^(auto|manual)$",
        description="whether a release that passed its gate is promoted and "
        "deployed, or waits until a person promotes it; None takes the pair's own",
    )
    out: Path = Field(Path("dist"), description="folder of bundles")
    runner: str = Field(
        "threads",
        pattern="^(threads|ray)$",
        description="where shards and replays run; timings are always "
        "taken in one place, one at a time",
    )
    workers: int = Field(1, ge=1, description="shards or replays at the same time")

    @property
    def temperatures(self) -> tuple[float, ...]:
        """One temperature of each class that is tuned for, that of greedy requests first."""
        return tuple(dict.fromkeys((0.0, self.sampled_temperature)))

    def evidence(self, pair: str) -> dict[str, Any]:
        """What is published with a release: all but the folders and files of this machine; `pair`
        is the pair's name."""
        return {**self.model_dump(mode="json", exclude=PLACES), "pair": pair}


def quality_floor() -> QualityFloor:
    """What a lossy strategy must keep, in benches, tunings and gates alike: registry/gates.yaml
    says it."""

    gates = load_gates()
    return QualityFloor(
        min_argmax_share=gates.min_quality_ratio,
        max_rouge_l_loss=gates.max_rouge_l_loss,
        max_surprisal_shift=gates.max_surprisal_shift,
    )


def pair_anywhere(pair: str) -> str:
    """How flows name a pair: a YAML file by its absolute path, because a worker may start
    elsewhere; any other by its name."""
    return str(Path(pair).expanduser().absolute()) if pair.endswith((".yaml", ".yml")) else pair
