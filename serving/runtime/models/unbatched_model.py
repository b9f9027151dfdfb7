"""Models with attention code of their own: one row at a time, through transformers' own cache.

Their attention does not go through `AttentionInterface`, so nothing can pack rows for them. A slot
is a `DynamicCache`; rows of a batch run one after another, so eight requests cost eight forward
passes. Rollback crops the cache. Positions (learned, rotary or ALiBi) are what the module counts
from the length of its cache, which is the slot's. Only architectures whose incremental forward
passes tests have compared with one forward pass over the whole text are taken
(tests/serving/runtime/models/test_unbatched_model.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.models.module_model import (
    ModuleModel,
    Placed,
    Trees,
    refuse_recurrent,
)
from draftwell.serving.runtime.models.slots import Slots

UNBATCHED = frozenset(
    {"gpt_neo", "gptj", "codegen", "bloom", "mpt", "ctrl", "falcon", "gpt_neox_japanese", "xglm"}
)
"""Architectures that this file can run."""
LIMITS = ("max_position_embeddings", "max_seq_len", "seq_length")
"""What configurations call the longest text that a model was trained on."""
ALIBI_LIMIT = 2048
"""The same for configurations that name none (BLOOM's)."""


class UnbatchedModel(ModuleModel):
    """A module run row by row; arguments as for `TransformersModel`.

    Args:
        max_context: positions of a slot; never more than the model's own limit, beyond which its
            tables of positions end.
    """

    slots: CacheSlots

    def __init__(
        self, module: Any, *, slots: int = 1, max_context: int | None = None, **settings: Any
    ):
        config = module.config.get_text_config()
        refuse_recurrent(module)
        if config.model_type not in UNBATCHED:
            raise DraftwellError(
                (
                    f"{config.model_type} models have not been checked with a cache of their "
                    "own: choose another model"
                ),
                code="unsupported_architecture",
            )
        # Falcon's; transformers 5.23: eager and sdpa differ by .27 on two tiny layers
        if getattr(config, "alibi", False):
            raise DraftwellError(
                f"{config.model_type} models with ALiBi get other logits from each "
                "attention of transformers: "
                "choose another model",
                code="unsupported_architecture",
            )
        limit = next(
            (getattr(config, name) for name in LIMITS if getattr(config, name, None)), ALIBI_LIMIT
        )
        memory = CacheSlots(slots, min(max_context or 4096, limit), module.dtype, module.device)
        super().__init__(module.eval(), memory, **settings)

    def _states(self, ids: Tensor, positions: Tensor, placed: list[Placed], trees: Trees) -> Tensor:
        parts = ids.split([count for _, _, count in placed])
        states = [
            self._body(
                input_ids=part[None], past_key_values=self.slots.cache(slot), use_cache=True
            ).last_hidden_state[0]
            for part, (slot, _, _) in zip(parts, placed, strict=True)
        ]
        return torch.cat(states)


class CacheSlots(Slots):
    """Slots whose keys and values are in caches of transformers, which grow as they are fed;
    arguments as for `Slots`."""

    def __init__(self, count: int, max_context: int, dtype: torch.dtype, device: torch.device):
        super().__init__([], count, max_context, dtype, device)
        self._caches: dict[int, Any] = {}

    def cache(self, slot: int) -> Any:
        """The `DynamicCache` of a slot: of plain layers, whatever the model's windows, so that
        every token can be taken back."""
        from transformers import DynamicCache

        return self._caches.setdefault(slot, DynamicCache())

    def close(self, slot: int) -> None:
        super().close(slot)
        if slot not in self.texts:
            self._caches.pop(slot, None)

    def _wipe(self, slot: int, start: int = 0) -> None:
        """Keep the first `start` positions."""
        if start:
            self._crop(slot, start)
        else:
            self._caches.pop(slot, None)

    def rollback(self, slot: int, length: int) -> None:
        super().rollback(slot, length)
        self._crop(slot, length)

    def _crop(self, slot: int, length: int) -> None:
        # one by one: a forward pass that failed half-way has fed only some of them
        for layer in self.cache(slot).layers:
            extra = layer.get_seq_length() - length
            if extra > 0:
                layer.crop(-extra)

    def fork(self, source: int, into: int, length: int, known: int = 0) -> None:
        from transformers import DynamicCache

        copy = DynamicCache()
        for number, layer in enumerate(self.cache(source).layers):
            copy.update(layer.keys[..., :length, :], layer.values[..., :length, :], number)
        super().fork(source, into, length, known)
        self._caches[into] = copy
