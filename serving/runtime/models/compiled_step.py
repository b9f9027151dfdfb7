"""Steps of decoding by compiled layers: one call a layer instead of some twenty.

At a few tokens a forward pass reads every weight once and computes little; the time goes into
memory and into calls. One token of a row, several tokens of a row, and several rows have a library
of their own (`compiled_layer`, `compiled_library`); the last takes each token of a draft as a row,
which sees what is written before it. All else goes the way of `lean_llama`, with layers in compiled
halves and attention between, which is compiled for rows of one token and for a short row by itself.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal, Protocol

import torch
from torch import Tensor

from draftwell.serving.device import has_matrix_unit
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.models.architecture import Architecture
from draftwell.serving.runtime.models.compiled_layer import (
    AfterAttention,
    BeforeAttention,
    CompiledLayer,
    ManyRows,
    OneRow,
    OneRowAttention,
    OneToken,
    RowsAttention,
    packed_layer,
)
from draftwell.serving.runtime.models.compiled_library import (
    Runner,
    attention_key,
    build,
    build_attention,
    build_half,
    build_head,
    half_key,
    head_key,
    key,
    library,
    load,
)
from draftwell.serving.runtime.models.lean_layer import Layer, Rope
from draftwell.serving.runtime.models.library_runner import LibraryRunner
from draftwell.serving.runtime.models.linear import ROUNDED_ROWS
from draftwell.serving.runtime.models.packed_matmul import packed
from draftwell.serving.runtime.models.row_attention import CompiledParts, Placed, additive, wasted
from draftwell.serving.runtime.models.row_kernel import fits
from draftwell.serving.runtime.models.slots import Slots
from draftwell.serving.runtime.models.visible import visible

log = logging.getLogger(__name__)

Compile = Literal["auto", "try", "on", "off"]
"""Compiled layers: those that were compiled before (auto); all, compiled now where they are
missing, of a model that is large enough, and the eager way where that fails (try); all, or an error
(on); none."""
WORTH_COMPILING = 16 << 20
"""Bytes of the layers of a model that is large enough: a smaller one never makes good the minute
that compiling takes."""
Form = Literal["token", "row", "rows"]
FORMS: dict[Form, type[CompiledLayer]] = {"token": OneToken, "row": OneRow, "rows": ManyRows}
"""Forward passes that are compiled."""
LONGEST_ROW = 16
"""Tokens of a row up to which it is compiled."""
LONGEST_BESIDE = 8
"""Tokens of a row beside others up to which whole layers compute it, each token by itself: every
one of them reads the slot."""
MOST_BESIDE = 32
"""Tokens of rows with drafts that whole layers compute: 16 take .7 to .9 of the time of halves with
attention between, 32 .8 to .95, and 64 1.06 (SmolLM2-135M, rows of two tokens after 120 to 330)."""
MOST_READ_AGAIN = 8192
"""Positions of slots that further tokens of drafts may read again, all rows together: an estimate,
above all that was timed."""
MOST_WASTED_WHOLE = 4096
"""As `row_attention.MOST_WASTED`, for rows of one token that are computed by whole layers: leaving
those costs more than another batch (by an estimate, too)."""
MOST_BY_KERNEL = 64
"""Tokens up to which our kernel is used where the processor has a matrix unit (AMX), which oneDNN
uses; elsewhere it is about as fast as oneDNN or faster for any number (64 tokens 34 against 41 ms,
512 tokens 265 against 263)."""


class States(Protocol):
    """Takes note of hidden states on their way through the layers."""

    def enter(self, layer: int, x: Tensor) -> None:
        """States `[n, hidden]` before a layer."""


Calls = list[tuple[Runner, list[Tensor]]]
"""For each layer its library and weights."""


class CompiledHalves:
    """A layer of which all but the attention is compiled; it is called as `Layer` is.

    Args:
        before, after: library and weights of the halves.
    """

    def __init__(self, before: tuple[Runner, list[Tensor]], after: tuple[Runner, list[Tensor]]):
        self._before, self._after = before, after

    def before(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        runner, weights = self._before
        query, key, value = runner.run([x, *rope, *weights])
        return query, key, value

    def after(self, attended: Tensor, x: Tensor) -> Tensor:
        runner, weights = self._after
        (out,) = runner.run([attended, x, *weights])
        return out


class CompiledRows:
    """Attention of rows of one token each by libraries; a `row_attention.Part`.

    Args:
        runners: the library of each layer.
        rows: with the place of their token among the packed ones.
    """

    def __init__(self, runners: Sequence[Runner], slots: Slots, rows: Sequence[tuple[int, Placed]]):
        self._runners, self._slots = runners, slots
        places = [at for at, _ in rows]
        joined = places[-1] - places[0] == len(places) - 1
        self.tokens: slice | Tensor = (
            slice(places[0], places[-1] + 1) if joined else torch.tensor(places)
        )
        positions = torch.tensor([start for _, (_, start, _) in rows])
        self._place = (
            torch.tensor([slot for _, (slot, _, _) in rows]),
            positions,
            torch.arange(int(positions.max()) + 1),
        )

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        memory = self._slots.keys[layer], self._slots.values[layer]
        # a library does not look at strides
        heads = [one.contiguous() for one in (query, key, value)]
        (out,) = self._runners[layer].run([*heads, *memory, *self._place])
        return out


class CompiledRow:
    """Attention of several tokens of one row by a library, which serves all layers; a
    `row_attention.Part`.

    Args:
        at: place of the row's first token among the packed ones.
        windows: as in `Architecture`.
        parents: of a row that is a tree.
    """

    def __init__(
        self,
        runner: Runner,
        windows: Sequence[int | None],
        slots: Slots,
        at: int,
        row: Placed,
        parents: Sequence[int] | None,
    ):
        self._runner, self._slots, self._windows = runner, slots, windows
        self._slot, start, count = row
        self.tokens = slice(at, at + count)
        self._into = torch.arange(start, start + count)
        self._masks = {
            window: additive(visible(start, count, window, parents), slots.keys[0])
            for window in set(windows)
        }

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads = [one.contiguous() for one in (query, key, value)]  # as above
        memory = self._slots.memory(layer, self._slot)
        (out,) = self._runner.run([*heads, *memory, self._into, self._masks[self._windows[layer]]])
        return out


class CompiledStep:
    """All layers of a model over few tokens.

    Args:
        calls: of each form that is compiled.
        halves: the layers for forward passes of no compiled form; None: the eager ones.
        parts: for those, the parts of their attention that are compiled; None: they attend the
            eager way.
        windows: as in `Architecture`.
        most: tokens of a forward pass up to which int4 weights are read; None for other weights.
        files: the libraries.
    """

    def __init__(
        self,
        calls: Mapping[Form, Calls],
        windows: Sequence[int | None],
        slots: Slots,
        most: int | None = None,
        files: Sequence[Path] = (),
        halves: Sequence[CompiledHalves] | None = None,
        parts: CompiledParts | None = None,
    ):
        self._calls, self._windows, self._slots, self._most = calls, windows, slots, most
        self.halves, self.parts = halves, parts
        self._columns = torch.arange(slots.max_context)
        self._most_by_kernel = most_by_kernel()
        self.files = tuple(files)

    def form(self, rows: Sequence[Placed], trees: Container[int] = ()) -> Form | None:
        """The form that packed rows have, or None where they are not compiled.

        Args:
            trees: slots whose rows are trees.
        """
        tokens = sum(count for _, _, count in rows)
        if self._most is not None and tokens > self._most:
            return None
        if len(rows) == 1 and 1 < rows[0][2] <= LONGEST_ROW:
            form: Form = "row"
        elif all(
            count <= LONGEST_BESIDE
            and slot < self._slots.count
            and (count == 1 or slot not in trees)
            for slot, _, count in rows
        ):  # branches are no part of the slots' tensors
            if tokens > self._most_by_kernel or (tokens > len(rows) and not few_drafts(rows)):
                return None
            form = "token" if len(rows) == 1 else "rows"
            if (
                self._most is None
                and self.parts
                and len(rows) > 1
                and wasted(list(enumerate(one_by_one(rows)))) > MOST_WASTED_WHOLE
            ):
                return None  # in batches of texts of about one length
        else:
            return None
        return form if form in self._calls else None

    def layers(self, tokens: int) -> Sequence[CompiledHalves] | None:
        """The layers for so many tokens of no compiled form; None: the eager ones, which read int4
        weights for a few."""
        return self.halves if (self._most or 1) < tokens <= self._most_by_kernel else None

    def __call__(
        self,
        form: Form,
        x: Tensor,
        ropes: Sequence[tuple[Tensor, Tensor]],
        positions: Tensor,
        rows: Sequence[Placed],
        parents: Sequence[int] | None = None,
        states: States | None = None,
        other: Mapping[int, Callable[[Tensor], Tensor]] = MappingProxyType({}),
    ) -> Tensor:
        """States `[n, hidden]` of the tokens of packed rows before the first layer → after the
        last.

        Args:
            ropes: for each layer cosines and sines of their positions, `[n, 1, head_dim]`.
            positions: `[n]`, of single tokens.
            parents: of one row that is a tree.
            states: takes note of what enters each layer.
            other: layer → what computes it in the place of its library: states before it → after
                it.
        """
        memories, places = (
            self._one_row(*rows[0], parents) if form == "row" else self._rows(positions, rows)
        )
        for number, ((runner, weights), rope, memory, place) in enumerate(
            zip(self._calls[form], ropes, memories, places, strict=True)
        ):
            if states is not None:
                states.enter(number, x)
            if number in other:
                x = other[number](x)
            else:
                (x,) = runner.run([x, *rope, *memory, *place, *weights])
        return x

    def _one_row(
        self, slot: int, start: int, count: int, parents: Sequence[int] | None
    ) -> tuple[list[tuple[Tensor, ...]], list[tuple[Tensor, ...]]]:
        """For each layer its memory and place as in `attend_row`."""
        windows = self._windows
        into = torch.arange(start, start + count)
        masks = {
            window: additive(visible(start, count, window, parents), self._slots.keys[0])
            for window in set(windows)
        }
        return [self._slots.memory(layer, slot) for layer in range(len(windows))], [
            (into, masks[window]) for window in windows
        ]

    def _rows(
        self, positions: Tensor, rows: Sequence[Placed]
    ) -> tuple[list[tuple[Tensor, ...]], list[tuple[Tensor, ...]]]:
        """For each layer its memory and place as in `attend`."""
        slots = torch.tensor([slot for slot, _, _ in one_by_one(rows)])
        place = slots, positions, self._columns[: max(start + count for _, start, count in rows)]
        return list(zip(self._slots.keys, self._slots.values, strict=True)), [place] * len(
            self._windows
        )


def few_drafts(rows: Sequence[Placed]) -> bool:
    """Whether rows of drafts are few and short enough to be computed token by token."""
    read_again = sum((count - 1) * (start + count) for _, start, count in rows)
    return sum(count for _, _, count in rows) <= MOST_BESIDE and read_again <= MOST_READ_AGAIN


def one_by_one(rows: Sequence[Placed]) -> list[Placed]:
    """Every token of some rows as a row.

    >>> one_by_one([(3, 10, 2), (1, 5, 1)])
    [(3, 10, 1), (3, 11, 1), (1, 5, 1)]
    """
    return [(slot, start + i, 1) for slot, start, count in rows for i in range(count)]


def most_by_kernel() -> int:
    """Tokens of a forward pass up to which products are our kernel's."""
    return MOST_BY_KERNEL if has_matrix_unit() else sys.maxsize


def compiled_step(
    layers: Sequence[Layer],
    weights: Sequence[Mapping[str, Tensor]],
    slots: Slots,
    wanted: Compile,
    folders: Sequence[Path],
) -> CompiledStep | None:
    """The compiled layers of a bfloat16 model, or None where they are not wanted or, under `auto`,
    not there yet.

    Args:
        weights: of each layer, by name (`compiled_layer.packed_layer`).
        folders: where libraries may be; the last is where new ones are kept.
    Raises:
        DraftwellError: they are to be compiled, and there is no C++ compiler or it fails; or a kept
            library is broken.
    """
    if wanted == "off":
        return None
    calls: dict[Form, Calls] = {}
    files: list[Path] = []
    for form in FORMS:
        found = compiled_calls(form, layers, weights, wanted, folders)
        if found is not None:
            calls[form] = found[0]
            files += found[1]
    if not calls:
        return None
    int4 = any(one.dtype == torch.uint8 for one in weights[0].values())
    halves = None if int4 else compiled_halves(layers, weights, wanted, folders)
    parts = None if halves is None else compiled_parts(layers[0].shape, slots, wanted, folders)
    files += [file for found in (halves, parts) if found is not None for file in found[1]]
    most = ROUNDED_ROWS["int4"] if int4 else None
    return CompiledStep(
        calls, layers[0].shape.windows, slots, most, files, halves and halves[0], parts and parts[0]
    )


def compiled_calls(
    form: Form,
    layers: Sequence[Layer],
    weights: Sequence[Mapping[str, Tensor]],
    wanted: Compile,
    folders: Sequence[Path],
) -> tuple[Calls, list[Path]] | None:
    """A form's library and weights for each layer, and the libraries' files; arguments and errors
    as in `compiled_step`."""
    runners: dict[int | None, Runner] = {}
    files = []
    # a row's windows are in its mask
    windows = layers[0].shape.windows if form in ("token", "rows") else (None,) * len(layers)
    for window in dict.fromkeys(windows):
        number = windows.index(window)
        module = FORMS[form](layers[number], list(weights[number]), window)
        file = library(key(module, weights[number]), folders)
        runner = loaded(file, wanted, partial(build, module, weights[number], file))
        if runner is None:
            return None
        runners[window] = runner
        files.append(file)
    return [
        (runners[window], list(one.values())) for one, window in zip(weights, windows, strict=True)
    ], files


def compiled_halves(
    layers: Sequence[Layer],
    weights: Sequence[Mapping[str, Tensor]],
    wanted: Compile,
    folders: Sequence[Path],
) -> tuple[list[CompiledHalves], list[Path]] | None:
    """The layers in halves, and the libraries' files; None where there are none."""
    calls: list[list[tuple[Runner, list[Tensor]]]] = []
    files = []
    for half in (BeforeAttention, AfterAttention):
        shares = [half.share(one) for one in weights]
        module = half(layers[0], list(shares[0]))
        file = library(half_key(module, shares[0]), folders)
        runner = loaded(
            file,
            wanted,
            partial(build_half, module, shares[0], len(weights[0]["attention_norm"]), file),
        )
        if runner is None:
            return None
        calls.append([(runner, list(one.values())) for one in shares])
        files.append(file)
    return [CompiledHalves(*pair) for pair in zip(*calls, strict=True)], files


def compiled_parts(
    shape: Architecture, slots: Slots, wanted: Compile, folders: Sequence[Path]
) -> tuple[CompiledParts, list[Path]] | None:
    """What makes the compiled parts of an attention, and the libraries' files; None where there are
    none."""
    files: list[Path] = []

    def runner(module: RowsAttention | OneRowAttention) -> Runner | None:
        file = library(attention_key(module), folders)
        found = loaded(file, wanted, partial(build_attention, module, file))
        files.extend([file] if found else [])
        return found

    by_window = {
        window: runner(RowsAttention(shape, window)) for window in dict.fromkeys(shape.windows)
    }
    of_layers = [found for window in shape.windows if (found := by_window[window])]
    if len(of_layers) < len(shape.windows):
        return None
    one = runner(OneRowAttention(shape)) if fits(shape.head_dim) else None
    row = None if one is None else partial(CompiledRow, one, shape.windows, slots)
    return CompiledParts(partial(CompiledRows, of_layers, slots), row), files


def compiled_head(
    weight: Tensor, eager: Callable[[Tensor], Tensor], wanted: Compile, folders: Sequence[Path]
) -> tuple[Callable[[Tensor], Tensor], list[Path]]:
    """A compiled head and its library; `eager` and none where there is none.

    Args:
        weight: `[vocab, hidden]`, of which a packed copy is kept.
    """
    weight = weight.detach()
    shape = packed(weight.to("meta"))
    if shape.dim() == 2:
        return eager, []  # outputs that fill no blocks
    file = library(head_key(shape), folders)
    runner = loaded(file, wanted, partial(build_head, shape, file))
    if runner is None:
        return eager, []
    weight, most = packed(weight), most_by_kernel()
    return (
        lambda states: (
            runner.run([states.contiguous(), weight])[0] if len(states) <= most else eager(states)
        ),
        [file],
    )


def loaded(file: Path, wanted: Compile, make: Callable[[], None]) -> Runner | None:
    """A library, made where it is missing and wanted; None where there is none. Errors as in
    `compiled_step`."""
    try:
        if wanted in ("try", "on") and not file.is_file():
            make_once(file, make, again=wanted == "on")
        return LibraryRunner(load(file), file) if file.is_file() else None
    except DraftwellError as error:
        if wanted == "on":
            raise
        # such as one of another machine's C library
        log.warning("%s; its forward passes are run without it", error)
        return None


def make_once(file: Path, make: Callable[[], None], *, again: bool) -> None:
    """Compile a library, unless that failed before.

    Args:
        again: try again nevertheless.
    """
    failed = file.with_name("failed.txt")
    if failed.is_file() and not again:
        return
    say_compiling()
    try:
        make()
    except DraftwellError as error:
        with suppress(OSError):  # a home that may only be read, or is full
            file.parent.mkdir(parents=True, exist_ok=True)
            failed.write_text(f"{error}\nDelete this file to try again.\n")
        raise
    with suppress(OSError):
        failed.unlink(missing_ok=True)


@cache
def say_compiling() -> None:
    """Once in a process. A warning, so that a command prints it on stderr without being set up to;
    a server never compiles."""
    log.warning("compiling layers: once for this machine, minutes; float32 runs without")


def is_compiled(layer: Layer, weights: Mapping[str, Tensor], folders: Sequence[Path]) -> bool:
    """Whether single tokens of a model with this first layer were compiled before (for all of its
    windows, `compiled_step` finds out)."""
    # the shapes will do
    weights = packed_layer({name: one.to("meta") for name, one in weights.items()})
    return library(
        key(OneToken(layer, list(weights), layer.shape.windows[0]), weights), folders
    ).is_file()
