"""What was made of served traffic is deleted when it is old, but for what serves."""

from __future__ import annotations

import os
import time
from pathlib import Path

from draftwell.flows.steps.announcement import Announced, announcement
from draftwell.flows.steps.old_traffic import remove_old
from draftwell.flows.steps.reference_traces import kept_reference
from draftwell.flows.workspace import Workspace
from draftwell.registry.store import Store
from draftwell.serving.files import file_lock, write_json
from tests.support.loop.publishing import release

DAY = 86_400


def aged(folder: Path, days: float) -> Path:
    """A folder with a file, last written so many days ago."""
    file = folder / "prompts.jsonl"
    folder.mkdir(parents=True)
    file.write_text("{}")
    for path in (file, folder):
        os.utime(path, (time.time() - days * DAY,) * 2)
    return folder


def test_old_recalibrations_and_references_go_and_the_champions_stay(
    own_stores: Path, pair_file: Path
) -> None:
    space = Workspace(str(pair_file))
    made = release(Store(), space.spec, space.files(), own_stores / "made")
    Store().set_alias(made.published, "champion")
    answers, references = space.root / "recalibrations", space.root / "drift" / "references"
    old = [aged(answers / ("0" * 12), 31), aged(references / "served-old", 31)]
    kept = [
        aged(answers / ("1" * 12), 29),
        aged(answers / ("2" * 12), 31),
        aged(answers / ("3" * 12), 31),
        aged(kept_reference(space, "7" * 64), 31),
    ]
    (kept[0] / "prompts.jsonl").touch()  # resumed since
    said = Announced(champion="c", digest="2" * 64, spool=own_stores, at="2026-01-01T00:00:00Z")
    write_json(announcement(space, "cpu"), said.model_dump(mode="json"))
    with file_lock(kept[2] / ".turn"):  # a flow works there
        os.utime(kept[2] / ".turn", (time.time() - 31 * DAY,) * 2)
        os.utime(kept[2], (time.time() - 31 * DAY,) * 2)
        assert remove_old(space, own_stores / "dist", 30) == old
    assert [folder.is_dir() for folder in (*old, *kept)] == [False] * 2 + [True] * 4
    assert remove_old(space, own_stores / "dist", 60) == []
