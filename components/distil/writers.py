"""How the target writes the text that a draft learns from: fast where it is a plain Llama, over the
engine's slots otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from draftwell.components.collect.decoding import decode_all, room
from draftwell.components.distil.lean import LIKELIEST, LONGEST, BatchedLlama, generate_batch
from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.engine.thread_governor import ThreadGovernor
from draftwell.serving.runtime.models.lean_llama import fits
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import build_strategy


class Writer(Protocol):
    """A target that continues prompts.

    Args:
        identity: what its texts depend on apart from weights and prompts.
    """

    identity: str

    def greedy(self, rows: Sequence[list[int]], new_tokens: int) -> list[tuple[list[int], Tensor]]:
        """For each prompt its output, up to and with a stop token, and the target's normalised last
        states `[prompt + output − 1, hidden]`, which predict tokens 1.. of both."""

    def sampled(
        self, rows: Sequence[list[int]], new_tokens: int, temperature: float, seed: int
    ) -> list[list[int]]:
        """For each prompt an output drawn from the likeliest tokens."""


def writer_of(
    pair: LoadedPair,
    at_once: int,
    governor: ThreadGovernor | None = None,
    *,
    features: tuple[int, ...] = (),
) -> Writer:
    """The fastest writer that the pair's target allows.

    Args:
        pair: loaded with `keep_modules`.
        at_once: prompts in one batch, as far as the pair has slots.
        governor: adapts the threads while texts are written, and only then.
        features: layers whose input states are wanted in front of the last ones.
    """
    module = pair.modules["target"]
    plain = fits(module) and module.config.tie_word_embeddings and pair.padded_to is None
    if (
        plain
        and module.config.rope_parameters.get("rope_type", "default") == "default"
        and module.device.type == "cpu"
        and pair.models["target"].max_context <= LONGEST
    ):
        return LeanWriter(module, pair.stop_tokens, module.dtype, governor, features)
    return EngineWriter(pair, at_once, governor, features)


class LeanWriter:
    """A Llama with tied embeddings in one static batch on the CPU.

    Args:
        module: the target, float32 or bfloat16.
        stops: tokens that end a text.
        dtype: dtype of weights and cache.
        governor: as in `writer_of`.
        features: as in `BatchedLlama`; the states then have those of these layers in front.
    """

    def __init__(
        self,
        module: Any,
        stops: frozenset[int],
        dtype: torch.dtype,
        governor: ThreadGovernor | None = None,
        features: tuple[int, ...] = (),
    ):
        self.model, self.stops, self.governor = (
            BatchedLlama(module, dtype, features),
            stops,
            governor,
        )
        self.identity = f"lean {dtype}" + (f" features {features}" if features else "")

    def greedy(self, rows: Sequence[list[int]], new_tokens: int) -> list[tuple[list[int], Tensor]]:
        return self._write(rows, new_tokens)

    def sampled(
        self, rows: Sequence[list[int]], new_tokens: int, temperature: float, seed: int
    ) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        return [out for out, _ in self._write(rows, new_tokens, temperature, generator)]

    def _write(
        self,
        rows: Sequence[list[int]],
        new_tokens: int,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> list[tuple[list[int], Tensor]]:
        with self.governor or nullcontext():
            return generate_batch(
                self.model,
                list(rows),
                new_tokens,
                self.stops,
                temperature,
                generator,
                governor=self.governor,
            )


class EngineWriter:
    """Any model over slots, on any device: batched decoding, then one teacher-forced pass of each
    text for its states."""

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
            pair.models["target"].keep_hidden_states(features)  # type: ignore[attr-defined]  # of targets like Llama

    def greedy(self, rows: Sequence[list[int]], new_tokens: int) -> list[tuple[list[int], Tensor]]:
        sampling = self.pair.sampling(max_tokens=new_tokens)
        outputs = self._decode(rows, [sampling] * len(rows))
        return [(out, self._states([*ids, *out])) for ids, out in zip(rows, outputs, strict=True)]

    def sampled(
        self, rows: Sequence[list[int]], new_tokens: int, temperature: float, seed: int
    ) -> list[list[int]]:
        return self._decode(
            rows,
            [
                self.pair.sampling(
                    max_tokens=new_tokens, temperature=temperature, top_k=LIKELIEST, seed=seed + i
                )
                for i in range(len(rows))
            ],
        )

    def _decode(self, rows: Sequence[list[int]], samplings: Sequence[Sampling]) -> list[list[int]]:
        engine = self.pair.engine(governor=self.governor)
        strategies = [build_strategy("autoregressive")] * len(rows)
        with self.governor or nullcontext():
            return decode_all(
                engine,
                list(zip(rows, samplings, strict=True)),
                strategies,
                room(engine, self.at_once),
            )

    def _states(self, ids: list[int]) -> Tensor:
        """`[ids − 1, hidden]` of one text, with those of `features` in front."""
        model: Any = self.pair.models["target"]
        slot = model.open()
        try:
            output = model.forward(
                [Forward("target", slot, tuple(ids[:-1]), keep=len(ids) - 1, prefill=True)]
            )[0]
            assert output.hidden is not None  # every module gives its states
            parts = [model.hidden_states(slot, 0, len(ids) - 1)] if self.features else []
            states: Tensor = torch.cat([*parts, output.hidden], -1).cpu()
        finally:
            model.close(slot)
        return states.clone()
