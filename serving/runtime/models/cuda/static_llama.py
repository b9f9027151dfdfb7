"""Llama-shaped models with fixed shapes: the CUDA path.

A forward pass is padded to a *bucket*, (rows, tokens a row, positions to attend over), all powers
of two, so that one CUDA graph a bucket can be captured and replayed. What differs from forward pass
to forward pass (slots, lengths, tokens) is one int64 tensor, copied once; which positions a token
sees is a boolean mask made from it on the device. Padding writes to a scratch slot. Nothing here
reads from the device: who reads a distribution waits for it, and times are events (`Marks`).

Everything but capture and replay runs on CPUs too, where the parity tests run it:
tests/serving/runtime/models/cuda/test_static_llama.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.logits import Logits, Span
from draftwell.serving.runtime.models.cuda.cuda_graph import Marks, ModelGraphs
from draftwell.serving.runtime.models.cuda.static_slots import StaticSlots
from draftwell.serving.runtime.models.lean_llama import LeanLlama
from draftwell.serving.runtime.models.module_model import Placed

LONGEST_STEP = 32
"""Rows of at most so many tokens run as one batch; the parts of a longer prompt run one by one."""
CHUNK = 512
"""Tokens of the largest bucket; a longer prompt is read in several."""
SHORTEST_REACH = 64
"""Positions of the smallest bucket to attend over."""
SLOT, START, COUNT, TOKENS = 0, 1, 2, 3
"""Columns of a packed batch."""


class Bucket(NamedTuple):
    """Shape of a forward pass: rows, tokens a row, and leading positions of the slots that they may
    see."""

    rows: int
    tokens: int
    reach: int


def power(n: int) -> int:
    """The smallest power of two that is at least n.

    >>> [power(n) for n in (1, 2, 3, 32, 33)]
    [1, 2, 4, 32, 64]
    """
    return 1 << (n - 1).bit_length()


@dataclass
class Part:
    """Consecutive tokens of row `row` that go into `slot` from position `start`; its states are
    wanted from token `first` on."""

    row: int
    slot: int
    start: int
    tokens: Sequence[int]
    first: int


class StaticLlama(LeanLlama):
    """A `LlamaForCausalLM` in fixed shapes; arguments as for `TransformersModel`.

    Args:
        chunk: tokens of the largest bucket, a power of two above `LONGEST_STEP`.
    """

    slots: StaticSlots
    slots_type = StaticSlots
    chains = True
    trees = False
    """Its graphs have the causal mask inside."""
    keeps_states = False
    skips = False
    """And all layers."""

    def __init__(self, module: Any, *, chunk: int = CHUNK, **settings: Any):
        super().__init__(module, **settings)
        self.chunk = chunk
        self.captures = self.device.type == "cuda"
        self.marks: Marks | None = None
        self._graphs = ModelGraphs(self.device)
        self._busy = threading.Lock()

    def bucket(self, rows: int, tokens: int, end: int) -> Bucket:
        """The shape for so many rows of at most `tokens` tokens that see positions below `end`."""
        return Bucket(
            power(rows), power(tokens), min(self.max_context, max(SHORTEST_REACH, power(end)))
        )

    def token_cost(self, position: int) -> float:
        """A piece of a prompt takes about as long anywhere: kernels are many and short."""
        return 1.0

    def warm_up(
        self, rows: int = 1, reach: int | None = None, seconds: float | None = None
    ) -> bool:
        """Capture the graphs of up to `rows` rows and `reach` positions (None: all) now rather than
        at first use, short texts first.

        Args:
            rows: 1 or more; the power of two that holds them.
            seconds: stop before the next shape once so much time has gone; None: never.
        Returns:
            whether all were captured.
        """
        ends = [
            power(n)
            for n in range(SHORTEST_REACH, (reach or self.max_context) + 1)
            if n == power(n)
        ] + [reach or self.max_context]
        widths = [1 << i for i in range(power(self.chunk).bit_length())]
        started = time.monotonic()
        for end in ends:
            for tokens in widths:
                for count in (
                    [1 << i for i in range(power(rows).bit_length())]
                    if tokens <= LONGEST_STEP
                    else [1]
                ):
                    if seconds is not None and time.monotonic() - started >= seconds:
                        return False
                    self._compute(
                        self._pack([], self.bucket(count, tokens, end)),
                        self.bucket(count, tokens, end),
                    )
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

    def _run(self, rows: Sequence[Forward], placed: list[Placed]) -> list[Span]:
        with self._busy:
            marks = Marks() if self.captures else None
            states = self._read(rows, placed)
            logits = list(self.compact_logits(torch.cat(states)).split([row.keep for row in rows]))
            for steps in {row.steps for row in rows} - {1}:
                self._go_on(
                    steps,
                    [i for i, row in enumerate(rows) if row.steps == steps],
                    placed,
                    states,
                    logits,
                )
            self.marks = marks.end() if marks else None
            return Logits(
                torch.cat(logits), torch.cat(states), self.head_tokens, self.vocab_size
            ).split([len(rows_of_one) for rows_of_one in logits])

    def _read(self, rows: Sequence[Forward], placed: list[Placed]) -> list[Tensor]:
        """Feed all tokens; states `[keep, hidden]` of every row."""
        pieces: list[list[Tensor]] = [[] for _ in rows]
        batch = []
        for number, (row, (slot, start, count)) in enumerate(zip(rows, placed, strict=True)):
            at, wanted = 0, count - row.keep
            while at < count:
                tokens = row.tokens[at : at + self.chunk]
                part = Part(number, slot, start + at, tokens, max(0, wanted - at))
                at += len(tokens)
                if len(tokens) <= LONGEST_STEP:
                    batch.append(part)
                else:
                    self._feed([part], pieces)
        if batch:
            self._feed(batch, pieces)
        # copies: the next replay overwrites what these are views of
        return [torch.cat(parts) for parts in pieces]

    def _feed(self, parts: list[Part], pieces: list[list[Tensor]]) -> None:
        """Run parts as one batch and append their wanted states to `pieces` of their rows."""
        bucket = self.bucket(
            len(parts),
            max(len(p.tokens) for p in parts),
            max(p.start + len(p.tokens) for p in parts),
        )
        states = self._compute(
            self._pack([[p.slot, p.start, len(p.tokens), *p.tokens] for p in parts], bucket), bucket
        )
        for i, part in enumerate(parts):
            if part.first < len(part.tokens):
                pieces[part.row].append(states[i, part.first : len(part.tokens)].clone())

    def _go_on(
        self,
        steps: int,
        numbers: list[int],
        placed: list[Placed],
        states: list[Tensor],
        logits: list[Tensor],
    ) -> None:
        """Greedily read `steps` - 1 further tokens of the rows `numbers`, each chosen on the
        device; append to `states`, `logits`."""
        ends = [placed[i][1] + placed[i][2] for i in numbers]
        for i in numbers:
            self.slots.reserve(placed[i][0], steps - 1)
        bucket = self.bucket(len(numbers), 1, max(ends) + steps - 1)
        packed = self._pack(
            [[placed[i][0], end, 1, 0] for i, end in zip(numbers, ends, strict=True)], bucket
        )
        last = torch.cat([logits[i][-1:] for i in numbers])
        fed, said = [torch.cat([states[i][-1:] for i in numbers])], [last]
        for _ in range(steps - 1):
            # of equals the first, as in Logits.top
            columns = last.max(-1).indices
            packed[: len(numbers), TOKENS] = (
                columns if self.head_tokens is None else self.head_tokens[columns]
            )
            fed.append(self._compute(packed, bucket)[: len(numbers), 0].clone())
            last = self.compact_logits(fed[-1])
            said.append(last)
            packed[:, START] += 1
        for place, i in enumerate(numbers):
            states[i] = torch.stack([step[place] for step in fed])
            logits[i] = torch.stack([step[place] for step in said])

    def _pack(self, parts: list[list[int]], bucket: Bucket) -> Tensor:
        """`[rows, 3 + tokens]` on the device: slot, start, count and tokens of every row; rows of
        padding have count 0."""
        width = TOKENS + bucket.tokens
        rows = [[*part, *[0] * (width - len(part))] for part in parts]
        rows += [[self.slots.scratch, *[0] * (width - 1)] for _ in range(bucket.rows - len(parts))]
        if not self.captures:
            return torch.tensor(rows, device=self.device)
        return torch.tensor(rows, pin_memory=True).to(self.device, non_blocking=True)

    @torch.inference_mode()
    def _compute(self, packed: Tensor, bucket: Bucket) -> Tensor:
        """Normalised states `[rows, tokens, hidden]` of a packed batch, by its bucket's graph where
        there are graphs."""
        if not self.captures:
            return self._forward(packed, bucket)
        return self._graphs.replay(
            bucket,
            packed,
            lambda inputs: self._forward(inputs, bucket),
            lambda: self._pack([], bucket),
        )

    def _forward(self, packed: Tensor, bucket: Bucket) -> Tensor:
        """The computation of a bucket; nothing but `packed` and the slots' content may differ
        between two calls."""
        slots = packed[:, SLOT]
        steps = torch.arange(bucket.tokens, device=packed.device)
        positions = (packed[:, START, None] + steps).clamp_(max=self.max_context - 1)
        into = slots[:, None].masked_fill(steps >= packed[:, COUNT, None], self.slots.scratch)
        seen = torch.arange(bucket.reach, device=packed.device) <= positions[..., None]
        mask = seen.repeat(1, self.heads // self.kv_heads, 1)[:, None]

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            shape = (bucket.rows, bucket.tokens, -1, self.head_dim)
            self.slots.put(layer, into, positions, key.view(shape), value.view(shape))
            keys, values = self.slots.take(layer, slots, bucket.reach)
            folded = (
                query.view(shape)
                .transpose(1, 2)
                .reshape(bucket.rows, self.kv_heads, -1, self.head_dim)
            )
            out = F.scaled_dot_product_attention(
                folded, keys, values, attn_mask=mask, scale=self.scale
            )
            # CUDA's kernels lay it out otherwise
            out = out.reshape(bucket.rows, self.heads, bucket.tokens, self.head_dim)
            return out.transpose(1, 2).reshape(bucket.rows * bucket.tokens, -1)

        return self.run_layers(packed[:, TOKENS:].flatten(), positions.flatten(), attend).view(
            bucket.rows, bucket.tokens, -1
        )
