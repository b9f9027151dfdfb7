"""What a verifier learns from: features and labels of a trace's draft tokens, split by prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from serving.runtime.trace import TraceSet
from serving.runtime.types import DraftwellError

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS = ("prompt_id", "task", "ratio", "draft_raw_q", "confidence", "entropy", "rank", "hidden_before", "hidden_after")
SPLITS = (("train", 0.6), ("validation", 0.2), ("test", 0.2))


@dataclass(frozen=True)
class Examples:
    """Draft tokens with what the draft knew about them and what the target thinks.

    Args:
        parts: name of a feature group → `[rows, width]` float32; groups that the trace lacks are absent.
        ratio: `[rows]` float32, q̄(x)/p̄(x), inf where the target gives x nothing.
        confidence: `[rows]` float32, C: the baseline's score.
        prompt: `[rows]` ids of the prompts.
    """

    parts: dict[str, np.ndarray]
    ratio: np.ndarray
    confidence: np.ndarray
    prompt: np.ndarray

    def __len__(self) -> int:
        return len(self.ratio)

    def take(self, rows: np.ndarray) -> Examples:
        """The examples of a boolean or index array."""
        return Examples({name: part[rows] for name, part in self.parts.items()}, self.ratio[rows], self.confidence[rows],
                        self.prompt[rows])

    def features(self, names: tuple[str, ...]) -> np.ndarray:
        """`[rows, width]` float32: groups side by side, in the order that `Verifier` reads them."""
        return np.concatenate([self.parts[name] for name in names], axis=1)


def read_examples(trace: TraceSet | pa.Table) -> Examples:
    """All draft tokens of a trace.

    Raises:
        DraftwellError: the trace is empty or holds NaN.
    """
    table = trace.read(COLUMNS) if isinstance(trace, TraceSet) else trace
    if table.num_rows == 0:
        raise DraftwellError("the trace holds no rows: collect one with `draftwell collect`")
    ratio, q, confidence, entropy, rank = (
        column(table, name) for name in ("ratio", "draft_raw_q", "confidence", "entropy", "rank"))
    parts = {"scalars": np.stack([q, confidence, entropy, np.log1p(rank)], axis=1)}
    for name in ("before", "after"):
        states = matrix(table, f"hidden_{name}")
        if states is not None:
            parts[name] = states
    for name, values in {**parts, "ratio": ratio}.items():
        if np.isnan(values).any():
            raise DraftwellError(f"the trace holds NaN in {name}: collect it again, a model's weights or dtype may be broken")
    return Examples(parts, ratio, confidence, np.array(table.column("prompt_id").to_pylist()))


def column(table: pa.Table, name: str) -> np.ndarray:
    """`[rows]` float32; a null is NaN."""
    values: np.ndarray = table.column(name).to_numpy(zero_copy_only=False).astype(np.float32)
    return values


def matrix(table: pa.Table, name: str) -> np.ndarray | None:
    """`[rows, width]` float32 of a column of equally long lists; None where the trace has none."""
    lists = table.column(name) if name in table.column_names else None
    if lists is None or lists.null_count:
        return None
    flat = lists.combine_chunks().flatten().to_numpy(zero_copy_only=False).astype(np.float32)
    rows: np.ndarray = flat.reshape(table.num_rows, -1)
    return rows if rows.shape[1] else None


def split_by_prompt(examples: Examples, seed: int) -> dict[str, Examples]:
    """Train, validation and test examples that share no prompt: neighbouring positions are too alike to be split.

    Raises:
        DraftwellError: fewer than three prompts.
    """
    names = np.unique(examples.prompt)
    if len(names) < len(SPLITS):
        raise DraftwellError(f"a verifier needs traces of at least {len(SPLITS)} prompts to be tested on unseen ones, "
                             f"this trace has {len(names)}: collect more")
    names = np.random.default_rng(seed).permutation(names)
    held = max(1, round(SPLITS[1][1] * len(names)))
    groups = {"train": names[2 * held :], "validation": names[:held], "test": names[held : 2 * held]}
    if not len(groups["train"]):
        groups = {"train": names[2:], "validation": names[:1], "test": names[1:2]}
    return {name: examples.take(np.isin(examples.prompt, group)) for name, group in groups.items()}
