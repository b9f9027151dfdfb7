"""Collection: both models read texts of a set of prompts, and what they say at every position is
kept as a trace.

One shard holds the texts of a few prompts and is written when they are done. A run that was killed,
at any moment, resumes with the first missing shard: what a shard holds depends on its own prompts
and on the plan only. Texts in bfloat16 also depend on the kind of processor and on the number of
threads, so a collection should be resumed where it was begun.

Shards do not depend on each other, so others may write them: `collect_traces` hands the missing
ones to `spread`, and each worker calls `collect_shard`. The trace is the same, row by row, as that
of a run that writes all shards itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from draftwell.components.collect.meter import Meter, Progress
from draftwell.components.collect.plan import (
    ForeignTrace,
    Plan,
    check_complete,
    check_room,
    claim,
    exclusive_folder,
    forget,
    read_plan,
)
from draftwell.components.collect.settings import CollectionSettings
from draftwell.components.collect.work import Work, work_of
from draftwell.components.prompts.prompt import Prompt, ids_of
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import Strategy

Log = Callable[[str, float, int], None]
Spread = Callable[[Sequence[int], Callable[[int], None]], None]
"""Has the shards of these numbers written, and calls back with each that is there."""


def collect_traces(
    pair: LoadedPair,
    prompts: Sequence[Prompt],
    folder: Path,
    settings: CollectionSettings,
    *,
    fresh: bool = False,
    spread: Spread | None = None,
    log: Log | None = None,
    progress: Progress | None = None,
) -> TraceSet:
    """Write texts for all prompts and record both models along them.

    Args:
        pair: with a draft, and as many slots as requests shall run at once.
        folder: of the trace; a run with the same inputs that was cut short is resumed there.
        fresh: replace a trace of other inputs in the folder, once these prompts are known to be
            readable.
        spread: has shards written by others (`collect_shard`, with the same settings); None writes
            them here, one by one.
        log: called with (name, value, shard): `collect_tokens_per_second`, and where the target
            writes here `generate_tokens_per_second` and the ratio of the two,
            `collect_to_generate`; last `cut_prompts` and `cut_tokens`.
        progress: called with (prompts done, prompts in all, tokens per second and time left)
            whenever a text is done.
    Raises:
        DraftwellError: what `work_of` refuses, a folder with another trace or one that another
            collection is writing to, or shards that nobody wrote.
    """
    return _collect(work_of(pair, prompts, settings), folder, fresh, spread, log, progress)


def collect_lossy_texts(
    pair: LoadedPair,
    prompts: Sequence[Prompt],
    folder: Path,
    settings: CollectionSettings,
    strategy: Strategy,
    *,
    fresh: bool = False,
    progress: Progress | None = None,
) -> TraceSet:
    """As `collect_traces`, with texts of kind `lossy`: what a server that decodes with this lossy
    strategy would write.

    Args:
        settings: with `lossy` among the prefix kinds.
    """
    return _collect(work_of(pair, prompts, settings, strategy), folder, fresh, None, None, progress)


def collect_shard(
    pair: LoadedPair,
    prompts: Sequence[Prompt],
    folder: Path,
    index: int,
    settings: CollectionSettings,
) -> Path:
    """Write one shard of a folder that a `collect_traces` of the same inputs holds; a shard that
    exists already is left alone.

    Two processes that write the same shard write the same bytes, and each file appears by a rename.
    So a worker that was believed dead and comes back does no harm.

    Raises:
        ForeignTrace: the folder was not claimed for these prompts, pair and settings, or for more
            slots or context than there are.
    """
    work = work_of(pair, prompts, settings)
    traces = TraceSet(Path(folder), fingerprint=pair.fingerprint)
    plan = read_plan(traces.folder)
    if plan is None or plan.inputs != work.plan.inputs:
        raise ForeignTrace(
            f"{folder} is not claimed here for these prompts, pair and settings: every "
            "worker needs the same version of "
            "draftwell, the same models, and the folder under the same path"
        )
    check_room(traces.folder, plan, work.plan)
    path = traces.shard(index)
    if not path.is_file():
        work.write_shard(
            traces,
            plan,
            index,
            Meter(len(prompts), plan.shard_prompts, len(settings.prefix_kinds), None),
        )
    return path


def cuts(traces: TraceSet) -> tuple[int, int]:
    """How many prompts were too long and were cut, and by how many tokens in all; each turn counts
    as a prompt."""
    rows = traces.read(["prompt_id", "turn", "cut_tokens"]).to_pylist()
    cut = {(row["prompt_id"], row["turn"]): row["cut_tokens"] for row in rows if row["cut_tokens"]}
    return len(cut), sum(cut.values())


def _collect(
    work: Work,
    folder: Path,
    fresh: bool,
    spread: Spread | None,
    log: Log | None,
    progress: Progress | None,
) -> TraceSet:
    traces = TraceSet(Path(folder), fingerprint=work.pair.fingerprint)
    with exclusive_folder(traces.folder):
        plan = _claim_fresh(traces, work) if fresh else claim(traces, work.plan)
        if len(traces.shards) < plan.shards:
            check_room(traces.folder, plan, work.plan)
        missing = [index for index in range(plan.shards) if not traces.shard(index).is_file()]
        meter = Meter(
            len(work.prompts),
            sum(len(work.part(plan, index)) for index in missing),
            len(work.settings.prefix_kinds),
            progress,
        )

        def written(index: int) -> None:
            meter.shard_done()
            if log:
                for name, value in meter.rates().items():
                    log(name, value, index)

        def found(index: int) -> None:
            meter.shard(work.part(plan, index), work.settings.turns)
            meter.rows += _rows_of(traces.shard(index))
            written(index)

        if spread is None:
            for index in missing:
                work.write_shard(traces, plan, index, meter)
                written(index)
        elif missing:
            spread(missing, found)
            check_complete(traces, plan)
        if log:
            for name, value in zip(("cut_prompts", "cut_tokens"), cuts(traces), strict=True):
                log(name, value, plan.shards - 1)
    return traces


def _claim_fresh(traces: TraceSet, work: Work) -> Plan:
    """As `claim`, but a trace of other inputs is removed: not before these prompts are known to be
    readable."""
    try:
        return claim(traces, work.plan)
    except ForeignTrace:
        for prompt, _ in work.prompts:
            ids_of(work.pair, prompt)
        forget(traces.folder)
        return claim(traces, work.plan)


def _rows_of(path: Path) -> int:
    """Rows of a shard, without reading them."""
    import pyarrow.parquet as pq

    return int(pq.read_metadata(path).num_rows)
