"""SPIDE's Figure 4: how often the target keeps the draft's first choice, by its confidence."""

from __future__ import annotations

import pytest

from draftwell.components.papers.confidence import BINS, counts_of, share_kept
from draftwell.components.replay.traced_text import TracedText
from draftwell.serving.artifacts.acceptance_table import AcceptanceTable


def text(tokens: list[list[int]], confidence: list[list[float]]) -> TracedText:
    """A prompt of two tokens and the target's 5 6 7 8."""
    return TracedText("a", [1, 2, 5, 6, 7, 8], 2, tokens, confidence, [])


def test_the_drafts_first_choice_is_counted_at_every_place() -> None:
    """Also behind a place where it was wrong; later tokens of a rollout, right or not, are not."""
    counts = counts_of(
        text([[5, 6], [9, 7], [7, 9], []], [[0.95, 0.1], [0.85, 0.9], [0.86, 0.2], []])
    )
    found = {b: count for b, count in enumerate(counts) if count != (0, 0)}
    assert found == {AcceptanceTable.bin_of(0.95): (1, 1), AcceptanceTable.bin_of(0.86): (2, 1)}


def test_a_share_is_of_all_texts_with_an_interval_over_them() -> None:
    texts = []
    for kept in (8, 9, 10):
        counts = [(0, 0)] * BINS
        counts[8] = (10, kept)
        texts.append(tuple(counts))
    found = share_kept(texts, 8)
    assert found is not None
    assert found.value == pytest.approx(0.9)
    assert found.low == pytest.approx(0.8, abs=0.05)
    assert found.high == pytest.approx(1.0, abs=0.05)
    assert share_kept(texts, 0) is None
