"""`draftwell monitor --engine URL`: is the engine as fast as it was?"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from json import dumps
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, NoReturn

import typer

from draftwell.components.watch.report import (
    alarm_line,
    headline,
    moment,
    watch_metrics,
    watch_tables,
)
from draftwell.flows.cli.options import say, wide_console
from draftwell.flows.steps.remote.watch import Watch, look, new_alarms
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import write_text

if TYPE_CHECKING:
    from draftwell.components.watch.report import WatchReport
    from draftwell.components.watch.schema import Alarm

ALARM = 3
"""Exit code while an alarm stands; 0 is steady, or not enough known yet, 2 a mistake."""


def watch_once(watch: Watch, metrics_file: Path | None, as_json: bool) -> NoReturn:
    """One look; ends with its exit code."""
    report = look(watch)
    write_metrics(report, metrics_file)
    if as_json:
        typer.echo(report_json(report))
    else:
        for table in watch_tables(report):
            wide_console().print(table)
    raise typer.Exit(ALARM if report.alarms else 0)


def watch_on(watch: Watch, seconds: float, metrics_file: Path | None, as_json: bool) -> NoReturn:
    """Look again and again until this process is asked to end: a line for each alarm that begins or
    ends, and progress on stderr. Whatever the engine answers, it continues.

    The exit code is that of the last look.
    """
    standing: tuple[Alarm, ...] = ()
    report: WatchReport | None = None
    with asked_to_end() as end:
        while not end.is_set():
            begun = time.monotonic()
            try:
                report = look(watch, patient=True)
                begun_now, ended = new_alarms(report, standing)
                for alarm in begun_now:
                    tell(report, alarm, as_json)
                for alarm in ended:
                    tell(report, alarm, as_json)
                standing = report.alarms
                say(f"{moment(report.at)} {headline(report)}" + note_of(report))
                write_metrics(report, metrics_file)
            except DraftwellError as error:
                say(f"{moment(watch.clock())} {error}")
            end.wait(max(0.0, seconds - (time.monotonic() - begun)))
    raise typer.Exit(ALARM if report is not None and report.alarms else 0)


def note_of(report: WatchReport) -> str:
    """The notes of a look, for its line of progress."""
    return "".join(f"; {note}" for note in report.notes)


def tell(report: WatchReport, alarm: Alarm, as_json: bool) -> None:
    """An alarm that began or ended, on stdout."""
    if as_json:
        typer.echo(dumps({"engine": report.engine, **alarm.model_dump(mode="json")}))
    elif alarm.until is None:
        typer.echo(f"{report.engine}: {alarm_line(alarm)}")
    else:
        typer.echo(f"{report.engine}: {alarm.cause.replace('_', ' ')} ended {moment(alarm.until)}")


def report_json(report: WatchReport) -> str:
    """The report as JSON."""
    return dumps({**report.model_dump(mode="json"), "digest": report.digest}, indent=2)


def write_metrics(report: WatchReport, file: Path | None) -> None:
    """The report as metrics, where a file is named."""
    if file is not None:
        write_text(file, watch_metrics(report))


@contextmanager
def asked_to_end() -> Iterator[Event]:
    """An event that SIGTERM and SIGINT set; a second one ends at once what is under way."""
    end = Event()

    def ask(number: int, frame: object) -> None:
        if end.is_set():
            raise KeyboardInterrupt
        end.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield end
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
