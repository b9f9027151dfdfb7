"""Collection: how a pair fares on a set of prompts, kept as a trace.

One shard holds the texts of a few prompts and is written when they are done. A run that was killed, at any moment, goes on with
the first missing shard: what a shard holds depends on its own prompts only, and on what the plan says. Texts in bfloat16 also
depend on the kind of processor and on the number of threads, so a collection should be resumed where it was begun.

Shards do not depend on each other, so others may write them: `collect_traces` hands the missing ones to `spread`, and whoever gets one
calls `collect_shard`. The trace is the same, row by row, as that of a run which writes them itself.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from components.collect.continuations import room_for_prompts, sampling_of, turns_of, write_texts
from components.collect.trace_rows import observe
from components.prompts.prompt import Prompt, ids_of
from serving.errors import DraftwellError
from serving.files import write_atomically
from serving.recording.trace import KINDS, LOSSY, TraceError, TraceHeader, TraceSet
from serving.runtime.pair import LoadedPair
from serving.runtime.requests import Sampling
from serving.runtime.strategies import Strategy

PLAN, LOCK = "plan.json", ".lock"
SHARD_PROMPTS = 32

Log = Callable[[str, float, int], None]
Progress = Callable[[int, int, str], None]
"""Called with (done, total, a few words)."""
Spread = Callable[[Sequence[int], Callable[[int], None]], None]
"""Sees to it that the shards of these numbers get written; calls back with each that is there."""


class ForeignTrace(DraftwellError):
    """The folder holds a trace of other prompts, another pair or other settings."""

    code = "foreign_trace"


class Plan(BaseModel):
    """What binds a folder to a collection: `plan.json`. A resumed run takes everything but its inputs from here."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    inputs: str = Field(description="digest of prompts, pair and settings")
    prompts: int = Field(ge=1)
    shard_prompts: int = Field(ge=1, description="prompts of a shard")
    batch: int = Field(ge=1, description="texts written at once")
    room: int = Field(ge=1, description="tokens that a prompt may have")

    @property
    def shards(self) -> int:
        return -(-self.prompts // self.shard_prompts)


def forget(folder: Path) -> None:
    """Remove the trace of a folder, and nothing else that may lie there."""
    for path in (*folder.glob("shard-*.parquet"), *leftovers(folder), folder / PLAN):
        path.unlink(missing_ok=True)
    (folder / TraceSet.SIDECAR).unlink(missing_ok=True)


def leftovers(folder: Path) -> list[Path]:
    """Half-written files of a run that was killed."""
    return [*folder.glob(".shard-*"), *folder.glob(f".{PLAN}.*")]


@dataclass(frozen=True)
class Work:
    """What is to be collected, wherever it is written to.

    Args:
        pairs: prompts with the sampling parameters of each.
        plan: of this pair as it is loaded here; a folder that was claimed earlier has its own.
    """

    pair: LoadedPair
    pairs: list[tuple[Prompt, Sampling]]
    header: TraceHeader
    plan: Plan
    kinds: Sequence[str]
    hidden: bool
    turns: int
    strategy: Strategy | None = None

    def part(self, plan: Plan, index: int) -> list[tuple[Prompt, Sampling]]:
        """The prompts of a shard."""
        return self.pairs[index * plan.shard_prompts : (index + 1) * plan.shard_prompts]

    def write(self, traces: TraceSet, plan: Plan, index: int, meter: Meter) -> None:
        """Write a shard."""
        header = self.header.model_copy(update={"batch": plan.batch})
        write_shard(self.pair, self.part(plan, index), traces, index, header, plan, self.kinds, hidden=self.hidden, turns=self.turns,
                    strategy=self.strategy, meter=meter)


def collect_traces(pair: LoadedPair, prompts: Sequence[Prompt], folder: Path, *, fresh: bool = False, spread: Spread | None = None,
            log: Log | None = None, progress: Progress | None = None, **settings: Any) -> TraceSet:
    """Write texts for all prompts and record both models along them.

    Args:
        pair: with a draft, and as many slots as requests shall run at once.
        folder: of the trace; a run with the same inputs that was cut short is continued there.
        fresh: forget a trace of other inputs in the folder, once these prompts have been read.
        spread: has shards written by others (`collect_shard`, with the same settings); None writes them here, one by one.
        settings: of `work_of`.
        log: called with (name, value, shard): `collect_tokens_per_second`, and where the target writes here
            `generate_tokens_per_second` and the ratio of the two, `collect_to_generate`; last `cut_prompts` and `cut_tokens`.
        progress: called with (prompts done, prompts in all, tokens per second and time left) whenever a text is done.
    Raises:
        DraftwellError: no prompts, no draft, an unknown kind, no room in the context, a folder with another trace, or one that
            another collection is writing to, or shards that nobody wrote.
    """
    work = work_of(pair, prompts, **settings)
    traces = TraceSet(Path(folder), fingerprint=pair.fingerprint)
    with exclusive_folder(traces.folder):
        plan = claim_or_reset(pair, prompts, traces, work.plan) if fresh else claim(traces, work.plan)
        if len(traces.shards) < plan.shards:
            check_room(traces.folder, plan, work.plan)
        missing = [index for index in range(plan.shards) if not traces.shard(index).is_file()]
        meter = Meter(len(prompts), sum(len(work.part(plan, index)) for index in missing), len(work.kinds), progress)

        def written(index: int) -> None:
            meter.shard_done()
            if log:
                for name, value in meter.rates().items():
                    log(name, value, index)

        def found(index: int) -> None:
            meter.shard(work.part(plan, index), work.turns)
            meter.rows += rows_of(traces.shard(index))
            written(index)

        if spread is None:
            for index in missing:
                meter.shard(work.part(plan, index), work.turns)
                work.write(traces, plan, index, meter)
                written(index)
        elif missing:
            spread(missing, found)
            check_whole(traces, plan)
        if log:
            for name, value in zip(("cut_prompts", "cut_tokens"), cuts(traces), strict=True):
                log(name, value, plan.shards - 1)
    return traces


def collect_shard(pair: LoadedPair, prompts: Sequence[Prompt], folder: Path, index: int, **settings: Any) -> Path:
    """Write one shard of a folder that a `collect_traces` of the same inputs holds; one that is there already is left alone.

    Two who write the same shard write the same bytes, and each file appears by a rename, so it harms nobody if a worker that was
    given up for dead comes back.

    Args:
        settings: of `work_of`.
    Raises:
        ForeignTrace: the folder was not claimed for these prompts, pair and settings, or for more slots or context than there are.
    """
    work = work_of(pair, prompts, **settings)
    traces = TraceSet(Path(folder), fingerprint=pair.fingerprint)
    plan = read_plan(traces.folder)
    if plan is None or plan.inputs != work.plan.inputs:
        raise ForeignTrace(f"{folder} is not claimed here for these prompts, pair and settings: every worker needs the same version of "
                           "draftwell, the same models, and the folder under the same path")
    check_room(traces.folder, plan, work.plan)
    path = traces.shard(index)
    if not path.is_file():
        meter = Meter(len(prompts), plan.shard_prompts, len(work.kinds), None)
        meter.shard(work.part(plan, index), work.turns)
        work.write(traces, plan, index, meter)
    return path


def work_of(pair: LoadedPair, prompts: Sequence[Prompt], *, max_tokens: int = 96, temperature: float = 0.0, top_k: int = 0,
            top_p: float = 1.0, rollout: int = 8, rollout_kinds: Sequence[str] = ("target",), batch: int = 8, hidden: bool = True,
            prefix_kinds: Sequence[str] = ("target",), turns: int = 1, seed: int = 0, strategy: Strategy | None = None) -> Work:
    """What these settings ask for, checked before anything is written.

    Args:
        rollout: K, draft tokens recorded behind every position.
        rollout_kinds: of `KINDS`, texts that get rollouts; replay and the acceptance table read the target's only.
        batch: requests at once, at most the pair's slots.
        hidden: keep the draft's hidden states (verifiers need them; they are most of the trace).
        prefix_kinds: of `KINDS`; a text of each kind for every prompt, so that kinds come in equal parts.
        turns: turns of a conversation that get a text, 0 for all.
        seed: of sampled and mixed texts, at least 0.
        strategy: a lossy one that writes the texts of kind `lossy`, which beside `KINDS` may then be among the prefix kinds.
    Raises:
        DraftwellError: as in `collect_traces`.
    """
    if rollout < 1:
        raise DraftwellError(f"rollout must be at least 1, not {rollout}")
    if turns < 0:
        raise DraftwellError(f"turns must be at least 0, which takes all, not {turns}")
    if seed < 0:
        raise DraftwellError(f"seed must be at least 0, not {seed}")
    check_inputs(pair, prompts, prefix_kinds, strategy)
    sampling = pair.sampling(max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    header = TraceHeader(pair=pair.name, fingerprint=pair.fingerprint, dtype=pair.dtype, rollout=rollout, max_tokens=max_tokens,
                         temperature=temperature, top_k=top_k, top_p=top_p, stop_token_ids=tuple(sorted(sampling.stop_token_ids)),
                         rollout_kinds=tuple(kind for kind in prefix_kinds if kind in rollout_kinds))
    inputs = [header.model_dump_json(), seed, hidden, turns, list(prefix_kinds),
              [[p.id, p.task, p.turns, p.messages, p.answers, *(["raw"] if p.raw else []), *([p.tokens] if p.tokens else [])]
               for p in prompts], *([identity_of(strategy)] if strategy else [])]
    slots = min([batch, *(model.slots.count for model in pair.models.values() if hasattr(model, "slots"))])
    plan = Plan(inputs=hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest(), prompts=len(prompts),
                shard_prompts=SHARD_PROMPTS, batch=slots, room=room_for_prompts(pair, max_tokens, rollout, strategy))
    pairs = [(prompt, sampling_of(sampling, i)) for i, prompt in enumerate(prompts)]
    return Work(pair, pairs, header, plan, prefix_kinds, hidden, turns, strategy)


def identity_of(strategy: Strategy) -> list[Any]:
    """What a strategy's texts depend on beside models and prompts, as plain JSON: name, parameters, digests of its artifacts."""
    artifacts = {kind: artifact.digest for kind, artifact in sorted(strategy.resources.artifacts.items()) if kind in strategy.artifacts}
    return [strategy.name, strategy.config.model_dump(mode="json"), artifacts]


def check_whole(traces: TraceSet, plan: Plan) -> None:
    """Remove what workers that died left half-written, and refuse a trace that lacks shards."""
    for rest in leftovers(traces.folder):
        rest.unlink(missing_ok=True)
    lost = [index for index in range(plan.shards) if not traces.shard(index).is_file()]
    if lost:
        raise DraftwellError(f"{len(lost)} of {plan.shards} shards in {traces.folder} were not written: run the same `draftwell collect` "
                             "again, it goes on with those")


def rows_of(path: Path) -> int:
    """Rows of a shard, without reading them."""
    import pyarrow.parquet as pq

    return int(pq.read_metadata(path).num_rows)


def write_shard(pair: LoadedPair, prompts: Sequence[tuple[Prompt, Sampling]], traces: TraceSet, index: int, header: TraceHeader,
                plan: Plan, kinds: Sequence[str], *, hidden: bool, turns: int, strategy: Strategy | None, meter: Meter) -> None:
    """Write one shard."""
    import pyarrow as pa

    texts = write_texts(pair, prompts, kinds, room=plan.room, batch=plan.batch, turns=turns, strategy=strategy, finished=meter.tick,
                        written=meter.wrote)
    tables = []
    for _, of_prompt in groupby(texts, key=lambda text: text.prompt.id):
        for table in observe(pair.models, list(of_prompt), header, hidden=hidden):
            tables.append(table)
            meter.saw(table.num_rows)
    if not tables:  # prompts of one token have no bare text
        raise TraceError(f"none of the prompts {prompts[0][0].id} … gave a text: leave them out")
    traces.write_shard(index, pa.concat_tables(tables))


def check_inputs(pair: LoadedPair, prompts: Sequence[Prompt], kinds: Sequence[str], strategy: Strategy | None = None) -> None:
    """Refuse what cannot be collected, before anything is written."""
    if not prompts:
        raise DraftwellError("there are no prompts to collect from: name a file that holds some")
    if len({prompt.id for prompt in prompts}) != len(prompts):
        raise DraftwellError("two prompts have the same id: make them unique")
    if "draft" not in pair.models:
        raise DraftwellError(f"pair {pair.name} has no draft model, so there is nothing to trace: choose a pair with one")
    if LOSSY in kinds and strategy is None:
        raise DraftwellError(f"texts of kind {LOSSY} are those of a release's own strategy, collected when it is published: choose "
                             f"kinds of {', '.join(KINDS)}")
    if strategy is not None and strategy.lossless:
        raise DraftwellError(f"strategy {strategy.name} is lossless, its texts are the target's own: collect the kind target")
    unknown = [kind for kind in kinds if kind not in (*KINDS, LOSSY)]
    if unknown or not kinds or len(set(kinds)) != len(kinds):
        raise DraftwellError(f"prefix kinds must be different ones of {', '.join(KINDS)}, not {', '.join(kinds) or 'none'}")


def check_room(folder: Path, plan: Plan, wanted: Plan) -> None:
    """Refuse to go on with fewer slots or less context than the run began with: its texts could differ from then on."""
    for name, had, has in (("texts at once", plan.batch, wanted.batch), ("tokens of room for a prompt", plan.room, wanted.room)):
        if has < had:
            raise ForeignTrace(f"the collection in {folder} was begun with {had} {name}, here are {has}: load the pair as it was, or "
                               "choose another folder")


def is_complete(folder: Path) -> bool:
    """Whether the collection that claimed a folder has written all its shards; True where no plan says how many."""
    plan = read_plan(folder)
    return plan is None or len(list(folder.glob("shard-*.parquet"))) >= plan.shards


def read_plan(folder: Path) -> Plan | None:
    """The plan of a folder, None where it has none that can be read."""
    try:
        return Plan.model_validate_json((folder / PLAN).read_text())
    except (OSError, ValidationError):
        return None


def cuts(traces: TraceSet) -> tuple[int, int]:
    """How many prompts, later turns counted apart, were too long and were cut, and by how many tokens in all."""
    rows = traces.read(["prompt_id", "turn", "cut_tokens"]).to_pylist()
    cut = {(row["prompt_id"], row["turn"]): row["cut_tokens"] for row in rows if row["cut_tokens"]}
    return len(cut), sum(cut.values())


@contextmanager
def exclusive_folder(folder: Path, what: str = "collection", mend: str = "choose another folder") -> Iterator[None]:
    """Hold a folder against others that do the same; the lock goes with the process, however that ends."""
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DraftwellError(f"another {what} is writing to {folder}: wait for it, or {mend}") from None
        yield


def claim(traces: TraceSet, wanted: Plan) -> Plan:
    """Bind a folder to these inputs, or find that it is bound to them already; returns the plan that holds.

    Raises:
        ForeignTrace: the folder holds a trace of other inputs, or shards without a plan.
    """
    folder, plan = traces.folder, read_plan(traces.folder)
    if (folder / PLAN).is_file() and (plan is None or plan.inputs != wanted.inputs):
        raise ForeignTrace(f"{folder} holds a trace of other inputs (prompts, pair or settings): choose another folder "
                           "or delete this one")
    if plan is None and traces.shards:
        raise ForeignTrace(f"{folder} holds shards but no {PLAN}: choose another folder or delete this one")
    for rest in leftovers(folder):
        rest.unlink(missing_ok=True)
    if plan is None:
        plan = wanted
        write_atomically(folder / PLAN, (plan.model_dump_json(indent=2) + "\n").encode())
    return plan


def claim_or_reset(pair: LoadedPair, prompts: Sequence[Prompt], traces: TraceSet, wanted: Plan) -> Plan:
    """As `claim`, but what the folder holds of other inputs is forgotten: not before these prompts are known to be readable."""
    try:
        return claim(traces, wanted)
    except ForeignTrace:
        for prompt in prompts:
            ids_of(pair, prompt)
        forget(traces.folder)
        return claim(traces, wanted)


class Meter:
    """How far a collection is, how fast it goes, and when it will end. A text counts half when it is written and half when it has
    been observed.

    Args:
        total: prompts in all.
        missing: those whose shards are not there yet.
        kinds: texts of each turn.
    """

    def __init__(self, total: int, missing: int, kinds: int, progress: Progress | None):
        self.total, self.missing, self.kinds, self.progress = total, missing, kinds, progress
        self.done = 0.0
        self.rows = self.generated = 0
        self.generating = 0.0
        self.started = time.perf_counter()
        self.end = 0.0

    def shard(self, prompts: Sequence[tuple[Prompt, Sampling]], turns: int) -> None:
        """A shard of these prompts begins."""
        self.end = self.done + len(prompts)
        self.share = len(prompts) / (2 * self.kinds * sum(turns_of(prompt, turns) for prompt, _ in prompts))

    def tick(self) -> None:
        """Half a text is done."""
        self.done = min(self.end, self.done + self.share)
        self.tell()

    def shard_done(self) -> None:
        """A shard is written, whatever texts it lacked."""
        self.done = self.end
        self.tell()

    def tell(self) -> None:
        if self.progress:
            seconds = time.perf_counter() - self.started
            left = seconds / self.done * (self.missing - self.done)
            rate = f"{self.rows / seconds:.0f} tokens/s, " if self.rows else ""
            self.progress(self.total - self.missing + int(self.done + 1e-6), self.total, f"{rate}{left / 60:.1f} min left")

    def saw(self, rows: int) -> None:
        """A text's rows are made."""
        self.rows += rows
        self.tick()

    def wrote(self, kind: str, tokens: int, seconds: float) -> None:
        """All texts of a kind are written."""
        if kind == "target":
            self.generated += tokens
            self.generating += seconds

    def rates(self) -> dict[str, float]:
        """Tokens per second so far: of the whole, and of the target's own writing."""
        rate = self.rows / (time.perf_counter() - self.started)
        if not self.generated:
            return {"collect_tokens_per_second": rate}
        generate = self.generated / self.generating
        return {"collect_tokens_per_second": rate, "generate_tokens_per_second": generate, "collect_to_generate": rate / generate}
