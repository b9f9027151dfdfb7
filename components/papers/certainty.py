"""How certain each model of a pair is of its next token: PyramidSD's Figure 3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from draftwell.components.prompts.prompt import Prompt, ids_of
from draftwell.serving.runtime.commands import Forward, Role
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import build_strategy


class Certainty(NamedTuple):
    """Of one model over the positions of one text; sums, so that texts add up.

    Args:
        positions: tokens of the text.
        entropy: nats, of the model's raw distributions (temperature 1).
        confidence: probabilities of its first choices.
    """

    positions: int
    entropy: float
    confidence: float


def certainty(
    pair: LoadedPair,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    temperature: float,
    seed: int = 0,
) -> dict[Role, tuple[Certainty, ...]]:
    """Role → what each model says at the same positions: those of texts that the target writes by
    itself, one a prompt.

    Args:
        seed: of the first prompt; every further one has the next.
    Returns:
        empty where a model's head covers a part of the vocabulary: it is certain of what it cannot
        say otherwise.
    """
    roles: tuple[Role, ...] = ("draft", "qualifier", "target")
    present = [role for role in roles if role in pair.models]
    if any(pair.models[role].head_tokens is not None for role in present):
        return {}
    texts = []
    for i, prompt in enumerate(prompts):
        ids = ids_of(pair, prompt)
        sampling = pair.sampling(max_tokens=max_tokens, temperature=temperature, seed=seed + i)
        output = pair.engine().generate(ids, sampling, build_strategy("autoregressive", {})).output
        if output:
            texts.append((list(ids), list(output)))
    return {role: tuple(certainty_of(pair, role, *text) for text in texts) for role in present}


def certainty_of(
    pair: LoadedPair, role: Role, prompt: Sequence[int], output: Sequence[int]
) -> Certainty:
    """One model on one text, by one teacher-forced pass."""
    model = pair.models[role]
    slot = model.open()
    try:
        logits = model.forward(
            [Forward(role, slot, (*prompt, *output[:-1]), keep=len(output), prefill=True)]
        )[0].logits
    finally:
        model.close(slot)
    probabilities = torch.softmax(logits, -1)  # [output, vocab]
    return Certainty(
        len(output),
        float(torch.special.entr(probabilities).sum()),
        float(probabilities.max(-1).values.sum()),
    )
