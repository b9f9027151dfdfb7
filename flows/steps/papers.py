"""Measuring the papers' tables on this machine: pairs of the catalogue with their artifacts, and
the page with its pictures."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftwell.components.bench.runner import core_plan
from draftwell.components.calibrate.hardware_profile import SIZES, measure_profile
from draftwell.components.papers.cell_file import CellFile, counted_texts
from draftwell.components.papers.cells import FULL, Cell, Scale, padding_name
from draftwell.components.papers.comparison import results
from draftwell.components.papers.made_of import MadeOf
from draftwell.components.papers.page import (
    CONFIDENCE,
    CURVES,
    LOSSES,
    POINTS,
    RATIOS,
    ROC,
    ROUNDS,
    further,
    render,
)
from draftwell.components.papers.plots import (
    draw_confidence,
    draw_curves,
    draw_losses,
    draw_points,
    draw_ratios,
    draw_roc,
    draw_rounds,
    draw_table,
)
from draftwell.components.papers.points import measured_points, published_points
from draftwell.components.papers.replays import SLOTS
from draftwell.components.papers.runner import Opened
from draftwell.components.papers.tables import Paper, PaperTable
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
    )
    kinds = kinds_of(cells)
    found: dict[str, Artifact | None] = {
        kind: find_kind(kind).load_class().load(folder, fingerprint=pair.fingerprint)
        for kind, folder in shipped_folders(workspace, kinds).items()
    }
    if "acceptance_table" in kinds and "acceptance_table" not in found:
        found["acceptance_table"] = empty_table(pair)
    found["hardware_profile"] = (
        measured_profile(pair, cell.repeats, say) if cell.replay is None else None
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


@dataclass(frozen=True)
class Page:
    """The page of a run.

    Args:
        path: of the Markdown file; pictures are in `images/` next to it.
        papers: all of it, also those that this run does not measure.
    """

    path: Path
    papers: Sequence[Paper]
    scale: Scale

    @property
    def cells(self) -> list[Cell]:
        """The cells that it shows, each once."""
        return list(
            {
                table.cell.name: table.cell
                for paper in self.papers
                for table in paper.tables(self.scale)
            }.values()
        )

    def picture(self, key: str) -> Path:
        """Where a picture is: those of another padding do not take the place of the usual ones."""
        return (
            self.path.parent
            / "images"
            / f"{'-'.join(filter(None, ('papers', padding_name(self.scale.pad_target), key)))}.png"
        )

    def write(
        self, cells: Mapping[str, CellFile], failed: Mapping[str, str], fresh: Cell | None = None
    ) -> list[Path]:
        """Write it.

        Args:
            fresh: the cell that is new since it was written last: only its pictures are drawn; None
                draws all.
        Returns:
            its pictures.
        """
        pictures = dict[str, Path]()
        for table in [table for paper in self.papers for table in paper.tables(self.scale)]:
            file = cells.get(table.cell.name)
            if file is not None:
                pictures |= self.pictures_of(
                    table, file, draw=fresh is None or table.cell.name == fresh.name
                )
        confidence = self.picture(CONFIDENCE)
        if draw_confidence(counted_texts(self.cells, cells), confidence):
            pictures[CONFIDENCE] = confidence
        points = self.picture(POINTS)
        if draw_points(
            list(measured_points(self.papers, self.scale, cells).values()),
            published_points(),
            points,
        ):
            pictures[POINTS] = points
        addresses = {
            name: Path(os.path.relpath(path, self.path.parent)) for name, path in pictures.items()
        }
        write_atomically(
            self.path, render(self.papers, self.scale, cells, failed, addresses).encode()
        )
        return list(pictures.values())

    def pictures_of(self, table: PaperTable, file: CellFile, *, draw: bool) -> dict[str, Path]:
        """Key → picture of one table, of those that it has.

        Args:
            draw: also those that are there already.
        """
        drawers: dict[str, Callable[..., Path | None]] = {
            CURVES: draw_curves,
            ROC: draw_roc,
            RATIOS: draw_ratios,
            ROUNDS: draw_rounds,
            LOSSES: draw_losses,
        }
        shown = {
            "": (draw_table, results(table, file)),
            **{end: (drawers[end], data) for end, data in further(table, file).items()},
        }
        draw = draw or not self.picture(table.name).is_file()
        found = {}
        for end, (drawer, data) in shown.items():
            path = self.picture(table.name + end)
            if data and (drawer(table, data, path) is not None if draw else path.is_file()):
                found[table.name + end] = path
        return found


def log_page(page: Page, pictures: Sequence[Path]) -> str | None:
    """Keep the page and its pictures as a run of MLflow's experiment `draftwell/papers`, where a
    registry is at hand.

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
        client.log_artifact(run, str(page.path))
        for picture in pictures:
            client.log_artifact(run, str(picture), "images")
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
