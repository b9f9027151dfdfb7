"""A decoder's layers by the library: weights are packed once, and a forward pass is one call."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from draftwell.serving.errors import OutOfMemory
from draftwell.serving.number_format import Weights
from draftwell.serving.runtime.models.architecture import Architecture
from draftwell.serving.runtime.models.native.packing import Weight, packed, pointer
from draftwell.serving.runtime.models.quantised import Rounded, rounded
from draftwell.serving.runtime.models.row_attention import Placed
from draftwell.serving.runtime.models.slots import Slots

NORMS = ("attention_norm", "beside_norm", "mlp_norm", "after_attention", "after_mlp", "qk_norm")


class Layer(ctypes.Structure):
    """`Layer` of decoder.cpp."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in (*NORMS, "cos", "sin")),
        ("window", ctypes.c_int64),
        ("qkv", Weight),
        ("out", Weight),
        ("feed_forwards", ctypes.c_int64),
        ("feed_forward", ctypes.c_void_p),
    ]


class Decoder(ctypes.Structure):
    """`Decoder` of decoder.cpp."""

    _fields_: ClassVar = [
        ("layers", ctypes.c_int64),
        ("hidden", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("gelu", ctypes.c_int64),
        ("halves", ctypes.c_int64),
        ("layer", ctypes.c_void_p),
    ]


class Row(ctypes.Structure):
    """`Row` of attention.h."""

    _fields_: ClassVar = [
        ("first", ctypes.c_int64),
        ("start", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("parents", ctypes.c_void_p),
        ("memory", ctypes.c_void_p),
        ("head_stride", ctypes.c_int64),
    ]


class Pass(ctypes.Structure):
    """`Pass` of decoder.cpp."""

    _fields_: ClassVar = [
        ("tokens", ctypes.c_int64),
        ("x", ctypes.c_void_p),
        ("beside", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("row", ctypes.c_void_p),
        ("skip", ctypes.c_void_p),
        ("notes", ctypes.c_int64),
        ("noted", ctypes.c_void_p),
        ("notes_into", ctypes.c_void_p),
    ]


class Product:
    """A product by the library.

    Args:
        weight, bias: `[out, in]` and `[out]`.
        weights: what the weight is rounded to first.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        weight: Tensor,
        bias: Tensor | None = None,
        weights: Weights | None = None,
    ):
        self._library, self._outputs = library, len(weight)
        whole: Tensor | Rounded = weight if weights is None else rounded(weight, weights)
        if isinstance(whole, Rounded) and weight.dtype == torch.float32:
            whole = whole.dense()
        self.packed, self._kept = packed(whole, bias, library)

    def __call__(self, x: Tensor) -> Tensor:
        """`[n, in]` → `[n, out]`."""
        return self.in_float32(x).to(x.dtype)

    def in_float32(self, x: Tensor) -> Tensor:
        """`[n, in]` → `[n, out]` float32."""
        x = x.float().contiguous()
        out = torch.empty(len(x), self.packed.outputs)
        done = self._library.draftwell_product(
            x.data_ptr(), ctypes.byref(self.packed), out.data_ptr(), len(x)
        )
        check_memory(done, len(x))
        return out[:, : self._outputs].contiguous()


def check_memory(done: int, tokens: int) -> None:
    """Raise where the library had not enough memory."""
    if done:
        raise OutOfMemory(
            f"no memory for a forward pass of {tokens} tokens: start with fewer slots or a shorter "
            "context"
        )


def dots(library: ctypes.CDLL, x: Tensor, rows: Tensor) -> Tensor:
    """Dot products `[n, m]` of `[n, hidden]` and `[m, hidden]` float32."""
    x, rows = x.contiguous(), rows.contiguous()
    out = torch.empty(len(x), len(rows))
    sizes = len(x), len(rows), x.shape[1]
    library.draftwell_dots(x.data_ptr(), rows.data_ptr(), out.data_ptr(), *sizes)
    return out


class NativeLayers:
    """Layers by the library.

    Args:
        slots: where their keys and values are.
        norms: of each layer, its weights by the names of `NORMS`.
        products: of each layer by name: qkv, out, and gate_up0, down0 and so on.
        ropes: of each layer cosines and signed sines `[positions, 1, head_dim]`.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        shape: Architecture,
        hidden: int,
        slots: Slots,
        norms: Sequence[Mapping[str, Tensor]],
        products: Sequence[Mapping[str, Product]],
        ropes: Sequence[tuple[Tensor, Tensor]],
    ):
        self._library, self._slots, self._hidden = library, slots, hidden
        self._kept: list[object] = [products]
        self._layers = (Layer * len(products))()
        for number, layer in enumerate(self._layers):
            for name, weight in norms[number].items():
                setattr(layer, name, self._floats(weight))
            layer.cos, layer.sin = (self._floats(one) for one in ropes[number])
            layer.window = shape.windows[number] or 0
            self._connect(layer, products[number])
        self._decoder = Decoder(
            len(products),
            hidden,
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.scale,
            shape.attention_softcap or 0.0,
            shape.eps,
            shape.activation != "silu",
            slots.keys[0].dtype == torch.bfloat16,
            ctypes.cast(self._layers, ctypes.c_void_p),
        )

    def _floats(self, tensor: Tensor) -> int:
        """Where a tensor's numbers are in float32."""
        one = tensor.detach().float().contiguous()
        self._kept.append(one)
        return one.data_ptr()

    def _connect(self, layer: Layer, products: Mapping[str, Product]) -> None:
        layer.qkv, layer.out = products["qkv"].packed, products["out"].packed
        count = (len(products) - 2) // 2
        fed = (Weight * (2 * count))()
        for i in range(count):
            fed[2 * i], fed[2 * i + 1] = (
                products[f"{name}{i}"].packed for name in ("gate_up", "down")
            )
        self._kept.append(fed)
        layer.feed_forwards, layer.feed_forward = count, ctypes.cast(fed, ctypes.c_void_p)

    def __call__(
        self,
        x: Tensor,
        positions: Tensor,
        rows: Sequence[Placed],
        trees: Mapping[int, Sequence[int]],
        *,
        beside: Tensor | None = None,
        skip: frozenset[int] = frozenset(),
        noted: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """States of packed rows before the first layer, `[n, hidden]`, → float32 after the last,
        and what entered the layers `noted`, side by side `[n, len(noted) * hidden]`.

        Args:
            positions: `[n]`; in a tree by depth.
            trees: slot → parents, of the rows that are trees.
            beside: `[n, hidden]`, what a head's layer reads besides.
            skip: as in `Forward.skip`.
        """
        x = x.to(torch.float32, copy=True).contiguous()
        given, kept, first = (Row * len(rows))(), [], 0
        for row, (slot, start, count) in zip(given, rows, strict=True):
            parents = trees.get(slot)
            memory = self._slots.pointers(slot)
            row.first, row.start, row.count, row.memory = (
                first,
                start,
                count,
                ctypes.addressof(memory),
            )
            row.head_stride = self._slots.keys[0].shape[2] * self._slots.keys[0].shape[3]
            if parents is not None:
                line = (ctypes.c_int32 * count)(*parents)
                row.parents = ctypes.addressof(line)
                kept.append(line)
            first += count
        beside = None if beside is None else beside.float().contiguous()
        count = 2 * len(self._layers)
        skips = (ctypes.c_uint8 * count)(*(i in skip for i in range(count)))
        notes = sorted(noted)
        into = torch.empty(len(x), len(notes) * self._hidden) if notes else None
        numbers = (ctypes.c_int64 * len(notes))(*notes)
        positions = positions.contiguous()
        given_pass = Pass(
            len(x),
            x.data_ptr(),
            pointer(beside),
            positions.data_ptr(),
            len(rows),
            ctypes.addressof(given),
            ctypes.addressof(skips) if skip else None,
            len(notes),
            ctypes.addressof(numbers),
            pointer(into),
        )
        done = self._library.draftwell_layers(ctypes.byref(self._decoder), ctypes.byref(given_pass))
        check_memory(done, len(x))
        return x, into

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm `[n, count]` float32 by a weight `[count]`."""
        x, weight = x.float().contiguous(), weight.float().contiguous()
        out = torch.empty_like(x)
        self._library.draftwell_norm(
            x.data_ptr(), weight.data_ptr(), out.data_ptr(), *x.shape, self._decoder.eps
        )
        return out
