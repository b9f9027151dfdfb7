"""The rows of a trace: one teacher-forced pass of each model over a text, and the draft's rollouts
from its positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from draftwell.components.collect.batched_probs import Distributions, residuals
from draftwell.components.collect.continuations import WrittenText, shared_beginning
from draftwell.components.collect.rollouts import Branches, SlowBranches, branches
from draftwell.serving.recording.trace_schema import KINDS, LOSSY, TraceHeader, trace_schema
from draftwell.serving.runtime.commands import Forward, Role
from draftwell.serving.runtime.logits import Span
from draftwell.serving.runtime.model import Model
from draftwell.serving.runtime.sampling import inverted

if TYPE_CHECKING:
    import pyarrow as pa

CANDIDATES = 8


def observe(
    models: dict[Role, Model],
    texts: Sequence[WrittenText],
    header: TraceHeader,
    *,
    hidden: bool = True,
) -> Iterator[pa.Table]:
    """The rows of each text, one for each token of its continuation.

    Args:
        models: target and draft, each with a free slot.
        texts: in any order; a prefix that a text shares with the one before it is read once.
        hidden: also keep the draft's hidden states.
    """
    with Reading(models["target"], "target") as target, Reading(models["draft"], "draft") as draft:
        for text in texts:
            outputs = target.read(text), draft.read(text)
            yield _table(text, header, Observation(text, header, *outputs, draft).columns(hidden))


class Reading:
    """A slot that reads texts, one after another."""

    def __init__(self, model: Model, role: Role):
        self.model, self.role, self.ids = model, role, list[int]()

    def __enter__(self) -> Reading:
        self.slot = self.model.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.model.close(self.slot)

    def read(self, text: WrittenText) -> Span:
        """The model's output at every position of the continuation."""
        ids = [*text.prompt_tokens, *text.tokens[:-1]]
        # the prompt's last token predicts the first one
        known = shared_beginning(self.ids, text.prompt_tokens[:-1])
        self.model.rollback(self.slot, known)
        self.ids = ids
        return self.model.forward(
            [
                Forward(
                    self.role,
                    self.slot,
                    tuple(ids[known:]),
                    keep=len(text.tokens),
                    prefill=known == 0,
                )
            ]
        )[0]


class Observation:
    """Columns of one text.

    Args:
        target, draft: outputs of both at every position.
        reading: the draft's slot, which has just read the text.
    """

    def __init__(
        self,
        text: WrittenText,
        header: TraceHeader,
        target: Span,
        draft: Span,
        reading: Reading,
    ):
        self.text, self.header, self.reading = text, header, reading
        self.states = draft.states
        self.target, self.draft = Distributions.of(target), Distributions.of(draft)
        # A stream of its own for every text: no uniform that wrote it is used again.
        self.random = np.random.default_rng(
            [text.sampling.seed, 17, text.turn, (*KINDS, LOSSY).index(text.kind)]
        )

    def columns(self, hidden: bool) -> dict[str, Any]:
        """All columns about the text's positions."""
        drawn = self._greedy() if self.text.sampling.greedy else self._drawn()
        rejected = drawn.pop("rejected")
        columns = self._judgements(drawn)
        rolled = self._rollouts(rejected) if self.text.kind in self.header.rollout_kinds else {}
        after = rolled.pop("after", None)
        if hidden and self.states is not None:
            columns["hidden_before"] = _halves(self.states)
            columns["hidden_after"] = _halves(
                self._after(drawn["draft_token"]) if after is None else after
            )
        return columns | rolled

    def _greedy(self) -> dict[str, Tensor]:
        """Temperature 0: the committed token of a target's text counts as its argmax, whichever
        token wins a near-tie here."""
        tokens = torch.tensor(self.text.tokens)
        drafted = self.draft.top.cpu()
        chosen = tokens if self.text.kind == "target" else self.target.top.cpu()
        return {
            "target_token": chosen,
            "correction": chosen,
            "draft_token": drafted,
            "draft_q": torch.ones(len(drafted)),
            "draft_p": (drafted == chosen).float(),
            "text_q": (drafted == tokens).float(),
            "text_p": (chosen == tokens).float(),
            "rejected": drafted,
        }

    def _drawn(self) -> dict[str, Tensor]:
        """Temperature > 0: draft token, target's choice, correction and a rejected token are drawn
        independently of each other."""
        sampling, tokens = self.text.sampling, torch.tensor(self.text.tokens)
        p, q = (model.warped(sampling).cpu() for model in (self.target, self.draft))
        rows = torch.arange(len(p))
        drafted, chosen = inverted(q, self._uniforms()), inverted(p, self._uniforms())
        correction, rejected = (
            inverted(residuals(p, q), self._uniforms()),
            inverted(residuals(q, p), self._uniforms()),
        )
        return {
            "target_token": tokens if self.text.kind == "target" else chosen,
            "correction": correction,
            "draft_token": drafted,
            "draft_q": q[rows, drafted],
            "draft_p": p[rows, drafted],
            "text_q": q[rows, tokens],
            "text_p": p[rows, tokens],
            "rejected": rejected,
        }

    def _uniforms(self, count: int | None = None) -> Tensor:
        return torch.from_numpy(
            self.random.random(len(self.text.tokens) if count is None else count)
        )

    def _judgements(self, drawn: dict[str, Tensor]) -> dict[str, Tensor]:
        """Columns about the two distributions of each position (docs/methods.md)."""
        p, q, drafted = self.target, self.draft, drawn["draft_token"]
        likely, likely_q = q.candidates(CANDIDATES)
        token_q, token_p = q.raw_prob(drafted).cpu(), p.raw_prob(drafted).cpu()
        return {
            **drawn,
            "target_p": p.raw_prob(drawn["target_token"]),
            "target_gap": p.gap(),
            "correction_p": p.raw_prob(drawn["correction"]),
            "text_raw_q": q.raw_prob(torch.tensor(self.text.tokens)),
            "draft_raw_q": token_q,
            "draft_raw_p": token_p,
            "ratio": token_q / token_p,
            "rank": q.rank(drafted),
            "confidence": q.confidence,
            "entropy": q.entropy,
            "candidates": likely,
            "candidate_q": likely_q,
        }

    def _rollouts(self, first: Tensor) -> dict[str, Tensor]:
        """What the draft writes from every position, K tokens with `first` `[n]` as the first.

        At temperature 0, where the draft's token is the text's, the rest of its rollout is that of
        the next position. Only the others, and the last one, are computed.
        """
        n, depth, sampling = len(self.text.tokens), self.header.rollout, self.text.sampling
        alone = self._alone(first) if sampling.greedy else list(range(n))
        places = torch.tensor(alone)
        begun = (first, self.draft.raw_prob(first), self.draft.confidence, self.draft.entropy)
        rolled = [torch.stack([part.cpu()] * depth, 1) for part in begun]
        branch = self._branches(alone, depth)
        states: Tensor | None = None
        tokens = first[places]
        for step in range(1, depth):
            span = branch.step(tokens.tolist())
            states = span.states if states is None else states
            found = Distributions.of(span)
            chosen = found.top if sampling.greedy else found.drawn(sampling, self._uniforms(n))
            for column, part in zip(
                rolled,
                (chosen, found.raw_prob(chosen), found.confidence, found.entropy),
                strict=True,
            ):
                column[places, step] = part.cpu().to(column.dtype)
            tokens = chosen
        for place in sorted(set(range(n)) - set(alone), reverse=True):
            for column in rolled:
                column[place, 1:] = column[place + 1, :-1]
        names = ("rollout_tokens", "rollout_q", "rollout_confidence", "rollout_entropy")
        columns = dict(zip(names, rolled, strict=True))
        if sampling.greedy and states is not None and self.states is not None:
            columns["after"] = self._shifted(places, states)
        return columns

    def _after(self, drafted: Tensor) -> Tensor:
        """The draft's state `[n, hidden]` after its own token: the next position's, where the text
        holds that token."""
        alone = self._alone(drafted)
        states = self._branches(alone, 1).step(drafted[torch.tensor(alone)].tolist()).states
        assert states is not None
        return self._shifted(torch.tensor(alone), states)

    def _shifted(self, places: Tensor, states: Tensor) -> Tensor:
        assert self.states is not None
        after = self.states.roll(-1, 0)
        after[places.to(after.device)] = states.to(after)
        return after

    def _alone(self, drafted: Tensor) -> list[int]:
        """Positions whose draft token is not the text's, so that its continuation is not known from
        the next position."""
        tokens = self.text.tokens
        return [
            i
            for i, token in enumerate(drafted.tolist())
            if i == len(tokens) - 1 or token != tokens[i]
        ]

    def _branches(self, places: Sequence[int], depth: int) -> Branches:
        text = self.text
        starts = [len(text.prompt_tokens) + place for place in places]
        branch = branches(
            self.reading.model, self.reading.slot, text.prompt_tokens + text.tokens, starts, depth
        )
        if isinstance(branch, SlowBranches):
            self.reading.ids = []  # they write to the slot
        return branch


def _halves(states: Tensor) -> Tensor:
    """float16 on the CPU; values out of its range become its largest."""
    return states.float().clamp(-65504, 65504).half().cpu()


def _table(text: WrittenText, header: TraceHeader, known: dict[str, Any]) -> pa.Table:
    """All columns of the schema; missing ones are null."""
    import pyarrow as pa

    n = len(text.tokens)
    columns: dict[str, Any] = {
        "prompt_id": [text.prompt.id] * n,
        "task": [text.prompt.task] * n,
        "turn": [text.turn] * n,
        "kind": [text.kind] * n,
        "temperature": [text.sampling.temperature] * n,
        "position": np.arange(n),
        "token": text.tokens,
        "prompt_tokens": [text.prompt_tokens] + [None] * (n - 1),
        "cut_tokens": [text.cut_tokens] + [None] * (n - 1),
        **{name: value.cpu().numpy() for name, value in known.items()},
    }
    schema = trace_schema(header)
    return pa.table(
        [column_of(columns.get(field.name), field.type, n) for field in schema], schema=schema
    )


def column_of(values: Any, kind: pa.DataType, n: int) -> pa.Array:
    """An array of the schema's type from a list, from `[n]`, or from `[n, width]` with one list a
    row."""
    import pyarrow as pa

    if values is None:
        return pa.nulls(n, kind)
    return pa.array(list(values) if getattr(values, "ndim", 1) == 2 else values, kind)
