"""Spreading: whoever writes the shards or replays the configs, in whatever order, the result is
that of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftwell.components.collect import work as collection
from draftwell.components.collect.plan import ForeignTrace, is_complete
from draftwell.components.prompts.prompt import Prompt
from draftwell.components.tune.evidence import Trial
from draftwell.components.tune.search.search import Search, trials_in
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import StrategyChoice
from tests.support.collecting import collect_shard, collect_traces
from tests.support.errors import raises_code
from tests.support.loop.scripted_clock import Clock
from tests.support.loop.tuning import run_tuner
from tests.support.models.tiny import llama_pair

PROMPTS = [
    Prompt(f"p{i}", "qa", [text, "and then"])
    for i, text in enumerate(["hello world", "abc", "so it goes", "xyzzy!", "q"])
]
SETTINGS: dict[str, Any] = {
    "max_tokens": 8,
    "rollout": 4,
    "prefix_kinds": ("bare", "target", "mixed"),
    "turns": 0,
    "batch": 2,
}


@pytest.fixture(scope="module")
def pair() -> LoadedPair:
    return llama_pair()


@pytest.fixture(autouse=True)
def three_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collection, "SHARD_PROMPTS", 2)


@pytest.fixture
def alone(pair: LoadedPair, tmp_path: Path) -> TraceSet:
    """The trace of one process."""
    return collect_traces(pair, PROMPTS, tmp_path / "alone", **SETTINGS)


def by_workers(
    folder: Path, order: Callable[[Sequence[int]], Sequence[int]], pairs: Iterator[LoadedPair]
) -> Any:
    """A `spread` whose workers write in some order, each with a pair of its own."""

    def spread(missing: Sequence[int], found: Callable[[int], None]) -> None:
        for index in order(missing):
            collect_shard(next(pairs), PROMPTS, folder, index, **SETTINGS)
        for index in missing:
            if TraceSet(folder).shard(index).is_file():
                found(index)

    return spread


def test_shards_by_others_in_any_order_are_the_same_trace(
    pair: LoadedPair, alone: TraceSet, tmp_path: Path
) -> None:
    """Each worker has other slots than the last, with what its own earlier texts left in them; one
    does a shard twice."""
    folder, told = tmp_path / "spread", []
    workers = iter([llama_pair(slots=4), llama_pair(slots=2), llama_pair(slots=2), pair])
    spread = collect_traces(
        pair,
        PROMPTS,
        folder,
        spread=by_workers(folder, lambda missing: [*missing[::-1], missing[0]], workers),
        progress=lambda done, total, words: told.append((done, total)),
        **SETTINGS,
    )
    assert spread.digest() == alone.digest()
    assert [spread.shard(i).read_bytes() for i in range(3)] == [
        alone.shard(i).read_bytes() for i in range(3)
    ]
    assert told[-1] == (5, 5)


def test_shards_that_nobody_wrote_are_told_and_made_up_for(
    pair: LoadedPair, alone: TraceSet, tmp_path: Path
) -> None:
    folder = tmp_path / "spread"
    with raises_code("missing_shards", "1 of 3 shards", "`draftwell step collect`"):
        collect_traces(
            pair,
            PROMPTS,
            folder,
            spread=by_workers(folder, lambda missing: missing[1:], iter([pair] * 3)),
            **SETTINGS,
        )
    assert not is_complete(folder)
    asked: list[int] = []
    whole = collect_traces(
        pair,
        PROMPTS,
        folder,
        **SETTINGS,
        spread=by_workers(
            folder, lambda missing: asked.extend(missing) or missing, iter([pair] * 3)
        ),
    )
    assert asked == [0]
    assert whole.digest() == alone.digest()


def test_what_dead_workers_left_half_written_goes(
    pair: LoadedPair, alone: TraceSet, tmp_path: Path
) -> None:
    folder = tmp_path / "spread"

    def order(missing: Sequence[int]) -> Sequence[int]:
        (folder / ".shard-00001.parquet.x7").write_bytes(b"half")
        return missing

    spread = collect_traces(
        pair, PROMPTS, folder, spread=by_workers(folder, order, iter([pair] * 3)), **SETTINGS
    )
    assert spread.digest() == alone.digest()
    assert not list(folder.glob(".shard-*"))


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1},
        {"max_tokens": 9},
        {"prompts": PROMPTS[:4]},
        {"slots": 1},
        {"folder": "elsewhere"},
    ],
)
def test_a_worker_that_sees_something_else_writes_nothing(
    pair: LoadedPair, tmp_path: Path, other: dict[str, Any]
) -> None:
    settings = {**SETTINGS, **other}
    prompts = settings.pop("prompts", PROMPTS)
    foreign = llama_pair(slots=1) if settings.pop("slots", None) else pair
    folder = tmp_path / "spread"
    seen = tmp_path / settings.pop("folder", "spread")

    def spread(missing: Sequence[int], found: Callable[[int], None]) -> None:
        collect_shard(foreign, prompts, seen, missing[0], **settings)

    with pytest.raises(ForeignTrace):
        collect_traces(pair, PROMPTS, folder, spread=spread, **SETTINGS)
    assert not list(tmp_path.rglob("shard-*"))


Found = Callable[[Trial], None]


def replays(search: Search, choices: Sequence[StrategyChoice], found: Found) -> None:
    """Three workers with a log of their own, the last one first, as
    `draftwell.flows.workers.worker_jobs.replay_configs` does it."""
    worker = replace(search, trials=trials_in(None))
    for part in (2, 1, 0):
        for choice in choices[part::3]:
            found(Trial.model_validate(worker.predict(choice).model_dump(mode="json")))


@pytest.fixture(scope="module")
def trace(pair: LoadedPair, tmp_path_factory: pytest.TempPathFactory) -> TraceSet:
    return collect_traces(
        pair, PROMPTS, tmp_path_factory.mktemp("trace"), max_tokens=12, rollout=6, batch=4
    )


@pytest.mark.parametrize("trials", [12, None])
def test_replays_by_others_choose_the_same_configs(
    pair: LoadedPair, trace: TraceSet, monkeypatch: pytest.MonkeyPatch, trials: int | None
) -> None:
    strategies = ["autoregressive", "vanilla_sd", "svip", "pearl", "prompt_lookup"]
    settings: dict[str, Any] = {"trials": trials, "max_tokens": 12, "strategies": strategies}
    one = run_tuner(pair, trace, PROMPTS, Clock({}), **settings)
    real, replayed = Search.predict, list[StrategyChoice]()
    monkeypatch.setattr(
        Search, "predict", lambda self, choice: replayed.append(choice) or real(self, choice)
    )
    spread = run_tuner(pair, trace, PROMPTS, Clock({}), spread=replays, **settings)
    assert spread.trials == one.trials
    assert spread.choice == one.choice
    # these two are references too
    trials_once = [
        choice for choice in replayed if choice.name not in {"autoregressive", "vanilla_sd"}
    ]
    assert len(set(trials_once)) == len(trials_once), (
        "nothing that workers replayed is replayed again"
    )


def test_workers_that_fail_lose_only_their_own_part(
    pair: LoadedPair, trace: TraceSet, tmp_path: Path
) -> None:
    """What was found is on disk; the next run hands out the rest, and chooses as one process
    does."""
    settings: dict[str, Any] = {
        "max_tokens": 12,
        "strategies": ["vanilla_sd", "prompt_lookup"],
        "study": tmp_path / "trials.jsonl",
    }
    asked: list[int] = []

    def dies(search: Search, choices: Sequence[StrategyChoice], found: Found) -> None:
        asked.append(len(choices))
        replays(search, choices[:5], found)
        raise KeyboardInterrupt

    def counted(search: Search, choices: Sequence[StrategyChoice], found: Found) -> None:
        asked.append(len(choices))
        replays(search, choices, found)

    with pytest.raises(KeyboardInterrupt):
        run_tuner(pair, trace, PROMPTS, Clock({}), spread=dies, **settings)
    first = run_tuner(pair, trace, PROMPTS, Clock({}), spread=counted, **settings)
    again = run_tuner(pair, trace, PROMPTS, Clock({}), spread=counted, **settings)
    assert asked == [asked[0], asked[0] - 5], "the third run had nothing to hand out"
    assert (
        again.trials
        == first.trials
        == run_tuner(pair, trace, PROMPTS, Clock({}), **settings | {"study": None}).trials
    )
