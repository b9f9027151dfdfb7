"""The target's own texts of a trace, in the form that replays read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftwell.components.collect.trace_checks import check_rollouts, greedy_header, targets_own
from draftwell.components.replay.traced_text import TracedText
from draftwell.serving.recording.trace import TraceSet

COLUMNS = (
    "prompt_id",
    "turn",
    "kind",
    "position",
    "prompt_tokens",
    "token",
    "rollout_tokens",
    "rollout_confidence",
    "rollout_entropy",
)


@dataclass(frozen=True)
class Texts:
    """The texts of a trace that can be replayed, read once for many replays.

    Args:
        max_tokens: of each text, at most.
        rollout: K, length of the recorded rollouts.
        temperature: of the texts; above 0 they come from `sampled.SampledTexts.draw`.
    """

    texts: list[TracedText]
    max_tokens: int
    stop_token_ids: frozenset[int]
    rollout: int
    temperature: float = 0.0


def read_texts(trace: TraceSet, limit: int | None = None) -> Texts:
    """The target's own greedy texts of a trace.

    Raises:
        DraftwellError: the trace was sampled, holds no such text, or cannot be read.
    """
    header = greedy_header(trace)
    columns, parts = target_rows(trace, COLUMNS)
    return Texts(
        [text_of(columns, part) for part in parts][:limit],
        header.max_tokens,
        frozenset(header.stop_token_ids),
        header.rollout,
    )


def target_rows(trace: TraceSet, names: Sequence[str]) -> tuple[dict[str, list[Any]], list[slice]]:
    """Columns of a trace, and the rows of each text that the target wrote.

    Raises:
        DraftwellError: there are none, they have no rollouts, or values are not finite.
    """
    table = trace.read(names)
    check_rollouts(targets_own(table))
    columns = {name: column.to_pylist() for name, column in zip(names, table.columns, strict=True)}
    starts = [i for i, position in enumerate(columns["position"]) if position == 0]
    return columns, [
        slice(start, end)
        for start, end in zip(starts, [*starts[1:], len(columns["position"])], strict=True)
        if columns["kind"][start] == "target"
    ]


def text_of(columns: Mapping[str, list[Any]], rows: slice) -> TracedText:
    """One text."""
    prompt = columns["prompt_tokens"][rows.start]
    turn = columns["turn"][rows.start]
    return TracedText(
        columns["prompt_id"][rows.start] + (f", turn {turn + 1}" if turn else ""),
        prompt + columns["token"][rows],
        len(prompt),
        columns["rollout_tokens"][rows],
        columns["rollout_confidence"][rows],
        columns["rollout_entropy"][rows],
    )
