"""SPIDE's acceptance table, counted from a trace: how often is a draft token accepted, by the draft's confidence?

**Each judged position is counted once.** A draft token is judged only if all before it were kept, so its prefix is the target's own greedy
text: its confidence and whether it is kept are facts of the position, whichever draft it came in. SPIDE's loop with overlap has no bonus
token, so it judges every position of a text but the first, which the pass over the prompt decides; that is what is counted, and what
`update` would count in such a run. A serial loop also skips the position after a draft that was kept as a whole. Which ones those
are depends on tau and on the table itself; a table serves every tau, so they are counted too.

To begin a draft at every position and follow it to its first rejection, as was done before, counts a position once for each draft that
reaches it: up to K times behind a run of kept tokens, and those are the easy ones, so alpha was too high.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from components.collect.trace_checks import targets_own
from components.collect.trace_columns import check_finite
from serving.artifacts.acceptance_table import EDGES, AcceptanceTable
from serving.artifacts.base import Provenance
from serving.errors import DraftwellError
from serving.recording.trace import TraceSet
from serving.recording.trace_schema import TraceError

if TYPE_CHECKING:
    import pyarrow as pa

Log = Callable[[str, float, int], None]

COLUMNS = ("prompt_id", "kind", "temperature", "position", "token", "draft_token", "confidence")
COUNTING = "judged once"
"""How tables are counted, in their provenance; those of earlier releases lack the parameter and counted a position up to K times."""


def build_acceptance_table(trace: TraceSet | pa.Table, provenance: Provenance, *, log: Log | None = None) -> AcceptanceTable:
    """Count, for every confidence bin, the draft tokens that greedy speculative decoding judges, and those of them that it accepts.

    Raises:
        DraftwellError: as in `greedy_rows`, or no token was judged (`no_judged_tokens`).
    """
    _, confidence, accepted = judged_tokens(greedy_rows(trace))
    if not len(accepted):
        raise DraftwellError("the trace contains no judged draft token: collect longer texts of the kind target", code="no_judged_tokens")
    bins = np.searchsorted(np.array(EDGES), confidence, side="right")  # as `AcceptanceTable.bin_of`
    total, kept = (np.bincount(found, minlength=len(EDGES) + 1).tolist() for found in (bins, bins[accepted]))
    metrics = {"judged": float(len(accepted)), "acceptance_rate": float(accepted.mean())}
    if log:
        for name, value in metrics.items():
            log(name, value, 0)
    made = provenance.model_copy(update={"parameters": {**provenance.parameters, "counting": COUNTING},
                                         "metrics": {**provenance.metrics, **metrics}})
    return AcceptanceTable(total, kept, made)


def greedy_rows(trace: TraceSet | pa.Table) -> pa.Table:
    """The rows of the target's own greedy texts, for `judged_tokens`.

    Raises:
        DraftwellError: no text of the target, sampled texts (`sampled_trace`), no draft tokens, or values that are not finite.
    """
    import pyarrow.compute as pc

    rows = targets_own(trace.read(COLUMNS) if isinstance(trace, TraceSet) else trace)
    # In a sampled trace a draft token is drawn apart from the text: whether it is the text's says too little about min(1, p/q).
    if (hottest := pc.max(rows.column("temperature")).as_py()) > 0:
        raise TraceError(f"the trace was sampled at temperature {hottest:g}, but acceptance is counted on greedy texts: collect one at "
                         "temperature 0 (`draftwell collect --temperature 0`)", code="sampled_trace")
    if any(rows.column(name).null_count for name in ("token", "draft_token", "confidence")):
        raise TraceError("the trace lacks the draft's token at some positions of the target's texts, as what a server records may: collect "
                         "one (`draftwell collect`)", code="no_draft_tokens")
    check_finite("confidence", rows.column("confidence").to_numpy(zero_copy_only=False))
    return rows


def judged_tokens(rows: pa.Table) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every judged draft token, once.

    Args:
        rows: of `greedy_rows`.
    Returns:
        `[n]` each: prompt id, confidence C (float64), and whether the target accepts the token (bool).
    """
    names = ("prompt_id", "position", "confidence", "token", "draft_token")
    prompt, position, confidence, token, drafted = (rows.column(name).to_numpy(zero_copy_only=False) for name in names)
    judged = is_judged(position)
    return prompt[judged], confidence[judged].astype(np.float64), (drafted == token)[judged]


def is_judged(position: np.ndarray) -> np.ndarray:
    """`[n]` bool: whether speculative decoding judges a draft token at a position of a text; the pass over the prompt gives the first."""
    found: np.ndarray = position > 0
    return found
