"""How certain each model of a pair is of its next token: PyramidSD's Figure 3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from components.prompts.prompt import Prompt, ids_of
from serving.runtime.commands import Forward, Role
from serving.runtime.pair import LoadedPair
from serving.runtime.strategies import build_strategy


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


def certainty(pair: LoadedPair, prompts: Sequence[Prompt], *, max_tokens: int, temperature: float,
              seed: int = 0) -> dict[Role, tuple[Certainty, ...]]:
    """Role → what each model says at the same positions: those of texts that the target writes by itself, one a prompt.

    Args:
        seed: of the first prompt; every further one has the next.
    """
    texts = []
    for i, prompt in enumerate(prompts):
        ids = ids_of(pair, prompt)
        sampling = pair.sampling(max_tokens=max_tokens, temperature=temperature, seed=seed + i)
        output = pair.engine().generate(ids, sampling, build_strategy("autoregressive", {})).output
        if output:
            texts.append((list(ids), list(output)))
    roles: tuple[Role, ...] = ("draft", "qualifier", "target")
    return {role: tuple(certainty_of(pair, role, *text) for text in texts) for role in roles if role in pair.models}


def certainty_of(pair: LoadedPair, role: Role, prompt: Sequence[int], output: Sequence[int]) -> Certainty:
    """One model on one text, by one teacher-forced pass."""
    model = pair.models[role]
    slot = model.open()
    try:
        logits = model.forward([Forward(role, slot, (*prompt, *output[:-1]), keep=len(output), prefill=True)])[0].logits
    finally:
        model.close(slot)
    probabilities = torch.softmax(logits.float(), -1)
    return Certainty(len(output), float(torch.special.entr(probabilities).sum()), float(probabilities.max(-1).values.sum()))


def certainty_words(found: Mapping[str, Sequence[Certainty]]) -> str:
    """Each model's means over all positions, in a sentence; empty where none was read.

    >>> certainty_words({"draft": [Certainty(2, 5.0, 0.8)], "target": [Certainty(2, 2.0, 1.4)]})
    'At the same 2 positions of texts that the target wrote, mean entropy in nats and mean probability of the first choice (Figure 3, of \
which the paper gives no values: both scale with size): draft 2.50 and 0.40, target 1.00 and 0.70.'
    """
    if not found:
        return ""
    sums = {role: [sum(column) for column in zip(*texts, strict=True)] for role, texts in found.items()}
    means = ", ".join(f"{role} {entropy / places:.2f} and {confidence / places:.2f}"
                      for role, (places, entropy, confidence) in sums.items())
    return (f"At the same {next(iter(sums.values()))[0]} positions of texts that the target wrote, mean entropy in nats and mean "
            f"probability of the first choice (Figure 3, of which the paper gives no values: both scale with size): {means}.")
