"""Checks of a trace before its rollouts are counted or replayed: texts of the target, rollouts
along them, finite values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftwell.components.collect.trace_columns import check_finite
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.recording.trace_schema import TraceError, TraceHeader

if TYPE_CHECKING:
    import pyarrow as pa

ROLLOUT_FIGURES = ("rollout_q", "rollout_confidence", "rollout_entropy")


def targets_own(table: pa.Table) -> pa.Table:
    """The rows whose text the target wrote: other texts do not show what it would have accepted.

    Raises:
        TraceError: there are none.
    """
    import pyarrow.compute as pc

    if table.num_rows == 0:
        raise TraceError(
            "the trace holds no rows: collect one with `draftwell step collect`", code="empty_trace"
        )
    rows = table.filter(pc.equal(table.column("kind"), "target"))
    if rows.num_rows == 0:
        raise TraceError(
            (
                "the trace holds no text written by the target: collect some with `draftwell "
                "step collect --set prefix_kinds=target --set fresh=true`"
            ),
            code="no_target_texts",
        )
    return rows


def check_rollouts(rows: pa.Table) -> None:
    """Refuse rows without usable rollouts; columns that the table lacks are not checked.

    Raises:
        DraftwellError: rows without rollouts, such as those that a server records, or values that
            are NaN or infinite.
    """
    import pyarrow.compute as pc

    known = set(rows.column_names)
    if any(
        rows.column(name).null_count
        for name in ("rollout_tokens", *ROLLOUT_FIGURES)
        if name in known
    ):
        raise TraceError(
            (
                "the trace holds no rollouts along the target's texts: collect with rollouts "
                "for them (`draftwell step collect`)"
            ),
            code="no_rollouts",
        )
    for name in ROLLOUT_FIGURES:
        if name in known:
            check_finite(name, pc.list_flatten(rows.column(name)).to_numpy(zero_copy_only=False))


def greedy_header(trace: TraceSet) -> TraceHeader:
    """The header of a trace whose rollouts are the draft's own greedy ones.

    Raises:
        TraceError: no trace, a foreign one, or one that was sampled, where every rollout begins
            with a token that the target rejects.
    """
    header = trace.header
    if header.temperature > 0:
        raise TraceError(
            f"{trace.folder} was sampled at temperature {header.temperature:g}: collect "
            "one at temperature 0 for this "
            "(`draftwell step collect --set temperature=0`)",
            code="sampled_trace",
        )
    return header


def check_temperature(trace: TraceSet, temperature: float) -> None:
    """Refuse a trace of another temperature, or one whose texts were sampled from a part of the
    vocabulary, which is not measured.

    Raises:
        TraceError: `sampled_trace` where a greedy one is needed, else
            `trace_of_another_temperature`.
    """
    header = greedy_header(trace) if temperature == 0 else trace.header
    cut = temperature > 0 and (header.top_k or header.top_p < 1)
    if header.temperature != temperature or cut:
        words = f" with top-k {header.top_k} and top-p {header.top_p:g}" if cut else ""
        raise TraceError(
            f"{trace.folder} was collected at temperature {header.temperature:g}{words}, and "
            f"one of temperature {temperature:g} over the whole vocabulary is needed: collect one "
            f"for it (`draftwell step collect --set temperature={temperature:g}`)",
            code="trace_of_another_temperature",
        )
