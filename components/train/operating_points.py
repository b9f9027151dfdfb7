"""Where two scores cost the same: SPRINTER's verifier and the draft's confidence at one run length
and at one η_FP.

A threshold means nothing by itself: class weights and scaling move it, and some threshold gives any
speed. So scores are compared where they ask the target equally often (which of them lets fewer bad
tokens pass?), and where they let as many bad tokens pass (which asks the target less often?). Both
are read from a trace, without a model.

Runs are counted along the trace's texts: a run lasts while the score of the draft's token is at
least τ; the target judges the first token below it, or the last of a run at its cap, and the next
run begins behind it. Texts of kind `mixed` are those that SPRINTER meets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from scipy.special import expit

from draftwell.components.collect.trace_columns import column
from draftwell.components.report.intervals import bootstrap_of_sums
from draftwell.components.train.examples import Examples, VerifierLabel, read_examples
from draftwell.components.train.metrics import RESAMPLES
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
        prompt: `[rows]` ids of the prompts.
        max_run: SPRINTER's cap.
    """

    score: np.ndarray
    begins: np.ndarray
    accepted: np.ndarray
    rejected: np.ndarray
    prompt: np.ndarray
    max_run: int = MAX_RUN

    def at(self, threshold: float) -> OperatingPoint:
        """What it does at a threshold."""
        run, eta_fp, eta_tp = figures_of(self.counts(threshold).sum(0)).tolist()
        return OperatingPoint(
            float(threshold),
            run,
            *(None if math.isnan(share) else share for share in (eta_fp, eta_tp)),
        )

    def counts(self, threshold: float) -> np.ndarray:
        """`[prompts, 6]` in the order of their ids: tokens that stay and target calls; tokens to be
        rejected that are kept, and all of them; the others that are kept, and all of them."""
        kept = self.score >= threshold
        row = np.arange(len(kept))
        # a stretch of kept tokens begins with a text and behind a token that is not kept
        fresh = self.begins | np.concatenate([[True], ~kept[:-1]])
        place = row - np.maximum.accumulate(np.where(fresh, row, 0)) + 1
        judged = ~kept | (place % self.max_run == 0)
        stays = np.where(judged, self.accepted, 1.0)
        rows = [stays, judged, *(part for side in self._sides for part in (kept * side, side))]
        place_of = self._places
        return np.stack([np.bincount(place_of, one) for one in rows], axis=1)

    @cached_property
    def _sides(self) -> tuple[np.ndarray, np.ndarray]:
        return self.rejected, 1 - self.rejected

    @cached_property
    def _places(self) -> np.ndarray:
        return np.unique(self.prompt, return_inverse=True)[1]

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


def figures_of(counts: np.ndarray) -> np.ndarray:
    """`[..., 6]` sums as in `ScoredTokens.counts` → `[..., 3]` run length, η_FP and η_TP; NaN of
    nothing."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found: np.ndarray = counts[..., 0::2] / counts[..., 1::2]
    return found


def difference(
    figure: Literal["run_length", "eta_fp"],
    one: tuple[ScoredTokens, OperatingPoint],
    other: tuple[ScoredTokens, OperatingPoint],
) -> tuple[float, float, float]:
    """A figure of one score at its point less that of another at its own, with the ends of its
    95 % interval: a paired bootstrap over prompts, the thresholds being what they are."""
    column_of = {"run_length": 0, "eta_fp": 1}[figure]
    both = np.concatenate(
        [tokens.counts(point.threshold) for tokens, point in (one, other)], axis=1
    )

    def measure(sums: np.ndarray) -> np.ndarray:
        first, second = (figures_of(sums[..., i : i + 6])[..., column_of] for i in (0, 6))
        return np.asarray(first - second)[..., None]

    low, high = bootstrap_of_sums(both, measure, resamples=RESAMPLES)
    return float(measure(both.sum(0))[0]), float(low[0]), float(high[0])


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
            scores_of(verifier, examples),
            begins,
            examples.accepted,
            rejected,
            examples.prompt,
            max_run,
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
