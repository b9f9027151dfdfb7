r"""The regret of a tuning: how much faster the best of a full measured grid is than what the tuner chose, and what each took.

    python -m components.tune.regret --target FOLDER --draft FOLDER [--qualifier FOLDER] --artifacts FOLDER \\
        --traces FOLDER --pad-target 1.1e9

Tuner and grid see the same prompts. The best of a grid is the best by luck too, so it and the choice are measured afresh, in turn.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from components.bench.runner import Progress
from components.prompts.prompt import Prompt
from components.report.intervals import expanded_tail, paired_bootstrap_ratio
from components.tune.constraints import ConstraintChecker, Constraints
from components.tune.evaluator import Config, Evaluator, Measured, QualityReader, label_of
from components.tune.search.space import grid
from components.tune.successive_halving import PLAIN, compare_with_plain, named
from components.tune.tune import tune_strategy
from serving.artifacts.hardware_profile import HardwareProfile
from serving.errors import DraftwellError
from serving.files import write_atomically
from serving.recording.trace import TraceSet
from serving.runtime.pair import LoadedPair
from serving.runtime.strategies import StrategyResources

GRID: list[Config] = [
    *(("vanilla_sd", point) for point in grid({"num_speculative_tokens": (1, 2, 3, 4, 5, 6, 7, 8)})),
    *(("svip", point) for point in grid({"threshold": (0.15, 0.3, 0.45, 0.6), "max_draft": (8, 40)})),
    *(("spide", point) for point in grid({"tau": (0.3, 0.5, 0.7, 0.9), "parallel": (False, True), "max_draft": (16,)})),
    *(("csd", point) for point in grid({"num_speculative_tokens": (4, 6, 8), "min_count": (6,), "tau": (0.01, 0.2)})),
]
"""What a user without a tuner would measure."""
STRATEGIES = ("vanilla_sd", "svip", "spide", "csd")
CONSTRAINTS = Constraints(lossless_only=False, max_quality_loss=0.1)
EXPLORE, MEASURE_TOP = 4, 5
"""Of the tuner. With three of csd's, eight configs are measured: they halve to two in two rungs of two prompts. On 8 prompts these, the
confirmation and the trials of csd are 1,904 requested tokens; the grid has 7,936."""


def regret(pair: LoadedPair, trace: TraceSet, prompts: Sequence[Prompt], kit: StrategyResources, measure_profile: HardwareProfile, *,
           configs: Sequence[Config] = tuple(GRID), max_tokens: int = 32, trials: int = 60, explore: int = EXPLORE,
           measure_top: int = MEASURE_TOP, repeats: int = 2, seed: int = 0, progress: Progress | None = None) -> dict[str, Any]:
    """Tune, measure the whole grid, and compare the choice with the grid's best.

    Args:
        profile: of this pair as it is loaded; what it took to make is not in the tuner's seconds.
        configs: the grid; lossy ones count where they keep to `CONSTRAINTS` on these prompts.
        repeats: passes over the prompts of the last comparison.
    Returns:
        plain JSON: `choice`, `best`, `regret` (seconds per token of the choice over the best's, minus 1) with `regret_low` and
        `regret_high` (5 % at each end), `tune_seconds`, `grid_seconds`, `time_share`, `regret_percent` and `time_percent` (the same for
        people, rounded), `grid` (figures of every config, with `objection`), `prompts`, `max_tokens`, `padded_to`, and the tuner's
        `evidence`.
    """
    quality = QualityReader(pair)
    started = time.perf_counter()
    tuned = tune_strategy(
        pair,
        trace,
        prompts,
        kit,
        measure_profile,
        strategies=STRATEGIES,
        constraints=CONSTRAINTS,
        trials=trials,
        explore=explore,
        measure_top=measure_top,
        max_tokens=max_tokens,
        seed=seed,
        quality=quality,
        evaluate=Evaluator(pair, kit, max_tokens=max_tokens, seed=seed, progress=progress),
    )
    tune_seconds = time.perf_counter() - started
    started = time.perf_counter()
    figures = measure_grid(pair, kit, configs, prompts, max_tokens, seed, progress)
    grid_seconds = time.perf_counter() - started
    best = fastest(figures)
    choice: Config = (tuned.strategy, tuned.parameters)
    ratio, low, high = compare_again(pair, kit, choice, best, prompts, max_tokens, repeats, seed, progress)
    return {"choice": named(choice), "best": named(best), "regret": ratio - 1, "regret_low": low - 1, "regret_high": high - 1,
            "tune_seconds": tune_seconds, "grid_seconds": grid_seconds, "time_share": tune_seconds / grid_seconds,
            "regret_percent": round(100 * (ratio - 1), 2), "time_percent": round(100 * tune_seconds / grid_seconds, 1), "grid": figures,
            "prompts": len(prompts), "max_tokens": max_tokens, "padded_to": pair.padded_to, "evidence": tuned.evidence}


def measure_grid(pair: LoadedPair, kit: StrategyResources, configs: Sequence[Config], prompts: Sequence[Prompt], max_tokens: int, seed: int,
                 progress: Progress | None) -> list[dict[str, Any]]:
    """Figures of every config on every prompt, plain decoding's first, with the constraint that it breaks, if any."""
    entrants = [PLAIN, *configs]
    results = Evaluator(pair, kit, max_tokens=max_tokens, seed=seed, progress=progress)(entrants, prompts)
    measured: list[tuple[Config, Measured]] = list(zip(entrants, results, strict=True))
    judge = ConstraintChecker(CONSTRAINTS, QualityReader(pair), None, {})
    return [figure | {"objection": judge.objection(config, prompts, result, results[0])}
            for figure, (config, result) in zip(compare_with_plain(measured, seed=seed), measured, strict=True)]


def fastest(figures: Sequence[dict[str, Any]]) -> Config:
    """The config with the least seconds per token among those that keep to the constraints."""
    best = min((figure for figure in figures if figure["objection"] is None), key=lambda figure: figure["seconds_per_token"])
    return best["strategy"], best["parameters"]


def compare_again(
    pair: LoadedPair,
    kit: StrategyResources,
    choice: Config,
    best: Config,
    prompts: Sequence[Prompt],
    max_tokens: int,
    repeats: int,
    seed: int,
    progress: Progress | None,
) -> tuple[float, float, float]:
    """Seconds per token of the choice over those of the grid's best, with its interval, both measured afresh and in turn."""
    if label_of(choice) == label_of(best):
        return 1.0, 1.0, 1.0
    contest = Evaluator(pair, kit, max_tokens=max_tokens, seed=seed, progress=progress)
    chosen, rival = (sum_of(passes) for passes in zip(*(contest([choice, best], prompts, fresh=True) for _ in range(repeats)), strict=True))
    return paired_bootstrap_ratio(chosen.seconds, chosen.tokens, rival.seconds, rival.tokens, seed=seed,
                                  tail=expanded_tail(0.05, len(prompts)))


def sum_of(passes: Sequence[Measured]) -> Measured:
    """One measurement of several passes over the same prompts: for each prompt all its seconds and all its tokens."""
    return Measured([sum(seconds) for seconds in zip(*(p.seconds for p in passes), strict=True)],
                    [list(chain.from_iterable(outputs)) for outputs in zip(*(p.outputs for p in passes), strict=True)],
                    [sum(calls) for calls in zip(*(p.calls for p in passes), strict=True)])


def summary(report: Mapping[str, Any]) -> str:
    """What a report says, for people."""
    choice, best = (f"{config['strategy']} {config['parameters']}" for config in (report["choice"], report["best"]))
    return (f"chosen: {choice}\nthe grid's best: {best}\n"
            f"regret {report['regret_percent']} % [{100 * report['regret_low']:.2f}, {100 * report['regret_high']:.2f}]\n"
            f"time {report['time_percent']} % of the grid's ({report['tune_seconds']:.0f} of {report['grid_seconds']:.0f} s)")


def main(target: Annotated[Path, typer.Option(help="Folder of the target.")],
         draft: Annotated[Path, typer.Option(help="Folder of the draft.")],
         artifacts: Annotated[Path, typer.Option(help="Folder with acceptance_table and correction_memory.")],
         traces: Annotated[Path, typer.Option(help="Folder of a trace of this pair.")],
         qualifier: Annotated[Path | None, typer.Option(
             help="Folder of the qualifier, where the pair has one: artifacts and traces are bound to all of its models.")] = None,
         out: Annotated[Path, typer.Option(help="JSON file of the report.")] = Path("regret.json"),
         prompts: Annotated[Path | None, typer.Option(help="JSONL of prompts; the shipped ones if left out.")] = None,
         limit: Annotated[int, typer.Option(min=1, help="Use the first N prompts; fewer than 8 choose plain decoding.")] = 8,
         max_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 32,
         trials: Annotated[int, typer.Option(min=1, help="Configurations tried by replay.")] = 60,
         explore: Annotated[int, typer.Option(min=1, help="Configurations of csd that are tried on two prompts.")] = EXPLORE,
         measure_top: Annotated[int, typer.Option(min=1, help="Replayed configurations that are measured.")] = MEASURE_TOP,
         pad_target: Annotated[float | None, typer.Option(help="Pad the target with zeros to so many parameters.")] = None,
         dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
         threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; all cores if left out.")] = None) -> None:
    """Measure the tuner's regret on a pair."""
    from components.calibrate.hardware_profile import measure_profile
    from components.prompts.prompt import demo_prompts, read_prompts
    from components.report.machine import using_threads
    from components.report.provenance import device_class, provenance
    from serving.artifacts.acceptance_table import AcceptanceTable
    from serving.artifacts.correction_memory import CorrectionMemory
    from serving.artifacts.pair_files import PairFiles
    from serving.runtime.pair import load_pair

    rows = read_prompts(prompts, limit) if prompts else demo_prompts(limit)
    with using_threads(threads):
        files = PairFiles(target.name, target, draft, qualifier)
        pair = load_pair(files, dtype=dtype, pad_target=pad_target, qualifier=False)  # type: ignore[arg-type]
        tables: Any = {cls.kind: cls.load(artifacts / cls.kind, fingerprint=pair.fingerprint)
                       for cls in (AcceptanceTable, CorrectionMemory)}
        made = measure_profile(pair, provenance(pair, device_class=device_class(pair.device)))
        kit = StrategyResources({**tables, made.kind: made}, pair.special_tokens)
        report = regret(pair, TraceSet(traces, fingerprint=pair.fingerprint), rows, kit, made, max_tokens=max_tokens, trials=trials,
                        explore=explore, measure_top=measure_top,
                        progress=lambda done, total, words: typer.echo(f"{done} of {total} {words}", err=True) if done == total else None)
    write_atomically(out, (json.dumps(report, indent=2, allow_nan=False) + "\n").encode())
    typer.echo(summary(report))


if __name__ == "__main__":
    try:
        typer.run(main)
    except DraftwellError as mistake:
        sys.exit(f"Error: {mistake}")
