"""Settings of the pipeline: strict, validated before anything runs, the same for the CLI, the flows and deployments.

Prompts and tokens here are the demo's and the schedules'. Those of a single command are in components/collect/settings.py and
components/tune/settings.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from components.tune.settings import DEFAULTS

PLACES = {"prompts", "spool", "reference", "out"}
"""Settings of all flows that name files and folders."""
BESIDES = {"pair", "prompts", "spool", "runner", "workers"}
"""Settings that no result depends on: weights and prompts have digests of their own, and workers change nothing."""


class PipelineSettings(BaseModel):
    """What the loop runs on and how long it may take. The defaults are the demo's: eight to ten minutes on two cores."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pair: str = Field("default", description="name, alias or YAML file of a pair")
    dtype: str | None = Field(None, pattern="^(float32|bfloat16)$", description="None takes the pair's own")
    prompts: Path | None = Field(None, description="JSONL of prompts; None takes the shipped demo prompts")
    collect_prompts: int = Field(16, ge=1, description="prompts to collect traces on")
    collect_tokens: int = Field(48, ge=8, description="tokens per collected prompt")
    calibrate_prompts: int = Field(8, ge=1, description="prompts that fill the correction memory")
    tune_prompts: int = Field(8, ge=2, description="prompts that the shortlist is measured on; fewer than 8 choose plain decoding")
    tune_tokens: int = Field(40, ge=8, description="tokens per measured prompt")
    trials: int = Field(DEFAULTS.trials, ge=1, description="configurations tried by replay")
    bench_prompts: int = Field(16, ge=2, description="prompts of the final comparison, disjoint from the others where there are enough")
    bench_tokens: int = Field(40, ge=8, description="tokens per prompt of the final comparison")
    lossless_only: bool = Field(DEFAULTS.constraints.lossless_only, description="choose among lossless strategies only")
    max_quality_loss: float = Field(DEFAULTS.constraints.max_quality_loss, ge=0, le=1, description="of a lossy choice: relative loss, at "
                                    "most, in the share of tokens that are the target's argmax, compared with plain decoding")
    max_cost_ratio: float | None = Field(DEFAULTS.constraints.max_cost_ratio, gt=0, description="target calls per token of the choice, at "
                                         "most, over those of vanilla speculative decoding at its fastest gamma; None: no limit")
    device: str = Field("cpu", pattern="^(cpu|cuda)$")
    threads: int | None = Field(None, ge=1, description="CPU threads; None takes all cores; several workers share them")
    runner: str = Field("threads", pattern="^(threads|ray)$", description="where shards and replays run; timings are always "
                        "taken in one place, one at a time")
    workers: int = Field(1, ge=1, description="shards or replays at the same time")

    def evidence(self, pair: str) -> dict[str, Any]:
        """What is published with a release: all but the folders and files of this machine; `pair` is the pair's name."""
        return {**self.model_dump(mode="json", exclude=PLACES), "pair": pair}


class TrafficSettings(PipelineSettings):
    """The same for scheduled flows, which use served traffic."""

    spool: Path | None = Field(None, description="folder of recorded requests; None takes $DRAFTWELL_HOME/spool/<pair>")
