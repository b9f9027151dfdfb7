"""The live view: what changes in place on a terminal, plain lines elsewhere, and a log of all."""

from __future__ import annotations

import io
import re
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console

from draftwell.components.bench.engines.figures import Figure
from draftwell.components.tune.evaluator import Measured
from draftwell.flows import live
from draftwell.flows.cli.options import progress, say
from draftwell.flows.live import LiveView
from draftwell.flows.progress import announce, announce_step, counting, shown, tell_best
from draftwell.flows.steps.engine.tune import tell_if_fastest
from draftwell.flows.steps.tune import tell_fastest
from draftwell.serving.runtime.strategies import PLAIN, StrategyChoice

OTHER = StrategyChoice("vanilla_sd", {})


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTWELL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=72, height=20, color_system=None)


@pytest.fixture
def pipe() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=72)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def rendered(view: LiveView) -> list[str]:
    """The lines that the view shows now."""
    console = Console(file=io.StringIO(), width=72, color_system=None)
    console.print(view._render())
    return written(console).splitlines()


def logged(view: LiveView) -> list[str]:
    lines = view.log_file.read_text().splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in lines)
    return [line[9:] for line in lines]


def test_a_terminal_shows_what_is_tried_the_best_and_time_left(terminal: Console) -> None:
    clock = Clock()
    with LiveView("tune", seconds=600, console=terminal, clock=clock) as view:
        announce_step("choose", 3, 7)
        view.advance(1, 128, "csd")
        clock.now += 30
        view.advance(31, 128, "eagle3")
        view.best("hybrid, 1.77 times as fast as plain decoding")
        head, done, trying, best, log = rendered(view)
    assert re.fullmatch(r"3/7 choose +30 s of 10 min 0 s", head)
    assert re.fullmatch(r"done +[━╸╺ ]+31/128, about 1 min 37 s left", done)
    assert re.fullmatch(r"trying +eagle3 *", trying)
    assert re.fullmatch(r"best +hybrid, 1\.77 times as fast as plain decoding *", best)
    assert log.startswith("log")


def test_time_left_is_of_this_step_and_only_where_it_is_known(terminal: Console) -> None:
    clock = Clock()
    with LiveView("tune", console=terminal, clock=clock) as view:
        clock.now += 1000
        announce_step("train", 2, 7)
        assert len(rendered(view)) == 2, "nothing is known of the step yet"
        view.advance(40, 140)  # an earlier run made forty
        clock.now += 1
        view.advance(41, 140)
        assert "left" not in rendered(view)[1], "one of a hundred says too little"
        clock.now += 9
        view.advance(90, 140)
        assert "90/140, about 10 s left" in rendered(view)[1]
        # the next count of the same step begins anew
        view.advance(0, 10)
        clock.now += 4
        view.advance(2, 10)
        assert "2/10, about 16 s left" in rendered(view)[1]
        clock.now += 600
        assert "left" not in rendered(view)[1], "it takes longer than the others did"
        view.advance(10, 10)
        assert "left" not in rendered(view)[1]
        announce_step("gate", 6, 7)
        assert len(rendered(view)) == 2, "what the last step tried is shown no longer"
    assert "2/7 train: 10 min 14 s" in written(terminal)


def test_a_line_that_begins_a_step_is_its_heading_and_stays_with_its_time(
    terminal: Console,
) -> None:
    clock = Clock()
    with LiveView("tune", console=terminal, clock=clock) as view:
        announce("1/7 collect")
        assert rendered(view)[0].startswith("1/7 collect")
        clock.now += 5
        announce("2/7 train")
        assert rendered(view)[0].startswith("2/7 train")
        announce("    texts: 3/9 csd")
        assert rendered(view)[0].startswith("2/7 train"), "no step"
        clock.now += 65
    lines = [
        line.rstrip() for line in re.sub(r"\x1b\[[?\d]*[A-Za-z]", "", written(terminal)).split("\n")
    ]
    assert "1/7 collect: 5 s" in [line.split("\r")[-1] for line in lines]
    assert "2/7 train: 1 min 5 s" in [line.split("\r")[-1] for line in lines]
    assert logged(view)[:2] == ["1/7 collect", "2/7 train"]


def test_a_small_window_cuts_lines_and_wraps_none(terminal: Console) -> None:
    with LiveView("tune", console=terminal) as view:
        announce_step("a name that is very long " * 9, 1, 2)
        view.advance(1, 2, "a strategy with many parameters " * 9)
        view.best("[bold]no markup[/bold] " * 9)
        lines = rendered(view)
    assert len(lines) == 5
    assert max(map(len, lines)) <= 72
    assert "[bold]no markup[/bold]" in lines[3]


def test_lines_of_all_kinds_go_through_the_view_and_into_its_log(
    terminal: Console, capsys: pytest.CaptureFixture[str]
) -> None:
    with LiveView("tune", console=terminal) as view:
        announce("announced")
        say("said")
        show = counting("replays", iter([0.0, 9.0, 9.0]).__next__)
        show(3, 9, "csd")
        tell_best("csd, 1.2 times as fast")
        with progress("bench") as bar:
            bar(4, 8, "eagle3")
        assert "4/8" in "\n".join(rendered(view))
        assert "eagle3" in "\n".join(rendered(view))
        thread = threading.Thread(target=announce, args=("from a thread",))
        thread.start()
        thread.join()
    assert logged(view) == [
        "announced",
        "said",
        "    replays: 3/9 csd",
        "    best so far: csd, 1.2 times as fast",
        "from a thread",
    ]
    text = written(terminal)
    assert "announced" in text
    assert "said" in text
    # what the view shows in place is not printed above it as well
    assert "replays: 3/9" not in text
    assert capsys.readouterr() == ("", "")
    assert shown() is None


def test_elsewhere_lines_are_plain_as_without_a_view(
    pipe: Console, capsys: pytest.CaptureFixture[str]
) -> None:
    with LiveView("tune", console=pipe) as view:
        announce_step("collect", 1, 7)
        announce("a line that is longer than the width of the console, which does not break it")
        counting("texts", iter([0.0, 1.0]).__next__)(9, 9)
        view.advance(1, 2)
        view.best("csd, 1.2 times as fast")
        view.best("csd, 1.2 times as fast")
    assert written(pipe).splitlines() == [
        "1/7 collect",
        "a line that is longer than the width of the console, which does not break it",
        "    texts: 9/9",
        "    best so far: csd, 1.2 times as fast",
    ]
    assert "\x1b" not in written(pipe)
    assert logged(view) == written(pipe).splitlines()


def test_without_a_view_nothing_changes(capsys: pytest.CaptureFixture[str]) -> None:
    tell_best("nobody looks")
    announce("a line")
    assert capsys.readouterr().err == "a line\n"


@pytest.mark.parametrize("console", ["terminal", "pipe"])
def test_ctrl_c_says_in_one_line_how_to_resume(
    request: pytest.FixtureRequest, console: str
) -> None:
    where: Console = request.getfixturevalue(console)
    view = LiveView("tune", "draftwell tune --target big", console=where)
    with pytest.raises(SystemExit) as ended, view:
        raise KeyboardInterrupt
    assert ended.value.code == 130
    last = written(where).splitlines()[-1]
    assert last.endswith(
        "stopped: `draftwell tune --target big` resumes where this was stopped; "
        f"log: {view.log_file}"
    )
    assert logged(view)[-1] == "stopped by Ctrl-C"
    assert shown() is None


def test_what_is_not_kept_is_not_said_to_resume(pipe: Console) -> None:
    view = LiveView("tune", None, console=pipe)
    with pytest.raises(SystemExit), view:
        raise KeyboardInterrupt
    assert written(pipe) == f"stopped; log: {view.log_file}\n"


def test_a_quiet_view_writes_the_log_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveView("tune", quiet=True) as view:
        announce_step("collect", 1, 7)
        say("a line")
    assert capsys.readouterr() == ("", "")
    assert logged(view) == ["1/7 collect", "a line"]


def test_an_error_passes_and_is_in_the_log(terminal: Console) -> None:
    view = LiveView("tune", console=terminal)
    with pytest.raises(ValueError, match="wrong"), view:
        raise ValueError("something is wrong")
    assert logged(view) == ["ended by ValueError: something is wrong"]
    assert shown() is None
    assert type(sys.stderr).__name__ != "FileProxy"


def test_the_terminal_is_clean_when_it_ends(terminal: Console) -> None:
    with LiveView("tune", console=terminal) as view:
        announce_step("collect", 1, 7)
        view.advance(1, 2, "plain")
    text = written(terminal)
    assert "\x1b[?25l" in text, "the cursor was hidden"
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "and is shown again"


@pytest.fixture
def many_logs(home: Path) -> Path:
    folder = home / "logs"
    folder.mkdir(parents=True)
    for number in range(30):
        (folder / f"tune-2020010{number // 10}-00000{number % 10}.log").write_text("old\n")
    (folder / "bench-20200101-000000.log").write_text("another command's\n")
    return folder


def test_old_logs_go(many_logs: Path, pipe: Console) -> None:
    with LiveView("tune", console=pipe) as view:
        pass
    left = sorted(many_logs.glob("tune-*.log"))
    assert len(left) == live.LOGS_KEPT
    assert left[-1] == view.log_file
    assert (many_logs / "bench-20200101-000000.log").is_file()


def measured(*seconds: float) -> Measured:
    return Measured(list(seconds), [[1] * 10 for _ in seconds], [1 for _ in seconds])


def test_a_tuning_tells_the_fastest_of_what_it_measured(pipe: Console) -> None:
    csd = StrategyChoice("csd", {"tau": 0.4})
    with LiveView("tune", console=pipe):
        tell_fastest({csd: measured(1.0)})  # beside nothing
        tell_fastest({PLAIN: measured(3.0)})
        tell_fastest(
            {csd: measured(2.0, 1.0), PLAIN: measured(3.0, 3.0), OTHER: measured(9.0, 9.0)}
        )
    assert written(pipe) == (
        f"    best so far: {csd}: 2.00 times as fast as plain decoding on 2 prompts\n"
    )


def test_a_tuning_of_an_engine_tells_what_is_faster_than_all_before(pipe: Console) -> None:
    def figure(label: str, ratio: float, at_once: int = 1) -> Figure:
        return Figure.model_construct(label=label, ratio=ratio, at_once=at_once, prompts=4)

    with LiveView("tune", console=pipe):
        tell = tell_if_fastest()
        for one in (figure("a", 1.2), figure("b", 1.1), figure("c", 1.9, 8), figure("d", 1.3)):
            tell(one)
    assert [line.split()[3] for line in written(pipe).splitlines()] == ["a:", "d:"]
