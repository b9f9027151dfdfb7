"""SPIDE's acceptance table, counted from a trace: how often is a draft token accepted, by the
draft's confidence?

**Each judged position is counted once.** A draft token is judged only if all before it were kept,
so its prefix is the target's own greedy text: its confidence and whether it is kept are facts of
the position, whichever draft it came in. SPIDE's loop with overlap has no bonus token, so it judges
every position of a text but the first, which the pass over the prompt decides; that is what is
counted, and what `update` would count in such a run. A serial loop also skips the position after a
draft that was kept as a whole. Which ones those are depends on tau and on the table itself; a table
serves every tau, so they are counted too.

**For sampled requests** the trace is one of sampled texts. Their prefixes follow the target's
distribution, whatever the draft does, and at each the trace holds a token x that the draft drew,
apart from the text. Such a token is kept with probability min(1, p(x)/q(x)), of the warped
distributions; that is what is summed for the bin of C, which reads the raw one, and rounded to a
whole number in each bin. The expectation is that of counting real runs, without the chance of their
draws.

To begin a draft at every position and follow it to its first rejection, as was done before, counts
a position once for each draft that reaches it: up to K times behind a run of kept tokens, and those
are the easy ones, so alpha was too high.

What the counts weigh beside the prior is estimated from the same trace (`prior_weight`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from draftwell.components.calibrate.judged_tokens import JudgedTokens, greedy_tokens, sampled_tokens
from draftwell.components.calibrate.prior_weight import estimate_prior_weight
from draftwell.serving.artifacts.acceptance_table import EDGES, AcceptanceTable
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.recording.trace import TraceSet

if TYPE_CHECKING:
    import pyarrow as pa

GREEDY, SAMPLED = "greedy counts", "sampled counts"
"""Parts of a table, where one does not record its prompts."""


def build_acceptance_table(trace: TraceSet | pa.Table, provenance: Provenance) -> AcceptanceTable:
    """Count, for every confidence bin, the draft tokens that greedy speculative decoding judges,
    and those of them that it accepts.

    Raises:
        DraftwellError: as in `greedy_tokens`.
    """
    return counted(greedy_tokens(trace), provenance)


def build_sampled_table(
    trace: TraceSet, provenance: Provenance, temperature: float
) -> AcceptanceTable:
    """The same for sampled requests: what speculative decoding accepts, in expectation, of the
    draft tokens that it judges.

    Args:
        temperature: above 0; the trace's must be the same.
    Raises:
        DraftwellError: as in `sampled_tokens`.
    """
    return counted(sampled_tokens(trace, temperature), provenance)


def with_sampled(table: AcceptanceTable, sampled: AcceptanceTable | None) -> AcceptanceTable:
    """A table with other counts for sampled requests, or as it is; its provenance names them, and
    the prompts of both."""
    if sampled is None:
        return table
    made, theirs = table.provenance, sampled.provenance
    lacking = [
        name
        for name, origin in ((GREEDY, made), (SAMPLED, theirs))
        if origin.training_prompts is None
    ]
    prompts = sorted({*(made.training_prompts or ()), *(theirs.training_prompts or ())})
    metrics = {f"sampled_{name}": value for name, value in rates(sampled).items()}
    both = made.model_copy(
        update={
            "parameters": {
                **made.parameters,
                "sampled_temperature": theirs.parameters["temperature"],
            },
            "metrics": {**made.metrics, **metrics},
            "training_prompts": None if lacking == [GREEDY, SAMPLED] else prompts,
            "unknown_prompts": sorted({*made.unknown_prompts, *theirs.unknown_prompts, *lacking}),
        }
    )
    return AcceptanceTable(
        table.total, table.accepted, both, sampled, prior_weight=table.prior_weight
    )


def counted(tokens: JudgedTokens, provenance: Provenance) -> AcceptanceTable:
    """The table of judged tokens, with the prior weight that they ask for."""
    # as `AcceptanceTable.bin_of`
    bins = np.searchsorted(np.array(EDGES), tokens.confidence, side="right")
    total = np.bincount(bins, minlength=len(EDGES) + 1).tolist()
    kept = (
        np.bincount(bins, weights=tokens.accepted, minlength=len(EDGES) + 1)
        .round()
        .astype(int)
        .tolist()
    )
    weight = estimate_prior_weight(tokens.task, tokens.prompt, tokens.confidence, tokens.accepted)
    metrics = {
        "judged": float(len(bins)),
        "acceptance_rate": float(tokens.accepted.mean()),
        "prior_weight": float(weight.tokens),
    }
    made = provenance.extended({"prior_weight_from": weight.basis}, metrics)
    return AcceptanceTable(total, kept, made, prior_weight=weight.tokens)


def rates(table: AcceptanceTable) -> dict[str, float]:
    """What the registry compares of a table's counts."""
    judged = sum(table.total)
    return {
        "judged": float(judged),
        "acceptance_rate": sum(table.accepted) / max(1, judged),
        "prior_weight": float(table.prior_weight),
    }
