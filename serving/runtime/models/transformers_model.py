"""Any causal language model of transformers behind the slot interface.

All rows of a batch are packed into one sequence `[1, total]` with explicit positions; an attention function registered
with transformers' `AttentionInterface` writes each row's keys and values into its slot and attends within the slot only.
No padding, no mask tensors, no cache objects of transformers; rollback is a lowered length.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from serving.runtime.models.slots import Slots
from serving.runtime.types import DraftwellError, Forward, Output

ATTENTION = "draftwell_slots"
Placed = tuple[int, int, int]
"""Slot, position of the first token, and number of tokens of a row."""
OWN_ATTENTION = frozenset({"gpt_neo", "gptj", "codegen", "bloom", "mpt", "ctrl", "xlnet", "openai-gpt", "mamba", "mamba2", "falcon_mamba",
                           "rwkv"})
"""Architectures whose attention does not go through `AttentionInterface`, or that have none."""


def slot_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
                   scaling: float | None = None, dropout: float = 0.0, softcap: float | None = None,
                   sliding_window: int | None = None, **kwargs: Any) -> tuple[Tensor, None]:
    """Attention of packed rows over their slots.

    Args:
        query: `[1, heads, total, head_dim]`; key, value: `[1, kv_heads, total, head_dim]`.
        kwargs: must hold `draftwell_rows`, a list of (slot, start, tokens), and `draftwell_slots`, the `Slots`.
    Returns:
        `[1, total, heads, head_dim]`.
    """
    slots: Slots = kwargs["draftwell_slots"]
    window = sliding_window or getattr(module, "sliding_window", None)
    layer = module.layer_idx
    outputs, at = [], 0
    for slot, start, count in kwargs["draftwell_rows"]:
        q = query[0, :, at : at + count]
        keys, values = slots.write(layer, slot, start, key[0, :, at : at + count], value[0, :, at : at + count])
        outputs.append(_attend(q, keys, values, start, scaling, softcap, window))
        at += count
    return torch.cat(outputs, 1).transpose(0, 1)[None], None


def _attend(q: Tensor, keys: Tensor, values: Tensor, start: int, scaling: float | None, softcap: float | None,
            window: int | None) -> Tensor:
    """One row: q `[heads, count, d]` at positions start.. over keys `[kv_heads, end, d]` → `[heads, count, d]`.

    Query groups are folded into the query axis, so that keys are never repeated for grouped-query attention.
    """
    heads, count, dim = q.shape
    kv_heads, end = keys.shape[0], keys.shape[1]
    groups = heads // kv_heads
    mask = None
    if count > 1 or (window and end > window):
        ahead = torch.arange(start, end, device=q.device)[:, None] - torch.arange(end, device=q.device)[None]
        mask = ahead >= 0
        if window:
            mask &= ahead < window
        mask = mask.repeat(groups, 1)  # [groups * count, end]
    folded = q.reshape(kv_heads, groups * count, dim)
    if softcap:
        scores = folded @ keys.transpose(1, 2) * (scaling if scaling is not None else dim**-0.5)
        scores = softcap * torch.tanh(scores / softcap)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        out = scores.float().softmax(-1).to(q.dtype) @ values
    else:
        out = F.scaled_dot_product_attention(folded[None], keys[None], values[None], attn_mask=mask, scale=scaling)[0]
    return out.reshape(heads, count, dim)


class TransformersModel:
    """A `PreTrainedModel` with an LM head, over slots.

    Args:
        module: the model; its attention implementation is replaced.
        slots: number of concurrent requests.
        max_context: positions of a slot; None takes the model's own limit, at most 4096.
        head_tokens: `[head]` ids that the head covers, or None for all; other logits are -inf.
        vocab_size: cut logits to this size (the shared tokenizer's).
    """

    slots_type: ClassVar[type[Slots]] = Slots

    def __init__(self, module: Any, *, slots: int = 1, max_context: int | None = None, head_tokens: Tensor | None = None,
                 vocab_size: int | None = None):
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION, slot_attention)
        module.set_attn_implementation(ATTENTION)
        self.module = module.eval()
        config = module.config.get_text_config()
        check_supported(module, config)
        self.device, self.dtype = module.device, module.dtype
        self.max_context = max_context or min(4096, config.max_position_embeddings)
        self.hidden_size = config.hidden_size
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.slots = self.slots_type([(kv_heads, head_dim)] * config.num_hidden_layers, slots, self.max_context, self.dtype, self.device)
        head = module.get_output_embeddings()
        self.head_tokens = None if head_tokens is None else head_tokens.to(self.device)
        self._head = head if head_tokens is None else partial(F.linear, weight=self.head_weight)
        self._softcap = getattr(config, "final_logit_softcapping", None)
        self.vocab_size = vocab_size or config.vocab_size
        self._body = module.base_model

    @property
    def head_weight(self) -> Tensor:
        """`[head, hidden]`: the rows of the output embedding that the head covers."""
        weight: Tensor = self.module.get_output_embeddings().weight
        return weight if self.head_tokens is None else weight[self.head_tokens].contiguous()

    def open(self) -> int:
        return self.slots.open()

    def close(self, slot: int) -> None:
        self.slots.close(slot)

    def rollback(self, slot: int, length: int) -> None:
        self.slots.rollback(slot, length)

    def open_branch(self) -> int:
        return self.slots.open_branch()

    @torch.inference_mode()
    def fork(self, source: int, into: int, length: int, known: int = 0) -> None:
        self.slots.fork(source, into, length, known)

    @torch.inference_mode()
    def forward(self, rows: Sequence[Forward]) -> list[Output]:
        placed = []
        try:
            for row in rows:
                placed.append((row.slot, self.slots.reserve(row.slot, len(row.tokens)), len(row.tokens)))
            return self._run(rows, placed)
        except BaseException:
            for slot, start, _ in placed:  # a failed forward leaves every slot as it was
                self.slots.rollback(slot, start)
            raise

    def _run(self, rows: Sequence[Forward], placed: list[Placed]) -> list[Output]:
        ids = torch.tensor([t for row in rows for t in row.tokens], device=self.device)
        positions = torch.tensor([p for _, start, count in placed for p in range(start, start + count)], device=self.device)
        hidden = self._states(ids, positions, placed)
        ends = [sum(n for _, _, n in placed[: i + 1]) for i in range(len(placed))]
        states = [hidden[end - row.keep : end] for row, end in zip(rows, ends, strict=True)]
        logits = self._logits(torch.cat(states)).split([row.keep for row in rows])
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the engine reads the clock next
        return [Output(row_logits, state) for row_logits, state in zip(logits, states, strict=True)]

    def _states(self, ids: Tensor, positions: Tensor, placed: list[Placed]) -> Tensor:
        """Normalised last hidden states `[total, hidden]` of packed tokens `ids` at `positions`, both `[total]`."""
        states: Tensor = self._body(input_ids=ids[None], position_ids=positions[None], use_cache=False, draftwell_rows=placed,
                                    draftwell_slots=self.slots).last_hidden_state[0]
        return states

    def _logits(self, states: Tensor) -> Tensor:
        """`[n, hidden]` → `[n, vocab]` float32."""
        logits: Tensor = self._head(states).float()
        if self._softcap:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        if self.head_tokens is not None:
            full = logits.new_full((logits.shape[0], self.vocab_size), float("-inf"))
            full[:, self.head_tokens] = logits
            return full
        return logits[:, : self.vocab_size]


def check_supported(module: Any, config: Any) -> None:
    """Refuse architectures that would give wrong numbers here: own attention code, or logits scaled behind the head."""
    name = config.model_type
    if config._attn_implementation != ATTENTION or name in OWN_ATTENTION:
        raise DraftwellError(f"{name} models bring their own attention code and cannot run over slots: choose another model")
    scaled = [key for key in ("logit_scale", "logits_scaling", "lm_head_multiplier") if getattr(config, key, None) not in (None, 1, 1.0)]
    if scaled:
        raise DraftwellError(f"{name} models scale their logits ({scaled[0]}), which is not supported yet: choose another model")

