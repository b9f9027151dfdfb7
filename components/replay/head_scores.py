"""An acceptance head's predictions along a trace's rollouts, so that SpecDec++ can be replayed.

A trace with the draft's state at every element of every rollout would take about 18 kB per
position. The head turns a state into one number, so the draft reads the recorded rollouts once
more, and only that number is kept.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftwell.components.collect.rollouts import branches
from draftwell.components.replay.traced_text import TracedText
from draftwell.serving.artifacts.acceptance_head import AcceptanceHead
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.output import Model
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import StrategyResources

if TYPE_CHECKING:
    from draftwell.components.replay.texts import Texts


class RecordedHead(AcceptanceHead):
    """Replaces the head in a replay, where states are already the head's predictions
    (`TraceRows.hidden`)."""

    def __init__(self, provenance: Provenance):
        self.provenance = provenance

    def acceptance(self, state: Tensor) -> float:
        return float(state)


def score_rollouts(pair: LoadedPair, texts: Texts, head: AcceptanceHead) -> Texts:
    """The same texts with the head's predictions, which a replay of specdec_pp reads.

    Args:
        pair: of the trace, with a free slot on the draft.
        head: must be the acceptance head among the resources of the replay.
    Raises:
        DraftwellError: the pair has no draft (`no_draft`), or its draft has no hidden states
            (`no_hidden_states`).
    """
    if "draft" not in pair.models:
        raise DraftwellError(
            (
                f"pair {pair.name} has no draft model, so there is nothing to score: choose a "
                "pair with one"
            ),
            code="no_draft",
        )
    scored = [
        replace(text, scores=scores(pair.models["draft"], text, head)) for text in texts.texts
    ]
    return replace(texts, texts=scored, head=head)


def scores(model: Model, text: TracedText, head: AcceptanceHead) -> list[list[float]]:
    """`[continuation][K]`: the head's prediction on the state that gave each token of each rollout.

    A rollout that continues as the next position's does is not read again.
    """
    count, depth = len(text.tokens), len(text.tokens[0])
    own = [
        i
        for i in range(count)
        if i == count - 1 or text.tokens[i] != [text.output[i], *text.tokens[i + 1][:-1]]
    ]
    scored = torch.empty(count, depth)
    slot = model.open()
    try:
        output = model.forward(
            [Forward("draft", slot, tuple(text.ids[:-1]), keep=count, prefill=True)]
        )[0]
        scored[:, 0] = predictions(head, output.hidden)
        branch = branches(model, slot, text.ids, [text.prompt_length + i for i in own], depth)
        for element in range(depth - 1):
            output = branch.step([text.tokens[i][element] for i in own])
            scored[own, element + 1] = predictions(head, output.hidden)
    finally:
        model.close(slot)
    for i in sorted(set(range(count)) - set(own), reverse=True):
        scored[i, 1:] = scored[i + 1, :-1]
    return scored.tolist()


def predictions(head: AcceptanceHead, states: Tensor | None) -> Tensor:
    """Predicted acceptance `[n]` of the last token that each state `[n, hidden]` has read."""
    if states is None:
        raise DraftwellError(
            (
                "the draft returns no hidden states, which an acceptance head reads: leave "
                "specdec_pp out"
            ),
            code="no_hidden_states",
        )
    return torch.sigmoid(head.logit(states.float().cpu()))


def with_recorded_head(
    resources: StrategyResources, head: AcceptanceHead | None
) -> StrategyResources:
    """The resources for texts that `head` has scored; None where none has.

    Raises:
        DraftwellError: the resources hold another head (`another_head`).
    """
    own = resources.artifacts.get(AcceptanceHead.kind)
    if head is None or own is None:
        return resources
    if own is not head:
        raise DraftwellError(
            (
                "the rollouts were scored by another acceptance head than the one that is "
                "replayed: score them with it"
            ),
            code="another_head",
        )
    return replace(
        resources,
        artifacts={**resources.artifacts, AcceptanceHead.kind: RecordedHead(head.provenance)},
    )
