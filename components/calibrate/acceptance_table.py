"""SPIDE's acceptance table, counted from a trace: how often is a draft token accepted, by the draft's confidence?"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from components.collect.trace_checks import check_rollouts, targets_own
from serving.artifacts.acceptance_table import EDGES, AcceptanceTable
from serving.artifacts.base import Provenance
from serving.errors import DraftwellError
from serving.recording.trace import TraceSet
from serving.recording.trace_schema import TraceError

if TYPE_CHECKING:
    import pyarrow as pa

Log = Callable[[str, float, int], None]

COLUMNS = ("prompt_id", "turn", "kind", "temperature", "position", "token", "rollout_tokens", "rollout_confidence")


def build_acceptance_table(trace: TraceSet | pa.Table, provenance: Provenance, *, log: Log | None = None) -> AcceptanceTable:
    """Count, for every confidence bin, the draft tokens judged and accepted by greedy speculative decoding.

    Every position of the target's texts starts a draft: its rollout is compared with the text that follows, up to and
    including the first token that differs. Those tokens are judged; later ones, and those after the end of the text, are not.

    Raises:
        DraftwellError: as in `greedy_rows`, or no token was judged (`no_judged_tokens`).
    """
    rows = greedy_rows(trace)
    bins = len(EDGES) + 1
    total, accepted = [0] * bins, [0] * bins
    for confidence, kept in judged_tokens(rows):
        b = AcceptanceTable.bin_of(confidence)
        total[b] += 1
        accepted[b] += kept
    if not sum(total):
        raise DraftwellError("the trace contains no judged draft token: collect longer texts of the kind target", code="no_judged_tokens")
    metrics = {"judged": float(sum(total)), "acceptance_rate": sum(accepted) / sum(total)}
    if log:
        for name, value in metrics.items():
            log(name, value, 0)
    made = provenance.model_copy(update={"metrics": {**provenance.metrics, **metrics}})
    return AcceptanceTable(total, accepted, made)


def greedy_rows(trace: TraceSet | pa.Table) -> pa.Table:
    """The rows of the target's own greedy texts, for `judged_tokens`.

    Raises:
        DraftwellError: no text of the target, sampled texts (`sampled_trace`), no rollouts, or values that are not finite.
    """
    import pyarrow.compute as pc

    rows = targets_own(trace.read(COLUMNS) if isinstance(trace, TraceSet) else trace)
    # In a sampled trace the first token of a rollout is one that the target rejects, drawn from norm(max(0, q − p)): drafts
    # would look far too bad.
    if (hottest := pc.max(rows.column("temperature")).as_py()) > 0:
        raise TraceError(f"the trace was sampled at temperature {hottest:g}, but acceptance is counted on greedy texts: collect one at "
                         "temperature 0 (`draftwell collect --temperature 0`)", code="sampled_trace")
    check_rollouts(rows)
    return rows


def judged_tokens(rows: pa.Table) -> list[tuple[float, bool]]:
    """(confidence, accepted) of every judged token of every rollout, text by text.

    Args:
        rows: of `greedy_rows`.
    """
    names = ("prompt_id", "turn", "position", "token", "rollout_tokens", "rollout_confidence")
    columns = rows.select(names).to_pydict()
    texts: dict[tuple[Any, Any], list[int]] = {}
    for i, key in enumerate(zip(columns["prompt_id"], columns["turn"], strict=True)):
        texts.setdefault(key, []).append(i)
    judged = []
    for members in texts.values():
        members.sort(key=lambda i: columns["position"][i])
        text = [columns["token"][i] for i in members]
        for start, i in enumerate(members):
            drafted = columns["rollout_tokens"][i], columns["rollout_confidence"][i]
            for token, confidence, expected in zip(*drafted, text[start:], strict=False):
                judged.append((confidence, token == expected))
                if token != expected:
                    break
    return judged
