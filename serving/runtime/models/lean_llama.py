"""Llama-like models without the layers between them and their matrices: the engine's fast path.

On CPUs a library computes all layers in one call (`native`), with the same result for a token in
any company; elsewhere, or without it, torch computes them one by one (`lean_layer`), with queries,
keys and values as one product and gate and up as another. What differs between families is data
(`architecture`). Long prompts are read in passes of `CHUNK` tokens. Slots, packing of ragged rows
and heads are inherited. Parity with transformers:
tests/serving/runtime/models/test_lean_families.py.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from ctypes import CDLL
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import torch
from torch import Tensor

from draftwell.serving.number_format import Weights
from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.models.architecture import architecture_of
from draftwell.serving.runtime.models.features import Entered
from draftwell.serving.runtime.models.lean_layer import Layer, Rope, norm, norm_weight
from draftwell.serving.runtime.models.linear import MakeLinear, linear
from draftwell.serving.runtime.models.module_model import Placed, Trees
from draftwell.serving.runtime.models.native.decoder import NativeLayers, Product
from draftwell.serving.runtime.models.native.library import Compile, find_library
from draftwell.serving.runtime.models.padding import feed_forwards
from draftwell.serving.runtime.models.row_attention import RowAttention
from draftwell.serving.runtime.models.transformers_model import TransformersModel

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Layer number, query `[total, heads, head_dim]`, key and value `[total, kv_heads, head_dim]` →
`[total, heads * head_dim]`."""
ALL: frozenset[int] = frozenset()
"""`Forward.skip` of a pass through all layers."""
CHUNK = 512
"""Tokens of one pass: enough for the arithmetic to outweigh reading the weights again."""


def runs(module: Any) -> bool:
    """Whether this file can run a module: a causal language model of text whose architecture it
    knows, with full weights."""
    config = module.config
    return (
        config.get_text_config() is config
        and architecture_of(config) is not None
        and getattr(module, "hf_quantizer", None) is None
    )


def fits(module: Any) -> bool:
    """Whether a module is plainly Llama's: no biases, norms, windows or scales that other exporters
    of Llama would have to know."""
    config = module.config.get_text_config()
    return (
        config.model_type == "llama"
        and runs(module)
        and not config.attention_bias
        and not config.mlp_bias
        and config.hidden_act == "silu"
    )


ATTENTION = 2.0
"""How many times as long an operation of attention takes as one of a product, in pieces of a
prompt: a token of SmolLM2-135M costs .7 ms, and 2.5 to 2.8 behind 3,900 others (two cores of an AMD
EPYC with AVX-512)."""


class LeanLlama(TransformersModel):
    """A causal language model of a family in `architecture.FAMILIES` over slots; arguments as for
    `TransformersModel`.

    Args:
        compiled: whether the layers are computed by the library (`native`) on the CPU.
        libraries: folders where it may be besides this machine's own, such as a bundle's.
        weights: what the weights of the layers' products are rounded to (`quantised`).
    Attributes:
        library: the library, also for a head beside this model; None where there is none.
    """

    skips = True
    _linear: ClassVar[Any] = staticmethod(linear)

    def __init__(
        self,
        module: Any,
        *,
        compiled: Compile = "off",
        libraries: Sequence[Path] = (),
        weights: Weights | None = None,
        **settings: Any,
    ):
        super().__init__(module, **settings)
        shape = architecture_of(module.config)
        assert shape is not None, module.config.model_type
        self.shape = shape
        self.heads, self.kv_heads, self.head_dim, self.eps, self.scale = (
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.eps,
            shape.scale,
        )
        body = module.model
        self._layer_weights = sum(weight.numel() for weight in body.layers.parameters()) / len(
            body.layers
        )
        self.embedding = body.embed_tokens.weight
        self._embedding_scale = (
            None
            if shape.embedding_scale is None
            else self.embedding.new_tensor(shape.embedding_scale)
        )
        computes = self.device.type == "cpu" and self.dtype in (torch.float32, torch.bfloat16)
        self.library = find_library(compiled, libraries) if computes else None
        make: MakeLinear = partial(self._linear, weights=weights)
        if self.library is not None:
            make = partial(Product, self.library, weights=weights)
        with torch.inference_mode():
            self.final_norm = norm_weight(body.norm, shape)
            self.layers = [Layer(one, make, shape) for one in body.layers]
            self.sublayers = 2 * len(self.layers)
            self.ropes = {name: self._rope_table(name) for name in set(shape.ropes)}
            if self.library is not None:
                self._head = Product(self.library, self.head_weight).in_float32
        self.native = None if self.library is None else self._by_library(self.library)
        self.exact = self.native is not None

    def _by_library(self, library: CDLL) -> NativeLayers:
        products: list[Any] = [layer.products() for layer in self.layers]
        ropes = [self.ropes[name] for name in self.shape.ropes]
        norms = [layer.norms() for layer in self.layers]
        return NativeLayers(
            library, self.shape, self.hidden_size, self.slots, norms, products, ropes
        )

    def _rope_table(self, name: str | None) -> Rope:
        """Cosines and sines `[positions, 1, head_dim]` of all positions, the sign of `rotate_half`
        folded into the sines; in float32."""
        positions = torch.arange(self.max_context, device=self.device)[None]
        like, names = self.embedding[:1].float(), [] if name is None else [name]
        cos, sin = self.module.model.rotary_emb(like, positions, *names)
        half = cos.shape[-1] // 2
        return cos[0, :, None].contiguous(), torch.cat(
            [-sin[0, :, None, :half], sin[0, :, None, half:]], dim=-1
        )

    def release(self) -> None:
        """Give up the module's own projections: this model holds them in its own layout, and twice
        is once too often.

        The module keeps its configuration, embeddings and norms, but cannot run any more.
        """
        for layer in self.module.model.layers:
            for holder in (layer.self_attn, *feed_forwards(layer.mlp)):
                for part in holder.children():
                    if isinstance(part, torch.nn.Linear):
                        part.weight.data = part.weight.data.new_empty(0)

    def token_cost(self, position: int) -> float:
        """What the token of a prompt at a position takes, in first tokens of a prompt: the products
        of a layer, and attention over all that it sees, for each operation `ATTENTION` times as
        long."""
        seen = fmean(
            position if window is None else min(position, window) for window in self.shape.windows
        )
        return float(1 + seen * ATTENTION * 2 * self.heads * self.head_dim / self._layer_weights)

    def _states_of(self, rows: Sequence[Forward], placed: list[Placed], **settings: Any) -> Tensor:
        """Rows that skip the same sublayers run together."""
        alike: dict[frozenset[int], list[int]] = {}
        for number, row in enumerate(rows):
            alike.setdefault(row.skip, []).append(number)
        if alike.keys() == {ALL}:
            return super()._states_of(rows, placed, **settings)
        found: dict[int, Tensor] = {}
        for skip, numbers in alike.items():
            states = super()._states_of(
                [rows[i] for i in numbers], [placed[i] for i in numbers], skip=skip
            )
            found |= zip(numbers, states.split([placed[i][2] for i in numbers]), strict=True)
        return torch.cat([found[i] for i in range(len(rows))])

    def _states(
        self,
        ids: Tensor,
        positions: Tensor,
        placed: list[Placed],
        trees: Trees,
        skip: frozenset[int] = ALL,
    ) -> Tensor:
        states, at = [], 0
        for rows in passes(placed, CHUNK, trees):
            end = at + sum(count for _, _, count in rows)
            entered = Entered(self.features, rows) if self.features else None
            own_ids, own_positions = ids[at:end], positions[at:end]
            if self.native is not None:
                before = [layer for layer in self.features if layer < len(self.layers)]
                x, noted = self.native(
                    self._embed(own_ids), own_positions, rows, trees, skip=skip, noted=before
                )
                states.append(self.native.norm(x, self.final_norm).to(self.dtype))
                if entered is not None and noted is not None:
                    entered.enter_all(noted)
            else:
                attention = RowAttention(self.slots, rows, self.shape, trees)
                states.append(self.run_layers(own_ids, own_positions, attention, entered, skip))
            if entered is not None:
                entered.enter(len(self.layers), states[-1])
                entered.store(self.slots)
            at = end
        return states[0] if len(states) == 1 else torch.cat(states)

    def _embed(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embedding[ids]
        return x if self._embedding_scale is None else x * self._embedding_scale

    def _part_of_layer(
        self, number: int, rope: Rope, attend: Attend, skip: frozenset[int], x: Tensor
    ) -> Tensor:
        """States `[total, hidden]` after what is not skipped of a layer: a sublayer that is adds
        nothing."""
        layer = self.layers[number]
        if 2 * number not in skip:
            x = layer.after_attending(attend(number, *layer.before(x, rope)), x)
        return x if 2 * number + 1 in skip else layer.after_feed_forward(x)

    def run_layers(
        self,
        ids: Tensor,
        positions: Tensor,
        attend: Attend,
        entered: Entered | None = None,
        skip: frozenset[int] = ALL,
    ) -> Tensor:
        """Normalised last hidden states `[total, hidden]`; `entered` takes note of what enters each
        layer."""
        x = self._embed(ids)
        for number, (layer, rope) in enumerate(
            zip(self.layers, self._layer_ropes(positions), strict=True)
        ):
            if entered is not None:
                entered.enter(number, x)
            if 2 * number in skip or 2 * number + 1 in skip:
                x = self._part_of_layer(number, rope, attend, skip, x)
            else:
                x = layer.after(attend(number, *layer.before(x, rope)), x)
        return norm(x, self.final_norm, self.eps)

    def _layer_ropes(self, positions: Tensor) -> list[Rope]:
        """For each layer cosines and sines of positions `[total]`, in the model's dtype."""
        ropes = {
            name: (cos[positions].to(self.dtype), sin[positions].to(self.dtype))
            for name, (cos, sin) in self.ropes.items()
        }
        return [ropes[name] for name in self.shape.ropes]


def passes(placed: list[Placed], most: int, whole: Container[int] = ()) -> list[list[Placed]]:
    """Packed rows cut into passes of at most `most` tokens; a row that is cut is continued in the
    next.

    Args:
        whole: slots whose rows are not cut, as long as they fit into a pass.

    >>> passes([(0, 7, 1), (2, 0, 5)], 4)
    [[(0, 7, 1), (2, 0, 3)], [(2, 3, 2)]]
    >>> passes([(0, 7, 2), (2, 0, 3)], 4, whole={2})
    [[(0, 7, 2)], [(2, 0, 3)]]
    """
    cut: list[list[Placed]] = [[]]
    room = most
    for slot, start, count in placed:
        if slot in whole and room < count <= most:
            room = 0
        while count:
            if not room:
                cut.append([])
                room = most
            now = min(count, room)
            cut[-1].append((slot, start, now))
            start, count, room = start + now, count - now, room - now
    return cut
