"""The station that collects: prompts → traces of the pair."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.context import StepContext
from flows.workspace import Workspace

if TYPE_CHECKING:
    from components.prompts.prompt import Prompt
    from flows.workers.task_runners import WorkerPool
    from serving.recording.trace import TraceSet

KINDS = ("bare", "draft", "target", "mixed")
"""SPRINTER's prefix kinds (a) to (d)."""
SLOTS = 16
"""Texts written at once."""
ROLLOUT = 16
"""Draft tokens behind every position."""
MOST_CONTEXT = 4096
"""What a pair is loaded with where nobody says how much it needs."""
UNWRITTEN = "…"
"""Stands for an answer that the target has yet to write, where a chat template is measured."""


def run_collect(step: StepContext, prompts: Sequence[Prompt], *, max_tokens: int = 96, folder: Path | None = None, fresh: bool = False,
            rollout: int = ROLLOUT, kinds: Sequence[str] = KINDS, temperature: float = 0.0, top_p: float = 1.0, turns: int = 1,
            seed: int = 0, fan: WorkerPool | None = None, log: Callable[[str, float, int], None] | None = None) -> TraceSet:
    """Collect traces of the pair on prompts; a collection that was cut short goes on where it stopped.

    Args:
        fresh: forget traces of other prompts or settings in the folder.
        kinds: prefix kinds in equal parts; a verifier learns from all, replay and table from the target's own texts.
        fan: how shards are spread over workers (`runners.fan_of`); None writes them here.
        turns, log: as in `components.collect.collect.collect_traces`.
    """
    from components.collect.collect import collect_traces as run

    where = folder or step.workspace.traces
    options: dict[str, Any] = {"max_tokens": max_tokens, "rollout": rollout, "prefix_kinds": tuple(kinds), "temperature": temperature,
                               "top_p": top_p, "turns": turns, "seed": seed, "batch": SLOTS}
    spread = None
    if fan is not None:
        from flows.workers.task_runners import spread_shards

        spread = spread_shards(fan, step, prompts, where, options)
    return run(step.pair, prompts, where, fresh=fresh, spread=spread, progress=step.bar, log=log, **options)


def loading(workspace: Workspace, prompts: Sequence[Prompt], *, max_tokens: int, rollout: int = ROLLOUT, turns: int = 1) -> dict[str, Any]:
    """How a pair is loaded to collect, from the command line as in the pipeline: arguments of `flows.loading.open_pair`."""
    context = context_for(workspace, prompts, max_tokens=max_tokens, rollout=rollout, turns=turns)
    return {"slots": SLOTS, "max_context": context, "any_strategy": False}


def context_for(workspace: Workspace, prompts: Sequence[Prompt], *, max_tokens: int, rollout: int, turns: int = 1) -> int | None:
    """Positions that the longest conversation and its rollouts need, so that many slots take little memory.

    Returns:
        None where that is as much as the models can read, or as they are loaded with anyway.
    """
    from components.collect.continuations import turns_of
    from serving.runtime.model_files import load_tokenizer
    from serving.runtime.pair import LoadedPair

    files, spec = workspace.files(), workspace.spec
    # Without models it can only encode, but just as the pair will.
    encoder = LoadedPair(spec.name, spec.dtype, "cpu", {}, {}, load_tokenizer(files.target), "", spec.chat)

    def length(prompt: Prompt) -> int:
        if prompt.raw:
            return len(encoder.encode(prompt.prompt)) + max_tokens
        count = turns_of(prompt, turns)
        recorded = prompt.answers[: count - 1]
        answers = [*recorded, *[UNWRITTEN] * (count - 1 - len(recorded))]
        talk = [{"role": role, "content": text} for turn, answer in zip_longest(prompt.turns[:count], answers)
                for role, text in (("user", turn), ("assistant", answer)) if text is not None]
        return len(encoder.encode_messages([*prompt.messages, *talk])) + max_tokens * (count - len(recorded))  # the last: the text itself

    needed = max(map(length, prompts)) + rollout
    needed += -needed % 64
    limits = [_positions(folder) for folder in (files.target, files.draft) if folder is not None]
    return needed if needed < min(limits) else None


def _positions(folder: Path) -> int:
    """Positions that a model folder's configuration names, at most those that a pair is loaded with."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):  # a distilled draft, which reads as far as its target
        return MOST_CONTEXT
    config = config.get("text_config", config)
    named = [config[key] for key in ("max_position_embeddings", "n_positions") if isinstance(config.get(key), int)]
    return min([MOST_CONTEXT, *named])
