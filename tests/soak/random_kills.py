"""Writers that are killed by SIGKILL at random moments: `python -m tests.soak.random_kills FOLDER
KILLS`.

One process that has imported everything forks the others. Each writes number after number and says
which are done. After its death a further one reads what is there: the last number that was done, or
the one behind it. A line a kill: writer, done, found.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

# seconds, once for all processes
import mlflow  # noqa: F401
import torch._dynamo  # noqa: F401  # what optimizers import

from draftwell.registry.bundles.build import build_bundle
from draftwell.registry.connection import connect
from draftwell.registry.pairs import fetch, model_records
from draftwell.registry.releases import create_release
from draftwell.registry.store import Store
from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.pair_files import fingerprint
from draftwell.serving.bundle.bundle import open_bundle
from draftwell.serving.recording.trace import TraceSet
from tests.components.collect.killed_collector import SHARDS, collect
from tests.registry.killed_publisher import pair_in
from tests.support.killing import ended, forked
from tests.support.loop.publishing import config, publish
from tests.support.server.state_writer import resumed_state, save_state
from tests.support.writers import WRITERS, Writer


def deploy(root: Path, number: int) -> None:
    """Publish a release of a table with this number, and let `current` lead to its bundle."""
    spec, store = pair_in(root), Store(f"sqlite:///{root / 'mlflow.db'}")
    files = fetch(spec)
    mark = fingerprint(files, "float32")
    made = Provenance(pair="tiny", fingerprint=mark)
    table = AcceptanceTable([number + 9] * 20, [number] * 20, made)
    first = publish(store, table, root / "made" / "table")
    second = publish(
        store, config(mark, {"acceptance_table": first.digest}), root / "made" / "config"
    )
    pins = {"acceptance_table": first.version, "decoding_config": second.version}
    release = create_release(store, "tiny", "cpu", pins, model_records(spec, files), {})
    alias = str(release.version)
    build_bundle(store, spec, files, alias=alias, out=root / "dist", ungated_reason="a trial")


def deployed(root: Path) -> int | None:
    """The number that `current` serves; every file of every version is checked."""
    store = Store(f"sqlite:///{root / 'mlflow.db'}")
    for version in store.versions("acceptance_table", "tiny"):
        store.download(version, root / "down" / str(version.version))
    current = root / "dist" / "tiny" / "current"
    if not current.is_symlink():
        return None
    table = open_bundle(current).path / "artifacts" / "acceptance_table"
    return int(AcceptanceTable.load(table).accepted[0])


def collected(root: Path) -> int | None:
    """How many collections are whole; a broken shard is an error."""
    whole = 0
    for folder in root.iterdir():
        traces = TraceSet(folder)
        if traces.shards:
            traces.read(["prompt_id"])
        whole += len(traces.shards) == SHARDS
    return whole or None


EVERY = {
    **{name: writer for name, writer in WRITERS.items() if writer.replaces},
    "state": Writer(save_state, resumed_state),
    "collect": Writer(lambda root, number: collect(root / str(number)), collected),
    "deploy": Writer(deploy, deployed),
}
LONGEST = {"deploy": 12.0, "collect": 8.0}
"""Seconds within which a writer is killed; others: 0.3."""


def told(work: Callable[[Callable[[object], None]], None], seconds: float | None) -> list[str]:
    """What a process says, which is killed after a time, or ends by itself."""
    read, write = os.pipe()
    child = forked(lambda: work(lambda said: os.write(write, f"{said}\n".encode())))
    os.close(write)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    with os.fdopen(read) as words:
        said = words.read().split()
    assert ended(child) == (0 if seconds is None else -signal.SIGKILL)
    return said


def kill(name: str, root: Path, last: int, seconds: float) -> tuple[int, int]:
    """Let a writer go on behind a number and kill it; the last that was done, and what is there."""
    writer = EVERY[name]

    def work(say: Callable[[object], None]) -> None:
        for number in count(last + 1):
            writer.write(root, number)
            say(number)

    done = max([last, *map(int, told(work, seconds))])
    (found,) = told(lambda say: say(writer.read(root) or 0), None)
    return done, int(found)


def main(folder: Path, kills: int) -> None:
    """Kill writers in turn, each where it goes on."""
    os.environ["DRAFTWELL_HOME"] = str(folder / "home")
    os.environ["DRAFTWELL_MODELS"] = str(folder / "models")
    last = dict.fromkeys(EVERY, 0)
    for name in EVERY:
        (folder / name).mkdir()
    database = folder / "deploy" / "mlflow.db"
    assert ended(forked(lambda: connect(f"sqlite:///{database}"))) == 0
    moments = random.Random(48)
    for number in range(kills):
        name = list(EVERY)[number % len(EVERY)]
        seconds = moments.uniform(0, LONGEST.get(name, 0.3))
        done, last[name] = kill(name, folder / name, last[name], seconds)
        print(name, done, last[name], flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
