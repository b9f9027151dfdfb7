"""A tuner that kills itself: `python -m tests.components.tune.killed_tuner TRACE FOLDER POINT NUMBER`.

It dies by SIGKILL at the NUMBER-th time that it comes to POINT: before a replay, before the study hears of a trial (tell), or before
the file of what was measured gets its name (rename).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from components.prompts.prompt import Prompt
from components.tune.search import search
from serving.recording.trace import TraceSet
from serving.runtime.strategies import StrategyResources
from tests.components.collect.killed_collector import deadly
from tests.support.loop.scripted_clock import Clock
from tests.support.loop.tuning import PROFILE, run_tuner
from tests.support.models.tiny import table_pair

PROMPTS = [Prompt(f"p{i}", None, [text]) for i, text in enumerate(["hello world", "abc", "so it goes", "xyzzy!", "ok?", "1984", "q", "hm"])]


def run(trace: Path, folder: Path, clock: Clock) -> Any:
    """The same tuning, whole or the rest of it; the trials suffice for every config there is."""
    return run_tuner(
        table_pair(),
        TraceSet(trace),
        PROMPTS,
        clock,
        resources=StrategyResources({"hardware_profile": PROFILE}, deterministic=True),
        strategies=["vanilla_sd", "prompt_lookup"],
        trials=40,
        max_tokens=12,
        study=folder / "study.db",
        rungs=folder / "rungs.json",
    )


def main(trace: str, folder: str, point: str, number: str) -> None:
    """Set the trap and walk into it."""
    import optuna

    place, name = {"replay": (search, "replay_strategy"), "tell": (optuna.Study, "tell"), "rename": (os, "replace")}[point]
    setattr(place, name, deadly(getattr(place, name), int(number)))
    run(Path(trace), Path(folder), Clock({"vanilla_sd": 1.3}))


if __name__ == "__main__":
    main(*sys.argv[1:])
