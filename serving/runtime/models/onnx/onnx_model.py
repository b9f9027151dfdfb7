"""A Llama-shaped draft in ONNX Runtime, over slots: DuoDecoding's draft, which computes on cores of
its own.

float32 throughout, whatever the pair's dtype: ONNX Runtime has no fast bfloat16 on CPUs. A draft's
output is still exact, because q is the distribution that its tokens were really drawn from. Keys
and values are in buffers made once, which the graph appends to in place; rollback lowers a length.
Rows of one token in neighbouring slots run as one batch, others one by one. Threads of ONNX Runtime
never spin: a waiting draft takes nothing from the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.failures import room_for
from draftwell.serving.runtime.logits import Logits, Span
from draftwell.serving.runtime.model import Model
from draftwell.serving.runtime.models.slots import Slots
from draftwell.serving.runtime.slot_texts import SlotText

BRANCHES = 7
"""Branch slots for each slot: DuoDecoding drafts at most 8 sequences."""


class OnnxModel(Model):
    """A graph of `onnx_export` over slots.

    Args:
        graph: file of the graph, or its bytes.
        module: the torch module that it was made from: lends the embedding table, rotary embedding
            and sizes.
        slots: number of concurrent requests.
        max_context: positions of a slot.
        head_tokens: `[head]` ids that the head covers, or None for all; other logits are -inf.
        vocab_size: ids of the logits; None: as many as the model's own.
        cores: cores to compute on, one thread each: the calling thread on the first, ONNX Runtime's
            own on the others.
    """

    slots: Slots

    def __init__(
        self,
        graph: Path | bytes,
        module: Any,
        *,
        slots: int = 1,
        max_context: int,
        head_tokens: Tensor | None = None,
        vocab_size: int | None = None,
        cores: Sequence[int] = (0,),
    ):
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = len(cores), 1
        if len(cores) > 1:  # numbered from 1 there
            options.add_session_config_entry(
                "session.intra_op_thread_affinities", ";".join(str(core + 1) for core in cores[1:])
            )
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self.session = ort.InferenceSession(
            graph if isinstance(graph, bytes) else str(graph),
            options,
            providers=["CPUExecutionProvider"],
        )
        config = module.config
        self.device, self.max_context, self.hidden_size = (
            torch.device("cpu"),
            max_context,
            config.hidden_size,
        )
        self.embedding = module.model.embed_tokens.weight.detach().cpu()
        self.head_tokens, self.vocab_size = head_tokens, vocab_size or config.vocab_size
        self.head_size = self.session.get_outputs()[0].shape[-1]
        self.layers, kv_heads = config.num_hidden_layers, config.num_key_value_heads
        with torch.inference_mode():
            cos, sin = module.model.rotary_emb(
                torch.zeros(1, device=module.device),
                torch.arange(max_context, device=module.device)[None],
            )
        half = cos.shape[-1] // 2
        self._tables = {
            name: np.ascontiguousarray(table[0, :, :half].float().cpu().numpy())
            for name, table in (("cos", cos), ("sin", sin))
        }
        self.slots = Slots([], slots, max_context, torch.float32, self.device)
        shape = (slots * (1 + BRANCHES), kv_heads, max_context, 2 * half)
        with room_for(
            f"{slots} slots of {max_context} positions",
            "start with fewer slots or a shorter context",
        ):
            # zeros are promised, not written: memory that no sequence reaches is never taken from
            # the machine
            self.memory = {
                f"{kind}_{i}": np.zeros(shape, np.float32)
                for i in range(self.layers)
                for kind in ("key", "value")
            }

    def open(self, text: SlotText | None = None, prompt: Sequence[int] = ()) -> int:
        return self.slots.open(text, prompt)

    def open_branch(self) -> int:
        slot = self.slots.open_branch()
        if slot >= self.slots.count * (1 + BRANCHES):
            self.slots.close(slot)
            raise DraftwellError(
                (
                    f"a draft in ONNX Runtime holds {1 + BRANCHES} sequences a request at "
                    "most: draft fewer"
                ),
                code="too_many_branches",
            )
        return slot

    def close(self, slot: int) -> None:
        self.slots.close(slot)

    def rollback(self, slot: int, length: int) -> None:
        self.slots.rollback(slot, length)

    def fork(self, source: int, into: int, length: int, known: int = 0) -> None:
        self.slots.fork(source, into, length, known)
        for memory in self.memory.values():
            memory[into, :, known:length] = memory[source, :, known:length]

    def forward(self, rows: Sequence[Forward]) -> list[Span]:
        outputs: dict[int, Span] = {}
        placed: list[tuple[int, int]] = []
        try:
            for group in neighbours(self.as_read(rows)):
                starts = [self.slots.reserve(row.slot, len(row.tokens)) for row in group]
                placed += [(row.slot, start) for row, start in zip(group, starts, strict=True)]
                for row, output in zip(group, self._run(group, starts), strict=True):
                    outputs[row.slot] = output
        except BaseException:
            for slot, start in placed:  # a failed forward pass leaves every slot as it was
                self.slots.rollback(slot, start)
            raise
        return [outputs[row.slot] for row in rows]

    @torch.inference_mode()
    def _run(self, rows: Sequence[Forward], starts: Sequence[int]) -> list[Span]:
        """Rows of equal length in neighbouring slots, as one batch."""
        count, keep, first_slot = len(rows[0].tokens), rows[0].keep, rows[0].slot
        ends = [start + count for start in starts]
        embedded = self.embedding[torch.tensor([row.tokens for row in rows])].float()
        feeds = {
            "embeddings": embedded.numpy(),
            "last": np.array(ends, np.int32) - 1,
            "total": np.array([max(ends)], np.int32),
            "first": np.array([count - keep], np.int64),
            **self._tables,
        }
        binding = self.session.io_binding()
        for name, array in feeds.items():
            binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for name, whole in self.memory.items():
            part = whole[first_slot : first_slot + len(rows)]
            binding.bind_input(name, "cpu", 0, np.float32, part.shape, part.ctypes.data)
            binding.bind_output(f"new_{name}", "cpu", 0, np.float32, part.shape, part.ctypes.data)
        logits = np.empty((len(rows), keep, self.head_size), np.float32)
        hidden = np.empty((len(rows), keep, self.hidden_size), np.float32)
        for name, array in (("logits", logits), ("hidden", hidden)):
            binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        self.session.run_with_iobinding(binding)
        columns = None if self.head_tokens is not None else self.vocab_size
        return Logits(
            torch.from_numpy(logits).flatten(0, 1)[:, :columns],
            torch.from_numpy(hidden).flatten(0, 1),
            self.head_tokens,
            self.vocab_size,
        ).split([keep] * len(rows))


def neighbours(rows: Sequence[Forward]) -> list[list[Forward]]:
    """Rows in groups that can run as one batch: one token each, in slots that are side by side; any
    other row alone."""
    groups: list[list[Forward]] = []
    for row in sorted(rows, key=lambda row: row.slot):
        last = groups[-1][-1] if groups else None
        if (
            last is not None
            and len(last.tokens) == len(row.tokens) == 1
            and row.slot == last.slot + 1
        ):
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups
