"""Releases that are published, gated and promoted in processes of their own: killed at a given
moment, or two at once.

    python -m tests.registry.killed_publisher FOLDER kill 3 17 …    # killed just before the 3rd, the 17th … write of MLflow's client
    python -m tests.registry.killed_publisher FOLDER count          # how many writes that is
    python -m tests.registry.killed_publisher FOLDER together 2 3   # two processes: tables with 2 and with 3 accepted tokens
    python -m tests.registry.killed_publisher FOLDER race 2 3       # the same, judged beside one champion; both look before either promotes

`kill` leaves a copy of the registry for every write, `FOLDER/<write>/mlflow.db`. One process that has
imported everything forks all others, which therefore begin at once. Forked before any database is
opened: a connection must not be shared.
"""  # noqa: E501

import multiprocessing
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from draftwell.registry import promotion
from draftwell.registry.pairs import PairSpec, fetch
from draftwell.registry.promotion import promote
from draftwell.registry.releases import record_gate
from draftwell.registry.store import Store
from tests.support.killing import ended, forked
from tests.support.loop.publishing import model_folder, release, verdict

READS = ("get_", "search_", "list_", "download_")
"""How the calls begin that change nothing: a kill behind one leaves what a kill before it does."""


class Mortal:
    """MLflow's client, whose process is killed just before its n-th write; 0 counts only."""

    def __init__(self, client: Any, last: int):
        self.client, self.last, self.calls = client, last, 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.client, name)

        def call(*arguments: Any, **options: Any) -> Any:
            writes = not name.startswith(READS)
            self.calls += writes
            if writes and self.calls == self.last:
                os.kill(os.getpid(), signal.SIGKILL)
            return found(*arguments, **options)

        return call


def pair_in(folder: Path) -> PairSpec:
    """A pair of two local model folders, made where they are not there yet."""
    for role, seed in (("target", 1), ("draft", 2)):
        if not (folder / "local" / role).is_dir():
            model_folder(folder / "local" / role, seed=seed)
    return PairSpec.model_validate(
        {
            "name": "tiny",
            "description": "two tiny models",
            "licence": "none",
            "dtype": "float32",
            "target": {"path": str(folder / "local" / "target")},
            "draft": {"path": str(folder / "local" / "draft")},
        }
    )


def ship(
    folder: Path, database: Path, accepted: int, last: int = 0, *, reason: str | None = None
) -> int:
    """Publish a release, record that its gate passed beside the champion, and promote it; returns
    the writes of MLflow's client."""
    spec, store = pair_in(folder), Store(f"sqlite:///{database}")
    store.client = Mortal(store.client, last)
    made = release(
        store,
        spec,
        fetch(spec),
        database.parent / f"made-{accepted}-{os.getpid()}",
        accepted=accepted,
    )
    beside = store.get_aliases("release", "tiny.cpu").get("champion")
    promote(store, "tiny", "cpu", made.version, verdict(made, beside=beside), reason=reason)
    return int(store.client.calls)


def kill(folder: Path, calls: list[int]) -> None:
    """Ship release 1 whole, and release 2 into a copy of the registry for every call, where its
    process dies."""
    assert ended(forked(lambda: ship(folder, folder / "mlflow.db", 1))) == 0
    for call in calls:
        place = folder / str(call)
        place.mkdir()
        shutil.copyfile(folder / "mlflow.db", place / "mlflow.db")
        print(
            call,
            ended(
                forked(lambda place=place, call=call: ship(folder, place / "mlflow.db", 2, call))
            ),
            flush=True,
        )  # type: ignore[misc]


def count(folder: Path, _: list[int]) -> None:
    """Ship both releases whole; the writes of the second."""
    ship(folder, folder / "mlflow.db", 1)
    print(ship(folder, folder / "mlflow.db", 2))


def together(folder: Path, accepted: list[int]) -> None:
    """Ship releases at once into one registry, whichever the champion is meanwhile."""
    pair_in(folder)
    why = "both shall be champion"
    children = [
        forked(lambda count=count: ship(folder, folder / "mlflow.db", count, reason=why))
        for count in accepted
    ]  # type: ignore[misc]
    print(*map(ended, children), flush=True)


def race(folder: Path, accepted: list[int]) -> None:
    """Promote releases at once that were all judged beside the champion."""
    database, spec = folder / "mlflow.db", pair_in(folder)
    assert ended(forked(lambda: ship(folder, database, 1))) == 0

    def publish() -> None:
        store = Store(f"sqlite:///{database}")
        for count in accepted:
            made = release(store, spec, fetch(spec), folder / f"raced-{count}", accepted=count)
            record_gate(store, verdict(made, beside=1))

    assert ended(forked(publish)) == 0
    barrier, look = multiprocessing.Barrier(len(accepted)), promotion.outdated

    def outdated(*given: Any) -> str | None:
        found = look(*given)
        barrier.wait(60)
        return found

    promotion.outdated = outdated
    children = [
        forked(lambda n=n: promote(Store(f"sqlite:///{database}"), "tiny", "cpu", n))
        for n in range(2, 2 + len(accepted))
    ]  # type: ignore[misc]
    print(*map(ended, children), flush=True)


if __name__ == "__main__":
    import mlflow  # seconds, once for all processes  # noqa: F401

    {"kill": kill, "count": count, "together": together, "race": race}[sys.argv[2]](
        Path(sys.argv[1]), [int(word) for word in sys.argv[3:]]
    )
