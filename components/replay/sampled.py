"""Replay of sampled texts: what a strategy does at temperature > 0, on average.

A text that a lossless strategy samples follows the target's distribution, whatever the draft does.
Given its token x at a tested position, the draft had drawn x too with probability min(1,
q(x)/p(x)), independently at every position: the exact rule emits x with probability min(p(x), q(x))
as an accepted token and max(0, p(x) − q(x)) as a recovered one (Leviathan 2023, Appendix A.1). A
rejected token follows norm(max(0, q − p)), independently of x, and never equals it. A trace holds
one such token for every position, with the draft's sampled continuation. So a random draw decides
for every position whether the draft had drawn x or the rejected token, and from there the strategy
is replayed as at temperature 0. Every position is tested at most once in a generation, so each draw
is used once. The replay has exactly the distribution of a real run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from draftwell.components.replay.texts import COLUMNS, Texts, read_texts, target_rows, text_of
from draftwell.components.replay.traced_text import TracedText
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.recording.trace_schema import TraceError

SAMPLED_COLUMNS = (*COLUMNS, "text_q", "text_p", "text_raw_q", "rollout_q")
DRAWS = (0, 1)
"""Seeds of the random draws that a search replays: the same for every strategy, so that all are
compared on the same drafts."""
STREAM = 13
"""Number of this module's random stream, so that no seed is used for two purposes."""


@dataclass(frozen=True)
class SampledTexts:
    """The target's sampled texts of a trace.

    Args:
        rejected: the texts, every rollout of which starts with a token that the exact rule
            rejected.
        kept: `[text][continuation]`, min(1, q/p) of the text's own token.
        raw: `[text][continuation]`, its raw draft probability.
    """

    rejected: Texts
    kept: list[np.ndarray]
    raw: list[list[float]]

    def draw(self, seed: int) -> Texts:
        """The texts with the token that the draft had drawn at every position: the text's own, or
        the rejected one."""
        rng = np.random.default_rng([seed, STREAM])
        texts = [
            settled(text, (rng.random(len(kept)) < kept).tolist(), raw)
            for text, kept, raw in zip(self.rejected.texts, self.kept, self.raw, strict=True)
        ]
        return replace(self.rejected, texts=texts)

    def draws(self, seeds: Sequence[int]) -> Texts:
        """Every text once for each seed, so that one replay of them gives means over texts and
        draws.

        A strategy's online state continues from draw to draw, as it does from text to text.
        """
        return replace(
            self.rejected, texts=[text for seed in seeds for text in self.draw(seed).texts]
        )


def settled(text: TracedText, accepted: list[bool], raw: list[float]) -> TracedText:
    """A text on which the draft had drawn the text's own token where `accepted`; only its first
    values are read there."""

    def pick(rejected: list[list[Any]], mine: list[Any] | None = None) -> list[list[Any]]:
        return [
            [mine[i] if mine else row[0]] if accepted[i] else row for i, row in enumerate(rejected)
        ]

    assert text.raw is not None
    return replace(
        text,
        tokens=pick(text.tokens, text.output),
        confidence=pick(text.confidence),
        entropy=pick(text.entropy),
        raw=pick(text.raw, raw),
    )


def read_sampled(trace: TraceSet, limit: int | None = None) -> SampledTexts:
    """The target's own sampled texts of a trace.

    Raises:
        TraceError: it was collected at temperature 0 (`greedy_trace`), or holds no such text.
    """
    header = trace.header
    if header.temperature == 0:
        raise TraceError(
            f"{trace.folder} was collected at temperature 0: replay it with `replay_strategy`",
            code="greedy_trace",
        )
    columns, parts = target_rows(trace, SAMPLED_COLUMNS)
    parts = parts[:limit]
    texts = [replace(text_of(columns, part), raw=columns["rollout_q"][part]) for part in parts]
    rejected = Texts(
        texts,
        header.max_tokens,
        frozenset(header.stop_token_ids),
        header.rollout,
        header.temperature,
    )
    return SampledTexts(
        rejected,
        [ratio(columns, part) for part in parts],
        [columns["text_raw_q"][part] for part in parts],
    )


def ratio(columns: Mapping[str, list[Any]], part: slice) -> np.ndarray:
    """min(1, q/p) of the text's tokens; where p was rounded to 0 (a tie at the edge of top-k), 1 if
    the draft can draw the token."""
    draft, target = (
        np.array(columns["text_q"][part], dtype=float),
        np.array(columns["text_p"][part], dtype=float),
    )
    quotient: np.ndarray = np.divide(draft, target, out=(draft > 0).astype(float), where=target > 0)
    return np.minimum(1.0, quotient)


def texts_of(trace: TraceSet) -> Texts:
    """The texts of a trace that a search replays: greedy ones as they are, of sampled ones `DRAWS`.

    Raises:
        TraceError: as in `read_texts` and `read_sampled`.
    """
    if trace.header.temperature == 0:
        return read_texts(trace)
    return read_sampled(trace).draws(DRAWS)
