"""From a trained module to a shipped draft, and how well it agrees with its target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from draftwell.components.collect.decoding import decode_all, read_text, room
from draftwell.components.distil.family import NOT_OF_THE_DRAFT
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.compiled_libraries import wanted_mode
from draftwell.serving.artifacts.distilled_draft import DistilledDraft, lent_names
from draftwell.serving.runtime.model_files import build_distilled
from draftwell.serving.runtime.pair import LoadedPair, on_fast_path, over_slots
from draftwell.serving.runtime.strategies import build_strategy


def to_artifact(
    draft: Any, head_tokens: Tensor, donor: str, provenance: Provenance
) -> DistilledDraft:
    """The trained weights of a draft module, and its embeddings of positions, as an artifact;
    embeddings of tokens stay with the donor.

    Args:
        head_tokens: `[head]` ids that the head covers, ascending.
        donor: sha256 of the target's weights.
    """
    lent = lent_names(draft)
    state = {
        name: t.detach().float().cpu().clone()
        for name, t in draft.state_dict().items()
        if name not in lent
    }
    config = {
        key: value for key, value in draft.config.to_dict().items() if key not in NOT_OF_THE_DRAFT
    }
    return DistilledDraft(state, config, head_tokens, donor, provenance)


def with_draft(
    target: LoadedPair, draft: DistilledDraft, *, slots: int, max_context: int
) -> LoadedPair:
    """A pair of a loaded target and an artifact as it will run: embeddings borrowed, weights
    rounded.

    Args:
        target: loaded with `keep_modules`.
    """
    module = build_distilled(draft, target.modules["target"])
    rounded = target.dtype == "bfloat16" and on_fast_path(module, max_context)
    model = over_slots(
        module,
        slots=slots,
        max_context=max_context,
        head_tokens=draft.head_tokens,
        vocab_size=target.models["target"].vocab_size,
        weights="int8" if rounded else None,
        compiled=wanted_mode(),
    )
    return replace(
        target,
        models={**target.models, "draft": model},
        modules={**target.modules, "draft": module},
    )


def agreement(
    pair: LoadedPair,
    prompts: Sequence[tuple[str, list[int]]],
    *,
    max_tokens: int = 128,
) -> dict[str, Any]:
    """Top-1 agreement of draft and target on the target's own greedy outputs.

    Args:
        prompts: (task, ids) of each prompt.
    Returns:
        `agreement` (share of output positions whose argmax is the target's token, over all
        positions), `positions`, `tasks` (task → share) and `mean_run` (mean number of consecutive
        agreeing positions from a random position).
    """
    engine, sampling = pair.engine(), pair.sampling(max_tokens=max_tokens)
    outputs = decode_all(
        engine,
        [(ids, sampling) for _, ids in prompts],
        [build_strategy("autoregressive")] * len(prompts),
        room(engine, len(prompts)),
    )
    hits: dict[str, list[list[bool]]] = {}
    for (task, ids), output in zip(prompts, outputs, strict=True):
        hits.setdefault(task, []).append(agreeing(pair, ids, output))
    flat = [run for runs in hits.values() for run in runs]
    count = sum(map(len, flat))
    return {
        "agreement": sum(map(sum, flat)) / max(1, count),
        "positions": count,
        "mean_run": sum(map(_run_lengths, flat)) / max(1, count),
        "tasks": {
            task: sum(map(sum, runs)) / max(1, sum(map(len, runs))) for task, runs in hits.items()
        },
    }


def agreeing(pair: LoadedPair, prompt: list[int], output: list[int]) -> list[bool]:
    """For each output token whether it is the draft's argmax on the same prefix, in one
    teacher-forced pass."""
    top = read_text(pair.models["draft"], "draft", prompt + output[:-1], len(output)).top
    return [a == b for a, b in zip(top, output, strict=True)]


def _run_lengths(hits: list[bool]) -> int:
    """Sum over positions of the agreeing run that starts there."""
    total = run = 0
    for hit in reversed(hits):
        run = run + 1 if hit else 0
        total += run
    return total
