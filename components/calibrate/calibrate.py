"""Calibration: SPIDE's acceptance table from a trace, and CSD's correction memory from speculative decoding or a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from components.collect.decoding import decode_all, encode_all, room
from components.collect.trace_checks import check_rollouts, targets_own
from components.prompts.prompt import Prompt, prompts_digest
from serving.artifacts.acceptance_table import EDGES, AcceptanceTable
from serving.artifacts.base import Provenance
from serving.artifacts.correction_memory import CorrectionMemory
from serving.errors import DraftwellError
from serving.recording.trace import TraceSet
from serving.recording.trace_schema import TraceError
from serving.runtime.acceptance.exact import Exact
from serving.runtime.commands import Step
from serving.runtime.drafting.draft_model import DraftModel
from serving.runtime.drafting.stopping import FixedLength
from serving.runtime.pair import LoadedPair
from serving.runtime.schedules.serial import serial
from serving.runtime.session import Session
from serving.runtime.strategies import StrategyResources
from serving.runtime.strategies.lossless.vanilla_sd import VanillaSD
from serving.runtime.types import Draft, Verdict

if TYPE_CHECKING:
    import pyarrow as pa

Log = Callable[[str, float, int], None]
Progress = Callable[[int, int, str], None]

TABLE_COLUMNS = ("prompt_id", "turn", "kind", "temperature", "position", "token", "rollout_tokens", "rollout_confidence")
MEMORY_COLUMNS = ("kind", "temperature", "draft_token", "draft_q", "draft_p", "correction")


def build_acceptance_table(trace: TraceSet | pa.Table, provenance: Provenance, *, log: Log | None = None) -> AcceptanceTable:
    """Count, for every confidence bin, the draft tokens judged and accepted by greedy speculative decoding.

    Every position of the target's texts starts a draft: its rollout is compared with the text that follows, up to and
    with the first token that differs. Those tokens are judged; what lies behind them, or behind the text's end, is not.

    Raises:
        DraftwellError: as in `greedy_rows`, or no token was judged.
    """
    rows = greedy_rows(trace)
    bins = len(EDGES) + 1
    total, accepted = [0] * bins, [0] * bins
    for confidence, kept in judged_tokens(rows):
        b = AcceptanceTable.bin_of(confidence)
        total[b] += 1
        accepted[b] += kept
    if not sum(total):
        raise DraftwellError("the trace holds no judged draft token: collect longer texts of the kind target")
    metrics = {"judged": float(sum(total)), "acceptance_rate": sum(accepted) / sum(total)}
    if log:
        for name, value in metrics.items():
            log(name, value, 0)
    made = provenance.model_copy(update={"metrics": {**provenance.metrics, **metrics}})
    return AcceptanceTable(total, accepted, made)


def greedy_rows(trace: TraceSet | pa.Table) -> pa.Table:
    """What `judged_tokens` reads of the target's own greedy texts.

    Raises:
        DraftwellError: no text of the target, texts that were sampled, no rollouts along them, or figures that are not finite.
    """
    import pyarrow.compute as pc

    rows = targets_own(trace.read(TABLE_COLUMNS) if isinstance(trace, TraceSet) else trace)
    # There a rollout's first token is one that the target rejects, drawn from norm(max(0, q − p)): drafts would look far too bad.
    if (hottest := pc.max(rows.column("temperature")).as_py()) > 0:
        raise TraceError(f"the trace was sampled at temperature {hottest:g}, and acceptance is counted on greedy texts: collect one at "
                         "temperature 0 (`draftwell collect --temperature 0`)")
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
            follows = text[start:]
            for token, confidence, expected in zip(columns["rollout_tokens"][i], columns["rollout_confidence"][i], follows,
                                                   strict=False):
                judged.append((confidence, token == expected))
                if token != expected:
                    break
    return judged


class RecordingSD(VanillaSD):
    """Standard speculative decoding that keeps every (rejected token, token recovered in its place)."""

    def __init__(self, config: Any, resources: StrategyResources):
        super().__init__(config, resources)
        self.rejections: list[tuple[int, int]] = []

    def run(self, session: Session) -> Step[None]:
        def learn(draft: Draft, verdict: Verdict) -> None:
            if verdict.rejected and verdict.token is not None:
                self.rejections.append((draft.tokens[verdict.accepted], verdict.token))

        yield from serial(session, DraftModel(FixedLength(self.config.num_speculative_tokens)), Exact(), learn)


def build_correction_memory(pair: LoadedPair, prompts: Sequence[Prompt], provenance: Provenance, *, max_tokens: int = 96,
                            temperature: float = 0.6, gamma: int = 6, batch: int = 1, seed: int = 0,
                            log: Log | None = None, progress: Progress | None = None) -> CorrectionMemory:
    """Count (draft token, target's correction) in standard speculative decoding of prompts (CSD, section 4.2).

    Args:
        temperature: .6 in the paper; at 0 a correction is the target's argmax.
        gamma: draft tokens a round, 6 in the paper.
        batch: requests at once, as far as the pair has slots. But for near-ties the counts do not depend on it.
    Raises:
        DraftwellError: no prompts, a pair without draft.
        ContextTooLong: a prompt is too long; nothing has been decoded then.
    """
    if not prompts:
        raise DraftwellError("there are no prompts to learn corrections from: name a file that holds some")
    encoded = encode_all(pair, prompts, max_tokens, RecordingSD.roles)
    config = VanillaSD.Config(num_speculative_tokens=gamma)
    base = pair.sampling(max_tokens=max_tokens, temperature=temperature, seed=seed)
    recorders = [RecordingSD(config, StrategyResources()) for _ in prompts]
    requests = [(ids, replace(base, seed=seed + i)) for i, ids in enumerate(encoded)]
    engine = pair.engine()
    decode_all(engine, requests, recorders, room(engine, batch),
               (lambda done: progress(done, len(requests), "correction memory")) if progress else None)
    settings = {"temperature": temperature, "gamma": gamma, "max_tokens": max_tokens, "prompts": len(prompts),
                "prompts_digest": prompts_digest(prompts), "seed": seed}
    return remember([rejection for one in recorders for rejection in one.rejections], provenance, settings, log)


def correction_memory_from_trace(trace: TraceSet | pa.Table, provenance: Provenance, *, seed: int = 0,
                                 log: Log | None = None) -> CorrectionMemory:
    """Count corrections at every position of a trace's target texts, without running a model.

    A position's draft token is rejected with probability 1 - p(x)/q(x), as speculative decoding would; unlike there, it
    is tested at every position. The trace's own temperature holds.
    """
    table = trace.read(MEMORY_COLUMNS) if isinstance(trace, TraceSet) else trace
    rows = targets_own(table).select(MEMORY_COLUMNS).to_pydict()
    uniforms = np.random.default_rng([seed, 13]).random(len(rows["kind"]))
    pairs = [(x, t) for x, t, p, q, r in zip(rows["draft_token"], rows["correction"], rows["draft_p"], rows["draft_q"], uniforms,
                                             strict=True) if r * q >= p]
    settings = {"temperature": rows["temperature"][0], "positions": len(rows["kind"]), "seed": seed}
    return remember(pairs, provenance, settings, log)


def remember(pairs: Sequence[tuple[int, int]], provenance: Provenance, settings: dict[str, Any], log: Log | None) -> CorrectionMemory:
    """A memory of these rejections, in order."""
    metrics = {"rejections": float(len(pairs)), "patterns": float(len(set(pairs)))}
    if log:
        for name, value in metrics.items():
            log(name, value, 0)
    memory = CorrectionMemory.empty(provenance.model_copy(update={
        "parameters": {**provenance.parameters, **settings}, "metrics": {**provenance.metrics, **metrics}}))
    for drafted, correction in pairs:
        memory.update(drafted, correction)
    return memory
