"""Where two scores cost the same: SPRINTER's verifier and the draft's confidence at one run length
and at one η_FP.

A threshold means nothing by itself: class weights and scaling move it, and some threshold gives any
speed. So scores are compared where they ask the target equally often (which of them lets fewer bad
tokens pass?), and where they let as many bad tokens pass (which asks the target less often?). Both
are read from a trace, without a model.

Runs are counted along the trace's texts: a run goes on while the score of the draft's token is at
least τ; the target judges the first token below it, or the last of a run at its cap, and the next
run begins behind it. Texts of kind `mixed` are those that SPRINTER meets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from scipy.special import expit

from draftwell.components.collect.trace_columns import column
from draftwell.components.train.examples import Examples, VerifierLabel, read_examples
from draftwell.components.train.metrics import rate
from draftwell.components.train.verifier import choose_threshold
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.verifier import SCALAR_NAMES, Verifier
from draftwell.serving.errors import DraftwellError
from draftwell.serving.recording.trace import TraceSet

if TYPE_CHECKING:
    import pyarrow as pa

MAX_RUN = 20
"""SPRINTER's cap."""
THRESHOLDS = 400
"""At most so many are tried for a run length, evenly spread over a trace's scores."""


class OperatingPoint(NamedTuple):
    """What a score does at a threshold.

    Args:
        threshold: τ, for `sprinter:tau=…` with the verifier that gave the scores.
        run_length: draft tokens that stay for each call of the target: trusted ones, and the judged
            one as often as the target keeps it (SPRINTER's "Avg Token", Table 2); inf where the
            target is never asked.
        eta_fp, eta_tp: share that the score keeps of the tokens to be rejected and of the others;
            None of none.
    """

    threshold: float
    run_length: float
    eta_fp: float | None
    eta_tp: float | None


@dataclass(frozen=True)
class ScoredTokens:
    """A trace's draft tokens as one score sees them, text by text in order.

    Args:
        score: `[rows]` in [0, 1].
        begins: `[rows]` whether a text begins here.
        accepted: `[rows]` chance that the target keeps the token when it judges it.
        rejected: `[rows]` how much it counts as one to be rejected (`VerifierLabel.rejected`).
        max_run: SPRINTER's cap.
    """

    score: np.ndarray
    begins: np.ndarray
    accepted: np.ndarray
    rejected: np.ndarray
    max_run: int = MAX_RUN

    def at(self, threshold: float) -> OperatingPoint:
        """What it does at a threshold."""
        kept = self.score >= threshold
        row = np.arange(len(kept))
        # a stretch of kept tokens begins with a text and behind a token that is not kept
        fresh = self.begins | np.concatenate([[True], ~kept[:-1]])
        place = row - np.maximum.accumulate(np.where(fresh, row, 0)) + 1
        judged = ~kept | (place % self.max_run == 0)
        calls = int(judged.sum())
        stay = float((~judged).sum() + self.accepted[judged].sum())
        return OperatingPoint(
            float(threshold),
            stay / calls if calls else math.inf,
            rate(kept, self.rejected),
            rate(kept, 1 - self.rejected),
        )

    def at_run_length(self, wanted: float) -> OperatingPoint:
        """Where the run length is nearest to the wanted one; of equally near thresholds the
        strictest."""
        scores = np.unique(self.score)
        picked = np.linspace(0, len(scores) - 1, min(len(scores), THRESHOLDS)).round().astype(int)
        tried = [self.at(t) for t in (np.nextafter(scores[-1], 2.0), *scores[picked][::-1])]
        return min(tried, key=lambda point: abs(point.run_length - wanted))

    def at_eta_fp(self, wanted: float) -> OperatingPoint:
        """The lowest threshold that keeps at most this share of the tokens to be rejected, as a
        verifier's own is chosen."""
        return self.at(choose_threshold(self.rejected, self.score, wanted))


class Comparison(NamedTuple):
    """Points of several scores, by name, at the same cost."""

    at_run_length: dict[str, OperatingPoint]
    at_eta_fp: dict[str, OperatingPoint]


def compare(tokens: Mapping[str, ScoredTokens], *, run_length: float, eta_fp: float) -> Comparison:
    """Scores of one trace at an equal run length, and at an equal η_FP.

    Args:
        tokens: name → the same tokens with that score (`scored_tokens`).
        run_length: SPRINTER's on Wiki-Summary is 11.1 (Table 2).
        eta_fp: share in [0, 1].
    """
    return Comparison(
        {name: one.at_run_length(run_length) for name, one in tokens.items()},
        {name: one.at_eta_fp(eta_fp) for name, one in tokens.items()},
    )


def scored_tokens(
    trace: TraceSet | pa.Table,
    verifiers: Mapping[str, Verifier],
    label: VerifierLabel | None = None,
    *,
    kinds: Sequence[str] | None = None,
    max_run: int = MAX_RUN,
) -> dict[str, ScoredTokens]:
    """A trace's draft tokens with the scores of each verifier; `confidence_rule` is one.

    Args:
        trace: of prompts on which no verifier was trained.
        label: says which tokens should be rejected; default: q̄/p̄ > 1, as in the paper.
        kinds: of the texts; None: all.
    Raises:
        DraftwellError: as in `read_examples`; the trace lacks a verifier's features
            (`no_hidden_states`), the target's chances (`no_probabilities`), or texts of these kinds
            (`empty_trace`).
    """
    examples, begins = read_examples(trace), first_positions(trace)
    if kinds is not None:
        chosen = np.isin(examples.kind if examples.kind is not None else [], list(kinds))
        if not chosen.any():
            raise DraftwellError(
                f"the trace holds no texts of kind {', '.join(kinds)}: collect some with "
                f"`draftwell step collect --set prefix_kinds={','.join(kinds)}`",
                code="empty_trace",
            )
        examples, begins = examples.take(chosen), begins[chosen]
    if examples.accepted is None:
        raise DraftwellError(
            "the trace lacks draft_p and draft_q, of which run lengths are made: collect it again",
            code="no_probabilities",
        )
    rejected = (label or VerifierLabel()).rejected(examples)
    return {
        name: ScoredTokens(
            scores_of(verifier, examples), begins, examples.accepted, rejected, max_run
        )
        for name, verifier in verifiers.items()
    }


def scores_of(verifier: Verifier, examples: Examples) -> np.ndarray:
    """`[rows]` float64, a verifier's scores of draft tokens."""
    absent = [name for name in verifier.features if name not in examples.parts]
    if absent:
        raise DraftwellError(
            f"the trace holds no hidden states for the feature {absent[0]!r}: collect it again "
            "with them",
            code="no_hidden_states",
        )
    weight = verifier.weight.double().numpy()
    logits = [block @ weight for block in examples.blocks(verifier.features)]
    score: np.ndarray = expit(np.concatenate(logits) + verifier.bias)
    return score


def confidence_rule(provenance: Provenance) -> Verifier:
    """The baseline "score = C" as a verifier, which SPRINTER can run with: its score is the sigmoid
    of the draft's confidence."""
    weight = torch.tensor([float(name == "confidence") for name in SCALAR_NAMES])
    return Verifier(weight, 0.0, ("scalars",), 0.5, 1.2, provenance)


def first_positions(trace: TraceSet | pa.Table) -> np.ndarray:
    """`[rows]` whether a text begins."""
    parts = trace.batches(["position"]) if isinstance(trace, TraceSet) else [trace]
    found: np.ndarray = np.concatenate([column(part, "position") == 0 for part in parts])
    return found
