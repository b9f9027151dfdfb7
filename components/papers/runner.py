"""Measuring cells, resumably: each is one JSON file in the run's folder, written when it is
complete, and never measured twice."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from draftwell.components.bench.bench import run_bench
from draftwell.components.bench.interleaved import Progress, reason_of
from draftwell.components.bench.runner import core_plan
from draftwell.components.bench.settings import BenchSettings
from draftwell.components.papers.aucs import Aucs, measured_aucs
from draftwell.components.papers.cell_file import CellFile, Costs, read_cell
from draftwell.components.papers.cells import Cell
from draftwell.components.papers.counted import counted
from draftwell.components.papers.made_of import MadeOf, MadeOfCell, nothing
from draftwell.components.papers.prompts import Chosen, choose
from draftwell.components.papers.replays import replayed
from draftwell.components.papers.trained import HOW_TRAINED, Trained, contender, trained_verifiers
from draftwell.components.prompts.overlap import hash_of
from draftwell.components.prompts.prompt import Prompt
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.artifacts.verifier import Verifier
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import json_digest, write_json
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import StrategyResources, find_strategy

Opened = tuple[LoadedPair, StrategyResources]
Open = Callable[[Sequence[Cell]], Opened]
"""Load the pair of some cells, which have one, with the artifacts of their strategies."""
Say = Callable[[str], None]
After = Callable[[Mapping[str, str]], object]


@dataclass(frozen=True)
class Run:
    """Where the cells of a run are, and what else makes their keys.

    Args:
        folder: of the cells' files.
        where: number format and device: what was measured elsewhere is measured again.
        data: folder of the papers' data sets, see `prompts.choose`.
        made_of: what a cell is measured with.
    """

    folder: Path
    where: str = ""
    data: Path | None = None
    made_of: MadeOfCell = nothing
    known: dict[str, Planned] = field(default_factory=dict, compare=False, repr=False)

    def planned(self, cell: Cell) -> Planned:
        """Where a cell's file is, and what it is measured on; found out once."""
        settings = cell.model_dump_json()
        if settings not in self.known:
            self.known[settings] = self._plan(cell)
        return self.known[settings]

    def _plan(self, cell: Cell) -> Planned:
        made = self.made_of(cell)
        training = {
            role: choose(name, cell.training_prompts, self.data, made.prompts)
            for role, name in cell.training.items()
        }
        taken = {hash_of(prompt) for one in training.values() for prompt in one.prompts}
        chosen = choose(cell.data, cell.prompts, self.data, made.prompts, taken)
        digest = (
            json_digest([HOW_TRAINED, chosen.digest, *(one.digest for one in training.values())])
            if training
            else chosen.digest
        )
        return Planned(
            self.folder / f"{cell.name}-{cell.key(digest, self.where, made.digests)}.json",
            chosen,
            made,
            training,
        )


class Planned(NamedTuple):
    """A cell's file, prompts and artifacts, and role → prompts of the verifiers that it trains."""

    path: Path
    chosen: Chosen
    made: MadeOf
    training: Mapping[str, Chosen]

    @property
    def source(self) -> str:
        """All prompts in words."""
        return "; ".join(
            [self.chosen.source, *(f"{role}: {one.source}" for role, one in self.training.items())]
        )


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
            write_json(
                planned.path,
                json.loads(file.model_dump_json(exclude={"report"}))
                | {"report": file.report.to_json()},
            )
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

    def __init__(self, name: str, say: Say, every: float = 60.0):
        self.name, self.say, self.every = name, say, every
        self.last = time.monotonic()
        self.first: tuple[float, int] | None = None

    def __call__(self, done: int, total: int, label: str) -> None:
        now = time.monotonic()
        # what a cell does before its texts says nothing of their pace
        start, before = self.first = self.first or (now, done)
        if done > before and now - self.last >= self.every:
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
    if cell.counted is not None:
        return count(cell, planned, pair, resources, start, progress)
    if cell.replay is not None:
        return replay(cell, planned, pair, resources, start, progress)
    trained = trained_verifiers(
        cell,
        pair,
        {role: one.prompts for role, one in planned.training.items()},
        planned.chosen.prompts,
        # before the bench: what fails here loses no measured text
        planned.path.parent / "traces",
    )
    aucs = aucs_beside(cell, pair, planned.chosen.prompts, resources, trained)
    profile = resources.artifacts.get("hardware_profile")
    known = profile if isinstance(profile, HardwareProfile) and profile.t_draft else None
    # Each prompt in the list again has a seed of its own: the bench gives every place in it the
    # next one.
    report = run_bench(
        pair,
        cell.choices(),
        planned.chosen.prompts * cell.seeds,
        resources,
        BenchSettings(max_tokens=cell.max_tokens, temperature=cell.temperature, seed=cell.seed),
        cost_ratios=False,
        progress=progress,
        extra=[contender(pair, resources, role, one.verifier) for role, one in trained.items()],
    )
    return CellFile(
        cell=cell.settings(),
        source=planned.source,
        made_of=planned.made.digests,
        aucs=aucs,
        seconds=time.monotonic() - start,
        costs=Costs.of(known) if known else None,
        report=report,
    )


def replay(
    cell: Cell,
    planned: Planned,
    pair: LoadedPair,
    resources: StrategyResources,
    start: float,
    progress: Progress | None,
) -> CellFile:
    """A cell that is counted by replay."""
    trace = planned.path.parent / "traces" / trace_name(cell, planned)
    report = replayed(cell, pair, planned.chosen.prompts, resources, trace, progress)
    return CellFile(
        cell=cell.settings(),
        source=planned.chosen.source,
        made_of=planned.made.digests,
        seconds=time.monotonic() - start,
        report=report,
    )


def count(
    cell: Cell,
    planned: Planned,
    pair: LoadedPair,
    resources: StrategyResources,
    start: float,
    progress: Progress | None,
) -> CellFile:
    """A cell whose passes are counted."""
    found = counted(
        cell,
        pair,
        planned.chosen.prompts,
        resources,
        planned.path.parent,
        made_of=planned.made,
        training={name: one.prompts for name, one in planned.training.items()},
        progress=progress,
    )
    return CellFile(
        cell=cell.settings(),
        source=planned.source,
        made_of=planned.made.digests,
        seconds=time.monotonic() - start,
        points=found.points,
        report=found.report,
    )


def aucs_beside(
    cell: Cell,
    pair: LoadedPair,
    prompts: Sequence[Prompt],
    resources: StrategyResources,
    trained: Mapping[str, Trained],
) -> Aucs:
    """How well SPRINTER's verifiers rank tokens, which no bench measures: those that were trained
    for the cell, else the pair's."""
    if trained:
        return {role: aucs for one in trained.values() for role, aucs in one.aucs.items()}
    verifier = resources.artifacts.get("verifier")
    if not isinstance(verifier, Verifier) or not any(
        core_plan(choice.name)[0] == "sprinter" for choice in cell.choices()
    ):
        return {}
    with TemporaryDirectory() as folder:
        return measured_aucs(
            pair,
            verifier,
            prompts,
            Path(folder) / "trace",
            temperature=cell.temperature,
            seed=cell.seed,
        )


def trace_name(cell: Cell, planned: Planned) -> str:
    """Folder of a cell's trace: contenders may change, and the same texts are replayed."""
    digest = json_digest([planned.made.fingerprint, planned.chosen.digest, cell.max_tokens])
    return f"{cell.pair}-{cell.data}-{digest[:12]}"
