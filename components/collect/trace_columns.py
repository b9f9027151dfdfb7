"""Columns of a trace as NumPy arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from draftwell.serving.artifacts.verifier import SCALARS
from draftwell.serving.errors import DraftwellError

if TYPE_CHECKING:
    import pyarrow as pa


def check_finite(name: str, values: np.ndarray) -> None:
    """Refuse values from which no score can be computed."""
    if not np.isfinite(values).all():
        raise DraftwellError(
            (
                f"the trace holds NaN or infinity in {name}: collect it again, a model's "
                "weights or dtype may be broken"
            ),
            code="not_finite",
        )


def column(table: pa.Table, name: str) -> np.ndarray:
    """`[rows]` float32; a null is NaN."""
    values: np.ndarray = table.column(name).to_numpy(zero_copy_only=False).astype(np.float32)
    return values


def scalars(table: pa.Table) -> np.ndarray:
    """`[rows, scalars]` float32, the features `scalars` of a verifier; a null is NaN."""
    return np.stack([scalar.of(column(table, scalar.column)) for scalar in SCALARS], axis=1)


def texts(table: pa.Table, name: str) -> np.ndarray:
    """`[rows]` of text; "" where the table has none."""
    import pyarrow as pa

    if name not in table.column_names:
        return np.full(table.num_rows, "")
    encoded = table.column(name).cast(pa.string()).combine_chunks().dictionary_encode()
    names = np.array(["", *encoded.dictionary.to_pylist()])
    found: np.ndarray = names[encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False) + 1]
    return found


def matrix(table: pa.Table, name: str) -> np.ndarray | None:
    """`[rows, width]` of a column of equally long lists, in its own type; None where the trace has
    none."""
    lists = table.column(name) if name in table.column_names else None
    if lists is None or lists.null_count:
        return None
    flat = lists.combine_chunks().flatten().to_numpy(zero_copy_only=False)
    if len(flat) % table.num_rows:
        raise DraftwellError(
            f"the trace holds lists of different lengths in {name}: collect it again",
            code="bad_trace",
        )
    rows: np.ndarray = flat.reshape(table.num_rows, -1)
    return rows if rows.shape[1] else None
