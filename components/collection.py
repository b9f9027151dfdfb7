"""Collection: how a pair fares on a set of prompts, kept as a trace.

One shard holds the texts of a few prompts and is written when they are done. A run that was killed goes on with the
first missing shard: what a shard holds depends on its own prompts only.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from components.observation import observe
from components.prompts import Prompt
from components.texts import room_for_prompts, sampling_of, write_texts
from serving.runtime.artifacts.base import write_atomically
from serving.runtime.pair import LoadedPair
from serving.runtime.trace import KINDS, TraceError, TraceHeader, TraceSet
from serving.runtime.types import DraftwellError, Sampling

PLAN = "plan.json"
SHARD_PROMPTS = 16

Log = Callable[[str, float, int], None]
Progress = Callable[[int, int, str], None]
"""Called with (done, total, a few words)."""


class ForeignTrace(DraftwellError):
    """The folder holds a trace of other prompts, another pair or other settings."""


def forget(folder: Path) -> None:
    """Remove the trace of a folder, and nothing else that may lie there."""
    for path in (*folder.glob("shard-*.parquet"), *folder.glob(".shard-*"), folder / PLAN):
        path.unlink(missing_ok=True)
    (folder / TraceSet.SIDECAR).unlink(missing_ok=True)


def collect(pair: LoadedPair, prompts: Sequence[Prompt], folder: Path, *, max_tokens: int = 96, temperature: float = 0.0,
            rollout: int = 8, batch: int = 8, hidden: bool = True, prefix_kinds: Sequence[str] = ("target",),
            turns: int = 1, seed: int = 0, log: Log | None = None, progress: Progress | None = None) -> TraceSet:
    """Write texts for all prompts and record both models along them.

    Args:
        pair: with a draft, and as many slots as requests shall run at once.
        folder: of the trace; a run with the same inputs that was cut short is continued there.
        rollout: K, draft tokens recorded behind every position.
        batch: requests at once, at most the pair's slots.
        hidden: keep the draft's hidden states (verifiers need them; they are most of the trace).
        prefix_kinds: of `KINDS`; a text of each kind for every prompt, so that kinds come in equal parts.
        turns: turns of a conversation that get a text.
        log: called with (name, value, shard).
        progress: called with (prompts done, prompts in all, tokens per second).
    Raises:
        DraftwellError: no prompts, no draft, an unknown kind, no room in the context, a folder with another trace.
    """
    if rollout < 1:
        raise DraftwellError(f"rollout must be at least 1, not {rollout}")
    check_inputs(pair, prompts, prefix_kinds)
    sampling = pair.sampling(max_tokens=max_tokens, temperature=temperature, seed=seed)
    header = TraceHeader(pair=pair.name, fingerprint=pair.fingerprint, dtype=pair.dtype, rollout=rollout,
                         max_tokens=max_tokens, temperature=temperature, stop_token_ids=tuple(sorted(sampling.stop_token_ids)))
    room = room_for_prompts(pair, max_tokens, rollout)
    cut = sum(len(pair.encode_prompt(prompt.prompt)) > room for prompt in prompts)
    traces = TraceSet(Path(folder), fingerprint=pair.fingerprint)
    inputs = [header.model_dump_json(), seed, hidden, turns, list(prefix_kinds), room,
              [[p.id, p.task, p.turns] for p in prompts]]
    claim(traces.folder, inputs, {"prompts": len(prompts), "cut_prompts": cut, "header": header.model_dump()})
    if log:
        log("cut_prompts", cut, 0)
    pairs = [(prompt, sampling_of(sampling, i)) for i, prompt in enumerate(prompts)]
    for index, first in enumerate(range(0, len(pairs), SHARD_PROMPTS)):
        part = pairs[first : first + SHARD_PROMPTS]
        if traces.shard(index).is_file():
            continue
        started = time.perf_counter()
        rows = collect_shard(pair, part, traces, index, header, prefix_kinds, room=room, batch=batch, hidden=hidden, turns=turns)
        rate = rows / (time.perf_counter() - started)
        if log:
            log("tokens_per_second", rate, index)
        if progress:
            progress(first + len(part), len(pairs), f"{rate:.0f} tokens/s")
    return traces


def collect_shard(pair: LoadedPair, prompts: Sequence[tuple[Prompt, Sampling]], traces: TraceSet, index: int,
                  header: TraceHeader, kinds: Sequence[str], *, room: int, batch: int, hidden: bool, turns: int) -> int:
    """Write one shard and return the number of its rows."""
    import pyarrow as pa

    texts = write_texts(pair, prompts, kinds, room=room, batch=batch, turns=turns)
    tables = [observe(pair.models, text, header, hidden=hidden) for text in texts]
    if not tables:  # prompts of one token have no bare text
        raise TraceError(f"none of the prompts {prompts[0][0].id} … gave a text: leave them out")
    table = pa.concat_tables(tables)
    traces.write_shard(index, table)
    return int(table.num_rows)


def check_inputs(pair: LoadedPair, prompts: Sequence[Prompt], kinds: Sequence[str]) -> None:
    """Refuse what cannot be collected, before anything is written."""
    if not prompts:
        raise DraftwellError("there are no prompts to collect from: name a file that holds some")
    if len({prompt.id for prompt in prompts}) != len(prompts):
        raise DraftwellError("two prompts have the same id: make them unique")
    if "draft" not in pair.models:
        raise DraftwellError(f"pair {pair.name} has no draft model, so there is nothing to trace: choose a pair with one")
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds or len(set(kinds)) != len(kinds):
        raise DraftwellError(f"prefix kinds must be different ones of {', '.join(KINDS)}, not {', '.join(kinds) or 'none'}")


def is_complete(folder: Path) -> bool:
    """Whether the collection that claimed a folder has written all its shards; True where no plan says how many."""
    try:
        prompts = json.loads((folder / PLAN).read_text())["prompts"]
    except (OSError, ValueError, KeyError, TypeError):
        return True
    return len(list(folder.glob("shard-*.parquet"))) >= -(-int(prompts) // SHARD_PROMPTS)


def claim(folder: Path, inputs: object, facts: dict[str, object]) -> None:
    """Bind a folder to these inputs, or find that it is bound to them already.

    Raises:
        ForeignTrace: the folder holds a trace of other inputs, or shards without a plan.
    """
    digest = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
    path = folder / PLAN
    if path.is_file():
        try:
            known = json.loads(path.read_text()).get("inputs")
        except (ValueError, AttributeError):
            known = None
        if known != digest:
            raise ForeignTrace(f"{folder} holds a trace of other inputs (prompts, pair or settings): choose another folder "
                               "or delete this one")
    elif TraceSet(folder).shards:
        raise ForeignTrace(f"{folder} holds shards but no {PLAN}: choose another folder or delete this one")
    else:
        write_atomically(path, (json.dumps({"inputs": digest, **facts}, indent=2) + "\n").encode())
    for rest in folder.glob(".shard-*"):  # of a run that was killed while it wrote
        rest.unlink(missing_ok=True)
