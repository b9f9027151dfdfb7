"""`draftwell demo --engine vllm`: the loop of `draftwell.flows.steps.engine.loop`, and what it ends
with: a table and a few lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from draftwell.flows.cli.engine import open_engine
from draftwell.flows.cli.options import check_folder, say, set_threads, wide_console
from draftwell.flows.cli.release import EXIT_FAILED, EXIT_UNDECIDED
from draftwell.flows.cli.signals import ends_what_it_started

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


def demo_elsewhere(
    pair: str,
    dtype: str | None,
    device: str | None,
    threads: int | None,
    *,
    prompts: Path | None,
    methods: str | None,
    port: int | None,
    out: Path,
    **wanted: Any,
) -> None:
    """Run the loop, print what it found, and leave with the gate's exit code.

    Args:
        wanted: fields of `LoopSettings`.
    """
    from draftwell.components.engines.ports import refuse_taken
    from draftwell.components.gate.verdict import FAILED, PASSED, UNDECIDED, Thresholds
    from draftwell.components.prompts.prompt import demo_prompts, mixed, read_prompts
    from draftwell.flows.steps.engine.loop import EngineLoop, LoopSettings
    from draftwell.flows.steps.monitor import load_limits
    from draftwell.flows.steps.verdict import result_of
    from draftwell.registry.gates import load_gates

    named = (
        None
        if methods is None
        else tuple(part.strip() for part in methods.split(",") if part.strip())
    )
    wishes = LoopSettings(methods=named, port=port, out=out, **wanted)
    # a mistake in methods or levels is refused now, and not after texts were collected
    wishes.tuning()
    rows = read_prompts(prompts) if prompts else mixed(demo_prompts())
    check_folder(out)
    if port is not None:
        refuse_taken(port)  # now, and not after half an hour
    set_threads(threads)
    with ends_what_it_started(), open_engine("demo", pair, dtype, device, threads) as space:
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
    from draftwell.components.report.tables import rich_table

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
    from draftwell.components.tune.engines.choice import Final
    from draftwell.flows.steps.engine.loop import clock_time
    from draftwell.flows.steps.verdict import sentence, unmet

    seconds = report["seconds"]
    yield from (f"final: {Final.model_validate(final)}" for final in report["choice"]["finals"])
    yield f"chosen: {report['choice']['reason']}"
    yield regret_line(report["regret"], "by the tuning's own figures")
    if grid := report.get("grid"):
        yield (
            regret_line(grid["regret"], "by the whole grid on all prompts of the tuning")
            if grid["regret"]
            else "regret by the whole grid: unknown, because the choice could not be measured again"
        )
        if final := grid["final"]:
            yield (
                "the choice and the best of the others in the grid once more: "
                f"{Final.model_validate(final)}"
            )
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


def regret_line(regret: Mapping[str, Any], by: str) -> str:
    """How far the choice is behind the best that was measured."""
    interval = (
        ""
        if regret["low"] is None
        else f" ({100 * regret['low']:.1f} to {100 * regret['high']:.1f})"
    )
    best = f", {regret['best']}," if regret["regret"] else ""
    return (
        f"regret {by}: {100 * regret['regret']:.1f} %{interval}: the best of "
        f"{regret['settings']} settings{best} over what was chosen"
    )
