"""The pipeline step that collects: prompts → traces of the pair."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwell.components.collect.collect import collect_traces
from draftwell.components.collect.continuations import turns_of
from draftwell.components.collect.settings import CollectionSettings
from draftwell.components.prompts.prompt import ids_of
from draftwell.flows.context import StepContext, encoder_of
from draftwell.flows.loading import worker_pool_of
from draftwell.flows.workers.task_runners import spread_shards
from draftwell.flows.workspace import Workspace
from draftwell.serving.temperature import class_of

if TYPE_CHECKING:
    from draftwell.components.prompts.prompt import Prompt
    from draftwell.flows.settings import PipelineSettings
    from draftwell.flows.workers.task_runners import WorkerPool
    from draftwell.serving.recording.trace import TraceSet

MOST_CONTEXT = 4096
"""Positions that a pair is loaded with where nothing says how many it needs."""
UNWRITTEN = "…"
"""Stands for an answer that the target has yet to write, where a chat template is measured."""
SAMPLED_ROLLOUT = 8
"""Draft tokens that the flows record at each position of a sampled text. All must be computed,
while most of a greedy text's are known from its next position: twice as many take twice the
time."""


def run_collect(
    step: StepContext,
    prompts: Sequence[Prompt],
    settings: CollectionSettings,
    *,
    folder: Path | None = None,
    fresh: bool = False,
    pool: WorkerPool | None = None,
) -> TraceSet:
    """Collect traces of the pair on prompts; a collection that was cut short resumes where it
    stopped.

    Args:
        folder: of the trace; None takes the workspace's for this temperature.
        fresh: replace traces of other prompts or settings in the folder.
        pool: how shards are spread over workers; None writes them here.
    """

    if folder is None:
        step.workspace.begin()
    traces = folder or step.workspace.traces_at(settings.temperature)
    spread = None
    if pool is not None:
        spread = spread_shards(pool, step, prompts, traces, settings)
    return collect_traces(
        step.pair, prompts, traces, settings, fresh=fresh, spread=spread, progress=step.bar
    )


def collection_at(settings: PipelineSettings, temperature: float) -> CollectionSettings:
    """What the flows collect at a temperature: greedy texts of all kinds, which verifier and memory
    are made from; of sampled ones those of the target alone, without hidden states, which are all
    that replay and the acceptance table read."""

    if class_of(temperature) == "greedy":
        return CollectionSettings(max_tokens=settings.max_tokens)
    return CollectionSettings(
        max_tokens=settings.max_tokens,
        temperature=temperature,
        rollout=SAMPLED_ROLLOUT,
        prefix_kinds=("target",),
        hidden=False,
    )


def collect_classes(
    step: StepContext, prompts: Sequence[Prompt], settings: PipelineSettings
) -> dict[str, TraceSet]:
    """Traces of each class of temperatures that is tuned for, by the name of their folder in the
    workspace.

    Sampled texts are written for the first `settings.sampled_prompts` of the same prompts, so that
    no further ones are learnt from.
    """

    found = {}
    for temperature in settings.temperatures:
        rows = prompts if class_of(temperature) == "greedy" else prompts[: settings.sampled_prompts]
        traces = run_collect(
            step,
            rows,
            collection_at(settings, temperature),
            fresh=True,
            pool=worker_pool_of(settings),
        )
        found[traces.folder.name] = traces
    return found


def loading(
    workspace: Workspace, prompts: Sequence[Prompt], settings: CollectionSettings
) -> dict[str, Any]:
    """How a pair is loaded to collect, from the command line as in the pipeline: arguments of
    `draftwell.flows.loading.open_pair`."""
    return {
        "slots": settings.batch,
        "max_context": context_for(workspace, prompts, settings),
        "any_strategy": False,
    }


def context_for(
    workspace: Workspace, prompts: Sequence[Prompt], settings: CollectionSettings
) -> int | None:
    """Positions that the longest conversation and its rollouts need, so that many slots take little
    memory.

    Returns:
        None where they need all that the models can read, or what these are loaded with anyway.
    """

    files, max_tokens = workspace.files(), settings.max_tokens
    encoder = encoder_of(workspace)

    def length(prompt: Prompt) -> int:
        if prompt.raw or prompt.tokens:
            return len(ids_of(encoder, prompt)) + max_tokens
        count = turns_of(prompt, settings.turns)
        recorded = prompt.answers[: count - 1]
        answers = [*recorded, *[UNWRITTEN] * (count - 1 - len(recorded))]
        talk = [
            {"role": role, "content": text}
            for turn, answer in zip_longest(prompt.turns[:count], answers)
            for role, text in (("user", turn), ("assistant", answer))
            if text is not None
        ]
        # the last: the text itself
        talk = [*prompt.messages, *talk, *prompt.after]
        return len(encoder.encode_messages(talk, prompt.tools)) + max_tokens * (
            count - len(recorded)
        )

    needed = max(map(length, prompts)) + settings.rollout
    needed += -needed % 64
    limits = [_positions(folder) for folder in (files.target, files.draft) if folder is not None]
    return needed if needed < min(limits) else None


def _positions(folder: Path) -> int:
    """Positions that a model folder's configuration names, at most those that a pair is loaded
    with."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):  # a distilled draft, which reads as far as its target
        return MOST_CONTEXT
    config = config.get("text_config", config)
    named = [
        config[key]
        for key in ("max_position_embeddings", "n_positions")
        if isinstance(config.get(key), int)
    ]
    return min([MOST_CONTEXT, *named])
