"""SPIDE's acceptance table, counted from a trace: how often is a draft token accepted, by the draft's confidence?

**Each judged position is counted once.** A draft token is judged only if all before it were kept, so its prefix is the target's own greedy
text: its confidence and whether it is kept are facts of the position, whichever draft it came in. SPIDE's loop with overlap has no bonus
token, so it judges every position of a text but the first, which the pass over the prompt decides; that is what is counted, and what
`update` would count in such a run. A serial loop also skips the position after a draft that was kept as a whole. Which ones those
are depends on tau and on the table itself; a table serves every tau, so they are counted too.

**For sampled requests** the trace is one of sampled texts. Their prefixes follow the target's distribution, whatever the draft does, and at
each the trace holds a token x that the draft drew, apart from the text. Such a token is kept with probability min(1, p(x)/q(x)), of the
warped distributions; that is what is summed for the bin of C, which reads the raw one, and rounded to a whole number in each bin. The
expectation is that of counting real runs, without the chance of their draws.

To begin a draft at every position and follow it to its first rejection, as was done before, counts a position once for each draft that
reaches it: up to K times behind a run of kept tokens, and those are the easy ones, so alpha was too high.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from components.collect.trace_checks import check_temperature, targets_own
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
SAMPLED_COLUMNS = ("prompt_id", "kind", "position", "confidence", "draft_q", "draft_p")
GREEDY, SAMPLED = "greedy counts", "sampled counts"
"""Parts of a table, where one does not record its prompts."""
COUNTING = "judged once"
"""How tables are counted, in their provenance; those of earlier releases lack the parameter and counted a position up to K times."""


def build_acceptance_table(trace: TraceSet | pa.Table, provenance: Provenance, *, log: Log | None = None) -> AcceptanceTable:
    """Count, for every confidence bin, the draft tokens that greedy speculative decoding judges, and those of them that it accepts.

    Raises:
        DraftwellError: as in `greedy_rows`, or no token was judged (`no_judged_tokens`).
    """
    _, confidence, accepted = judged_tokens(greedy_rows(trace))
    table = counted(confidence, accepted.astype(np.float64), provenance)
    if log:
        for name, value in table.provenance.metrics.items():
            log(name, value, 0)
    return table


def build_sampled_table(trace: TraceSet, provenance: Provenance, temperature: float) -> AcceptanceTable:
    """The same for sampled requests: what speculative decoding accepts, in expectation, of the draft tokens that it judges.

    Args:
        temperature: above 0; the trace's must be the same.
    Raises:
        DraftwellError: a trace of another temperature, or of a part of the vocabulary (`trace_of_another_temperature`), no text of the
            target, no draft tokens (`no_draft_tokens`), values that are not finite, or no token was judged (`no_judged_tokens`).
    """
    check_temperature(trace, temperature)
    rows = targets_own(trace.read(SAMPLED_COLUMNS))
    check_drafted(rows, ("draft_q", "draft_p", "confidence"))
    position, confidence, draft, target = (rows.column(name).to_numpy(zero_copy_only=False).astype(np.float64)
                                           for name in ("position", "confidence", "draft_q", "draft_p"))
    judged = is_judged(position)
    return counted(confidence[judged], np.minimum(1.0, target[judged] / draft[judged]), provenance)  # what was drawn has draft > 0


def with_sampled(table: AcceptanceTable, sampled: AcceptanceTable | None) -> AcceptanceTable:
    """A table with other counts for sampled requests, or as it is; its provenance names them, and the prompts of both."""
    if sampled is None:
        return table
    made, theirs = table.provenance, sampled.provenance
    lacking = [name for name, origin in ((GREEDY, made), (SAMPLED, theirs)) if origin.training_prompts is None]
    prompts = sorted({*(made.training_prompts or ()), *(theirs.training_prompts or ())})
    metrics = {f"sampled_{name}": value for name, value in rates(sampled.total, sampled.accepted).items()}
    both = made.model_copy(update={
        "parameters": {**made.parameters, "sampled_temperature": theirs.parameters["temperature"]},
        "metrics": {**made.metrics, **metrics},
        "training_prompts": None if lacking == [GREEDY, SAMPLED] else prompts,
        "unknown_prompts": sorted({*made.unknown_prompts, *theirs.unknown_prompts, *lacking})})
    return AcceptanceTable(table.total, table.accepted, both, sampled)


def counted(confidence: np.ndarray, accepted: np.ndarray, provenance: Provenance) -> AcceptanceTable:
    """The table of judged tokens.

    Args:
        confidence, accepted: `[n]` float64, C and how likely each was to be kept: 0 or 1 of greedy texts.
    Raises:
        DraftwellError: there is no token (`no_judged_tokens`).
    """
    if not len(accepted):
        raise DraftwellError("the trace contains no judged draft token: collect longer texts of the kind target", code="no_judged_tokens")
    bins = np.searchsorted(np.array(EDGES), confidence, side="right")  # as `AcceptanceTable.bin_of`
    total = np.bincount(bins, minlength=len(EDGES) + 1).tolist()
    kept = np.bincount(bins, weights=accepted, minlength=len(EDGES) + 1).round().astype(int).tolist()
    metrics = {"judged": float(len(accepted)), "acceptance_rate": float(accepted.mean())}
    made = provenance.model_copy(update={"parameters": {**provenance.parameters, "counting": COUNTING},
                                         "metrics": {**provenance.metrics, **metrics}})
    return AcceptanceTable(total, kept, made)


def rates(total: Sequence[int], accepted: Sequence[int]) -> dict[str, float]:
    """What the registry compares of counts by bin."""
    return {"judged": float(sum(total)), "acceptance_rate": sum(accepted) / max(1, sum(total))}


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
    check_drafted(rows, ("token", "draft_token", "confidence"))
    return rows


def check_drafted(rows: pa.Table, names: Sequence[str]) -> None:
    """Refuse rows that lack one of these columns somewhere, or the confidence of which is not finite."""
    if any(rows.column(name).null_count for name in names):
        raise TraceError("the trace lacks the draft's token at some positions of the target's texts, as what a server records may: collect "
                         "one (`draftwell collect`)", code="no_draft_tokens")
    check_finite("confidence", rows.column("confidence").to_numpy(zero_copy_only=False))


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
