"""What is to be collected: prompts and settings, checked before anything is written; one shard of
them as a file; and how far a collection is."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from draftwell.components.collect.continuations import room_for_prompts, write_texts
from draftwell.components.collect.decoding import room
from draftwell.components.collect.plan import Plan
from draftwell.components.collect.settings import CollectionSettings
from draftwell.components.collect.trace_rows import observe
from draftwell.components.prompts.overlap import hash_of
from draftwell.components.prompts.prompt import Prompt
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import json_digest
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.recording.trace_schema import KINDS, LOSSY, TraceError, TraceHeader
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import Strategy

SHARD_PROMPTS = 32
ROLLOUT_KINDS = ("target",)
"""Texts with rollouts: replay and the acceptance table read no others'."""
Progress = Callable[[int, int, str], None]
"""Called with (prompts done, prompts in all, rate and time left as text)."""


class Meter:
    """How far a collection is, how fast it is, and when it will end.

    Args:
        total: prompts in all.
        missing: those whose shards do not exist yet.
    """

    def __init__(self, total: int, missing: int, progress: Progress | None):
        self.total, self.missing, self.progress = total, missing, progress
        self.done, self.rows = 0.0, 0
        self.started = time.perf_counter()

    def advance(self, prompts: float, rows: int) -> None:
        """A share of the prompts is done, in so many recorded positions."""
        self.done, self.rows = self.done + prompts, self.rows + rows
        if self.progress:
            seconds = time.perf_counter() - self.started
            left = seconds / self.done * (self.missing - self.done)
            words = f"{self.rows / seconds:.0f} tokens/s, {left / 60:.1f} min left"
            done = self.total - self.missing + int(self.done + 1e-6)
            self.progress(done, self.total, words)


@dataclass(frozen=True)
class Work:
    """What is to be collected, wherever it is written to.

    Args:
        prompts: with the sampling parameters of each.
        strategy: writes the texts of kind `lossy`.
    """

    pair: LoadedPair
    prompts: list[tuple[Prompt, Sampling]]
    settings: CollectionSettings
    header: TraceHeader
    plan: Plan
    strategy: Strategy | None = None

    def part(self, index: int) -> list[tuple[Prompt, Sampling]]:
        """The prompts of a shard."""
        size = self.plan.shard_prompts
        return self.prompts[index * size : (index + 1) * size]

    def write_shard(self, traces: TraceSet, index: int, meter: Meter) -> None:
        """Write a shard; a text counts when both models have read it.

        Raises:
            TraceError: none of the prompts gave a text.
        """
        import pyarrow as pa

        prompts, settings = self.part(index), self.settings
        texts = write_texts(self.pair, prompts, settings, self.plan.room, strategy=self.strategy)
        tables = []
        for _, of_prompt in groupby(texts, key=lambda text: text.prompt.id):
            for table in observe(
                self.pair.models, list(of_prompt), self.header, hidden=settings.hidden
            ):
                tables.append(table)
                meter.advance(len(prompts) / len(texts), table.num_rows)
        # prompts of one token have no bare text, and messages in a chat template have none
        if not tables:
            raise TraceError(
                f"none of the prompts {prompts[0][0].id} … gave a text of the kinds "
                f"{', '.join(settings.prefix_kinds)}: leave "
                "them out, or collect other kinds (a chat pair's messages have no bare text)",
                code="no_texts",
            )
        traces.write_shard(index, pa.concat_tables(tables))


def work_of(
    pair: LoadedPair,
    prompts: Sequence[Prompt],
    settings: CollectionSettings,
    strategy: Strategy | None = None,
) -> Work:
    """What these settings ask for, checked before anything is written.

    Args:
        strategy: a lossy one that writes the texts of kind `lossy`, which is then allowed among the
            prefix kinds.
    Raises:
        DraftwellError: no prompts, two with the same id, no draft, a kind that no one writes, or no
            room in the context.
    """
    check_inputs(pair, prompts, settings.prefix_kinds, strategy)
    sampling = pair.sampling(
        **settings.model_dump(include={"max_tokens", "temperature", "top_p", "seed"})
    )
    header = TraceHeader(
        pair=pair.name,
        fingerprint=pair.fingerprint,
        dtype=pair.dtype,
        stop_token_ids=tuple(sorted(sampling.stop_token_ids)),
        rollout_kinds=tuple(kind for kind in settings.prefix_kinds if kind in ROLLOUT_KINDS),
        **settings.model_dump(include={"rollout", "max_tokens", "temperature", "top_p"}),
    )
    slots = room(pair.engine(), settings.batch)
    plan = Plan(
        inputs=inputs_digest(prompts, header, settings, strategy),
        prompts=len(prompts),
        shard_prompts=SHARD_PROMPTS,
        batch=slots,
        room=room_for_prompts(pair, settings.max_tokens, settings.rollout, strategy),
        prompt_hashes={prompt.id: hash_of(prompt) for prompt in prompts},
    )
    return Work(
        pair,
        # each prompt has its own seed, so that no draw depends on other prompts
        [(prompt, replace(sampling, seed=sampling.seed + i)) for i, prompt in enumerate(prompts)],
        settings.model_copy(update={"batch": slots}),
        header.model_copy(update={"batch": slots}),
        plan,
        strategy,
    )


def inputs_digest(
    prompts: Sequence[Prompt],
    header: TraceHeader,
    settings: CollectionSettings,
    strategy: Strategy | None,
) -> str:
    """Digest of all that a trace depends on. It never changes from version to version, so that
    unfinished collections resume."""
    rows = [
        [
            p.id,
            p.task,
            p.turns,
            p.messages,
            p.answers,
            *(["raw"] if p.raw else []),
            *([p.tokens] if p.tokens else []),
            *([p.tools, p.after] if p.tools or p.after else []),
        ]
        for p in prompts
    ]
    return json_digest(
        [
            header.model_dump_json(),
            settings.seed,
            settings.hidden,
            settings.turns,
            list(settings.prefix_kinds),
            rows,
            *([identity_of(strategy)] if strategy else []),
        ]
    )


def identity_of(strategy: Strategy) -> list[Any]:
    """What a strategy's texts depend on apart from models and prompts, as plain JSON: name,
    parameters, digests of its artifacts."""
    artifacts = {
        kind: artifact.digest
        for kind, artifact in sorted(strategy.resources.artifacts.items())
        if kind in strategy.reads()
    }
    return [strategy.name, strategy.config.model_dump(mode="json"), artifacts]


def check_inputs(
    pair: LoadedPair, prompts: Sequence[Prompt], kinds: Sequence[str], strategy: Strategy | None
) -> None:
    """Refuse what cannot be collected, before anything is written."""
    if not prompts:
        raise DraftwellError(
            "there are no prompts to collect from: name a file that holds some", code="no_prompts"
        )
    if len({prompt.id for prompt in prompts}) != len(prompts):
        raise DraftwellError(
            "two prompts have the same id: make them unique", code="duplicate_prompt_id"
        )
    if "draft" not in pair.models:
        why = pair.models["target"].left_out.get("draft", "choose a pair with one")
        raise DraftwellError(
            f"pair {pair.name} has no draft model, so there is nothing to trace: {why}",
            code="no_draft",
        )
    if LOSSY in kinds and strategy is None:
        raise DraftwellError(
            f"texts of kind {LOSSY} are those of a release's own strategy, collected when "
            "it is published: choose "
            f"kinds of {', '.join(KINDS)}",
            code="no_lossy_strategy",
        )
    if strategy is not None and strategy.lossless:
        raise DraftwellError(
            (
                f"strategy {strategy.name} is lossless, its texts are the target's own: "
                "collect the kind target"
            ),
            code="lossless_strategy",
        )
