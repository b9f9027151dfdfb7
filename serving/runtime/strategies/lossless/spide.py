"""SPIDE: dynamic drafting by calibrated confidence, serial and parallel intertwined (SPIDE,
Algorithm 1)."""

from __future__ import annotations

import math
from functools import cached_property

from pydantic import Field, model_validator

from draftwell.serving.artifacts.acceptance_table import MIDPOINTS, AcceptanceTable
from draftwell.serving.artifacts.forward_costs import in_one_pass
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.runtime.acceptance.exact import Exact
from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.drafting.draft_model import DraftModel
from draftwell.serving.runtime.drafting.stopping import (
    CumulativeAcceptance,
    FixedLength,
    count_kept,
)
from draftwell.serving.runtime.schedules.intertwined import intertwined
from draftwell.serving.runtime.schedules.serial import serial
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.strategies.base import Strategy, StrategyConfig
from draftwell.serving.runtime.types import Draft, StopPolicy, Verdict

LONGEST = 32


class Spide(Strategy):
    name = "spide"
    lossless = True
    paper = "SPIDE, Algorithm 1 and section 4"
    artifacts = ("acceptance_table", "hardware_profile")
    bench_only = ("calibrated",)

    class Config(StrategyConfig):
        tau: float = Field(
            0.7,
            ge=0,
            le=1,
            description="verify once the estimated chance of full acceptance falls to tau",
        )
        max_draft: int | None = Field(
            None,
            ge=1,
            le=LONGEST,
            description="longest serial draft, and the cap of a continuation, whose length is "
            f"then Eq. 6's; None: {LONGEST}, and a continuation no longer than the target "
            "verifies in about one pass",
        )
        parallel: bool = Field(True, description="draft on while the target verifies")
        dynamic: bool = Field(
            True, description="stop by confidence; off: a fixed length of `num_speculative_tokens`"
        )
        overlap_tau: float = Field(
            0.0,
            ge=0,
            lt=1,
            description="while the target verifies, draft on only until the continuation's "
            "estimated chance, given what is verified, falls to this; 0: as long as the "
            "verification takes",
        )
        num_speculative_tokens: int = Field(
            5, ge=1, le=32, description="draft length without dynamic drafting"
        )
        calibrated: bool = Field(
            True,
            description="off: the acceptance table starts empty, and what it learns is not saved "
            "(ablation, for "
            "benches)",
        )
        learns: bool = Field(
            True, description="off: the acceptance table stays as it started (ablation)"
        )

        @model_validator(mode="after")
        def _overlap_tau_needs_overlap(self) -> Spide.Config:
            if self.overlap_tau > 0 and not (self.parallel and self.dynamic):
                raise ValueError(
                    "overlap_tau needs parallel and dynamic drafting: leave it out, or "
                    "switch both on"
                )
            return self

    @property
    def overlaps(self) -> bool:  # type: ignore[override]
        return bool(self.config.parallel)

    @property
    def most_unverified(self) -> int:
        """The longest serial draft."""
        return LONGEST if self.config.max_draft is None else int(self.config.max_draft)

    def overlap_steps(self, times: HardwareProfile, unverified: int) -> int:
        """Draft steps during a verification of so many tokens.

        As many as fit into it, and no more than `in_one_pass` (ours): the next verification reads
        them, and where a long one takes longer, the last of them cost more than they bring. With
        a `max_draft`, Eq. 6's fixed s, up to that.
        """
        if self.config.max_draft is not None:
            return min(self.most_unverified, max(1, math.floor(times.speed_ratio)))
        fitting = math.floor(times.verify_seconds(unverified + 1) / times.draft_seconds)
        return min(in_one_pass(times.t_verify, LONGEST), max(1, fitting))

    @property
    def longest_draft(self) -> int:
        return int(
            self.most_unverified if self.config.dynamic else self.config.num_speculative_tokens
        )

    @cached_property
    def table(self) -> AcceptanceTable:
        """What all requests read and, unless they work on copies, write. First asked for by the
        thread that decodes, as all of `run` is."""
        if self.config.calibrated:
            return self.artifact(AcceptanceTable)
        nothing = [0] * len(MIDPOINTS)
        return AcceptanceTable.empty().with_counts(
            nothing, nothing, sampled=AcceptanceTable.empty()
        )

    def run(self, session: Session) -> Step[None]:
        table = self.table.at(session.sampling.temperature)
        table = table.copy() if self.resources.deterministic else table

        def learn(draft: Draft, verdict: Verdict) -> None:
            if self.config.learns:
                count_kept(table, draft, verdict)

        drafter = DraftModel(self.stop_policy(table), with_confidence=True)
        if not self.config.parallel:
            yield from serial(session, drafter, Exact(), learn)
            return
        times = self.artifact(HardwareProfile).when(overlapping=True)
        ahead = DraftModel(
            CumulativeAcceptance(table, self.config.overlap_tau, self.most_unverified),
            with_confidence=True,
        )
        yield from intertwined(
            session,
            drafter,
            ahead,
            Exact(),
            lambda unverified: self.overlap_steps(times, unverified),
            learn,
        )

    def stop_policy(self, table: AcceptanceTable) -> StopPolicy:
        if not self.config.dynamic:
            return FixedLength(self.config.num_speculative_tokens)
        return CumulativeAcceptance(table, self.config.tau, self.most_unverified)
