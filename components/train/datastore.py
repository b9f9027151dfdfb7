"""Making a datastore of what the target wrote: the texts of a trace (REST, He 2023, 2311.08252,
section 3.1).

Prompts are left out: a datastore is looked up to guess what the target writes. The folder in which
a server records its requests is a trace too; there a text is what was recorded without a gap.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import Field

from draftwell.components.collect.repeated_prompts import first_of_the_same
from draftwell.components.collect.trace_checks import targets_own
from draftwell.components.train.examples import TEST_SHARE
from draftwell.components.train.reports import Report
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.datastore import MAX_TOKENS, Datastore
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.recording.trace_schema import TraceError

COLUMNS = ("prompt_id", "turn", "kind", "position", "token")
LOOKED_UP = 8
"""Tokens of a draft that is counted on held-out texts."""
MOST_LOOKUPS = 2000
"""Positions of held-out texts that are looked up, evenly spread."""


class DatastoreReport(Report):
    """What a datastore holds, and what it is worth on texts that it does not hold.

    The figures are of a datastore of the other prompts, a fifth smaller than the one that is kept;
    None where there is but one prompt.
    """

    texts: int
    tokens: int
    left_out: int = Field(description="texts that did not fit, the oldest")
    found: float | None = Field(
        description="share of the positions of held-out texts where something was proposed"
    )
    right_per_lookup: float | None = Field(
        description=f"mean number of right tokens at the beginning of a draft of up to {LOOKED_UP}"
    )

    def line(self) -> str:
        """For the terminal."""
        held_out = (
            ""
            if self.found is None or self.right_per_lookup is None
            else (
                f"; on held-out prompts it proposes at {100 * self.found:.0f} % of the "
                f"positions, and {self.right_per_lookup:.2f} tokens a "
                "position are right"
            )
        )
        return f"datastore: {self.tokens} tokens of {self.texts} texts{held_out}"


def build_datastore(
    trace: TraceSet, provenance: Provenance, most: int = MAX_TOKENS
) -> tuple[Datastore, DatastoreReport]:
    """A datastore of the target's own texts, the last `most` tokens of them at most, and its
    report.

    Args:
        provenance: of the datastore; metrics are filled in.

    Raises:
        TraceError: no text of the target (`no_target_texts`), or none whose tokens were recorded
            (`no_texts`).
    """
    prompts, texts = read_texts(trace)
    sizes = np.cumsum([len(text) for text in texts][::-1])
    kept = int(np.searchsorted(sizes, most, side="right"))
    if not kept:
        raise TraceError(
            (
                f"no text in {trace.folder} has its tokens recorded: collect some with "
                "`draftwell step collect`"
            ),
            code="no_texts",
        )
    prompts, texts = prompts[-kept:], texts[-kept:]
    found, right = held_out_figures(prompts, texts)
    report = DatastoreReport(
        texts=kept,
        tokens=int(sizes[kept - 1]),
        left_out=len(sizes) - kept,
        found=found,
        right_per_lookup=right,
    )
    metrics = {
        name: float(value) for name, value in report.model_dump().items() if value is not None
    }
    return Datastore.from_texts(texts, provenance.extended({}, metrics)), report


def read_texts(trace: TraceSet) -> tuple[list[str], list[np.ndarray]]:
    """The target's own texts in order, each `[tokens]`, with the id of its prompt; a position
    without a token ends a text.

    Of several prompts with the same tokens it is the first one's id: a server gives every request a
    new id.
    """
    import pyarrow.compute as pc

    table = targets_own(trace.read(COLUMNS))
    table = table.filter(pc.is_valid(table.column("token")))
    if not table.num_rows:
        return [], []
    prompts, turns, positions, tokens = (
        table.column(name).to_numpy() for name in ("prompt_id", "turn", "position", "token")
    )
    begins = (
        (positions[1:] != positions[:-1] + 1)
        | (prompts[1:] != prompts[:-1])
        | (turns[1:] != turns[:-1])
    )
    edges, alike = np.flatnonzero(begins) + 1, first_of_the_same(trace)
    names = [str(part[0]) for part in np.split(prompts, edges)]
    return [alike.get(name, name) for name in names], np.split(tokens, edges)


def held_out_figures(
    prompts: Sequence[str], texts: Sequence[np.ndarray]
) -> tuple[float | None, float | None]:
    """Share of positions of a fifth of the prompts where a datastore of the others proposes
    something, and mean number of right tokens."""
    names = list(dict.fromkeys(prompts))
    held = set(names[:: round(1 / TEST_SHARE)])
    if len(held) == len(names):
        return None, None
    store = Datastore.from_texts(
        text for prompt, text in zip(prompts, texts, strict=True) if prompt not in held
    )
    places = [
        (text.tolist(), at)
        for prompt, text in zip(prompts, texts, strict=True)
        if prompt in held
        for at in range(1, len(text))
    ]
    places = places[:: max(1, -(-len(places) // MOST_LOOKUPS))]
    if not places:
        return None, None
    found = right = 0
    for text, at in places:
        occurrences: list[list[int]] = store.continuations(text[:at], LOOKED_UP).tokens
        likeliest: list[int] = max(
            occurrences, key=lambda tokens: occurrences.count(tokens), default=[]
        )
        found += bool(occurrences)
        right += longest_common(likeliest, text[at:])
    return found / len(places), right / len(places)


def longest_common(draft: Sequence[int], text: Sequence[int]) -> int:
    """How many tokens of a draft are those of the text before the first wrong one."""
    return next(
        (i for i, (a, b) in enumerate(zip(draft, text, strict=False)) if a != b),
        min(len(draft), len(text)),
    )
