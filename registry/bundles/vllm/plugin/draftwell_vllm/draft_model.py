"""A draft model of transformers, asked row by row: it says at every token how sure it is, which
vLLM's own draft models do not.

Each row keeps the keys and values of what was read for it. Where a row holds another text now, what
both begin with is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from .stopping import StopRule

FILES = "config.json"


class Read(NamedTuple):
    """What a row's cache holds.

    Args:
        ids: tokens that were read.
        cache: their keys and values.
    """

    ids: list[int]
    cache: Any


class DraftModel:
    """Drafts greedily.

    Args:
        folder: of a model with complete weights and the target's vocabulary; there may be further
            rows of logits, which pad it.
        dtype: torch's, that it computes in.
        device: that it computes on.
        rows: texts whose keys and values are kept at once.
        vocab: size of the target's vocabulary, beyond which nothing is drafted; None: not known.
    Raises:
        ValueError: there is no model in the folder.
    """

    def __init__(self, folder: str, dtype: Any, device: Any, rows: int, vocab: int | None = None):
        from transformers import AutoModelForCausalLM

        try:
            module = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{folder} is no draft model ({type(error).__name__}): name a folder with "
                f"{FILES} and weights"
            ) from error
        self.module = module.to(device).eval()
        self.device, self.rows, self.vocab = device, rows, vocab
        self.context = int(getattr(module.config, "max_position_embeddings", None) or 1 << 20)
        self._read: dict[int, Read] = {}

    def draft(
        self, row: int, ids: Sequence[int], room: int, rule: StopRule
    ) -> tuple[list[int], list[float]]:
        """At most `room` tokens behind a text with the probability of each; the token at which the
        rule stops stays, it is paid for."""
        import torch

        tokens: list[int] = []
        confidences: list[float] = []
        rule.start()
        room = min(room, self.context - len(ids))
        with torch.inference_mode():
            for _ in range(room):
                logits = self._logits(row, [*ids, *tokens])[: self.vocab].float()
                logs = torch.log_softmax(logits, -1)
                probs = logs.exp()
                best = int(probs.argmax())
                tokens.append(best)
                confidences.append(float(probs[best]))
                if not rule.continues(
                    confidences[-1], float(-(probs * logs.clamp(min=-1e4)).sum())
                ):
                    break
        return tokens, confidences

    def keep(self, count: int) -> None:
        """Forget what was read for rows from `count` on, which are no more."""
        self._read = {row: read for row, read in self._read.items() if row < count}

    def _logits(self, row: int, ids: list[int]) -> Any:
        """[vocab] logits behind a text, of which only what the row has not read is computed."""
        import torch
        from transformers import DynamicCache

        known = self._read.pop(row, None) or Read([], DynamicCache())
        shared = min(common(known.ids, ids), len(ids) - 1)
        if shared < len(known.ids):
            cut(known.cache, shared)
        out = self.module(
            torch.tensor([ids[shared:]], device=self.device),
            past_key_values=known.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._read[row] = Read(ids, out.past_key_values)
        while len(self._read) > self.rows:
            self._read.pop(next(iter(self._read)))
        return out.logits[0, -1]


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts begin with in common.

    >>> common([1, 2, 3], [1, 2, 9])
    2
    """
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


def cut(cache: Any, length: int) -> None:
    """Keep the keys and values of the first `length` tokens: `crop` takes other numbers in other
    versions of transformers."""
    for layer in cache.layers:
        if getattr(layer, "keys", None) is not None and layer.keys.numel():
            layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]
