r"""The regret of a tuning: how much faster the best of a full measured grid is than what the tuner chose, and what each took.

    python -m draftwell.components.tune.regret --target FOLDER --draft FOLDER [--qualifier FOLDER] --artifacts FOLDER \\
        --traces FOLDER --pad-target 1.1e9

Tuner and grid see the same prompts. The best of a grid is partly the best by luck, so it and the choice are measured again, in turn.
"""  # noqa: E501

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel

from draftwell.components.bench.interleaved import Progress
from draftwell.components.calibrate.hardware_profile import measure_profile
from draftwell.components.prompts.prompt import demo_prompts
from draftwell.components.report.intervals import Timed, ratio_of
from draftwell.components.report.provenance import provenance
from draftwell.components.tune.constraints import ConstraintChecker
from draftwell.components.tune.evaluator import Evaluator, QualityReader
from draftwell.components.tune.evidence import Metrics
from draftwell.components.tune.search.space import Space, grid
from draftwell.components.tune.settings import Constraints, TuneSettings
from draftwell.components.tune.successive_halving import compare_with_plain
from draftwell.components.tune.tune import SEED, TuneInputs, tune_strategy
from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.correction_memory import CorrectionMemory
from draftwell.serving.artifacts.pair_files import PairFiles
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import write_atomically
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.runtime.pair import LoadSettings, load_pair
from draftwell.serving.runtime.strategies import PLAIN, StrategyChoice, StrategyResources

SPACES: dict[str, Space] = {
    "vanilla_sd": {"num_speculative_tokens": (1, 2, 3, 4, 5, 6, 7, 8)},
    "svip": {"threshold": (0.15, 0.3, 0.45, 0.6), "max_draft": (8, 40)},
    "spide": {"tau": (0.3, 0.5, 0.7, 0.9), "parallel": (False, True), "max_draft": (None,)},
    "csd": {"num_speculative_tokens": (4, 6, 8), "min_count": (6,), "tau": (0.01, 0.2)},
}
"""A sample, and so are the `STRATEGIES`: new ones are not entered."""
PROMPTS = 8
"""Fewer choose plain decoding."""
GRID = [StrategyChoice(name, point) for name, space in SPACES.items() for point in grid(space)]
"""What a user without a tuner would measure."""
SETTINGS = TuneSettings(
    constraints=Constraints(
        lossless_only=False, max_quality_loss=0.1, max_rouge_l_loss=2.0, max_surprisal_shift=0.1
    ),
    max_tokens=32,
)
"""Of the tuner. The limits are those of registry/gates.yaml."""
STRATEGIES, EXPLORED, MEASURED = ("vanilla_sd", "svip", "spide", "csd"), 2, 4
"""What the tuner tries. The whole grid is replayed, so that the best of each kind (serial and
parallel SPIDE are two) are enough to measure: four, and two of csd's. Successive halving leaves two
of them after two rungs of two prompts. On 8 prompts these, the confirmation and the trials of csd
are 1,616 requested tokens; the grid has 7,936."""


class Regret(BaseModel):
    """How far a choice is behind the best of a grid, both measured again, in turn: the best of a
    grid is partly the best by luck.

    Args:
        best: label of the fastest of the others.
        regret: seconds per token of the choice over those of the best, minus 1.
        low, high: of the interval over prompts.
    """

    best: str
    regret: float
    low: float
    high: float


def regret_of(best: str, chosen: Timed, rival: Timed, seed: int = 0) -> Regret:
    """The regret, by what the choice and the best took for the same prompts."""
    ratio, low, high = ratio_of(chosen, rival, seed=seed)
    return Regret(best=best, regret=ratio - 1, low=low - 1, high=high - 1)


@dataclass(frozen=True)
class RegretStudy:
    """A tuning and a grid on the same prompts.

    Args:
        inputs: their profile is of the pair as it is loaded; what it took to make is not in the
            tuner's seconds.
        choices: the grid; lossy ones count where they keep to the settings' constraints on these
            prompts.
    """

    inputs: TuneInputs
    settings: TuneSettings = SETTINGS
    choices: Sequence[StrategyChoice] = tuple(GRID)
    progress: Progress | None = None

    def run(self) -> dict[str, Any]:
        """Tune, measure the complete grid, and compare the choice with the grid's best.

        Returns:
            plain JSON: `choice`, the fields of `Regret`, `tune_seconds`, `grid_seconds`, `grid`
            (figures of every configuration, with `objection`), `prompts`, `max_tokens`,
            `padded_to`, and the tuner's `evidence`.
        """
        started = time.perf_counter()
        evidence = tune_strategy(
            self.inputs, self.settings, self.evaluator(), QualityReader(self.inputs.pair)
        )
        tune_seconds = time.perf_counter() - started
        started = time.perf_counter()
        figures = self.measure_grid()
        grid_seconds = time.perf_counter() - started
        best = fastest(figures)
        return {
            "choice": evidence.choice.to_json(),
            **self.compare(evidence.choice, best).model_dump(),
            "tune_seconds": tune_seconds,
            "grid_seconds": grid_seconds,
            "grid": [figure.model_dump(exclude_unset=True) for figure in figures],
            "prompts": len(self.inputs.prompts),
            "max_tokens": self.settings.max_tokens,
            "padded_to": self.inputs.pair.padded_to,
            "evidence": evidence.to_json(),
        }

    def evaluator(self) -> Evaluator:
        """One whose contenders have learnt nothing."""
        return Evaluator(
            self.inputs.pair,
            self.inputs.resources,
            max_tokens=self.settings.max_tokens,
            seed=SEED,
            progress=self.progress,
        )

    def measure_grid(self) -> list[Metrics]:
        """Figures of every choice on every prompt, plain decoding's first, with the constraint that
        it breaks, if any."""
        entrants, prompts = [PLAIN, *self.choices], self.inputs.prompts
        measured = dict(zip(entrants, self.evaluator()(entrants, prompts), strict=True))
        checker = ConstraintChecker(self.settings.constraints, QualityReader(self.inputs.pair))
        return [
            figure.model_copy(
                update=checker.metrics(choice, prompts, measured[choice], measured[PLAIN])
            )
            for choice, figure in zip(
                entrants, compare_with_plain(measured, seed=SEED), strict=True
            )
        ]

    def compare(self, choice: StrategyChoice, best: StrategyChoice) -> Regret:
        """The choice and the grid's best measured again, in turn."""
        if choice == best:
            return Regret(best=str(best), regret=0.0, low=0.0, high=0.0)
        chosen, rival = self.evaluator()([choice, best], self.inputs.prompts, fresh=True)
        return regret_of(str(best), chosen, rival, SEED)


def fastest(figures: Sequence[Metrics]) -> StrategyChoice:
    """The choice with the least seconds per token among those that keep to the constraints."""
    return min(
        (figure for figure in figures if figure.objection is None),
        key=lambda figure: figure.seconds_per_token,
    ).choice


def summary(report: Mapping[str, Any]) -> str:
    """A report in four lines."""
    choice, tuned, whole = report["choice"], report["tune_seconds"], report["grid_seconds"]
    return (
        f"chosen: {choice['strategy']} {choice['parameters']}\n"
        f"the grid's best: {report['best']}\n"
        f"regret {100 * report['regret']:.2f} % [{100 * report['low']:.2f}, "
        f"{100 * report['high']:.2f}]\n"
        f"time {100 * tuned / whole:.1f} % of the grid's ({tuned:.0f} of {whole:.0f} s)"
    )


def main(
    target: Annotated[Path, typer.Option(help="Folder of the target.")],
    draft: Annotated[Path, typer.Option(help="Folder of the draft.")],
    artifacts: Annotated[
        Path, typer.Option(help="Folder with acceptance_table and correction_memory.")
    ],
    traces: Annotated[Path, typer.Option(help="Folder of a trace of this pair.")],
    qualifier: Annotated[
        Path | None,
        typer.Option(
            help=(
                "Folder of the qualifier, where the pair has one: artifacts and traces are "
                "bound to all of its models."
            )
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="JSON file of the report.")] = Path("regret.json"),
    pad_target: Annotated[
        float | None, typer.Option(help="Pad the target with zeros to so many parameters.")
    ] = None,
) -> None:
    """Measure the tuner's regret on a pair (one parameter for each flag)."""
    files = PairFiles(target.name, target, draft, qualifier)
    pair = load_pair(files, LoadSettings(dtype="bfloat16", pad_target=pad_target), qualifier=False)
    tables: Any = {
        cls.kind: cls.load(artifacts / cls.kind, fingerprint=pair.fingerprint)
        for cls in (AcceptanceTable, CorrectionMemory)
    }
    made = measure_profile(pair, provenance(pair))
    resources = StrategyResources({**tables, made.kind: made}, pair.special_tokens)
    trace = TraceSet(traces, fingerprint=pair.fingerprint)
    inputs = TuneInputs(
        pair,
        trace,
        demo_prompts(PROMPTS),
        resources,
        made,
        strategies=STRATEGIES,
        explored=EXPLORED,
        measured=MEASURED,
    )
    report = RegretStudy(inputs, progress=show_finished).run()
    write_atomically(out, (json.dumps(report, indent=2, allow_nan=False) + "\n").encode())
    typer.echo(summary(report))


def show_finished(done: int, total: int, name: str) -> None:
    """Report each measurement that is complete."""
    if done == total:
        typer.echo(f"{done} of {total} {name}", err=True)


if __name__ == "__main__":
    try:
        typer.run(main)
    except DraftwellError as mistake:
        sys.exit(f"Error: {mistake}")
