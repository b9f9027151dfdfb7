"""Loading a pair once for all flows of a process, and the prompts of each pipeline step."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwell.components.prompts.overlap import different, hash_of
from draftwell.components.prompts.prompt import demo_prompts, mixed
from draftwell.components.prompts.sources import LeftOut, load_prompts
from draftwell.flows.context import Bar, StepContext
from draftwell.flows.progress import announce, counting
from draftwell.flows.workspace import Say, Workspace
from draftwell.registry.pairs import find_pair
from draftwell.serving.artifacts.pair_files import draftwell_home
from draftwell.serving.device import set_threads
from draftwell.serving.errors import DraftwellError

if TYPE_CHECKING:
    from draftwell.components.prompts.prompt import Prompt
    from draftwell.flows.settings import PipelineSettings
    from draftwell.flows.workers.task_runners import WorkerPool


SLOTS = 8
"""As many as a server has: draft lengths are tuned for so many requests at once."""
KEPT = {"bench": 16, "tune": 8, "collect": 6, "calibrate": 4}
"""Step → prompts that it keeps as long as others have more, in a loop of so many minutes."""
FEWEST = {"bench": 8, "tune": 8, "collect": 2, "calibrate": 1}
"""Step → prompts with fewer of which it says nothing, there."""
_kept: dict[Any, StepContext] = {}
"""The pair that was loaded last, by the arguments it was loaded with."""


def _loaded(*asked: Any) -> StepContext:
    """The kept pair, or another one instead; the old one is released before the next is loaded, as
    both may not fit into memory."""
    if asked not in _kept:
        _kept.clear()
        _kept[asked] = _load(*asked)
    return _kept[asked]


def _load(
    name: str,
    dtype: str | None,
    device: str,
    slots: int,
    max_context: int | None,
    any_strategy: bool,
    pad_target: float | None,
    say: Say,
    *places: Path,
) -> StepContext:
    workspace = Workspace(name, dtype, say, device)
    from draftwell.serving.runtime.strategies import STRATEGIES, StrategyChoice

    strategies = [StrategyChoice(strategy) for strategy in STRATEGIES] if any_strategy else []
    return StepContext(
        workspace,
        workspace.load(
            slots=slots,
            device=device,
            max_context=max_context,
            pad_target=pad_target,
            strategies=strategies,
        ),
    )


def forget_loaded() -> None:
    """Free the pair that is kept."""
    _kept.clear()
    gc.collect()


def open_pair(  # noqa: PLR0913
    name: str,
    dtype: str | None = None,
    *,
    device: str = "cpu",
    slots: int = SLOTS,
    max_context: int | None = None,
    say: Say = announce,
    bar: Bar | None = None,
    any_strategy: bool = True,
    pad_target: float | None = None,
) -> StepContext:
    """A pair's workspace with its models; the last one loaded is kept. One parameter for each thing
    that decides whether it can be kept.

    Args:
        max_context: positions of a slot; None takes the models' own limit, at most 4096.
        any_strategy: also load what only some strategies need, such as the draft in ONNX Runtime;
            for tuning and profiles.
        pad_target: as in `load_pair`.
    """
    step = _loaded(
        name,
        dtype,
        device,
        slots,
        max_context,
        any_strategy,
        pad_target,
        say,
        draftwell_home().absolute(),
        Path.cwd(),
    )
    return StepContext(step.workspace, step.pair, bar)


def open_from_settings(settings: PipelineSettings, say: Say = announce, **load: Any) -> StepContext:
    """The loaded pair of a pipeline's settings; `load`: further arguments of `open_pair`."""

    set_threads(settings.threads)
    step = open_pair(
        settings.pair, settings.dtype, device=settings.device, say=say, bar=counting("done"), **load
    )
    return replace(step, workspace=_place(settings, step.workspace))


def workspace_of(settings: PipelineSettings) -> Workspace:
    """The workspace of a pipeline's settings, without loading a model."""
    return _place(settings, Workspace(settings.pair, settings.dtype, announce, settings.device))


def _place(settings: PipelineSettings, space: Workspace) -> Workspace:
    """The workspace, or the folder of the prompts where drift is answered: the workspace stays as
    it is until something better passed the gate."""
    if settings.source == "drift" and settings.prompts is not None:
        return space.aside(settings.prompts.parent)
    return space


def worker_pool_of(settings: PipelineSettings) -> WorkerPool | None:
    """How a pipeline's settings spread shards and replays over workers; None where one worker does
    all."""
    from draftwell.flows.workers.task_runners import worker_pool_for

    return worker_pool_for(
        settings.runner, settings.workers, threads=settings.threads, device=settings.device
    )


def prompts_of(settings: PipelineSettings) -> dict[str, list[Prompt]]:
    """The prompts of each pipeline step, cut from one file: none is in two steps, whatever its id.

    Where there are too few for all, the steps that want most get fewer; with `minutes` those that
    choose and confirm keep as many as these need, and prompts of a file are taken in an order of
    their own, a kind after the other, because a file may be sorted.

    Raises:
        DraftwellError: fewer different prompts than the steps need (`too_few_prompts`).
    """

    file = settings.prompts
    in_time = settings.minutes is not None
    if file:
        in_order = not (in_time and settings.source == "prompts")
        rows, left = rows_of(file, marks_of(file), settings.redact, in_order)
        if left:
            announced(left)
    else:
        rows = different(demo_prompts())
    wanted = {
        "bench": settings.bench_prompts,
        "collect": settings.collect_prompts,
        "calibrate": settings.calibrate_prompts,
        "tune": settings.tune_prompts,
    }
    if settings.restarts:
        del wanted["calibrate"]  # such an engine has nothing to calibrate
    if in_time and not settings.restarts and find_pair(settings.pair).draft is None:
        wanted |= {"collect": 0, "calibrate": 0}  # nothing to trace
    elif in_time and not settings.restarts and not settings.takes_lossy:
        wanted["calibrate"] = 0  # they fill a memory that only lossy strategies read
    kept = KEPT if in_time else {}
    fewest = FEWEST if in_time and not settings.restarts else {}
    least = {step: min(count, fewest.get(step, 1)) for step, count in wanted.items()}
    needed = sum(least.values())
    if len(rows) < needed:
        raise DraftwellError(
            f"{settings.prompts} holds {len(rows)} different prompts, and {', '.join(wanted)} "
            f"together need {needed} of their own: name a file of more; with 40 there are 16 to "
            "confirm on",
            code="too_few_prompts",
        )
    cut, start = {}, 0
    for step, count in shares(wanted, len(rows), kept, least).items():
        cut[step] = rows[start : start + count]
        start += count
    return cut


def marks_of(source: Path) -> tuple[tuple[int, ...], ...]:
    """What changes with the content of a file, or of those in a folder; nothing of others."""
    files = sorted(source.rglob("*")) if source.is_dir() else [source]
    found = [file.stat() for file in files if file.is_file()]
    return tuple((one.st_ino, one.st_size, one.st_mtime_ns) for one in found)


@lru_cache(maxsize=1)
def rows_of(
    source: Path, marks: tuple[tuple[int, ...], ...], redact: bool, in_order: bool
) -> tuple[list[Prompt], str]:
    """The different prompts of a source, and which rows were left out: read and hashed once, since
    every step of a run cuts them again.

    Args:
        marks: another one reads the source again (`marks_of`).
        in_order: as in the source; else by their hashes, a kind after the other.
    """
    left = LeftOut()
    rows = different(load_prompts(source, redact=redact, left_out=left))
    return (rows if in_order else mixed(sorted(rows, key=hash_of))), str(left) if left else ""


@cache
def announced(line: str) -> None:
    """Say a line, once a process: every task cuts the prompts again."""
    announce(line)


def shares(
    wanted: Mapping[str, int],
    total: int,
    kept: Mapping[str, int] | None = None,
    least: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """How many of `total` each gets: what it wants, or less, taken from those that want most beyond
    what they are to keep; none gets less than its `least`, where the total allows that.

    >>> (
    ...     shares({"bench": 16, "collect": 24, "tune": 8}, 100),
    ...     shares({"bench": 16, "collect": 24, "tune": 8}, 28),
    ... )
    ({'bench': 16, 'collect': 24, 'tune': 8}, {'bench': 10, 'collect': 10, 'tune': 8})
    >>> shares({"bench": 64, "collect": 16, "tune": 8}, 40, {"bench": 16, "collect": 8, "tune": 8})
    {'bench': 20, 'collect': 12, 'tune': 8}
    """
    given, floors, bounds = dict(wanted), kept or {}, least or {}
    for _ in range(sum(wanted.values()) - total):
        able = [name for name, count in given.items() if count > bounds.get(name, 0)]
        given[max(able or given, key=lambda name: given[name] - floors.get(name, 0))] -= 1
    return given
