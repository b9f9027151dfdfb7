"""A collector that kills itself: `python -m tests.components.collect.killed_collector FOLDER POINT
NUMBER`; or one for each of several moments, `FOLDER POINT-NUMBER POINT-NUMBER …`, in a folder of
that name, whose exit codes are printed.

It dies by SIGKILL at the NUMBER-th time that it comes to POINT: before a forward pass of a model,
after a file was written but before it is safe on disk (fsync), before a finished file gets its name
(rename), or just after that (renamed).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from draftwell.components.collect import work as collection
from draftwell.components.prompts.prompt import Prompt
from draftwell.serving.recording.trace import TraceSet
from tests.support.collecting import collect_traces
from tests.support.killing import deadly, ended, forked
from tests.support.models.table_model import TableModel
from tests.support.models.tiny import table_pair

PROMPTS = [
    Prompt(f"p{i}", "qa", [text, "and then"])
    for i, text in enumerate(["hello world", "abc", "so it goes", "xyzzy!", "q"])
]
SHARDS = 3
FILES = 1 + SHARDS
"""The plan and every shard are written once."""
POINTS = ("forward", "fsync", "rename", "renamed")


def collect(folder: Path) -> TraceSet:
    """The same collection, complete or the rest of it."""
    collection.SHARD_PROMPTS = 2
    return collect_traces(
        table_pair(),
        PROMPTS,
        folder,
        max_tokens=6,
        rollout=3,
        prefix_kinds=("bare", "draft", "target", "mixed"),
        turns=0,
        batch=4,
    )


def main(folder: str, point: str, number: str) -> None:
    """Set the trap and walk into it."""
    place, name = {
        "forward": (TableModel, "forward"),
        "fsync": (os, "fsync"),
        "rename": (os, "replace"),
        "renamed": (os, "replace"),
    }[point]
    setattr(place, name, deadly(getattr(place, name), int(number), after=point == "renamed"))
    collect(Path(folder))


def each(folder: str, *moments: str) -> None:
    """Forked before anything is computed: threads, such as pyarrow's, do not survive a fork."""
    for moment in moments:
        print(ended(forked(lambda: main(f"{folder}/{moment}", *moment.split("-")))))  # noqa: B023


if __name__ == "__main__":
    (each if "-" in sys.argv[2] else main)(*sys.argv[1:])
