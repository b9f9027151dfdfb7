"""From a training checkpoint to a shipped draft, and how well it agrees with its target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from serving.runtime.artifacts.base import Provenance
from serving.runtime.artifacts.distilled_draft import DistilledDraft
from serving.runtime.pair import LoadedPair
from serving.runtime.strategies import build_strategy
from serving.runtime.types import Forward, Sampling


def to_artifact(draft: Any, head_tokens: Tensor, donor: str, provenance: Provenance) -> DistilledDraft:
    """The trained layers and final norm of a draft module as an artifact; embeddings stay with the donor.

    Args:
        head_tokens: `[head]` ids that the head covers, ascending.
        donor: sha256 of the target's weights.
    """
    lent = {"model.embed_tokens.weight", "lm_head.weight"}
    state = {name: t.detach().float().clone() for name, t in draft.state_dict().items() if name not in lent}
    skipped = {"_name_or_path", "_model_name_or_path", "architectures", "transformers_version", "dtype"}
    config = {k: v for k, v in draft.config.to_dict().items() if k not in skipped}
    return DistilledDraft(state, config, head_tokens, donor, provenance)


def agreement(pair: LoadedPair, prompts: Sequence[tuple[str, list[int]]], *, max_tokens: int = 128,
              progress: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Top-1 agreement of draft and target on the target's own greedy outputs.

    Args:
        prompts: (task, ids) of each prompt.
    Returns:
        `agreement` (share of output positions whose argmax is the target's token, over all positions), `positions`,
        `tasks` (task → share) and `mean_run` (mean number of consecutive agreeing positions from a random position).
    """
    engine = pair.engine()
    hits: dict[str, list[list[bool]]] = {}
    for i, (task, ids) in enumerate(prompts):
        output = engine.generate(ids, pair.sampling(max_tokens=max_tokens), build_strategy("autoregressive")).output
        hits.setdefault(task, []).append(agreeing(pair, ids, output))
        if progress:
            progress(f"{i + 1}/{len(prompts)} prompts")
    flat = [run for runs in hits.values() for run in runs]
    count = sum(map(len, flat))
    return {
        "agreement": sum(map(sum, flat)) / max(1, count),
        "positions": count,
        "mean_run": sum(map(_run_lengths, flat)) / max(1, count),
        "tasks": {task: sum(map(sum, runs)) / max(1, sum(map(len, runs))) for task, runs in hits.items()},
    }


def agreeing(pair: LoadedPair, prompt: list[int], output: list[int]) -> list[bool]:
    """For each output token whether it is the draft's argmax on the same prefix, in one teacher-forced pass."""
    draft = pair.models["draft"]
    slot = draft.open()
    try:
        row = Forward("draft", slot, tuple(prompt + output[:-1]), keep=len(output), prefill=True)
        top = draft.forward([row])[0].rows(Sampling()).top
    finally:
        draft.close(slot)
    return [a == b for a, b in zip(top, output, strict=True)]


def _run_lengths(hits: list[bool]) -> int:
    """Sum over positions of the agreeing run that starts there."""
    total = run = 0
    for hit in reversed(hits):
        run = run + 1 if hit else 0
        total += run
    return total


def load_checkpoint(draft: Any, folder: Any) -> dict[str, float]:
    """Weights of a training checkpoint into a draft module; returns the training progress."""
    from components.distillation.training import restore

    return restore(draft, torch.optim.AdamW(draft.parameters(), lr=0.0), folder)
