"""Settings of the pipeline: strict, validated before anything runs, the same for the CLI, the flows
and deployments.

Prompts and tokens here are the demo's and the schedules'. Those of a single command are in
components/collect/settings.py and components/tune/settings.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from draftwell.components.bench.settings import QualityFloor
from draftwell.components.engines.port import EngineName, capabilities
from draftwell.components.engines.vllm import device_for
from draftwell.components.tune.settings import DEFAULTS
from draftwell.registry.gates import load_gates
from draftwell.serving.device import default_device
from draftwell.serving.temperature import SERVED_TEMPERATURE

PLACES = {"prompts", "spool", "reference", "out"}
"""Settings of all flows that name files and folders."""
OF_TRAFFIC = ("source", "spool", "drift", "restart")
"""Settings of flows that run on served traffic."""
RESTARTING = {
    *("methods", "levels", "train_minutes", "restart", "grid"),
}
"""Settings of engines that a change of settings starts again."""
OF_OURS = {
    *("sampled_prompts", "calibrate_prompts", "trials", "lossless_only"),
    *("max_quality_loss", "runner", "workers"),
}
"""Settings of our own engine alone."""
BESIDES = {
    *("pair", "prompts", "spool", "source", "drift", "engine"),
    *("runner", "workers", "promote", "out", "step_hours", "minutes", "fresh"),
    *RESTARTING,
}
"""Settings that no result depends on: weights and prompts have digests of their own, and workers
change nothing."""
OF_VLLM: dict[str, Any] = {
    "minutes": 45.0,
    "collect_prompts": 24,
    "tune_prompts": 12,
    "max_tokens": 64,
}
"""Defaults of the loop on vLLM, where they are others than ours."""
FORMER = ("collect_tokens", "tune_tokens", "bench_tokens")
"""Settings of earlier versions that are `max_tokens` now."""


class AskedSettings(BaseModel):
    """What a person is asked in one command as a deployment is in its settings."""

    prompts: Path | None = Field(
        None,
        description="file or folder of prompts, as `draftwell step collect` takes; None takes the "
        "shipped demo prompts",
    )
    minutes: float | None = Field(
        None,
        gt=0,
        description="for the whole loop: counts of prompts and tokens that are not named are "
        "scaled to it, and the gate takes more prompts while there is time and the interval is "
        "wide; None takes the counts as they are",
    )
    fresh: bool = Field(
        False, description="begin again instead of with what an earlier run has finished"
    )

    @field_validator("prompts", "spool", "out", mode="before", check_fields=False)
    @classmethod
    def _refuse_empty(cls, given: Any) -> Any:
        if given == "":
            raise ValueError("it is empty, which would be the working folder: leave it out")
        return given


class PipelineSettings(AskedSettings):
    """What the loop runs on and how long it may take. Those from `methods` on are for engines that
    restart."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pair: str = Field("default", description="name, alias or YAML file of a pair")
    dtype: str | None = Field(
        None, pattern="^(float32|bfloat16)(-int8|-int4)?$", description="None takes the pair's own"
    )
    redact: bool = Field(
        False, description="mask e-mails, phone numbers, keys and the like in prompts"
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
    engine: EngineName = Field(
        "draftwell", description="what decodes; with vllm other counts of prompts and tokens"
    )
    collect_prompts: int = Field(16, ge=1, description="prompts to collect traces on")
    max_tokens: int = Field(
        40, ge=8, description="tokens of an answer, at most, that is collected, measured or judged"
    )
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
    lossless_only: bool = Field(
        DEFAULTS.constraints.lossless_only, description="choose among lossless strategies only"
    )
    max_quality_loss: float | None = Field(
        None,
        ge=0,
        le=1,
        description="of a lossy choice: relative loss, at most, in the share of "
        "tokens that are the target's argmax, compared with plain decoding; the gate holds it to "
        "that; None: the gate's own",
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
    methods: tuple[str, ...] | None = Field(
        None, description="ways to speculate to choose among; None: all that are possible"
    )
    levels: tuple[int, ...] = Field(
        (1, 8),
        description="requests at once, ascending from 1; the highest that there is time to measure "
        "is what the bundle serves at once",
    )
    train_minutes: float | None = Field(
        None,
        gt=0,
        description="training time of a head; None trains one only where the pair has none, in a "
        "fifth of the time",
    )
    restart: str | None = Field(
        None,
        description="command of a shell that restarts the servers after `current` has moved; None "
        "leaves that to a person",
    )
    grid: bool = Field(
        False, description="at last measure every setting again, for the regret of the choice"
    )

    @model_validator(mode="before")
    @classmethod
    def _name_what_took_its_place(cls, given: Any) -> Any:
        if isinstance(given, dict) and (former := [name for name in FORMER if name in given]):
            raise ValueError(
                f"{former[0]} is max_tokens now, for collecting, tuning and the gate; "
                "of a deployment: `draftwell schedule` again"
            )
        return given

    @model_validator(mode="before")
    @classmethod
    def _take_defaults_of_engine(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("engine") != "vllm":
            return given
        return {**OF_VLLM, "device": device_for(None) or default_device(), **given}

    @model_validator(mode="after")
    def _refuse_what_means_nothing(self) -> Self:
        for name in sorted(OF_OURS if self.restarts else RESTARTING):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} means nothing with the engine {self.engine}")
        return self

    @property
    def restarts(self) -> bool:
        """Whether another setting needs another start of the engine, so that it keeps its own
        measurements, and its servers are a user's."""
        return capabilities(self.engine).restart

    @property
    def engine_minutes(self) -> float:
        """For the whole loop on an engine that restarts."""
        return self.minutes or float(OF_VLLM["minutes"])

    @property
    def takes_lossy(self) -> bool:
        """Whether what only lossy strategies read is made: in a loop of so many minutes only where
        one may be chosen. A schedule's artifacts may be read by others than its own choice."""
        return self.minutes is None or not self.lossless_only

    @property
    def temperatures(self) -> tuple[float, ...]:
        """One temperature of each class that is tuned for, that of greedy requests first."""
        return tuple(dict.fromkeys((0.0, self.sampled_temperature)))

    def evidence(self, pair: str) -> dict[str, Any]:
        """What is published with a release: all but the folders and files of this machine; `pair`
        is the pair's name."""
        left_out = PLACES | RESTARTING | {"minutes", "fresh"}
        return {**self.model_dump(mode="json", exclude=left_out), "pair": pair}


def quality_floor() -> QualityFloor:
    """What a lossy strategy must keep, in benches, tunings and gates alike: registry/gates.yaml
    says it."""

    gates = load_gates()
    return QualityFloor.model_validate(
        {
            "min_argmax_share": gates.min_quality_ratio,
            "max_rouge_l_loss": gates.max_rouge_l_loss,
            "max_surprisal_shift": gates.max_surprisal_shift,
        }
    )


def pair_anywhere(pair: str) -> str:
    """How flows name a pair: a YAML file by its absolute path, because a worker may start
    elsewhere; any other by its name."""
    return str(Path(pair).expanduser().absolute()) if pair.endswith((".yaml", ".yml")) else pair
