"""What drift is measured on: positions of a trace set, by prompt.

Only single positions are looked at, so that a server need not record rollouts: the columns of
`COLUMNS`, and the draft's hidden states where the champion's verifier reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from draftwell.components.calibrate.judged_tokens import is_judged
from draftwell.components.collect.trace_columns import matrix, scalars
from draftwell.serving.artifacts.verifier import SCALARS
from draftwell.serving.errors import DraftwellError
from draftwell.serving.recording.trace_schema import LOSSY

BY_POSITION = (
    "prompt_id",
    "position",
    "draft_token",
    "draft_q",
    "draft_p",
    "ratio",
    "confidence",
    "correction",
)
"""What becomes an array; the other columns choose rows, name prompts or are read by `scalars`."""
CHOOSING = ("turn", "kind", "temperature", "prompt_tokens", "token")
COLUMNS = tuple(dict.fromkeys((*BY_POSITION, *CHOOSING, *(scalar.column for scalar in SCALARS))))
HIDDEN = ("hidden_before", "hidden_after")
NEEDED = ("draft_q", "draft_p", "confidence")
"""A position that lacks one of these was not drafted: it says nothing."""
TOKENS = ("draft_token", "correction")
"""Needed too, but where a spool keeps no texts: such a position has no `token` either, its figures
are there, its pattern is not."""
NEAR = 1e-6
"""Temperatures that differ by no more are the same."""
BY_ROW = ("confidence", "kept", "judged", "pattern", "ratio")
"""Fields of `Traffic` with an entry for each position."""


@dataclass(frozen=True)
class Traffic:
    """Drafted positions, by prompt.

    Args:
        names: id of each prompt. Prompts of the same tokens count as one: a repeated prompt is no
            further evidence.
        unit: `[rows]` index into `names`.
        confidence: `[rows]` float64, C.
        kept: `[rows]` float64, the chance that the target keeps the draft token: min(1, p/q), which
            is 0 or 1 at temperature 0.
        judged: `[rows]` float64, 1 where speculative decoding judges a draft token, as an
            acceptance table counts it, 0 at a text's first position (`is_judged`).
        pattern: `[rows, 2]` int64, draft token and what the target puts in its place if it rejects
            it; −1 where tokens are not kept.
        ratio: `[rows]` float32, q̄/p̄ of the draft token; NaN where it was not recorded.
        parts: feature group → `[rows, width]` float32 of verifiers; groups that were not recorded
            are absent.
        others: positions of the same kinds at other temperatures or too far into a text, which were
            left out.
        undrafted: positions without the draft's view, which were left out too.
    """

    names: tuple[str, ...]
    unit: np.ndarray
    confidence: np.ndarray
    kept: np.ndarray
    judged: np.ndarray
    pattern: np.ndarray
    ratio: np.ndarray
    parts: dict[str, np.ndarray] = field(default_factory=dict)
    others: int = 0
    undrafted: int = 0

    def __len__(self) -> int:
        return len(self.unit)

    def sums(self, *columns: np.ndarray, bins: int = 1, index: Any = 0) -> np.ndarray:
        """`[prompts, columns · bins]` float64: sums of columns `[rows]` over each prompt's
        positions, apart for each bin of `index`; all bins of the first column come first."""
        total = np.zeros((len(self.names), len(columns) * bins))
        for place, values in enumerate(columns):
            np.add.at(total, (self.unit, place * bins + index), values)
        return total

    def take(self, names: Sequence[str]) -> Traffic:
        """The prompts with these ids."""
        chosen = set(names)
        kept = [i for i, name in enumerate(self.names) if name in chosen]
        new_index = np.full(len(self.names), -1)
        new_index[kept] = np.arange(len(kept))
        rows = new_index[self.unit] >= 0
        return replace(
            self,
            names=tuple(self.names[i] for i in kept),
            unit=new_index[self.unit[rows]],
            parts={name: part[rows] for name, part in self.parts.items()},
            **{name: getattr(self, name)[rows] for name in BY_ROW},
        )


def shared_kinds(reference: pa.Table, feedback: pa.Table) -> tuple[str, ...]:
    """Prefix kinds that can be compared: the target's own texts where both have some, else all that
    both have. Where there is no feedback (none at the reference's temperature), or only what lossy
    strategies served, those of the reference.

    Raises:
        DraftwellError: they share none.
    """
    then, now = (set(rows.column("kind").unique().to_pylist()) for rows in (reference, feedback))
    both = then & now
    if not both and now <= {LOSSY}:
        both = then
    if not both:
        raise DraftwellError(
            f"the feedback holds texts of the kinds {', '.join(sorted(now))}, the "
            f"reference of {', '.join(sorted(then))}: "
            "collect the reference with the kinds that are served",
            code="no_shared_kinds",
        )
    return ("target",) if "target" in both else tuple(sorted(both))


def prompts_of_the_other_sort(rows: pa.Table, kinds: Sequence[str]) -> int:
    """Prompts that a lossy strategy answered, where such texts are not compared; those that a
    lossless one answered, where they are."""
    other = (pc.not_equal if LOSSY in kinds else pc.equal)(rows.column("kind"), LOSSY)
    return int(pc.count_distinct(rows.filter(other).column("prompt_id")).as_py())


def read_traffic(
    rows: pa.Table, *, kinds: Sequence[str], temperature: float, max_tokens: int
) -> Traffic:
    """The drafted positions of some rows.

    Args:
        rows: with `COLUMNS`, and `HIDDEN` or not.
        kinds: of prefixes; others are left out.
        temperature: rows at another one are left out: they differ from the reference whatever the
            traffic is.
        max_tokens: as far as texts are looked at, so that longer texts do not look like another
            traffic.
    Raises:
        DraftwellError: confidences or probabilities that are NaN.
    """
    of_kind = rows.filter(pc.is_in(rows.column("kind"), pa.array(list(kinds))))
    unit_of, names = units(of_kind)
    near = pc.less_equal(
        pc.abs(pc.subtract(of_kind.column("temperature"), pa.scalar(temperature, pa.float32()))),
        NEAR,
    )
    table = of_kind.filter(pc.and_(near, pc.less(of_kind.column("position"), max_tokens)))
    others = of_kind.num_rows - table.num_rows
    seen, table = table.num_rows, drafted(table)
    columns = {
        name: (
            pc.fill_null(table.column(name), -1) if name in TOKENS else table.column(name)
        ).to_numpy(zero_copy_only=False)
        for name in BY_POSITION
    }
    p, q = columns["draft_p"].astype(np.float64), columns["draft_q"].astype(np.float64)
    confidence = columns["confidence"].astype(np.float64)
    if np.isnan(p).any() or np.isnan(q).any() or np.isnan(confidence).any():
        raise DraftwellError(
            "the traces hold NaN: a model's weights or dtype may be broken: check the pair, then "
            "collect again",
            code="nan_in_traces",
        )
    kept = np.minimum(1.0, p / np.maximum(q, 1e-12))
    unit = np.array([unit_of[name] for name in columns["prompt_id"]], dtype=np.int64)
    present = np.unique(unit)
    judged = is_judged(columns["position"]).astype(np.float64)
    pattern = np.stack([columns["draft_token"], columns["correction"]], axis=1).astype(np.int64)
    return Traffic(
        tuple(names[i] for i in present),
        np.searchsorted(present, unit),
        confidence,
        kept,
        judged,
        pattern,
        columns["ratio"].astype(np.float32),
        features(table),
        others,
        seen - table.num_rows,
    )


def drafted(table: pa.Table) -> pa.Table:
    """The rows that the draft has seen."""
    for name in NEEDED:
        table = table.filter(pc.is_valid(table.column(name)))
    for name in TOKENS:
        table = table.filter(
            pc.or_(pc.is_valid(table.column(name)), pc.is_null(table.column("token")))
        )
    return table


def units(rows: pa.Table) -> tuple[dict[str, int], list[str]]:
    """Prompt id → number of its unit, and each unit's name: prompts that begin with the same tokens
    are one."""
    columns = {name: rows.column(name).to_pylist() for name in ("prompt_id", "prompt_tokens")}
    begins: dict[str, tuple[int, ...]] = {}
    for name, tokens in zip(columns["prompt_id"], columns["prompt_tokens"], strict=True):
        if tokens is not None:
            begins.setdefault(name, tuple(tokens))
    numbers: dict[Any, int] = {}
    names: list[str] = []
    found: dict[str, int] = {}
    for name in dict.fromkeys(columns["prompt_id"]):
        key = begins.get(name, name)
        if key not in numbers:
            numbers[key] = len(names)
            names.append(name)
        found[name] = numbers[key]
    return found, names


def features(table: pa.Table) -> dict[str, np.ndarray]:
    """Feature groups of verifiers, in `Verifier`'s words; those with a null or NaN are left out."""
    found = {"scalars": scalars(table)}
    for name in ("before", "after"):
        states = matrix(table, f"hidden_{name}") if table.num_rows else None
        if states is not None:
            found[name] = states
    return {name: part for name, part in found.items() if not np.isnan(part).any()}
