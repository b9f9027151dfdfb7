"""A tuner that kills itself: `python -m tests.components.tune.killed_tuner TRACE FOLDER POINT
NUMBER`.

It dies by SIGKILL at the NUMBER-th time that it comes to POINT: before a replay, or in the middle
of a line of the file of trials (trials) or of that of what was measured (rungs).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from draftwell.components.prompts.prompt import Prompt
from draftwell.components.results import Results
from draftwell.components.tune.search import search
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.runtime.strategies import StrategyResources
from tests.support.killing import deadly
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
        rungs=folder / "rungs.jsonl",
    )


def main(trace: str, folder: str, point: str, number: str) -> None:
    """Set the trap and walk into it."""
    if point == "replay":
        search.replay_strategy = deadly(search.replay_strategy, int(number))
    else:
        Results.put = deadly(  # type: ignore[method-assign]
            Results.put,
            int(number),
            after=True,
            counts=lambda results, *_: results.file is not None and results.file.stem == point,
            last=lambda results, *_: os.truncate(results.file, results.file.stat().st_size - 20),
        )
    run(Path(trace), Path(folder), Clock({"vanilla_sd": 1.3}))


if __name__ == "__main__":
    main(*sys.argv[1:])
