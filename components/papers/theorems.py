"""SPRINTER's theorems 3.1, 3.3 and 3.4 beside what a verifier does: with its measured η_FP and η_TP
they say how long it trusts the draft, and how far its texts are from the target's, if its mistakes
are independent of each other and of the token.

    python -m draftwell.components.papers.theorems TRACE VERIFIER

reads a trace of prompts that the verifier was not trained on, whose texts draft and target wrote in
turn: `draftwell step collect --set prefix_kinds=mixed --set temperature=1`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import typer

from draftwell.components.report.intervals import bootstrap_of_sums
from draftwell.components.report.tables import markdown
from draftwell.components.train.metrics import RESAMPLES
from draftwell.components.train.operating_points import (
    ScoredTokens,
    confidence_rule,
    scored_tokens,
)
from draftwell.serving.artifacts.verifier import Verifier
from draftwell.serving.errors import DraftwellError
from draftwell.serving.recording.trace import TraceSet

SHARES = (0.1, 0.5)
"""η_FP at which scores are looked at."""
COLUMNS = (
    *("score", "τ", "η_FP", "η_TP"),
    *("trusted tokens", "over theorem 3.3"),
    *("distance from the target", "over theorem 3.1"),
)


def expected_run(
    eta_tp: float, eta_fp: float, acceptable: np.ndarray, room: np.ndarray | float = np.inf
) -> np.ndarray:
    """Tokens that a verifier trusts in a row, of a draft that begins with `acceptable` good ones
    and continues with bad ones (Eq. 3), where its text has room for so many. Theorem 3.4's time is
    one draft pass more.

    >>> expected_run(0.5, 0.0, np.array([0, 1, 2])).tolist()
    [0.0, 0.5, 0.75]
    """
    good, bad = np.minimum(acceptable, room), np.maximum(room - acceptable, 0)
    return powers(eta_tp, good) + eta_tp**good * powers(eta_fp, bad)


def powers(share: float, count: np.ndarray) -> np.ndarray:
    """The sum of the first `count` powers of a share, from the first on."""
    if share == 1:
        return count
    found: np.ndarray = share * (1 - share**count) / (1 - share)
    return found


class Stretches(NamedTuple):
    """Drafts that begin with a text or behind a token that is not trusted, up to the next such one.

    Args:
        prompt: `[n]` ids of the prompts.
        trusted: `[n]` tokens in a row that the score trusts.
        acceptable: `[n]` tokens in a row that are good, whether trusted or not.
        room: `[n]` tokens up to the text's end, which cuts both off.
    """

    prompt: np.ndarray
    trusted: np.ndarray
    acceptable: np.ndarray
    room: np.ndarray


def stretches_of(tokens: ScoredTokens, threshold: float) -> Stretches:
    """Of a trace's texts."""
    kept, good = tokens.score >= threshold, tokens.rejected < 0.5
    starts = np.flatnonzero(tokens.begins | np.concatenate([[True], ~kept[:-1]]))
    ends = np.append(np.flatnonzero(tokens.begins)[1:], len(kept))
    room = ends[np.searchsorted(ends, starts, side="right")] - starts
    trusted, acceptable = (np.minimum(in_a_row(flags)[starts], room) for flags in (kept, good))
    return Stretches(tokens.prompt[starts], trusted, acceptable, room)


def in_a_row(flags: np.ndarray) -> np.ndarray:
    """For each place how many flags in a row are set from there on.

    >>> in_a_row(np.array([True, True, False, True])).tolist()
    [2, 1, 0, 1]
    """
    unset = np.flatnonzero(~flags)
    place = np.arange(len(flags))
    following = np.append(unset, len(flags))[np.searchsorted(unset, place)]
    found: np.ndarray = following - place
    return found


class Compared(NamedTuple):
    """What was measured, what the theorem says with the score's own rates, and the ratio of both
    with the ends of its 95 % interval (a bootstrap over prompts, the rates being what they are)."""

    measured: float
    predicted: float
    ratio: float
    low: float
    high: float

    @property
    def words(self) -> str:
        """The ratio with its interval."""
        return f"{self.ratio:.2f} [{self.low:.2f}, {self.high:.2f}]"


def compared(prompt: np.ndarray, measured: np.ndarray, predicted: np.ndarray) -> Compared:
    """Two columns of rows, by their means."""
    place = np.unique(prompt, return_inverse=True)[1]
    sums = np.stack([np.bincount(place, one) for one in (measured, predicted)], axis=1)

    def ratio(of: np.ndarray) -> np.ndarray:
        return np.asarray(of[..., 0] / of[..., 1])[..., None]

    low, high = bootstrap_of_sums(sums, ratio, resamples=RESAMPLES)
    both = float(measured.mean()), float(predicted.mean())
    return Compared(*both, float(ratio(sums.sum(0))[0]), float(low[0]), float(high[0]))


def rates_of(tokens: ScoredTokens, threshold: float) -> tuple[float, float]:
    """η_FP and η_TP of a score.

    Raises:
        DraftwellError: the trace has only good tokens, or only bad ones.
    """
    point = tokens.at(threshold)
    if point.eta_fp is None or point.eta_tp is None:
        raise DraftwellError(
            "the trace has no tokens to be rejected, or no others: collect more prompts",
            code="empty_trace",
        )
    return point.eta_fp, point.eta_tp


def runs(tokens: ScoredTokens, threshold: float) -> Compared:
    """Tokens in a row that are trusted, beside theorem 3.3, which takes all tokens behind the first
    bad one for bad."""
    eta_fp, eta_tp = rates_of(tokens, threshold)
    found = stretches_of(tokens, threshold)
    expected = expected_run(eta_tp, eta_fp, found.acceptable, found.room)
    return compared(found.prompt, found.trusted, expected)


def distances(tokens: ScoredTokens, threshold: float) -> Compared:
    """The total variation between the target's law and that of SPRINTER's tokens, beside theorem
    3.1. By importance: of tokens that the draft drew, those that the target would reject and the
    score trusts."""
    eta_fp, _ = rates_of(tokens, threshold)
    apart = 1 - tokens.accepted.astype(np.float64)
    return compared(tokens.prompt, apart * (tokens.score >= threshold), eta_fp * apart)


def rows_of(name: str, tokens: ScoredTokens, threshold: float) -> list[str]:
    """A row of the table."""
    eta_fp, eta_tp = rates_of(tokens, threshold)
    cells = [name, f"{threshold:.3f}", f"{eta_fp:.3f}", f"{eta_tp:.3f}"]
    run, apart = runs(tokens, threshold), distances(tokens, threshold)
    return [*cells, f"{run.measured:.2f}", run.words, f"{apart.measured:.3f}", apart.words]


def main(
    trace: Annotated[Path, typer.Argument(help="Folder of the trace.")],
    verifier: Annotated[Path, typer.Argument(help="Folder of the verifier.")],
) -> None:
    """The theorems' figures beside measured ones, as a Markdown table."""
    own = Verifier.load(verifier)
    scores = {"verifier": own, "confidence": confidence_rule(own.provenance)}
    tokens = scored_tokens(TraceSet(trace), scores, kinds=("mixed",))
    typer.echo(
        markdown(
            COLUMNS,
            [
                rows_of(name, one, one.at_eta_fp(share).threshold)
                for share in SHARES
                for name, one in tokens.items()
            ],
        )
    )


if __name__ == "__main__":
    typer.run(main)
