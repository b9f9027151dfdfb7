"""Llama-like models on CUDA: a pass is one of six graphs, and a token's logits depend on its own
text alone.

A pass is padded to a count of tokens; all else about it is data (`packing`), copied once. What is
computed is `kernels` by Triton, whose sums are in an order that no other token changes; `reference`
is the same by torch, which CPUs run, without graphs. Every pass ends with the choice of the
likeliest tokens and with its own input brought to them, so that a greedy chain is the same graph,
replayed. Nothing here reads from the device: who reads a distribution waits for it, and times are
events (`Marks`). Tests on CPUs: tests/serving/runtime/models/cuda/.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib import import_module
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor

from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.logits import Logits, Span
from draftwell.serving.runtime.models.cuda import packing, reference
from draftwell.serving.runtime.models.cuda.cuda_graph import Marks, ModelGraphs, Uncaptured
from draftwell.serving.runtime.models.cuda.cuda_slots import CudaSlots
from draftwell.serving.runtime.models.cuda.reference import split
from draftwell.serving.runtime.models.lean_llama import LeanLlama
from draftwell.serving.runtime.models.module_model import Placed
from draftwell.serving.runtime.models.slots import pinned, sent

CHUNK = 512
"""Tokens of the largest bucket; a longer prompt is read in several."""
KERNELS = f"{__package__}.kernels"
Said = tuple[Tensor, Tensor, Tensor]
"""Of the kept tokens of a pass: states `[kept, hidden]`, logits `[kept, columns]` float32 and the
likeliest tokens `[kept]`."""


class CudaLlama(LeanLlama):
    """A `LeanLlama` whose passes are graphs; arguments as for `TransformersModel`.

    Args:
        chunk: tokens of the largest bucket, a power of two.
        ops: what computes, `kernels` or `reference`; None: kernels on CUDA.
    """

    slots: CudaSlots
    slots_type = CudaSlots
    chains = True
    skips = False
    """Its graphs have all layers."""
    _linear: ClassVar[Any] = staticmethod(split)

    def __init__(self, module: Any, *, chunk: int = CHUNK, ops: Any = None, **settings: Any):
        super().__init__(module, **settings)
        self.chunk, self.captures = chunk, self.device.type == "cuda"
        self.ops = ops or (import_module(KERNELS) if self.captures else reference)
        self.exact = self.ops is not reference
        self.marks: Marks | None = None
        self._head_split = split(self.head_weight)
        self._graphs = ModelGraphs(self.device)
        self._busy = threading.Lock()

    def token_cost(self, position: int) -> float:
        """A piece of a prompt takes about as long anywhere: kernels are many and short."""
        return 1.0

    @torch.inference_mode()
    def warm_up(self, seconds: float | None = None) -> bool:
        """Capture all graphs now rather than at first use, those of few tokens first.

        Args:
            seconds: stop before the next once so much time has gone; None: never.
        Returns:
            whether all were captured.
        """
        started, tokens = time.monotonic(), packing.SMALLEST
        with self._busy, self._on_device():
            while tokens <= self.chunk:
                if seconds is not None and time.monotonic() - started >= seconds:
                    return False
                self._step(tokens)
                tokens *= 2
        return True

    def synchronize(self) -> None:
        """Wait for all that was launched on the calling thread's stream, and for the last forward
        pass, whose stream may be another."""
        if self.captures:
            torch.cuda.current_stream(self.device).synchronize()
            if self.marks is not None:
                self.marks.stop.synchronize()

    def open_branch(self) -> int:
        if not self.slots.full:
            return self.slots.open_branch()
        # the slots' tensors move: no forward pass may be on its way
        with self._busy, torch.inference_mode():
            self.synchronize()
            self._graphs.drop()
            slot = self.slots.open_branch()
            # a pass that waits for the lock has another stream, which does not wait for what was
            # copied here
            self.synchronize()
            return slot

    def keep_hidden_states(self, layers: tuple[int, ...]) -> None:
        with self._busy:
            before = self.features
            super().keep_hidden_states(layers)
            if self.features != before:  # graphs that exist keep none
                self.synchronize()
                self._graphs.drop()

    def _on_device(self) -> AbstractContextManager[Any]:
        """Kernels are launched on the thread's current device."""
        on_cuda = self.device.type == "cuda"
        return torch.cuda.device(self.device) if on_cuda else nullcontext()

    def _run(self, rows: Sequence[Forward], placed: list[Placed]) -> list[Span]:
        with self._busy, self._on_device():
            marks = Marks() if self.captures else None
            states, logits, chosen = self._read(rows, placed)
            counts = [row.keep for row in rows]
            found = list(zip(states.split(counts), logits.split(counts), strict=True))
            ends = list(accumulate(counts))
            for steps in {row.steps for row in rows} - {1}:
                numbers = [i for i, row in enumerate(rows) if row.steps == steps]
                first = chosen[sent([ends[i] - 1 for i in numbers], self.device)]
                fed, spoken = self._go_on(
                    steps, [rows[i] for i in numbers], [placed[i] for i in numbers], first
                )
                for place, i in enumerate(numbers):
                    found[i] = (
                        torch.cat([found[i][0], fed[:, place]]),
                        torch.cat([found[i][1], spoken[:, place]]),
                    )
            self.marks = marks.end() if marks else None
            if any(row.steps > 1 for row in rows):
                states, logits = (torch.cat(one) for one in zip(*found, strict=True))
            said = Logits(logits, states, self.head_tokens, self.vocab_size)
            return said.split([len(own) for own, _ in found])

    def _read(self, rows: Sequence[Forward], placed: list[Placed]) -> Said:
        """Feed all tokens."""
        said = []
        sharing = self.ops.sharing(self.shape.groups)
        for packed, keeps in packing.passes(
            *packing.pack(rows, placed), self.chunk, sharing, self.slots.scratch
        ):
            said.append(self._replay(self._given(packed), keeps))
        states, logits, chosen = (
            one[0] if len(one) == 1 else torch.cat(one) for one in zip(*said, strict=True)
        )
        return states, logits, chosen

    def _go_on(
        self, steps: int, rows: list[Forward], placed: list[Placed], first: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Greedily read `steps` − 1 further tokens of rows, from `first` `[rows]` on, each chosen
        on the device: their states and logits, `[steps − 1, rows, …]`."""
        following = [(slot, self.slots.reserve(slot, steps - 1), 1) for slot, _, _ in placed]
        single = [replace(row, tokens=(0,), steps=1, parents=None) for row in rows]
        fields, kept = packing.pack(single, following)
        ((packed, keeps),) = packing.passes(fields, kept, len(rows), 1, self.slots.scratch)
        step = self._given(packed)
        step.inputs[packing.ID, :keeps] = first
        said = [self._replay(step, keeps) for _ in range(steps - 1)]
        states, logits, _ = zip(*said, strict=True)
        return torch.stack(states), torch.stack(logits)

    def _given(self, packed: packing.Fields) -> Any:
        """The pass of a bucket with its input."""
        step = self._step(packed.shape[1])
        step.inputs.copy_(pinned(packed, self.device), non_blocking=True)
        return step

    def _step(self, tokens: int) -> Any:
        """The pass of a bucket, to be given an input and replayed."""

        def nothing() -> Tensor:
            return sent(packing.padding(tokens, self.slots.scratch), self.device)

        if not self.captures:
            return Uncaptured(self._forward, nothing())
        return self._graphs.captured(tokens, self._forward, nothing)

    def _replay(self, step: Any, keeps: int) -> Said:
        """Run a pass; copies, since the next one overwrites what it gives."""
        states, logits = step.replay()
        return (
            states[:keeps].clone(),
            logits[:keeps].clone(),
            step.inputs[packing.ID, :keeps].clone(),
        )

    def _forward(self, fields: Tensor) -> tuple[Tensor, Tensor]:
        """The computation of a bucket: states and logits of the tokens `packing.KEPT`; nothing but
        `fields` and the slots' content may differ between two calls."""
        ops, shape, live = self.ops, self.shape, fields[packing.LIVE, :1]
        settings = shape.eps, self.dtype
        x = self._embed(fields[packing.ID]).float()
        after = [*(layer.attention_norm for layer in self.layers[1:]), self.final_norm]
        normed = ops.add_norm(
            x.new_empty(0, *x.shape), None, x, (None, self.layers[0].attention_norm), *settings
        )
        for number, (layer, next_norm) in enumerate(zip(self.layers, after, strict=True)):
            self._note(number, x, fields)
            memory = self.slots.keys[number], self.slots.values[number]
            qkv: Any = layer.qkv
            out: Any = layer.out
            query = ops.place_heads(
                ops.product(normed, qkv, live),
                qkv.bias,
                layer.qk_norm,
                self.ropes[shape.ropes[number]],
                fields,
                memory,
                shape,
            )
            attended = ops.attend(query, memory, fields, shape, shape.windows[number])
            norms = layer.after_attention, layer.mlp_norm
            normed = ops.add_norm(ops.product(attended, out, live), out.bias, x, norms, *settings)
            fed, bias = self._feed_forward(layer, normed, live)
            normed = ops.add_norm(fed, bias, x, (layer.after_mlp, next_norm), *settings)
        self._note(len(self.layers), normed, fields)
        kept = normed.index_select(0, fields[packing.KEPT])
        logits = self._kept_logits(kept, fields[packing.LIVE, 1:2])
        ops.choose(logits, fields, self.head_tokens)
        return kept, logits

    def _feed_forward(self, layer: Any, x: Tensor, live: Tensor) -> tuple[Tensor, Tensor | None]:
        """Sums of the product down, `[splits, tokens, hidden]`, and its bias; of both
        feed-forwards, where the target is padded."""
        parts = []
        for gate_up, down in layer.feed_forwards:
            activated = self.ops.activate(
                self.ops.product(x, gate_up, live),
                gate_up.bias,
                self.shape.activation,
                self.dtype,
            )
            parts.append(self.ops.product(activated, down, live))
        return torch.cat(parts) if len(parts) > 1 else parts[0], down.bias

    def _note(self, layer: int, x: Tensor, fields: Tensor) -> None:
        """Keep the states that enter a layer, if a head reads them; padding's and branches' go to a
        slot that nobody has."""
        for place, noted in enumerate(self.features):
            if noted == layer and self.slots.features is not None:
                own = slice(place * self.hidden_size, (place + 1) * self.hidden_size)
                slots = fields[packing.SLOT].clamp(max=self.slots.scratch)
                self.slots.features[slots, fields[packing.PLACE], own] = x.to(self.dtype)

    def _kept_logits(self, states: Tensor, live: Tensor) -> Tensor:
        """`[kept, hidden]` → `[kept, columns]` float32, as `compact_logits`."""
        parts = self.ops.product(states, self._head_split, live)
        logits = reference.total(parts, None)
        if self._softcap:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits if self.head_tokens is not None else logits[:, : self.vocab_size]
