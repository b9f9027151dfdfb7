"""What two models say along a text: one teacher-forced pass of each, and the draft's rollouts from every position."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from components.rollouts import branches
from components.texts import WrittenText
from serving.runtime.sampling import LogitRows, Streams, residual
from serving.runtime.trace import TraceHeader, trace_schema
from serving.runtime.types import Forward, Model, Output, Role

if TYPE_CHECKING:
    import pyarrow as pa

CANDIDATES = 8


def observe(models: dict[Role, Model], text: WrittenText, header: TraceHeader, *, hidden: bool = True) -> pa.Table:
    """The rows of a text, one for each token of its continuation.

    Args:
        models: target and draft, each with a free slot.
        hidden: also keep the draft's hidden states.
    """
    with _forced(models["target"], "target", text) as (_, output):
        target = output
    with _forced(models["draft"], "draft", text) as (slot, draft):
        said = _judgements(text, LogitRows(target.logits, text.sampling), LogitRows(draft.logits, text.sampling))
        said |= _rollouts(models["draft"], slot, text, said, header.rollout, hidden)
    if hidden and draft.hidden is not None:
        said["hidden_before"] = _halves(draft.hidden)
    return _table(text, header, said)


@contextmanager
def _forced(model: Model, role: Role, text: WrittenText) -> Iterator[tuple[int, Output]]:
    """A slot that has read the text, and the output at every position of the continuation."""
    ids = (*text.prompt_tokens, *text.tokens[:-1])
    slot = model.open()
    try:
        yield slot, model.forward([Forward(role, slot, ids, keep=len(text.tokens), prefill=True)])[0]
    finally:
        model.close(slot)


def _judgements(text: WrittenText, target: LogitRows, draft: LogitRows) -> dict[str, Any]:
    """Columns about the two distributions of each position (METHODS, "Two pairs of distributions")."""
    rows = torch.arange(len(target))
    raw_p, raw_q = target.logits.softmax(-1), draft.logits.softmax(-1)
    drawn = _draw_greedily(text, target, draft) if text.sampling.greedy else _draw(text, target, draft)
    chosen, corrected, drafted = (drawn[name].to(raw_p.device) for name in ("target_token", "correction", "draft_token"))
    two = target.logits.topk(2).values
    likely = raw_q.topk(min(CANDIDATES, raw_q.shape[-1]))
    token_q, token_p = raw_q[rows, drafted], raw_p[rows, drafted]
    return {**drawn, "target_p": raw_p[rows, chosen], "target_gap": two[:, 0] - two[:, 1],
            "correction_p": raw_p[rows, corrected], "draft_raw_q": token_q, "draft_raw_p": token_p,
            "ratio": token_q / token_p, "rank": (raw_q > token_q[:, None]).sum(-1), "confidence": raw_q.amax(-1),
            "entropy": torch.special.entr(raw_q).sum(-1), "candidates": likely.indices, "candidate_q": likely.values}


def _draw_greedily(text: WrittenText, target: LogitRows, draft: LogitRows) -> dict[str, Tensor]:
    """Temperature 0: the committed token of a target's text is its argmax, whichever way a near-tie fell here."""
    chosen = torch.tensor(text.tokens if text.kind == "target" else target.top)
    drafted = torch.tensor(draft.top)
    return {"target_token": chosen, "correction": chosen, "draft_token": drafted, "draft_q": torch.ones(len(drafted)),
            "draft_p": (drafted == chosen).float()}


def _draw(text: WrittenText, target: LogitRows, draft: LogitRows) -> dict[str, Tensor]:
    """Temperature > 0: the draft token is drawn, and so is what the target would put in its place."""
    streams = Streams(text.sampling.seed)
    columns: dict[str, list[float]] = {name: [] for name in ("target_token", "correction", "draft_token", "draft_q", "draft_p")}
    for i, token in enumerate(text.tokens):
        p, q = target.probs(i), draft.probs(i)
        drafted = draft.sample(i, streams.draft)
        chosen = token if text.kind == "target" else target.sample(i, streams.test)
        values = (chosen, streams.sample.draw(residual(p, q)), drafted, float(q[drafted]), float(p[drafted]))
        for name, value in zip(columns, values, strict=True):
            columns[name].append(value)
    return {name: torch.tensor(values) for name, values in columns.items()}


def _rollouts(model: Model, slot: int, text: WrittenText, said: dict[str, Any], depth: int, hidden: bool) -> dict[str, Any]:
    """The draft's next `depth` greedy tokens from every position, and its state having read its sampled token."""
    first = said["candidates"][:, 0].tolist()
    drafted = said["draft_token"].tolist()
    starts = range(len(text.prompt_tokens), len(text.prompt_tokens) + len(text.tokens))
    branch = branches(model, slot, text.prompt_tokens + text.tokens, starts, depth)
    after: Tensor | None = None
    if hidden and (depth == 1 or first != drafted):
        after = branch.step(drafted)[1]
        branch.rewind()
    tokens, confidence, entropy = [first], [said["confidence"]], [said["entropy"]]
    for _ in range(depth - 1):
        logits, state = branch.step(tokens[-1])
        after = state if after is None else after
        raw = logits.softmax(-1)
        tokens.append(logits.argmax(-1).tolist())
        confidence.append(raw.amax(-1))
        entropy.append(torch.special.entr(raw).sum(-1))
    columns = {"rollout_tokens": torch.tensor(tokens).T, "rollout_confidence": torch.stack(confidence, 1),
               "rollout_entropy": torch.stack(entropy, 1)}
    return columns | ({"hidden_after": _halves(after)} if hidden and after is not None else {})


def _halves(states: Tensor) -> Tensor:
    """float16 on the CPU, with what it cannot hold cut to its largest value."""
    return states.float().clamp(-65504, 65504).half().cpu()


def _table(text: WrittenText, header: TraceHeader, said: dict[str, Any]) -> pa.Table:
    """All columns of the schema; those that nothing is known about are null."""
    import pyarrow as pa

    n = len(text.tokens)
    columns: dict[str, Any] = {
        "prompt_id": [text.prompt.id] * n, "task": [text.prompt.task] * n, "turn": [text.turn] * n, "kind": [text.kind] * n,
        "temperature": [text.sampling.temperature] * n, "position": np.arange(n), "token": text.tokens,
        "prompt_tokens": [text.prompt_tokens] + [None] * (n - 1), **{name: _plain(value) for name, value in said.items()}}
    schema = trace_schema(header)
    return pa.table([_column(columns.get(field.name), field.type, n) for field in schema], schema=schema)


def _plain(value: Tensor) -> np.ndarray:
    array: np.ndarray = value.cpu().numpy()
    return array


def _column(values: Any, kind: pa.DataType, n: int) -> pa.Array:
    """An array of the schema's type from a list, from `[n]`, or from `[n, width]` with one list a row."""
    import pyarrow as pa

    if values is None:
        return pa.nulls(n, kind)
    if isinstance(values, np.ndarray) and values.ndim == 2:
        offsets = np.arange(n + 1, dtype=np.int32) * values.shape[1]
        return pa.ListArray.from_arrays(offsets, pa.array(values.reshape(-1), kind.value_type))
    return pa.array(values, kind)
