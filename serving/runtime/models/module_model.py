"""What every adapter of a transformers module shares: its slots, its head, and how logits come from
hidden states.

An adapter runs the module's body its own way (`_states`): packed rows over slots
(`transformers_model`), or one row after another through the library's own cache
(`unbatched_model`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.logits import Logits, Span
from draftwell.serving.runtime.model import Model
from draftwell.serving.runtime.models.slots import Slots
from draftwell.serving.runtime.slot_texts import SlotText
from draftwell.serving.runtime.trees import depths

Placed = tuple[int, int, int]
"""Slot, position of the first token, and number of tokens of a row."""
Trees = Mapping[int, tuple[int, ...]]
"""Slot → `Forward.parents` of the rows that are trees."""
RECURRENT_LAYERS = frozenset(
    {"conv", "linear_attention", "mamba", "recurrent", "hybrid", "hybrid_sliding"}
)
"""Kinds of layers, as transformers' configurations name them, that carry a state from token to
token."""
SCALINGS = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
SCALED_LOGITS: dict[str, tuple[str, Callable[[Tensor, float], Tensor]]] = {
    "cohere": ("logit_scale", torch.mul),
    "cohere2": ("logit_scale", torch.mul),
    "cohere2_moe": ("logit_scale", torch.mul),
    "granite": ("logits_scaling", torch.div),
    "granitemoe": ("logits_scaling", torch.div),
    "granitemoeshared": ("logits_scaling", torch.div),
    "granite_swa": ("logits_scaling", torch.div),
    "granitemoe_swa": ("logits_scaling", torch.div),
    "hyperclovax": ("logits_scaling", torch.mul),
    "minicpm3": ("logits_scaling", torch.div),
}
"""Model type → what its configuration calls the factor after the head, and what is done with it."""


class ModuleModel(Model):
    """A `PreTrainedModel` with an LM head, over slots that a subclass lays out.

    Args:
        module: the model.
        slots: where rows of requests are placed.
        head_tokens: `[head]` ids that the head covers, or None for all; other logits are -inf.
        vocab_size: ids of the logits; None: as many as the model's own.
    """

    slots: Slots

    def __init__(
        self,
        module: Any,
        slots: Slots,
        *,
        head_tokens: Tensor | None = None,
        vocab_size: int | None = None,
    ):
        self.module, self.slots, self.max_context = module, slots, slots.max_context
        config = module.config.get_text_config()
        self.device, self.dtype = module.device, module.dtype
        self.hidden_size = config.hidden_size
        head = module.get_output_embeddings()
        self.head_tokens = (
            None if head_tokens is None else head_tokens.sort().values.to(self.device)
        )
        bias = getattr(head, "bias", None)
        self._head = (
            head
            if self.head_tokens is None
            else partial(
                F.linear,
                weight=self.head_weight,
                bias=None if bias is None else bias[self.head_tokens],
            )
        )
        self._scale = logit_scaling(config)
        self._softcap = getattr(config, "final_logit_softcapping", None)
        self.vocab_size = vocab_size or config.vocab_size
        body = module.base_model
        self._body = module.model if body is module else body  # Llama 4's text models name none

    @property
    def head_weight(self) -> Tensor:
        """`[head, hidden]`: the rows of the output embedding that the head covers."""
        weight: Tensor = self.module.get_output_embeddings().weight
        if self.head_tokens is None:
            return weight
        count = len(self.head_tokens)
        # ascending: no copy of the first rows; on "meta" nobody knows
        first = not weight.is_meta and int(self.head_tokens[-1]) == count - 1
        return weight[:count] if first else weight[self.head_tokens].contiguous()

    @torch.inference_mode()
    def head_rows(self, tokens: Tensor) -> Tensor:
        """`[n, hidden]`: a copy of the output embedding's rows for some tokens `[n]`, for heads
        that share it."""
        weight: Tensor = self.module.get_output_embeddings().weight
        return weight[tokens.to(weight.device)]

    def open(self, text: SlotText | None = None, prompt: Sequence[int] = ()) -> int:
        return self.slots.open(text, prompt)

    def close(self, slot: int) -> None:
        self.slots.close(slot)

    def rollback(self, slot: int, length: int) -> None:
        self.slots.rollback(slot, length)

    def hidden_states(self, slot: int, start: int, end: int) -> Tensor:
        """States `[end − start, width]` of a slot's positions that a head drafts from
        (`TransformersModel.keep_hidden_states`).

        Raises:
            DraftwellError: it keeps none (`no_hidden_states`).
        """
        if self.slots.features is None:
            raise DraftwellError(
                (
                    "this model keeps no hidden states: a head is given them by the model that "
                    "it was made for"
                ),
                code="no_hidden_states",
            )
        return self.slots.features[slot, start:end]

    @torch.inference_mode()
    def keep(self, slot: int, length: int, path: Sequence[int]) -> None:
        """After a tree behind the first `length` tokens of a slot: keep these places of it, in
        order, and forget its other tokens."""
        self.slots.keep(slot, length, path)

    def open_branch(self) -> int:
        return self.slots.open_branch()

    @torch.inference_mode()
    def fork(self, source: int, into: int, length: int, known: int = 0) -> None:
        self.slots.fork(source, into, length, known)

    @torch.inference_mode()
    def forward(self, rows: Sequence[Forward]) -> list[Span]:
        rows, placed = self.as_read(rows), []
        try:
            for row in rows:
                placed.append(
                    (row.slot, self.slots.reserve(row.slot, len(row.tokens)), len(row.tokens))
                )
            return self._run(rows, placed)
        except BaseException:
            for slot, start, _ in placed:  # a failed forward pass leaves every slot as it was
                self.slots.rollback(slot, start)
            raise

    def _run(self, rows: Sequence[Forward], placed: list[Placed]) -> list[Span]:
        hidden = self._states_of(rows, placed)
        ends = accumulate(count for _, _, count in placed)
        states = joined([hidden[end - row.keep : end] for row, end in zip(rows, ends, strict=True)])
        logits = self.logits_of(states)
        if self.device.type == "cuda":
            # the engine reads the clock next; another model may still compute
            torch.cuda.current_stream(self.device).synchronize()
        return logits.split([row.keep for row in rows])

    def _states_of(self, rows: Sequence[Forward], placed: list[Placed], **settings: Any) -> Tensor:
        """Normalised last hidden states `[total, hidden]` of all tokens; `settings` as a subclass's
        `_states` takes them."""
        ids = torch.tensor([t for row in rows for t in row.tokens], device=self.device)
        positions = torch.tensor(
            [p for row, one in zip(rows, placed, strict=True) for p in positions_of(row, one)],
            device=self.device,
        )
        trees = {row.slot: row.parents for row in rows if row.parents is not None}
        return self._states(ids, positions, placed, trees, **settings)

    @abstractmethod
    def _states(self, ids: Tensor, positions: Tensor, placed: list[Placed], trees: Trees) -> Tensor:
        """Normalised last hidden states `[total, hidden]` of packed tokens `ids` at `positions`,
        both `[total]`.

        Args:
            trees: slot → parents, of the rows that are trees; their tokens are stored one after
                another, whatever their positions.
        """

    def logits_of(self, states: Tensor) -> Logits:
        """What is said at some positions, of their normalised last hidden states `[n, hidden]`."""
        return Logits(self.compact_logits(states), states, self.head_tokens, self.vocab_size)

    def compact_logits(self, states: Tensor) -> Tensor:
        """`[n, hidden]` → `[n, columns]` float32: of the tokens that the head covers, in ascending
        order."""
        logits: Tensor = self._head(states)
        if self._scale is not None:
            logits = self._scale(logits)  # in the head's own dtype, as the module does
        logits = logits.float()
        if self._softcap:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits if self.head_tokens is not None else logits[:, : self.vocab_size]


def joined(rows: Sequence[Tensor]) -> Tensor:
    """Rows one after another; one alone is not copied."""
    return rows[0] if len(rows) == 1 else torch.cat(list(rows))


def positions_of(row: Forward, placed: Placed) -> Iterable[int]:
    """The position of each token of a row: in a tree its depth after the slot's content."""
    _, start, count = placed
    return (
        range(start, start + count)
        if row.parents is None
        else [start + depth - 1 for depth in depths(row.parents)]
    )


def refuse_recurrent(module: Any) -> None:
    """Refuse a model whose layers carry a state from token to token: rows cannot be packed, and
    nothing can be rolled back."""
    config = module.config.get_text_config()
    if getattr(module, "_is_stateful", False) or RECURRENT_LAYERS & set(
        getattr(config, "layer_types", None) or ()
    ):
        raise DraftwellError(
            f"{config.model_type} models carry a recurrent state, which cannot be rolled "
            "back after a rejected draft: "
            "choose a model with attention only",
            code="unsupported_architecture",
        )


def logit_scaling(config: Any) -> Callable[[Tensor], Tensor] | None:
    """What a model does to its logits after the head, or None.

    Raises:
        DraftwellError: the configuration names a factor, and nobody has checked here what the model
            does with it.
    """
    kind = config.model_type
    if kind in SCALED_LOGITS:
        name, operation = SCALED_LOGITS[kind]
        factor: float = getattr(config, name)
        return lambda logits: operation(logits, factor)
    named = [name for name in SCALINGS if getattr(config, name, None) not in (None, 1, 1.0)]
    if named:
        raise DraftwellError(
            (
                f"{kind} models scale their logits ({named[0]}) in a way that is not known "
                "here: choose another model"
            ),
            code="unsupported_architecture",
        )
    return None
