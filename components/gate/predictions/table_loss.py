"""How well an acceptance table predicts which draft tokens the target keeps, on prompts that it has
not counted.

A table that was counted on the very trace is judged by leaving out one prompt at a time: each
prompt is predicted by the counts of the others, which are the table's less the prompt's own.
Otherwise the prompts that it records are left out of the trace.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from draftwell.components.calibrate.judged_tokens import greedy_tokens, sampled_tokens
from draftwell.components.collect.plan import prompt_hashes
from draftwell.components.gate.predictions.learnt_prompts import (
    UnseenPrompts,
    for_other_requests,
    learnt_by_hash,
)
from draftwell.components.gate.predictions.losses import PredictiveLoss, log_loss
from draftwell.serving.artifacts.acceptance_table import EDGES, AcceptanceTable
from draftwell.serving.artifacts.kinds import temperature_of
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.temperature import class_of


def table_prediction(
    table: AcceptanceTable, rival: AcceptanceTable | None, trace: TraceSet
) -> tuple[PredictiveLoss, list[str]]:
    """Two tables over the tokens that speculative decoding judges in the target's own texts; with
    notes.

    Args:
        table: greedy counts, or those for sampled requests: then the trace is of their temperature.
        rival: the champion's; None, or one that is for other temperatures, gives way to an empty
            one.
    Raises:
        DraftwellError: as in `greedy_tokens` or `sampled_tokens`, or the table has counted all
            prompts of a trace that it was not counted on (`no_untouched_prompts`).
    """
    temperature = temperature_of(table) or 0.0
    tokens = (
        sampled_tokens(trace, temperature)
        if class_of(temperature) == "sampled"
        else greedy_tokens(trace)
    )
    prompts, confidence, kept = tokens.prompt, tokens.confidence, tokens.accepted
    why = None if rival is None else for_other_requests(table, rival)
    against, other = "the champion's", rival
    if other is None or why is not None:
        against, other = "an empty table's", AcceptanceTable.empty()
    names, hashes, digest = (
        list(dict.fromkeys(prompts.tolist())),
        prompt_hashes(trace),
        trace.digest(),
    )
    mine, theirs = (
        set[str]() if counted_on(one, digest) else learnt_by_hash(one, names, hashes)
        for one in (table, other)
    )
    chosen = UnseenPrompts.choose(table.kind, names, mine, theirs or ())
    rows = [(confidence[prompts == name], kept[prompts == name]) for name in chosen.names]
    found = PredictiveLoss(
        table.kind,
        losses_of(table, rows, counted_on(table, digest)),
        losses_of(other, rows, counted_on(other, digest)),
        tuple(len(accepted) for _, accepted in rows),
        against,
        chosen.favours_champion,
    )
    return found, [
        *([f"acceptance_table compared with an empty one: {why}"] if why else []),
        *chosen.notes,
    ]


def counted_on(table: AcceptanceTable, digest: str) -> bool:
    """Whether a table was counted on just this trace."""
    return table.provenance.trace_digest == digest


def losses_of(
    table: AcceptanceTable, rows: Sequence[tuple[np.ndarray, np.ndarray]], counted: bool
) -> tuple[float, ...]:
    """A table's log loss on every prompt, nats.

    Args:
        rows: of every prompt the confidences and how likely the target kept the tokens, `[tokens]`
            each.
        counted: the table has counted them: each prompt is predicted without its own.
    """
    found = []
    for confidence, kept in rows:
        left = without(table, confidence, kept) if counted else table
        found.append(log_loss(np.array([left.alpha(c) for c in confidence.tolist()]), kept))
    return tuple(found)


def without(table: AcceptanceTable, confidence: np.ndarray, kept: np.ndarray) -> AcceptanceTable:
    """A table less some tokens that it has counted; no count falls below 0, whatever a table says
    that it was counted on.

    >>> left = without(
    ...     AcceptanceTable(
    ...         [0, 3] + [0] * 18, [0, 2] + [0] * 18, AcceptanceTable.empty().provenance
    ...     ),
    ...     np.array([0.15, 0.15]),
    ...     np.array([True, False]),
    ... )
    >>> left.total[1], left.accepted[1]
    (1, 1)
    """
    bins = np.searchsorted(np.array(EDGES), confidence, side="right")  # as `AcceptanceTable.bin_of`
    own, own_kept = (
        np.bincount(bins, weights=some, minlength=len(EDGES) + 1)
        for some in (np.ones(len(bins)), kept)
    )
    total = np.maximum(np.array(table.total) - own.astype(int), 0)
    accepted = np.clip(np.array(table.accepted) - own_kept.round().astype(int), 0, total)
    return table.with_counts(total.tolist(), accepted.tolist())
