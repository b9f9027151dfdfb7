"""How the target writes the text that a draft learns from: batched decoding over the slots of the
engine, on any device, whose states are kept as they pass."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from draftwell.components.collect.decoding import decode_all, room
from draftwell.serving.runtime.commands import Forward, Step
from draftwell.serving.runtime.engine.thread_governor import ThreadGovernor
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.strategies import Strategy, build_strategy
from draftwell.serving.runtime.strategies.base import StrategyResources
from draftwell.serving.runtime.strategies.lossless.autoregressive import Autoregressive

LIKELIEST = 64
"""Sampled tokens come from this many of the likeliest."""


class Noting(Autoregressive):
    """Plain decoding of one text, with the states of all that is read of it."""

    states: Tensor

    def run(self, session: Session) -> Step[None]:
        yield from super().run(session)
        self.states = session.target.hidden_states(0, session.target.length).cpu().clone()


class Writer:
    """A target that continues prompts.

    Args:
        pair: its target writes.
        at_once: prompts in one batch, as far as the pair has slots.
        governor: adapts the threads while texts are written, and only then.
        features: layers whose input states are wanted in front of the last ones, of targets like
            Llama.
    Attributes:
        identity: what its texts depend on apart from weights and prompts.
    """

    def __init__(
        self,
        pair: LoadedPair,
        at_once: int,
        governor: ThreadGovernor | None = None,
        features: tuple[int, ...] = (),
    ):
        self.pair, self.at_once, self.governor, self.features = pair, at_once, governor, features
        self.identity = f"slots {pair.dtype}" + (f" features {features}" if features else "")
        if features:
            model: Any = pair.models["target"]  # of targets like Llama
            model.keep_hidden_states((*features, model.module.config.num_hidden_layers))

    def greedy(self, rows: Sequence[list[int]], new_tokens: int) -> list[tuple[list[int], Tensor]]:
        """For each prompt its output, up to and with a stop token, and the target's states
        `[prompt + output − 1, (features + 1) * hidden]`, which predict tokens 1.. of both: those of
        `features`, then the normalised last ones."""
        samplings = [self.pair.sampling(max_tokens=new_tokens)] * len(rows)
        if self.features:
            noting = [Noting(Autoregressive.Config(), StrategyResources()) for _ in rows]
            outputs = self._decode(rows, samplings, noting)
            return [(out, one.states) for out, one in zip(outputs, noting, strict=True)]
        outputs = self._decode(rows, samplings, [build_strategy("autoregressive")] * len(rows))
        model = self.pair.models["target"]
        return [
            (output, states_of(model, [*ids, *output[:-1]]))
            for ids, output in zip(rows, outputs, strict=True)
        ]

    def sampled(
        self, rows: Sequence[list[int]], new_tokens: int, temperature: float, seed: int
    ) -> list[list[int]]:
        """For each prompt an output drawn from the likeliest tokens."""
        return self._decode(
            rows,
            [
                self.pair.sampling(
                    max_tokens=new_tokens, temperature=temperature, top_k=LIKELIEST, seed=seed + i
                )
                for i in range(len(rows))
            ],
            [build_strategy("autoregressive")] * len(rows),
        )

    def _decode(
        self,
        rows: Sequence[list[int]],
        samplings: Sequence[Sampling],
        strategies: Sequence[Strategy],
    ) -> list[list[int]]:
        engine = self.pair.engine(governor=self.governor)
        with self.governor or nullcontext():
            return decode_all(
                engine,
                list(zip(rows, samplings, strict=True)),
                strategies,
                room(engine, self.at_once),
            )


def states_of(model: Any, ids: Sequence[int], features: int = 0) -> Tensor:
    """`[ids, (features + 1) * hidden]` of a text: the states of as many layers as the model keeps
    hidden states of, and the normalised last ones, side by side."""
    slot = model.open()
    try:
        row = Forward("target", slot, tuple(ids), keep=len(ids), prefill=True)
        span = model.forward([row])[0]
        parts = [model.hidden_states(slot, 0, len(ids))] if features else []
        return torch.cat([*parts, span.states], -1).cpu()
    finally:
        model.close(slot)
