"""What CSD's and SPRINTER's own rules take beside the passes of models: CSD's Figure 4.

    python -m draftwell.components.papers.overhead

Rows of random logits over the shipped pair's vocabulary stand for a pass: what the rules compute
does not depend on their values.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median, quantiles
from timeit import repeat

import torch

from draftwell.components.train.operating_points import confidence_rule
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.correction_memory import CorrectionMemory
from draftwell.serving.artifacts.verifier import Verifier
from draftwell.serving.runtime.acceptance.rescue import Rescue
from draftwell.serving.runtime.logits import Logits, Span

VOCABULARY, HIDDEN = 49_152, 576
"""Of the shipped pair."""
TIMES, REPEATS = 50, 40
NOBODY = Provenance(pair="", fingerprint="")


def csd_rejection(vocabulary: int = VOCABULARY) -> Callable[[], object]:
    """What CSD does at a rejected token behind the exact rule: look it up, pass it through the
    gate, and count it."""
    rows = Span.of(Logits(torch.randn(7, vocabulary)))
    memory = CorrectionMemory.empty()
    for _ in range(6):
        memory.update(3, 4)
    rule = Rescue(memory, 6, 0.01)
    _ = rows.top  # the exact rule asked for it

    def judge() -> object:
        found = [*rule.rescues(2, 3, 4, rows)]
        memory.update(3, 4)
        return found

    return judge


def sprinter_score(vocabulary: int = VOCABULARY, hidden: int = HIDDEN) -> Callable[[], object]:
    """What SPRINTER does at each token of its draft: score it, by a verifier that reads the
    draft's state and its probabilities."""
    verifier = Verifier(
        torch.randn(hidden + len(confidence_rule(NOBODY).weight)),
        0.0,
        ("before", "scalars"),
        0.5,
        1.2,
        NOBODY,
    )
    values, states = torch.randn(1, vocabulary), torch.randn(1, hidden)

    def score() -> object:
        # a pass of its own: nothing that it was asked before is kept
        return verifier.score_drafted(Span.of(Logits(values, states)), None, 3)

    return score


def spent(work: Callable[[], object], times: int = TIMES) -> tuple[float, float, float]:
    """How long one call takes, in microseconds: the median of the repeats, their lower and their
    upper decile."""
    work()
    found = [seconds / times * 1e6 for seconds in repeat(work, number=times, repeat=REPEATS)]
    deciles = quantiles(found, n=10, method="inclusive")
    return median(found), deciles[0], deciles[-1]


def main() -> None:
    """Time both rules."""
    torch.set_num_threads(1)
    for name, work in {
        "CSD, a rejected token": csd_rejection(),
        "SPRINTER, a drafted token": sprinter_score(),
    }.items():
        middle, low, high = spent(work)
        print(f"{name}: {middle:.1f} µs ({low:.1f} to {high:.1f})")


if __name__ == "__main__":
    main()
