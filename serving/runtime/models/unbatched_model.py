"""Models whose attention knows more than packed rows can tell it: one row at a time, through
transformers' own cache.

Some have attention code of their own, others sinks, chunked windows or latent keys. A slot is a
`DynamicCache`; rows of a batch run one after another, so eight requests cost eight forward passes.
Rollback crops the cache. Positions (learned, rotary or ALiBi) are what the module counts from the
length of its cache, which is the slot's. Only architectures that tests have compared with
transformers are taken (docs/models.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.models.architecture import context_of, settled_length
from draftwell.serving.runtime.models.module_model import (
    ModuleModel,
    Placed,
    Trees,
    refuse_recurrent,
)
from draftwell.serving.runtime.models.slots import Slots

UNBATCHED = frozenset(
    {
        "aria_text",
        "axk1",
        "bloom",
        "codegen",
        "ctrl",
        "dbrx",
        "deepseek_v2",
        "deepseek_v3",
        "diffllama",
        "doge",
        "falcon",
        "flint",
        "gemma4_text",
        "glm4_moe_lite",
        "gpt_neo",
        "gpt_neox_japanese",
        "gpt_oss",
        "gptj",
        "granite_swa",
        "granitemoe_swa",
        "hrm_text",
        "hy_v3",
        "internlm3",
        "iquestcoder",
        "jetmoe",
        "kolibri1",
        "laguna",
        "llama4_text",
        "longcat_flash",
        "mellum",
        "mimo_v2_flash",
        "minicpm3",
        "mpt",
        "nemotron",
        "phimoe",
        "stablelm",
        "xglm",
        "youtu",
    }
)
"""Architectures that this file can run."""
REREAD = frozenset({"phi3", "phimoe"})
"""Those whose LongRoPE transformers follows over the border: it reads the text again."""
LIMITS = ("max_position_embeddings", "max_seq_len", "seq_length")
"""What configurations call the longest text that a model was trained on."""
ALIBI_LIMIT = 2048
"""The same for configurations that name none (BLOOM's)."""


def row_by_row(config: Any, max_context: int | None) -> bool:
    """Whether a model runs here: its architecture is one of these, or its slots are longer than
    LongRoPE's border."""
    settled = settled_length(config)
    longest = max_context or min(4096, getattr(config, "max_position_embeddings", 0))
    beyond = settled is not None and longest > settled
    return config.model_type in UNBATCHED or (config.model_type in REREAD and beyond)


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
        if config.model_type not in UNBATCHED | REREAD:
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
        settled = settled_length(config)
        self._border = settled if config.model_type in REREAD else None
        if settled is not None and self._border is None:
            limit = context_of(config, max_context)
        memory = CacheSlots(slots, min(max_context or 4096, limit), module.dtype, module.device)
        super().__init__(module.eval(), memory, **settings)

    def _states(self, ids: Tensor, positions: Tensor, placed: list[Placed], trees: Trees) -> Tensor:
        parts = ids.split([count for _, _, count in placed])
        return torch.cat(
            [
                self._row(slot, start, part)
                for part, (slot, start, _) in zip(parts, placed, strict=True)
            ]
        )

    def _row(self, slot: int, start: int, ids: Tensor) -> Tensor:
        """Hidden states of tokens after the first `start` of a slot. A text that grows over the
        border is read again with the factors of long texts, one that shrinks with the others."""
        border, end = self._border, start + len(ids)
        if border is None:
            return self._fed(ids, self.slots.cache(slot))[0]
        if 0 < start < border < end:
            before, behind = ids.split([border - start, end - border])
            return torch.cat([self._row(slot, start, before), self._row(slot, border, behind)])
        known = self.slots.last_texts.get(slot, ids[:0])
        text = torch.cat([known[:start], ids])
        if start and (len(known) > border) != (end > border):
            states, cache = self._fed(text)
            self.slots.put(slot, cache)  # a pass that fails leaves the slot as it was
        else:
            states, _ = self._fed(ids, self.slots.cache(slot))
        self.slots.last_texts[slot] = text
        return states[-len(ids) :]

    def _fed(self, ids: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        """Hidden states `[tokens, hidden]` of tokens behind a cache, and the cache with them; None:
        behind nothing."""
        cache = new_cache() if cache is None else cache
        found = self._body(input_ids=ids[None], past_key_values=cache, use_cache=True)
        return found.last_hidden_state[0], cache


def new_cache() -> Any:
    """An empty `DynamicCache`: of plain layers, whatever the model's windows, so that every token
    can be taken back."""
    from transformers import DynamicCache

    return DynamicCache()


class CacheSlots(Slots):
    """Slots whose keys and values are in caches of transformers, which grow as they are fed;
    arguments as for `Slots`."""

    def __init__(self, count: int, max_context: int, dtype: torch.dtype, device: torch.device):
        super().__init__([], count, max_context, dtype, device)
        self._caches: dict[int, Any] = {}
        self.last_texts: dict[int, Tensor] = {}
        """Ids `[tokens]` up to the end of the last pass, of a model that reads texts again."""

    def cache(self, slot: int) -> Any:
        """The `DynamicCache` of a slot."""
        return self._caches.setdefault(slot, new_cache())

    def put(self, slot: int, cache: Any) -> None:
        """Let a slot hold another cache."""
        self._caches[slot] = cache

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
        copy = new_cache()
        for number, layer in enumerate(self.cache(source).layers):
            copy.update(layer.keys[..., :length, :], layer.values[..., :length, :], number)
        super().fork(source, into, length, known)
        self._caches[into] = copy
        if source in self.last_texts:
            self.last_texts[into] = self.last_texts[source]
