"""Settings of a tuning on another engine."""

from __future__ import annotations

from pydantic import Field

from components.engines.vllm_methods import METHODS
from serving.settings import Settings

Lengths = tuple[int, ...]


class EngineTuneSettings(Settings):
    """What is tried, and how much is measured."""

    called, error_code = "tuning setting", "bad_tune_setting"

    methods: tuple[str, ...] = Field(METHODS[1:], description="names to choose among, besides plain decoding")
    ngram_n: Lengths = Field((2, 3, 4), min_length=1, description="longest n-grams; texts decide which one is measured")
    ngram_k: Lengths = Field((3, 5, 8), min_length=1, description="draft tokens from n-grams")
    suffix_k: Lengths = Field((8,), min_length=1, description="draft tokens from suffixes, at most")
    cascade_k: Lengths = Field((8,), min_length=1, description="draft tokens of the plug-in's n-grams, at most")
    draft_k: Lengths = Field((1, 2, 3, 5), min_length=1, description="draft tokens of a draft model")
    head_k: Lengths = Field((1, 2, 3, 5), min_length=1, description="draft tokens of an EAGLE-3 head")
    explore: int = Field(6, ge=2, description="prompts on which every way is measured")
    confirm: int = Field(3, ge=1, description="of those the best, which are measured on all prompts")
    levels: Lengths = Field((1,), min_length=1, description="requests at once, ascending from 1; several give lengths by load")
    groups: int = Field(8, ge=2, description="groups of requests at each level above 1")
    max_tokens: int = Field(64, ge=1, description="tokens to emit per prompt at most")
    temperature: float = Field(0.0, ge=0, le=2)
    seed: int = 0


DEFAULTS = EngineTuneSettings()
