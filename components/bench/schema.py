"""The report of a bench: what `draftwell bench --out` writes and `draftwell release show` reads.

A report holds one entry for each strategy and peer. Fields that a contender cannot have (a peer
counts no target calls) are absent in the JSON; what could not be measured is null.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from draftwell.components.bench.categories import CategoryFigure
from draftwell.components.bench.settings import RunSettings

SCHEMA = 3


class Frozen(BaseModel):
    """A part of a report."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


@dataclass(frozen=True)
class Difference:
    """Where an output first differs from the autoregressive one.

    Args:
        position: index of the first token that differs, from the start of the output.
        gap: the target's largest logit minus its second largest there.
        near_tie: whether rounding alone may explain it.
    """

    prompt_id: str
    position: int
    gap: float
    near_tie: bool


class PromptRow(Frozen):
    """One prompt, decoded by one contender; of several runs the one of median pace."""

    prompt_id: str
    category: str | None = None
    """As in `BenchEntry.categories`."""
    seconds: float = 0.0
    """The whole request, the prompt's forward pass included."""
    tokens: int = 0
    """Emitted tokens."""
    target_calls: int = 0
    rounds: int = 0
    """In which the target verified a draft."""
    accepted: int = 0
    judged: int = 0
    ttft_ms: float = 0.0
    """Time to the first token."""
    identical: bool | None = None
    """The same tokens as autoregressive decoding; None for samples."""
    run_seconds: tuple[float, ...] = ()
    """Seconds of every run."""
    target_argmax: int | None = None
    """Emitted tokens that are the target's argmax; None where that was not counted."""
    divergence: float | None = None
    """Nats by which the target finds the output less likely than samples of its own, over all its
    tokens (`target_agreement.agreement`); None where that was not read."""
    log_likelihood: float | None = None
    """Nats of all tokens by the target's softmax at temperature 1; None where that was not read."""
    departure: str | None = None
    """How the output differs from the target's choices, where those were read."""
    sequences: dict[int, tuple[int, int]] | None = None
    """Drafted sequences → rounds with so many in which the first one's first token was kept, and in
    which it was not; None of other strategies."""
    rouge_1: float | None = None
    """ROUGE-1 against the prompt's reference, points, 0 to 100; None without one."""
    rouge_2: float | None = None
    """ROUGE-2, likewise."""
    rouge_l: float | None = None
    """ROUGE-L, likewise."""


class OverVanilla(Frozen):
    """Speed over the fastest vanilla SD on the same plan of cores, with its interval (5 % and 95
    %)."""

    against: str
    ratio: float
    low: float
    high: float
    cost_ratio: float | None = None


class TaskAccuracy(Frozen):
    """Right answers of one task, and the difference from autoregressive decoding with its
    interval."""

    accuracy: float | None
    count: int
    difference: float | None
    low: float | None
    high: float | None
    note: str | None


class BenchEntry(Frozen):
    """All metrics of one contender; docs/methods.md defines them."""

    strategy: str | None = None
    """None for a peer."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    split_cores: bool = False
    """Whether each model had its own share of the cores."""
    lossless: bool = True
    greedy: bool = True
    dtype: str | None = None
    # speed
    tokens_per_second: float | None = None
    decode_tokens_per_second: float | None = None
    prefill_ms: float | None = None
    speedup: float | None = None
    """Over autoregressive decoding."""
    speedup_low: float | None = None
    speedup_high: float | None = None
    over_vanilla: OverVanilla | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    tpot_p95_ms: float | None = None
    # counts, of strategies only
    emitted: int = 0
    target_calls: int = 0
    draft_calls: int = 0
    qualifier_calls: int = 0
    rounds: int = 0
    inner_acceptance_rate: float | None = None
    cost_ratio: float | None = None
    """Target calls per token over those of the fastest vanilla SD."""
    acceptance_rate: float | None = None
    draft_efficiency: float | None = None
    mat: float | None = None
    mean_acceptance_length: float | None = None
    acceptance_by_position: tuple[float | None, ...] = ()
    """Kept / judged tokens at each position."""
    accepted_at: tuple[int, ...] = ()
    """Rounds that kept the token at each position of the draft and all before it."""
    rescued_share: float | None = None
    rescued: int = 0
    """Tokens that were kept without or against the target's choice."""
    time_share: dict[str, float | None] | None = None
    peak_memory_mb: float | None = None
    # origins
    artifacts: dict[str, str | None] | None = None
    config_digest: str | None = None
    trace_digest: str | None = None
    # identity and quality
    identical_outputs: int | None = None
    near_ties: int | None = None
    exact: bool = False
    differences: tuple[Difference, ...] = ()
    target_argmax_share: float | None = None
    kl: float | None = None
    rouge_l: float | None = None
    rouge_l_difference: float | None = None
    holds_floor: bool | None = None
    tasks: dict[str, TaskAccuracy] = Field(default_factory=dict)
    categories: tuple[CategoryFigure, ...] = ()
    """Empty where all prompts are of one."""
    per_prompt: tuple[PromptRow, ...] = ()

    @property
    def seconds(self) -> list[float]:
        return [row.seconds for row in self.per_prompt]

    @property
    def tokens(self) -> list[int]:
        return [row.tokens for row in self.per_prompt]


class Headline(Frozen):
    """A ratio that the bench is run for, with its interval; the cost ratio is None where it says
    nothing."""

    name: str
    contender: str
    against: str
    ratio: float
    low: float
    high: float
    cost_ratio: float | None


class ParityEntry(Frozen):
    """How a strategy's outputs compare with the target on the CPU; `wrong` names prompts."""

    identical: int
    near_ties: int
    wrong: tuple[str, ...]


class CpuCheck(Frozen):
    """Whether the outputs of all lossless strategies are the CPU's but for near-ties."""

    passed: bool
    strategies: dict[str, ParityEntry]


class Machine(Frozen):
    """The machine and the code of a report (`machine.describe_machine`)."""

    cpu: str
    cores: int
    threads: int
    others: float | None = None
    """Cores that the threads lacked, because other processes used them; None where nobody looked,
    or peers were among them."""
    dtype: str
    device_class: str | None = None
    device: str | None = None
    draft_device: str | None = None
    device_name: str | None = None
    cuda: str | None = None
    compiled: bool = False
    libraries: dict[str, str] = Field(default_factory=dict)
    commit: str | None = None


class ReportSettings(Frozen, RunSettings):
    """What was decoded. A report names all of the first three, whatever the defaults."""

    max_tokens: int
    temperature: float
    runs: int
    prompts_file: str | None = None


class BenchReport(Frozen):
    """The report of a bench."""

    schema_version: Literal[3]
    pair: str
    fingerprint: str | None = None
    padded_to: int | None = None
    """Parameters of a padded target; None: the target as it is."""
    machine: Machine
    settings: ReportSettings
    prompts: int
    prompt_ids: tuple[str, ...] = ()
    prompts_digest: str | None = None
    several_turns: int = 0
    """Prompts of which only the first of several turns was decoded."""
    references: int | None = None
    """Prompts with a reference, which ROUGE-L is computed on."""
    longest_prompt: int | None = None
    """Tokens of the longest prompt."""
    strategies: dict[str, BenchEntry]
    """By label: the name, with parameters where it was measured with several."""
    cost_reference: str | None = None
    """Label of the vanilla SD that cost ratios refer to."""
    peers: dict[str, dict[str, BenchEntry]] = Field(default_factory=dict)
    """Peer → its variants."""
    peer_versions: dict[str, str] = Field(default_factory=dict)
    peer_notes: tuple[str, ...] = ()
    """How peers were run."""
    headlines: tuple[Headline, ...] = ()
    cpu_check: CpuCheck | None = None
    left_out: dict[str, str] = Field(default_factory=dict)
    """Contenders that failed and were not measured → reason."""

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON, as it is written to a file; an infinite parameter is the string
        "Infinity", which reads as one."""
        written: dict[str, Any] = json.loads(self.model_dump_json(exclude_unset=True))
        return written
