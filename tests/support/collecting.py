"""Small collections for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftwell.components.collect import collect
from draftwell.components.collect.settings import CollectionSettings
from draftwell.components.prompts.prompt import Prompt
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.runtime.pair import LoadedPair

RUN = ("strategy", "fresh", "spread", "progress")


def small(**settings: Any) -> CollectionSettings:
    """Settings with texts of the target only, eight at once and eight draft tokens after every
    position, unless named otherwise."""
    return CollectionSettings(**{"prefix_kinds": ("target",), "batch": 8, "rollout": 8, **settings})


def collect_traces(
    pair: LoadedPair,
    prompts: Sequence[Prompt],
    folder: Path,
    **options: Any,
) -> TraceSet:
    """A collection with `small` settings; `options` are settings, and how to run it (`RUN`)."""
    run = {name: options.pop(name) for name in RUN if name in options}
    return collect.collect_traces(pair, prompts, folder, small(**options), **run)


def collect_shard(
    pair: LoadedPair, prompts: Sequence[Prompt], folder: Path, index: int, **settings: Any
) -> Path:
    """One shard of a collection with `small` settings."""
    return collect.collect_shard(pair, prompts, folder, index, small(**settings))
