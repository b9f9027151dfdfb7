"""The station that collects: prompts → traces of the pair."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flows.stations import Station
from flows.workspace import Workspace

if TYPE_CHECKING:
    from components.prompts import Prompt
    from serving.runtime.trace import TraceSet

KINDS = ("bare", "draft", "target", "mixed")
"""SPRINTER's prefix kinds (a) to (d)."""
SLOTS = 16
"""Texts written at once."""
MOST_CONTEXT = 4096
"""What a pair is loaded with where nobody says how much it needs."""
AROUND = 32
"""Tokens that a chat template puts around a message, at most; more is cut from the message."""


def collect(station: Station, prompts: Sequence[Prompt], *, max_tokens: int = 96, folder: Path | None = None, fresh: bool = False,
            rollout: int = 16, kinds: Sequence[str] = KINDS, temperature: float = 0.0, top_p: float = 1.0, turns: int = 1, seed: int = 0,
            log: Callable[[str, float, int], None] | None = None) -> TraceSet:
    """Collect traces of the pair on prompts; a collection that was cut short goes on where it stopped.

    Args:
        fresh: forget traces of other prompts or settings in the folder.
        kinds: prefix kinds in equal parts; a verifier learns from all, replay and table from the target's own texts.
        turns, log: as in `components.collection.collect`.
    """
    from components.collection import collect as run

    where = folder or station.workspace.traces
    return run(station.pair, prompts, where, max_tokens=max_tokens, rollout=rollout, prefix_kinds=tuple(kinds), temperature=temperature,
               top_p=top_p, turns=turns, seed=seed, fresh=fresh, batch=SLOTS, progress=station.bar, log=log)


def context_for(workspace: Workspace, prompts: Sequence[Prompt], *, max_tokens: int, rollout: int, turns: int = 1) -> int | None:
    """Positions that the longest conversation and its rollouts need, so that many slots take little memory.

    Returns:
        None where that is as much as the models can read, or as they are loaded with anyway.
    """
    from components.texts import turns_of
    from serving.runtime.pair import load_tokenizer

    files = workspace.files()
    tokenizer = load_tokenizer(files.target)

    def length(prompt: Prompt) -> int:
        count = turns_of(prompt, turns)
        recorded = prompt.answers[: count - 1]
        said = [*(message["content"] for message in prompt.messages), *prompt.turns[:count], *recorded]
        written = max_tokens * (count - len(recorded))  # the last is the text itself
        return sum(len(tokenizer(text)["input_ids"]) + AROUND for text in said) + AROUND * (count - len(recorded)) + written

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
