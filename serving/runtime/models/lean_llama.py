"""Llama-like models without the layers between them and their matrices: the engine's fast path.

The adapter of `transformers_model` runs the library's own module; at one token a forward pass, a
third of its time goes into calls rather than arithmetic, and every matrix product first brings its
weights into the layout of the processor's matrix unit. Here queries, keys and values are one
product, gate and up another; rotary tables and attention masks are made once a forward pass, not
once a layer; and on CPUs bfloat16 weights are kept in oneDNN's own layout. What differs between
families is data (`architecture`). Long prompts are read in passes of `CHUNK` tokens, so that no
mask grows with the square of a prompt. Slots, packing of ragged rows and heads are inherited.
Parity with transformers: tests/serving/runtime/models/test_lean_families.py.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from draftwell.serving.artifacts.compiled_libraries import libraries_folder
from draftwell.serving.number_format import Weights
from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.models.architecture import architecture_of
from draftwell.serving.runtime.models.compiled_layer import packed_layer
from draftwell.serving.runtime.models.compiled_library import compiler
from draftwell.serving.runtime.models.compiled_step import (
    WORTH_COMPILING,
    Compile,
    CompiledHalves,
    compiled_head,
    compiled_step,
    is_compiled,
)
from draftwell.serving.runtime.models.features import Entered
from draftwell.serving.runtime.models.lean_layer import (
    Layer,
    Rope,
    layer_weights,
    norm,
    norm_weight,
)
from draftwell.serving.runtime.models.linear import Int8Linear, MakeLinear, RoundedLinear, linear
from draftwell.serving.runtime.models.module_model import Placed, Trees
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
    knows."""
    config = module.config
    return config.get_text_config() is config and architecture_of(config) is not None


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
        int8: forward passes of a token or two, and all compiled ones, read 8-bit weights (a
            draft's, which are stored in 8 bits anyway).
        compiled: whether a bfloat16 model on the CPU decodes by compiled layers; it then holds its
            weights twice, and its head once more.
        libraries: folders of compiled layers besides this machine's own, such as a bundle's.
        weights: what the weights of the layers' products are rounded to (`quantised`); `int8` is
            for a draft, this for a target.
    Attributes:
        libraries: how and in which folders a head beside this model finds its own compiled layer;
            None where it shall not.
        note_libraries: told of that one's file, so that a bundle can bring it along.
    """

    skips = True

    def __init__(
        self,
        module: Any,
        *,
        int8: bool = False,
        compiled: Compile = "off",
        libraries: Sequence[Path] = (),
        weights: Weights | None = None,
        **settings: Any,
    ):
        super().__init__(module, **settings)
        shape = architecture_of(module.config)
        assert shape is not None, module.config.model_type
        self.shape = shape
        bfloat16_on_cpu = self.dtype == torch.bfloat16 and self.device.type == "cpu"
        make: MakeLinear = Int8Linear if int8 and bfloat16_on_cpu else linear
        if weights is not None:
            make = partial(RoundedLinear, weights=weights)
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
        if not bfloat16_on_cpu:
            compiled = "off"
        # those of a bundle were checked by their digests
        self._read_layers(body, make, compiled, [*libraries, libraries_folder()])
        self.note_libraries: Callable[[Iterable[Path]], None] = lambda _: None

    def _read_layers(
        self, body: Any, make: MakeLinear, compiled: Compile, folders: Sequence[Path]
    ) -> None:
        """The layers, the output head and the rotary tables; compiled where that is wanted and
        worth it."""
        modules = body.layers
        if compiled == "try" and (compiler() is None or weight_bytes(modules) < WORTH_COMPILING):
            compiled = "auto"
        compiles = compiled != "off"
        with torch.inference_mode():
            self.final_norm = norm_weight(body.norm, self.shape)
            if compiled == "auto":
                first = Layer(modules[0], make, self.shape)
                compiles = is_compiled(first, layer_weights(first, modules[0]), folders)
            self.layers: list[Layer] = []
            stored: list[dict[str, Tensor]] = []  # as compiled layers read them
            # once: a layer that was read may give up its weights (`released_as_read`)
            for module in modules:
                self.layers.append(Layer(module, make, self.shape))
                if compiles:
                    stored.append(packed_layer(layer_weights(self.layers[-1], module)))
            self._head = linear(self.head_weight)
            self.ropes = {name: self._rope_table(name) for name in set(self.shape.ropes)}
        self.step = (
            compiled_step(self.layers, stored, self.slots, compiled, folders) if compiles else None
        )
        if self.step is not None:
            self._head, files = compiled_head(self.head_weight, self._head, compiled, folders)
            self.step.files += tuple(files)
        self.libraries = None if self.step is None else (compiled, folders)

    def _rope_table(self, name: str | None) -> Rope:
        """Cosines and sines `[positions, 1, head_dim]` of all positions, the sign of `rotate_half`
        folded into the sines."""
        positions = torch.arange(self.max_context, device=self.device)[None]
        cos, sin = self.module.model.rotary_emb(
            self.embedding[:1], positions, *([] if name is None else [name])
        )
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

    @property
    def sublayers(self) -> int:
        """How many numbers `Forward.skip` may hold."""
        return 2 * len(self.layers)

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
            form = None if self.step is None else self.step.form(rows, trees)
            entered = Entered(self.features, rows) if self.features else None
            if self.step is not None and form is not None:
                own = positions[at:end]
                ropes = self._layer_ropes(own)
                x = self.step(
                    form,
                    self._embed(ids[at:end]),
                    ropes,
                    own,
                    rows,
                    trees.get(rows[0][0]),
                    entered,
                    self._partly(skip, ropes, rows, trees),
                )
                states.append(norm(x, self.final_norm, self.eps))
            else:
                attention = RowAttention(
                    self.slots,
                    rows,
                    self.shape,
                    None if self.step is None else self.step.parts,
                    trees,
                )
                states.append(
                    self.run_layers(ids[at:end], positions[at:end], attention, entered, skip)
                )
            if entered is not None:
                entered.store(self.slots)
            at = end
        return states[0] if len(states) == 1 else torch.cat(states)

    def _embed(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embedding[ids]
        return x if self._embedding_scale is None else x * self._embedding_scale

    def _partly(
        self, skip: frozenset[int], ropes: Sequence[Rope], rows: list[Placed], trees: Trees
    ) -> dict[int, Callable[[Tensor], Tensor]]:
        """The layers of which sublayers are skipped, over packed rows."""
        if not skip:
            return {}
        attention = RowAttention(self.slots, rows, self.shape, None, trees)
        return {
            number: partial(self._part_of_layer, number, ropes[number], attention, skip)
            for number in {one // 2 for one in skip}
        }

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
        halves = None if self.step is None else self.step.layers(len(ids))
        layers: Sequence[Layer | CompiledHalves] = halves or self.layers
        for number, (layer, rope) in enumerate(
            zip(layers, self._layer_ropes(positions), strict=True)
        ):
            if entered is not None:
                entered.enter(number, x)
            if 2 * number in skip or 2 * number + 1 in skip:
                x = self._part_of_layer(number, rope, attend, skip, x)
            else:
                x = layer.after(attend(number, *layer.before(x, rope)), x)
        return norm(x, self.final_norm, self.eps)

    def _layer_ropes(self, positions: Tensor) -> list[Rope]:
        """For each layer cosines and sines of positions `[total]`."""
        ropes = {name: (cos[positions], sin[positions]) for name, (cos, sin) in self.ropes.items()}
        return [ropes[name] for name in self.shape.ropes]


def weight_bytes(layers: torch.nn.Module) -> int:
    """Bytes of all weights."""
    return sum(weight.numel() * weight.element_size() for weight in layers.parameters())


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
