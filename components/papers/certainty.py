"""How certain each model of a pair is of its next token: PyramidSD's Figure 3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from draftwell.components.prompts.prompt import Prompt, ids_of
from draftwell.components.report.intervals import TAIL, bootstrap_of_sums, resamples_for
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


def certainty_words(found: Mapping[str, Sequence[Certainty]]) -> str:
    """Each model's means over all positions with intervals over texts (5 % left out at each end) in a sentence; empty without any.

    >>> certainty_words({"draft": [Certainty(2, 5.0, 0.8)], "target": [Certainty(2, 2.0, 1.4)]})
    'Figure 3 (no values in the text; larger models have a lower entropy and a higher confidence there), at the same 2 positions of texts \
that the target wrote, mean entropy in nats and mean probability of the first choice: draft 2.50 [2.50, 2.50] and 0.40 [0.40, 0.40], \
target 1.00 [1.00, 1.00] and 0.70 [0.70, 0.70].'
    """  # noqa: E501
    if not found:
        return ""
    positions = sum(one.positions for one in next(iter(found.values())))
    values = ", ".join(
        f"{role} {with_interval(texts, 1)} and {with_interval(texts, 2)}"
        for role, texts in found.items()
    )
    return (
        "Figure 3 (no values in the text; larger models have a lower entropy and a higher "
        f"confidence there), at the same {positions} "
        "positions of texts that the target wrote, mean entropy in nats and mean "
        f"probability of the first choice: {values}."
    )


def with_interval(texts: Sequence[Certainty], which: int) -> str:
    """A sum of `Certainty` over the positions, as a mean with its interval over texts."""
    table = np.array(texts, dtype=np.float64)

    def mean(sums: np.ndarray) -> np.ndarray:
        return np.asarray(sums[..., which] / sums[..., 0])[..., None]

    low, high = bootstrap_of_sums(table, mean, resamples=resamples_for(TAIL, len(table)), tail=TAIL)
    return f"{float(mean(table.sum(0))[0]):.2f} [{float(low[0]):.2f}, {float(high[0]):.2f}]"
