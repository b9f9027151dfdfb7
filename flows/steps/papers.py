"""Measuring the papers' tables on this machine: pairs of the catalogue with their artifacts, and
the page with its pictures."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftwell.components.bench.runner import core_plan
from draftwell.components.calibrate.hardware_profile import SIZES, measure_profile
from draftwell.components.emulation.cells import EmulatedCell, read_runs
from draftwell.components.emulation.page import emulated_page, summary_cells
from draftwell.components.emulation.result import EmulatedRun, read_run
from draftwell.components.papers.cell_file import CellFile
from draftwell.components.papers.cells import FULL, Cell, Scale
from draftwell.components.papers.csv_files import write_csv
from draftwell.components.papers.page import LOSSES, Shown, padded_page, paper_page, summary_page
from draftwell.components.papers.plan import MadeOf
from draftwell.components.papers.plots import draw_losses, draw_rows
from draftwell.components.papers.replays import SLOTS
from draftwell.components.papers.runner import Opened, Pace
from draftwell.components.papers.tables import Paper
from draftwell.components.prompts.overlap import TrainingPrompts
from draftwell.components.report.provenance import provenance
from draftwell.flows.context import distilled_draft, made_from_prompts
from draftwell.flows.workspace import Say, Workspace
from draftwell.registry.connection import (
    artifact_folder,
    connect,
    default_uri,
    registry_errors,
    registry_exists,
)
from draftwell.serving.artifacts.acceptance_table import MIDPOINTS, AcceptanceTable
from draftwell.serving.artifacts.base import Artifact, digest_of
from draftwell.serving.artifacts.kinds import find_kind
from draftwell.serving.artifacts.pair_files import fingerprint
from draftwell.serving.device import lacks_bfloat16
from draftwell.serving.files import write_atomically
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import StrategyChoice, StrategyResources, find_strategy

FEW_SIZES = (1, 2, 4, 8, 32)
"""Tokens of the target passes that the profile of a quick run times; passes between them are
interpolated."""

CONTEXT = 1024
"""Tokens of a request of a counted cell at most: eight slots of a whole context take gigabytes."""


def own_format(device: str) -> str:
    """The number format of a run: bfloat16, but float32 on CPUs that have no instructions for
    it."""

    return "float32" if device == "cpu" and lacks_bfloat16() else "bfloat16"


def open_cells(cells: Sequence[Cell], dtype: str, device: str, say: Say) -> Opened:
    """The pair of cells that have one, loaded, with the shipped artifacts that their strategies
    read, and a hardware profile of now."""

    choices = [
        StrategyChoice(core_plan(choice.name)[0], choice.parameters)
        for cell in cells
        for choice in cell.choices()
    ]
    cell = cells[0]
    workspace = Workspace(cell.pair, dtype, say, device)
    pair = workspace.load(
        device=device,
        pad_target=cell.pad_target,
        strategies=choices,
        slots=SLOTS if cell.collects else 1,
        max_context=CONTEXT if cell.kind == "counted" else None,
    )
    kinds = kinds_of(cells)
    found: dict[str, Artifact | None] = {
        kind: find_kind(kind).load_class().load(folder, fingerprint=pair.fingerprint)
        for kind, folder in shipped_folders(workspace, kinds).items()
    }
    if "acceptance_table" in kinds and "acceptance_table" not in found:
        found["acceptance_table"] = empty_table(pair)
    found["hardware_profile"] = (
        measured_profile(pair, cell.repeats, say) if cell.kind == "measured" else None
    )
    return pair, StrategyResources(
        {kind: artifact for kind, artifact in found.items() if artifact is not None},
        pair.special_tokens,
    )


def kinds_of(cells: Sequence[Cell]) -> list[str]:
    """Kinds of artifacts that the strategies of cells read, but for the hardware profile: that is
    measured."""

    names = dict.fromkeys(core_plan(choice.name)[0] for cell in cells for choice in cell.choices())
    return list(
        dict.fromkeys(
            kind
            for name in names
            for kind in find_strategy(name).reads()
            if kind != "hardware_profile"
        )
    )


def shipped_folders(workspace: Workspace, kinds: Sequence[str]) -> dict[str, Path]:
    """kind → folder of what the pair ships with; whatever was calibrated on this machine has no
    part in the papers' tables."""
    folders = {kind: workspace.shipped_folder(kind) for kind in kinds}
    return {kind: folder for kind, folder in folders.items() if folder is not None}


def made_of(cell: Cell, dtype: str, device: str, say: Say) -> MadeOf:
    """What a cell is measured with; fetches the pair's files if need be."""
    workspace = Workspace(cell.pair, dtype, say, device)
    folders = shipped_folders(workspace, kinds_of([cell]))
    makers = made_from_prompts({**folders, "distilled_draft": distilled_draft(workspace)})
    prompts = TrainingPrompts.of(
        {kind: one.training_prompts for kind, one in makers.items()},
        {kind: one.unknown_prompts for kind, one in makers.items()},
    )
    return MadeOf(
        fingerprint(workspace.files(), dtype),
        {kind: digest_of(folder) for kind, folder in folders.items()},
        prompts,
        fingerprint(replace(workspace.files(), draft=None, qualifier=None), dtype),
    )


def empty_table(pair: LoadedPair) -> Artifact:
    """SPIDE's table before anything is counted: it learns online alone, as in the paper."""

    nothing = [0] * len(MIDPOINTS)
    return AcceptanceTable(nothing, nothing, provenance(pair))


def measured_profile(pair: LoadedPair, repeats: int, say: Say) -> Artifact | None:
    """Times of the pair's passes; None where it has no draft model."""

    if "draft" not in pair.models:
        return None
    sizes = FEW_SIZES if repeats < FULL.repeats else SIZES
    say("measuring a hardware profile")
    return measure_profile(
        pair, provenance(pair), sizes=sizes, repeats=repeats, requests=False
    )  # no table predicts a whole request


def emulate(
    cells: Sequence[EmulatedCell], folder: Path, data: Path | None, dtype: str, say: Say
) -> Iterator[EmulatedCell]:
    """Run the cells that have no run in a folder, and write theirs; each cell when it has one."""
    for i, cell in enumerate(cells, 1):
        name, path = f"[{i}/{len(cells)}] {cell.name}", folder / f"{cell.name}.json"
        if path.is_file() and cell.is_of(read_run(path), data):
            say(f"{name}: measured before")
        else:
            pair = Workspace(cell.pair_name, dtype, say, "cpu").load()
            run = cell.measure(pair, data, Pace(name, say))
            run.write(path)
            say(f"{name}: {run.void or f'{run.seconds:.0f} s'}")
        yield cell


@dataclass(frozen=True)
class Page:
    """The pages of a run: a summary, and in a folder of its name one page a paper with CSV files
    beside it. A run with another padding has one page of its own, without pictures.

    Args:
        path: of the summary; pictures are in `images/` next to it.
        papers: all of it, also those that this run does not measure.
    """

    path: Path
    papers: Sequence[Paper]
    scale: Scale

    @property
    def cells(self) -> list[Cell]:
        """The cells that it shows, each once."""
        return [cell for paper in self.papers for cell in paper.measured_in(self.scale).values()]

    @property
    def folder(self) -> Path:
        """Of the papers' pages."""
        return self.path.with_suffix("")

    def write(
        self,
        cells: Mapping[str, CellFile],
        failed: Mapping[str, str],
        emulated: Mapping[str, EmulatedRun] | None = None,
    ) -> list[Path]:
        """Write it; its files, the summary first.

        Args:
            emulated: runs on emulated devices; None: those that the project keeps.
        """
        runs = read_runs() if emulated is None else emulated
        shown = Shown(
            self.papers, self.scale, cells, failed, self.path.stem, summary_cells([*runs.values()])
        )
        if not self.scale.usual:
            write_atomically(self.path, padded_page(shown).encode())
            return [self.path, *write_csv(shown, self.folder)]
        write_atomically(self.path, summary_page(shown).encode())
        made = [self.path, *write_csv(shown, self.folder), self.folder / "emulated.md"]
        write_atomically(made[-1], emulated_page(runs).encode())
        for paper in self.papers:
            pictures = self.draw(shown, paper)
            page = self.folder / f"{paper.name}.md"
            addresses = {
                title: Path(os.path.relpath(path, self.folder)) for title, path in pictures
            }
            write_atomically(page, paper_page(shown, paper, addresses).encode())
            made += [page, *(path for _, path in pictures)]
        return made

    def draw(self, shown: Shown, paper: Paper) -> list[tuple[str, Path]]:
        """(title, picture) of the tables that have one, and of what lossy methods lose."""
        compared = shown.tables[paper.name]
        wanted = [
            (draw_rows, table.title, rows, f"{paper.name}-{i}")
            for i, (table, rows) in enumerate(compared, 1)
            if table.picture
        ]
        every = [one for table, rows in compared if not table.csv for one in rows]
        wanted.append((draw_losses, LOSSES, every, f"{paper.name}-losses"))
        found = []
        for drawer, title, rows, key in wanted:
            path = self.path.parent / "images" / f"{self.path.stem}-{key}.png"
            if drawer(title, rows, path) is not None:
                found.append((title, path))
        return found


def log_page(page: Page, files: Sequence[Path]) -> str | None:
    """Keep a page's files as a run of MLflow's experiment `draftwell/papers`, where there is a
    registry.

    Returns:
        its address for a person; None where there is no registry.
    """

    if not registry_exists():
        return None
    uri, name = default_uri(), "draftwell/papers"
    client = connect(uri)
    with registry_errors(uri):
        known, root = client.get_experiment_by_name(name), artifact_folder(uri)
        experiment = (
            known.experiment_id
            if known
            else client.create_experiment(name, f"{root}/papers" if root else None)
        )
        run = client.create_run(
            experiment, run_name=f"papers, {page.scale.name}{page.scale.pad_option}"
        ).info.run_id
        for file in files:
            folder = file.parent.relative_to(page.path.parent).as_posix()
            client.log_artifact(run, str(file), None if folder == "." else folder)
        client.set_terminated(run)
    return f"{name}, run {run}"


def counts_of(cells: Sequence[Any], own: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """How many cells a run has, and how many more the page shows, in words.

    >>> counts_of("abcd", {"a": 1}, {"a": 1, "b": 1, "c": 1})
    'cells: 1 of 4 measured in this run, 2 as the project keeps them'
    """
    kept = len(set(found) - set(own))
    return (
        f"cells: {len(own)} of {len(cells)} measured in this "
        f"run{f', {kept} as the project keeps them' if kept else ''}"
    )
