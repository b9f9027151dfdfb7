"""Cells: which strategies are emulated with which pair, curve and placement, and the runs of them
that the project keeps."""

from __future__ import annotations

from pathlib import Path

import yaml
from pydantic import Field

from draftwell.components.bench.interleaved import Progress
from draftwell.components.bench.settings import BenchSettings
from draftwell.components.emulation.curve import find_curve
from draftwell.components.emulation.result import EmulatedRun, Placement, read_run
from draftwell.components.emulation.run import run_emulated, usual_choices
from draftwell.components.papers.committed import FOLDER
from draftwell.components.papers.prompts import Chosen, choose
from draftwell.components.prompts.prompt import Prompt
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.settings import Settings

HERE = Path(__file__).parent
KEPT = FOLDER / "emulated"
CALIBRATION = 8
"""Prompts that SPIDE's acceptance table is counted on, from the data set's end."""


class EmulatedCell(Settings):
    """One run on emulated devices, over the prompts of HumanEval."""

    called = "emulated cell's"

    name: str
    pair: str = Field(description="of the catalogue, or a file beside this one")
    curve: str
    placement: Placement = "own"
    strategies: list[str]
    alpha: float = Field(description="about how many of the draft's tokens are accepted")
    tau: float = Field(description="SPIDE's threshold")
    prompts: int = 100
    max_tokens: int = 32

    @property
    def pair_name(self) -> str:
        """As a workspace takes it."""
        return str(HERE / self.pair) if self.pair.endswith(".yaml") else self.pair

    def prompts_of(self, data: Path | None) -> Chosen:
        """Its prompts, with those of `CALIBRATION` behind them."""
        return choose("code", self.prompts + CALIBRATION, data)

    def is_of(self, run: EmulatedRun, data: Path | None) -> bool:
        """Whether a run has its settings and prompts, and counts."""
        chosen = self.prompts_of(data)
        return run.void is None and (
            run.curve,
            run.placement,
            run.max_tokens,
            list(run.prompt_ids),
            [row.strategy for row in run.rows.values()],
        ) == (
            find_curve(self.curve),
            self.placement,
            self.max_tokens,
            [prompt.id for prompt in counted(chosen)],
            self.strategies,
        )

    def measure(
        self, pair: LoadedPair, data: Path | None, progress: Progress | None = None
    ) -> EmulatedRun:
        """Run it."""
        chosen = self.prompts_of(data)
        prompts = counted(chosen)
        curve = find_curve(self.curve)
        usual = usual_choices(curve, self.alpha, [self.tau])
        return run_emulated(
            pair,
            curve,
            [choice for choice in usual if choice.name in self.strategies],
            prompts,
            placement=self.placement,
            calibration=chosen.prompts[len(prompts) :],
            source=chosen.source.partition(",")[0],
            settings=BenchSettings(max_tokens=self.max_tokens),
            progress=progress,
        )


def counted(chosen: Chosen) -> list[Prompt]:
    """The prompts that count; the last ones, a fifth of a small data set, calibrate."""
    return chosen.prompts[: -max(1, min(CALIBRATION, len(chosen.prompts) // 5))]


def emulated_cells(*, quick: bool = False) -> list[EmulatedCell]:
    """All cells, in the order of the page; quick ones have few prompts of few tokens."""
    found = yaml.safe_load((HERE / "cells.yaml").read_text(encoding="utf-8"))
    size = {"prompts": 2, "max_tokens": 12} if quick else {}
    return [
        EmulatedCell.model_validate({"name": name, **settings, **size})
        for name, settings in found.items()
    ]


def read_runs(folder: Path = KEPT) -> dict[str, EmulatedRun]:
    """Name → run of the cells that have a file; an installed package keeps none."""
    paths = {cell.name: folder / f"{cell.name}.json" for cell in emulated_cells()}
    return {name: read_run(path) for name, path in paths.items() if path.is_file()}
