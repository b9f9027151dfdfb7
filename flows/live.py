"""One live view while a long command works: what is being tried, the best so far, the time; and a
log file beside it with every line that was said.

On a terminal it is a few lines that change in place, with all other lines above them. Elsewhere
lines are printed as they come. Ctrl-C ends the command with one line that says how to resume.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from draftwell.components.report.tables import duration
from draftwell.flows.progress import showing
from draftwell.serving.artifacts.pair_files import draftwell_home
from draftwell.serving.files import make_folder

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.text import Text

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended."""
STEP = re.compile(r"(?P<number>\d+)/(?P<of>\d+) (?P<name>\S.*)")
"""A line that says that a step begins."""
LOGS_KEPT = 20
"""Of each command, the newest."""
FIRST_SHARE = 0.05
"""Of what a step has to do, before which nothing is said of its time left."""
CHANGES_A_SECOND = 4


class LiveView:
    """Progress of one command, as a context manager; what `announce`, `say`, `counting` and
    `progress` tell inside the block goes through it, from any thread.

    Args:
        command: its name, for the log file `<home>/logs/<command>-<time>.log`.
        resume: command that resumes where this one is stopped; empty: the same one; None: nothing
            that it did is kept.
        quiet: write the log alone.
        seconds: that the command may take in all, where that is known.
        console: where it is shown; None: on stderr.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        command: str,
        resume: str | None = "",
        *,
        quiet: bool = False,
        seconds: float | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        from rich.console import Console

        self._command, self._resume, self._seconds = command, resume, seconds
        self._console = console or Console(stderr=True, quiet=quiet)
        self._clock = clock
        self._began = self._step_began = clock()
        self._first = self._last = (0, self._began)
        self._title, self._number, self._of = "", 0, 0
        self._trying = self._best = ""
        self._done = self._total = 0
        self._writing, self._stack = threading.Lock(), ExitStack()
        self._log: TextIO | None = None
        self.log_file = log_file(command)

    @property
    def _live(self) -> bool:
        """Whether lines can change in place here."""
        return self._console.is_terminal and not self._console.is_dumb_terminal

    def _begin(self, name: str, number: int, of: int) -> None:
        self._end_step()
        self._title, self._number, self._of, self._step_began = name, number, of, self._clock()
        self._done, self._total, self._trying = 0, 0, ""

    def _end_step(self) -> None:
        """Of the step that is over a terminal keeps a line, with its time."""
        if self._live and self._title:
            spent = duration(self._clock() - self._step_began)
            self._print(f"{self._number}/{self._of} {self._title}: {spent}")
        self._title = ""

    def best(self, text: str) -> None:
        """The best so far, with its ratio."""
        if text != self._best:
            self._best = text
            self.line(f"    best so far: {text}", passing=True)

    def advance(self, done: int, total: int, words: str = "") -> None:
        """So much of the step is done.

        Args:
            words: what is being tried, where that changes.
        """
        now = self._clock()
        if total != self._total or done < self._done:  # another count; it may be resumed
            self._first = (done, now)
        self._last = (done, now)
        self._done, self._total = done, total
        if words:
            self._trying = words

    def line(self, text: str, *, passing: bool = False) -> None:
        """Say a line, which is in the log file too.

        Args:
            passing: the live view shows it already.
        """
        self._note(text)
        if step := STEP.fullmatch(text):
            self._begin(step["name"], int(step["number"]), int(step["of"]))
            passing = True
        if not (self._live and passing):
            self._print(text)

    def _print(self, text: str) -> None:
        """A line above what changes in place."""
        from rich.text import Text

        self._console.print(Text(text), soft_wrap=True, highlight=False)

    def _note(self, text: str) -> None:
        """Write a line into the log file, with the time of day."""
        with self._writing:
            if self._log is not None:
                self._log.write(f"{datetime.now():%H:%M:%S} {text}\n")
                self._log.flush()

    def __enter__(self) -> Self:
        make_folder(self.log_file.parent)
        self._log = self._stack.enter_context(self.log_file.open("a", encoding="utf-8"))
        remove_old(self.log_file.parent, self._command)
        if self._live:
            from rich.live import Live

            live = Live(
                console=self._console,
                get_renderable=self._render,
                refresh_per_second=CHANGES_A_SECOND,
                transient=True,
                redirect_stdout=sys.stdout.isatty(),
            )
            self._stack.enter_context(live)
        self._stack.enter_context(showing(self))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        stopped = isinstance(error, KeyboardInterrupt)
        if error is not None:
            self._note(
                "stopped by Ctrl-C" if stopped else f"ended by {type(error).__name__}: {error}"
            )
        if error is None:
            self._end_step()
        self._stack.close()
        self._log = None
        if stopped:
            how = f"`{self._resume}`" if self._resume else "the same command"
            resumed = "" if self._resume is None else f": {how} resumes where this was stopped"
            self.line(f"stopped{resumed}; log: {self.log_file}")
            raise SystemExit(INTERRUPTED) from None

    def _render(self) -> Group:
        """The view as it is now."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        head = Table.grid(expand=True)
        head.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        head.add_column(justify="right", no_wrap=True)
        number = f"{self._number}/{self._of} " if self._of else ""
        head.add_row(Text(f"{number}{self._title or self._command}", style="bold"), self._times())
        rows = Table.grid(padding=(0, 1), expand=True)
        rows.add_column(no_wrap=True, style="dim", width=6)
        rows.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        if self._total:
            line = Table.grid(padding=(0, 1), expand=True)
            line.add_column(ratio=1)
            line.add_column(justify="right", no_wrap=True)
            bar = ProgressBar(total=self._total, completed=self._done)
            line.add_row(bar, Text(f"{self._done}/{self._total}{self._step_left()}"))
            rows.add_row("done", line)
        if self._trying:
            rows.add_row("trying", Text(self._trying))
        if self._best:
            rows.add_row("best", Text(self._best, style="bold green"))
        rows.add_row("log", Text(str(self.log_file), style="dim"))
        return Group(head, rows)

    def _times(self) -> Text:
        """How long the command has run, and how long it may."""
        from rich.text import Text

        elapsed = self._clock() - self._began
        left = "" if self._seconds is None else f" of {duration(self._seconds)}"
        return Text(f"{duration(elapsed)}{left}")

    def _step_left(self) -> str:
        """How long the rest of the step takes at the pace so far; empty where too little is done,
        and where it takes longer than that."""
        (first, since), (done, last) = self._first, self._last
        made = done - first
        if made < max(1.0, FIRST_SHARE * (self._total - first)):
            return ""
        left = (last - since) * (self._total - done) / made - (self._clock() - last)
        return f", about {duration(left)} left" if left > 0 else ""


def log_file(command: str) -> Path:
    """Where the lines of a command that begins now are kept."""
    return draftwell_home() / "logs" / f"{command}-{datetime.now():%Y%m%d-%H%M%S}.log"


def remove_old(folder: Path, command: str) -> None:
    """Delete all but the newest logs of a command."""
    for old in sorted(folder.glob(f"{command}-*.log"))[:-LOGS_KEPT]:
        old.unlink(missing_ok=True)
