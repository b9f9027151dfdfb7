"""Measuring cells, resumably: each is one JSON file in the run's folder, written when it is
complete, and never measured twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from draftwell.components.bench.bench import run_bench
from draftwell.components.bench.interleaved import Progress, reason_of
from draftwell.components.bench.runner import StrategyContender, core_plan
from draftwell.components.bench.settings import BenchSettings
from draftwell.components.papers.cell_file import CellFile, Costs, read_cell
from draftwell.components.papers.cells import FORMAT, Cell
from draftwell.components.papers.counted import counted
from draftwell.components.papers.plan import Planned, Run
from draftwell.components.papers.replays import replayed
from draftwell.components.papers.verifiers import TAU, Aucs, measured_aucs, trained_verifiers
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.artifacts.verifier import Verifier
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import write_atomically
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import StrategyChoice, StrategyResources, find_strategy

Opened = tuple[LoadedPair, StrategyResources]
Open = Callable[[Sequence[Cell]], Opened]
"""Load the pair of some cells, which have one, with the artifacts of their strategies."""
Say = Callable[[str], None]
After = Callable[[Mapping[str, str]], object]


def measured_cells(cells: Sequence[Cell], run: Run) -> dict[str, CellFile]:
    """Name → file of the cells that are there; of those that have no file under any key not even
    the pair is looked at."""
    found = {}
    for cell in cells:
        if not any(run.folder.glob(f"{cell.name}-*.json")):
            continue
        # its pair cannot be had here: nothing can be said of its weights
        with suppress(DraftwellError):
            file = read_cell(run.planned(cell).path)
            if file is not None:
                found[cell.name] = file
    return found


def run_cells(
    cells: Sequence[Cell],
    run: Run,
    open_pair: Open,
    *,
    say: Say = lambda line: None,
    after: After = lambda failed: None,
) -> dict[str, str]:
    """Measure the cells that are missing, those of one pair after each other so that it is loaded,
    and its profile measured, once.

    Whatever goes wrong in a cell, a lack of memory too, is that cell's failure; the others are
    measured.

    Args:
        run: its folder is made if needed.
        say: called with one line for each cell.
        after: called when a cell was measured or has failed, with all failures so far.
    Returns:
        name → reason of the cells that could not be measured; all others have a file.
    """
    run.folder.mkdir(parents=True, exist_ok=True)
    failed: dict[str, str] = {}
    opened: tuple[tuple[Any, ...], Opened] | None = None
    ordered = by_pair(cells)
    for i, cell in enumerate(ordered, 1):
        name = f"[{i}/{len(ordered)}] {cell.name}"
        start = time.monotonic()
        try:
            planned = run.planned(cell)
            if read_cell(planned.path) is not None:
                say(f"{name}: measured before")
                continue
            if opened is None or opened[0] != needs(cell):
                opened = None  # so that two pairs never need memory at once
                opened = (
                    needs(cell),
                    open_pair([one for one in ordered if needs(one) == needs(cell)]),
                )
            file = measure(cell, planned, *opened[1], start, Pace(name, say))
            write_atomically(planned.path, file.model_dump_json(exclude_unset=True).encode())
            say(f"{name}: {file.seconds:.0f} s")
        except Exception as error:
            failed[cell.name] = reason_of(error)
            say(f"{name}: failed: {failed[cell.name]}")
            if not isinstance(error, DraftwellError):
                opened = None  # nobody knows what it left behind in the loaded pair
        after(failed)
    return failed


def by_pair(cells: Sequence[Cell]) -> list[Cell]:
    """Cells of one pair behind each other; pairs, and the cells of each, in the order that they
    have here: the most telling first.

    Before all of them those that are replayed, which take minutes each.
    """
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in sorted(cells, key=lambda cell: cell.kind == "measured"):
        groups.setdefault(needs(cell), []).append(cell)
    return [cell for group in groups.values() for cell in group]


class Pace:
    """Says now and then how far a cell is, and how long the rest of it takes at this pace.

    Args:
        name: of the cell, in front of the line.
    """

    def __init__(self, name: str, say: Say):
        self.name, self.say = name, say
        self.last = time.monotonic()
        self.first: tuple[float, int] | None = None

    def __call__(self, done: int, total: int, label: str) -> None:
        now = time.monotonic()
        # what a cell does before its texts says nothing of their pace
        start, before = self.first = self.first or (now, done)
        if done > before and now - self.last >= 60:
            self.last, left = now, (now - start) / (done - before) * (total - done)
            self.say(
                f"{self.name}: {done} of {total} texts, about {max(1, round(left / 60))} min left"
            )


def needs(cell: Cell) -> tuple[Any, ...]:
    """What has to be loaded for a cell; a draft in ONNX Runtime has times of its own, so the
    strategies that prefer one stay apart."""
    onnx = any(find_strategy(core_plan(choice.name)[0]).prefers_onnx for choice in cell.choices())
    return (
        cell.pair,
        cell.pad_target or 0.0,
        cell.repeats,
        onnx,
        cell.kind,
        bool(cell.verifiers),
    )


def measure(
    cell: Cell,
    planned: Planned,
    pair: LoadedPair,
    resources: StrategyResources,
    start: float,
    progress: Progress | None = None,
) -> CellFile:
    """One cell, measured now."""
    how = {"counted": counted, "replayed": replayed, "measured": benched}[cell.kind]
    found = how(cell, planned, pair, resources, progress)
    return CellFile(
        version=FORMAT,
        cell=cell,
        source=planned.source,
        made_of=planned.made.digests,
        seconds=time.monotonic() - start,
        **found,
    )


def benched(
    cell: Cell,
    planned: Planned,
    pair: LoadedPair,
    resources: StrategyResources,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Decode with a cell's contenders in turn, each text timed; fields of the cell's file."""
    prompts, aucs = planned.chosen.prompts, Aucs()
    further = []
    # before the bench: what fails here loses no measured text
    if cell.verifiers:
        training = {role: one.prompts for role, one in planned.training.items()}
        verifiers, aucs = trained_verifiers(cell, pair, training, prompts, planned.folder)
        for role, one in verifiers.items():
            used = replace(resources, artifacts={**resources.artifacts, "verifier": one})
            choice = StrategyChoice("sprinter", {"tau": TAU})
            further.append(StrategyContender(pair, used, choice, role))
    elif any(choice.name.partition("@")[0] == "sprinter" for choice in cell.choices()):
        shipped = resources.artifacts.get("verifier")
        if isinstance(shipped, Verifier):
            aucs = measured_aucs(cell, pair, shipped, prompts, planned.folder)
    # Each prompt in the list again has a seed of its own: the bench gives every place in it the
    # next one.
    report = run_bench(
        pair,
        cell.choices(),
        prompts * cell.seeds,
        resources,
        BenchSettings(max_tokens=cell.max_tokens, temperature=cell.temperature, seed=cell.seed),
        cost_ratios=False,
        progress=progress,
        extra=further,
    )
    profile = resources.artifacts.get("hardware_profile")
    costs = None
    if isinstance(profile, HardwareProfile) and profile.t_draft:
        costs = Costs(t_draft=profile.draft_seconds, t_verify=profile.t_verify, busy=profile.split)
    return {"report": report, "aucs": aucs, "costs": costs}
