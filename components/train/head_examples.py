"""Training data of the acceptance head: the draft's states in a mixture of the target's text and
its own tokens.

Along the target's own text X the draft's tokens Y are known (one after each prefix of X). In the
text that the draft reads, each token is X's with probability `mixing` and otherwise Y's, so that it
sees drafts as it will when it drafts. The state that has read a Y is an example, that of an X is
not.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from draftwell.components.collect.decoding import read_text
from draftwell.components.collect.trace_checks import targets_own
from draftwell.components.collect.trace_columns import check_finite, column
from draftwell.components.train.examples import Examples
from draftwell.serving.errors import DraftwellError
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.runtime.pair import LoadedPair

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS = (
    "prompt_id",
    "kind",
    "position",
    "prompt_tokens",
    "token",
    "draft_token",
    "draft_q",
    "draft_p",
    "ratio",
    "confidence",
)


def labels_of(examples: Examples) -> np.ndarray:
    """Soft labels `[rows]` float32 in [0, 1]: min(1, p̄/q̄); 0 where the target gives the token no
    probability."""
    with np.errstate(divide="ignore"):
        label: np.ndarray = np.minimum(1.0, 1.0 / examples.ratio).astype(np.float32)
    return label


def read_mixed(pair: LoadedPair, trace: TraceSet, mixing: float, seed: int) -> Examples:
    """An example for every draft token of the mixed texts; the feature group `after` is the draft's
    state having read it.

    `accepted` is the probability min(1, p/q) of the warped distributions: at temperature 0, whether
    it is the target's choice.
    """
    if "draft" not in pair.models:
        raise DraftwellError(
            (
                f"pair {pair.name} has no draft model, so there is nothing to train a head on: "
                "choose a pair with one"
            ),
            code="no_draft",
        )
    rng = np.random.default_rng(seed)
    parts = [mixed_text(pair, rows, mixing, rng) for rows in target_texts(trace.read(COLUMNS))]
    states, ratio, confidence, accepted, prompt = (
        np.concatenate(values) for values in zip(*parts, strict=True)
    )
    check_finite("hidden states", states)
    check_finite("confidence or probability of acceptance", np.stack([confidence, accepted]))
    check_finite("ratio", np.where(np.isposinf(ratio), 0.0, ratio))
    return Examples({"after": states}, ratio, confidence, prompt, accepted=accepted)


def target_texts(table: pa.Table) -> Iterator[pa.Table]:
    """The rows of each text that the target wrote.

    Raises:
        TraceError: there are none (`no_target_texts`).
    """
    rows = targets_own(table)
    starts = np.flatnonzero(rows.column("position").to_numpy() == 0).tolist()
    for start, end in pairwise([*starts, rows.num_rows]):
        yield rows.slice(start, end - start)


def mixed_text(
    pair: LoadedPair, rows: pa.Table, mixing: float, rng: np.random.Generator
) -> tuple[np.ndarray, ...]:
    """Of one text the states `[n, hidden]`, ratios, confidences, acceptance probabilities and
    prompt ids of its n draft tokens."""
    own, drafted = (rows.column(name).to_numpy() for name in ("token", "draft_token"))
    from_draft = rng.random(len(own)) >= mixing
    prompt = rows.column("prompt_tokens")[0].as_py()
    read = (*prompt, *np.where(from_draft, drafted, own).tolist())
    output = read_text(pair.models["draft"], "draft", read, len(own))
    if output.states is None:
        raise DraftwellError(
            (
                f"the draft of pair {pair.name} returns no hidden states, which an acceptance "
                "head reads: choose another pair"
            ),
            code="no_hidden_states",
        )
    names = np.array(rows.column("prompt_id").to_pylist())
    # q of what was drafted is above 0
    accepted = np.minimum(1.0, column(rows, "draft_p") / column(rows, "draft_q"))
    columns = (
        output.states.float().cpu().numpy(),
        column(rows, "ratio"),
        column(rows, "confidence"),
        accepted,
        names,
    )
    return tuple(values[from_draft] for values in columns)
