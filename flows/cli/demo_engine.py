"""`draftwell demo --engine vllm`: the loop of `draftwell.flows.steps.engine.loop`, and what it ends
with: a table and a few lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from draftwell.components.engines.ports import refuse_taken
from draftwell.components.gate.verdict import FAILED, PASSED, UNDECIDED, Thresholds
from draftwell.components.prompts.prompt import demo_prompts, mixed, read_prompts
from draftwell.components.report.tables import rich_table
from draftwell.flows.cli.engine import open_engine, path_of
from draftwell.flows.cli.engine_options import settings_of
from draftwell.flows.cli.options import (
    EXIT_FAILED,
    EXIT_UNDECIDED,
    check_folder,
    say,
    set_threads,
    wide_console,
)
from draftwell.flows.cli.signals import ends_what_it_started
from draftwell.flows.steps.engine.loop import EngineLoop, clock_time
from draftwell.flows.steps.engine.settings import LoopSettings
from draftwell.flows.steps.monitor import load_limits
from draftwell.flows.steps.verdict import result_of, sentence, unmet
from draftwell.registry.gates import load_gates

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = (
    "setting",
    "measured by",
    "at once",
    "tokens/s",
    "times plain",
    "interval",
    "lower bound",
)


def demo_elsewhere(context: typer.Context) -> NoReturn:
    """Run the loop, print what it found, and leave with the gate's exit code."""

    wishes = settings_of(context, LoopSettings)
    wishes.tuning(0.0)  # a mistake in methods or levels is refused now
    prompts = path_of(context, "prompts")
    rows = read_prompts(prompts) if prompts else mixed(demo_prompts())
    check_folder(wishes.out)
    if wishes.port is not None:
        refuse_taken(wishes.port)  # now, and not after half an hour
    set_threads(context.params["threads"])
    with ends_what_it_started(), open_engine("demo", context) as space:
        loop = EngineLoop(
            space, rows, wishes, Thresholds.of(load_gates().model_dump()), load_limits(None), say
        )
        report = loop.run()
    wide_console().print(figures_table(report))
    for line in outcome(report):
        typer.echo(line)
    raise typer.Exit(
        {PASSED: 0, FAILED: EXIT_FAILED, UNDECIDED: EXIT_UNDECIDED}[result_of(report["record"])]
    )


def figures_table(report: Mapping[str, Any]) -> Table:
    """Plain decoding, the settings that were measured on all prompts of the tuning, and what the
    gate measured of the choice."""

    choice, record = report["choice"], report["record"]
    tuned = [("tuning", figure) for figure in (*choice["confirmed"], *choice["scheduled"])]
    judged = [("gate", figure) for figure in record["figures"]]
    rows = []
    for name, figure in [judged[0]] if judged else tuned[:1]:
        rows.append(
            [
                f"{report['engine']}, plain",
                name,
                str(figure["at_once"]),
                f"{figure['plain_tokens_per_second']:.1f}",
                "1",
                "–",
                "–",
            ]
        )
    for name, figure in (*tuned, *judged):
        rows.append(
            [
                figure["label"],
                name,
                str(figure["at_once"]),
                f"{figure['tokens_per_second']:.1f}",
                f"{figure['ratio']:.3f}",
                f"{figure['low']:.3f}–{figure['high']:.3f}",
                f"{figure['low']:.3f}",
            ]
        )
    return rich_table(
        COLUMNS,
        rows,
        f"{report['pair']} in {report['dtype']} on {report['device_class']}, {report['engine']} "
        f"{report['version']}, {report['threads']} threads; each setting beside plain decoding",
    )


def outcome(report: Mapping[str, Any]) -> Iterator[str]:
    """What was chosen and why, its regret, the verdict, where it is, and how it was served."""

    seconds = report["seconds"]
    yield f"chosen: {report['choice']['reason']}"
    if grid := report.get("grid"):
        yield regret_line(grid)
        yield from (
            f"left out of the grid: {name}, {why}" for name, why in grid["left_out"].items()
        )
    against = "; ".join(f"{check['name']}, {check['detail']}" for check in unmet(report["record"]))
    yield sentence(report["record"]) + (f": {against}" if against else "")
    if "bundle" in report:
        served = report["served"]
        yield (
            f"served: {served['requests']} requests, {served['tokens_per_second']:.1f} "
            "tokens/s with "
            f"{served['clients']} at once, ready after {served['start_seconds']:.0f} s"
        )
        yield f"drafts since the tuning: {report['drift']['verdict']}, {report['drift']['why']}"
    yield (
        f"{clock_time(sum(seconds.values()))} of {report['minutes']:g} minutes: "
        + ", ".join(f"{name} {clock_time(taken)}" for name, taken in seconds.items())
    )
    if "bundle" in report:
        yield (
            f"the bundle decodes up to {served['clients']} requests at once, further ones "
            "wait: other numbers with --levels, such as "
            "--levels 1,8, and minutes enough to measure them"
        )
        yield f"bundle {report['bundle']}. Next: `make serve ENGINE={report['engine']}`"
    else:
        yield "nothing was deployed; what was deployed before stays"


def regret_line(grid: Mapping[str, Any]) -> str:
    """How far the choice is behind the best of a grid that was measured again."""
    regret = grid["regret"]
    if regret is None:
        return "regret: unknown, because the choice could not be measured again"
    low, mid, high = (100 * regret[name] for name in ("low", "regret", "high"))
    return (
        f"regret {mid:.1f} % ({low:.1f} to {high:.1f}): the choice beside {regret['best']}, the "
        f"best of the others of {len(grid['figures'])} settings, on all prompts of the tuning"
    )
