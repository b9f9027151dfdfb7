"""Prompt lookup decoding: the context's own n-grams are the draft (Saxena 2023)."""

from __future__ import annotations

from functools import partial

from pydantic import Field

from draftwell.serving.artifacts.datastore import Datastore
from draftwell.serving.runtime.acceptance.exact import Exact
from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.drafting.datastore_lookup import look_up
from draftwell.serving.runtime.drafting.ngram import NGram
from draftwell.serving.runtime.schedules.serial import serial
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.strategies.base import Strategy, StrategyConfig


class PromptLookup(Strategy):
    name = "prompt_lookup"
    lossless = True
    paper = "Saxena 2023, prompt lookup decoding"
    roles = ("target",)
    optional_artifacts = ("datastore",)
    length_field = "prompt_lookup_num_tokens"
    not_in_traces = (("use_datastore", True),)  # it would find every text in itself

    class Config(StrategyConfig):
        prompt_lookup_num_tokens: int = Field(10, ge=1, le=32, description="longest draft")
        max_matching_ngram_size: int = Field(
            3, ge=1, le=8, description="longest n-gram looked up, tried down to 1"
        )
        use_datastore: bool = Field(
            False,
            description=(
                "where the context has no match, look into the datastore, which must be there then"
            ),
        )

    def run(self, session: Session) -> Step[None]:
        elsewhere = (
            partial(look_up, self.artifact(Datastore)) if self.config.use_datastore else None
        )
        drafter = NGram(
            self.config.max_matching_ngram_size, self.config.prompt_lookup_num_tokens, elsewhere
        )
        yield from serial(session, drafter, Exact())
