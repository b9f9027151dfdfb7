"""The draft tokens of a trace that speculative decoding judges, each position once, with how likely
the target was to keep them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from draftwell.components.collect.repeated_prompts import first_of_the_same
from draftwell.components.collect.trace_checks import check_temperature, targets_own
from draftwell.components.collect.trace_columns import check_finite
from draftwell.serving.errors import DraftwellError
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.recording.trace_schema import TraceError

if TYPE_CHECKING:
    import pyarrow as pa

PLACE = ("prompt_id", "task", "kind", "position", "prompt_tokens", "confidence")
COLUMNS = (*PLACE, "temperature", "token", "draft_token")
SAMPLED_COLUMNS = (*PLACE, "draft_q", "draft_p")


@dataclass(frozen=True)
class JudgedTokens:
    """Judged draft tokens of the target's own texts.

    Args:
        prompt: `[n]` id of the prompt; of several with the same tokens, the first one's.
        task: `[n]` the prompt's task, None where it names none.
        confidence: `[n]` float64, C in 0..1.
        accepted: `[n]` float64, how likely the token was to be kept: 0 or 1 of greedy texts.
    """

    prompt: np.ndarray
    task: np.ndarray
    confidence: np.ndarray
    accepted: np.ndarray


def greedy_tokens(trace: TraceSet | pa.Table) -> JudgedTokens:
    """What greedy speculative decoding judges in the target's own greedy texts.

    Raises:
        DraftwellError: no text of the target, sampled texts (`sampled_trace`), no draft tokens,
            values that are not finite, or no token was judged (`no_judged_tokens`).
    """
    import pyarrow.compute as pc

    rows = targets_own(trace.read(COLUMNS) if isinstance(trace, TraceSet) else trace)
    # In a sampled trace a draft token is drawn apart from the text: whether it is the text's says
    # too little about min(1, p/q).
    if (hottest := pc.max(rows.column("temperature")).as_py()) > 0:
        raise TraceError(
            f"the trace was sampled at temperature {hottest:g}, but acceptance is counted "
            "on greedy texts: collect one at "
            "temperature 0 (`draftwell step collect --set temperature=0`)",
            code="sampled_trace",
        )
    check_drafted(rows, ("token", "draft_token", "confidence"))
    token, drafted = (values(rows, name) for name in ("token", "draft_token"))
    return judged(rows, (drafted == token).astype(np.float64))


def sampled_tokens(trace: TraceSet, temperature: float) -> JudgedTokens:
    """What speculative decoding judges at a temperature, in texts that were sampled at it; a token
    is kept with probability min(1, p/q).

    Args:
        temperature: above 0; the trace's must be the same.
    Raises:
        DraftwellError: a trace of another temperature, or of a part of the vocabulary
            (`trace_of_another_temperature`), no text of the target, no draft tokens
            (`no_draft_tokens`), values that are not finite, or no token was judged
            (`no_judged_tokens`).
    """
    check_temperature(trace, temperature)
    rows = targets_own(trace.read(SAMPLED_COLUMNS))
    check_drafted(rows, ("draft_q", "draft_p", "confidence"))
    draft, target = (values(rows, name).astype(np.float64) for name in ("draft_q", "draft_p"))
    return judged(rows, np.minimum(1.0, target / draft))  # what was drawn has draft > 0


def judged(rows: pa.Table, accepted: np.ndarray) -> JudgedTokens:
    """The rows that are judged, with how likely each row's token is kept, `[rows]`."""
    here = is_judged(values(rows, "position"))
    if not here.any():
        raise DraftwellError(
            "the trace contains no judged draft token: collect longer texts of the kind target",
            code="no_judged_tokens",
        )
    alike = first_of_the_same(rows)
    prompt = np.array([alike.get(name, name) for name in values(rows, "prompt_id")[here].tolist()])
    return JudgedTokens(
        prompt,
        values(rows, "task")[here],
        values(rows, "confidence")[here].astype(np.float64),
        accepted[here],
    )


def check_drafted(rows: pa.Table, names: Sequence[str]) -> None:
    """Refuse rows that lack one of these columns somewhere, or the confidence of which is not
    finite."""
    if any(rows.column(name).null_count for name in names):
        raise TraceError(
            "the trace lacks the draft's token at some positions of the target's texts, as "
            "what a server records may: collect "
            "one (`draftwell step collect`)",
            code="no_draft_tokens",
        )
    check_finite("confidence", rows.column("confidence").to_numpy(zero_copy_only=False))


def values(rows: pa.Table, name: str) -> np.ndarray:
    """`[rows]` a column; None in place of a missing text."""
    found: np.ndarray = rows.column(name).to_numpy(zero_copy_only=False)
    return found


def is_judged(position: np.ndarray) -> np.ndarray:
    """`[n]` bool: whether speculative decoding judges a draft token at a position of a text; the
    pass over the prompt gives the first."""
    found: np.ndarray = position > 0
    return found
