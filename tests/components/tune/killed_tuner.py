"""A tuner that kills itself: `python -m tests.components.tune.killed_tuner TRACE FOLDER POINT
NUMBER`.

It dies by SIGKILL at the NUMBER-th time that it comes to POINT: before a replay, in the middle of
writing a trial to its file (write), or before the file of what was measured gets its name (rename).
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from draftwell.components.prompts.prompt import Prompt
from draftwell.components.tune.search import search, trial_log
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.runtime.strategies import StrategyResources
from tests.components.collect.killed_collector import deadly
from tests.support.loop.scripted_clock import Clock
from tests.support.loop.tuning import PROFILE, run_tuner
from tests.support.models.tiny import table_pair

PROMPTS = [
    Prompt(f"p{i}", None, [text])
    for i, text in enumerate(
        ["hello world", "abc", "so it goes", "xyzzy!", "ok?", "1984", "q", "hm"]
    )
]


def run(trace: Path, folder: Path, clock: Clock) -> Any:
    """The same tuning, whole or the rest of it."""
    return run_tuner(
        table_pair(),
        TraceSet(trace),
        PROMPTS,
        clock,
        resources=StrategyResources({"hardware_profile": PROFILE}, deterministic=True),
        strategies=["vanilla_sd", "prompt_lookup"],
        max_tokens=12,
        study=folder / "trials.jsonl",
        rungs=folder / "rungs.json",
    )


def half_written(number: int) -> None:
    """The number-th trial is cut short in the middle of its line, and the process dies there."""
    real, count = trial_log.TrialLog._append, [0]

    def append(self: trial_log.TrialLog, rows: list[dict[str, Any]]) -> None:
        real(self, rows)
        count[0] += 1
        if count[0] == number:
            assert self.file is not None
            os.truncate(self.file, self.file.stat().st_size - 20)
            os.kill(os.getpid(), signal.SIGKILL)

    trial_log.TrialLog._append = append  # type: ignore[method-assign]


def main(trace: str, folder: str, point: str, number: str) -> None:
    """Set the trap and walk into it."""
    place, name = {"replay": (search, "replay_strategy"), "rename": (os, "replace")}.get(
        point, (None, "")
    )
    if point == "write":
        half_written(int(number))
    else:
        setattr(place, name, deadly(getattr(place, name), int(number)))
    run(Path(trace), Path(folder), Clock({"vanilla_sd": 1.3}))


if __name__ == "__main__":
    main(*sys.argv[1:])
