"""Turns: everybody does every item, in an order that rotates; who fails is left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from draftwell.components.bench.bench import run_bench
from draftwell.components.bench.interleaved import REFERENCE, reason_of, rotated, take_turns
from draftwell.components.bench.report.tables import bench_markdown
from draftwell.components.bench.runner import Generation, StrategyContender
from draftwell.components.bench.schema import BenchReport
from draftwell.components.bench.settings import BenchSettings
from draftwell.components.bench.throughput import batch_throughput
from draftwell.components.prompts.prompt import Prompt
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import PLAIN, StrategyChoice, StrategyResources
from tests.support.errors import raises_code
from tests.support.models.tiny import table_pair

PROMPTS = [Prompt(f"p{i}", None, [text]) for i, text in enumerate(["abc", "hello", "zebra"])]
SETTINGS = BenchSettings(max_tokens=4, warmup=False, runs=2)


def recorders(calls: list[tuple[str, int]], names: str) -> dict[str, Callable[[int], int]]:
    """Contenders that note whose turn it is."""

    def turn(name: str, item: int) -> int:
        calls.append((name, item))
        return len(calls)

    return {name: lambda item, name=name: turn(name, item) for name in names}  # type: ignore[misc]


def test_the_order_rotates() -> None:
    orders = ["".join(rotated("abc", turn)) for turn in range(4)]
    assert orders == ["abc", "bca", "cab", "abc"]


def test_everybody_does_every_item_of_every_round_before_the_next_item() -> None:
    calls: list[tuple[str, int]] = []
    fresh: list[str] = []
    bar: list[tuple[int, int, str]] = []
    found = take_turns(
        recorders(calls, "ab"),
        3,
        2,
        before_round=fresh.append,
        progress=lambda *seen: bar.append(seen),
    )
    assert [item for _, item in calls] == [0, 0, 1, 1, 2, 2] * 2
    assert [name for name, _ in calls] == list("abba" * 3)
    assert found["a"][0] == [1, 8]
    assert [[len(rounds) for rounds in items] for items in found.values()] == [[2, 2, 2]] * 2
    assert sorted(fresh) == ["a", "a", "b", "b"]
    assert bar[0] == (1, 12, "a")
    assert bar[-1][:2] == (12, 12)


def test_who_fails_has_no_results_and_no_further_turns() -> None:
    calls: list[tuple[str, int]] = []
    turns = recorders(calls, "abc")

    def dies(item: int) -> int:
        calls.append(("b", item))
        raise RuntimeError("recursion\nin a compiler")

    left_out: dict[str, str] = {}
    found = take_turns({**turns, "b": dies}, 2, 2, left_out=left_out)
    assert list(found) == ["a", "c"]
    assert left_out == {"b": "RuntimeError: recursion"}
    assert calls.count(("b", 0)) + calls.count(("b", 1)) == 1
    with pytest.raises(RuntimeError, match="recursion"):
        take_turns({**turns, "b": dies}, 2, 2)
    with pytest.raises(RuntimeError, match="recursion"):
        take_turns({**turns, REFERENCE: dies}, 2, 2, left_out={})


def test_a_reason_is_one_line() -> None:
    assert reason_of(DraftwellError("do this", code="x")) == "do this"
    assert reason_of(ValueError()) == "ValueError"


class DiesLater:
    """A peer that dies in its second text."""

    label = "peer/dies"

    def __init__(self) -> None:
        self.texts = 0

    def reset(self) -> None:
        pass

    def generate(self, ids: Sequence[int], sampling: Sampling) -> Generation:
        self.texts += 1
        if self.texts == 2:
            raise DraftwellError("peer/dies ended: see its log", code="engine_failed")
        pair = table_pair()
        return StrategyContender(pair, StrategyResources(), PLAIN, "x").generate(ids, sampling)


def test_a_peer_that_dies_in_the_middle_is_left_out_with_a_line() -> None:
    peer = DiesLater()
    left_out: dict[str, str] = {}
    arguments = (table_pair(), [StrategyChoice("vanilla_sd")], PROMPTS, StrategyResources())
    report = run_bench(
        *arguments,
        SETTINGS,
        extra=[peer],  # type: ignore[list-item]
        cost_ratios=False,
        left_out=left_out,
    )
    assert peer.texts == 2
    assert list(report.strategies) == ["autoregressive", "vanilla_sd"]
    assert [len(row.run_seconds) for row in report.strategies["vanilla_sd"].per_prompt] == [2] * 3
    reason = "prompt p1: peer/dies ended: see its log"
    assert report.left_out == {"peer/dies": reason}
    assert BenchReport.model_validate(report.to_json()).left_out == report.left_out
    assert f"- peer/dies is left out: {reason}\n" in bench_markdown(report)
    with raises_code("engine_failed", "prompt p1"):
        run_bench(
            *arguments,
            SETTINGS,
            extra=[DiesLater()],  # type: ignore[list-item]
            cost_ratios=False,
        )


def failing(monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    """Let a strategy of ours fail whenever it decodes."""
    decode = StrategyContender.generate

    def generate(self: StrategyContender, ids: Sequence[int], sampling: Sampling) -> Generation:
        if self.strategy == strategy:
            raise RuntimeError("out of memory")
        return decode(self, ids, sampling)

    monkeypatch.setattr(StrategyContender, "generate", generate)


@pytest.mark.parametrize(("warmup", "memory"), [(False, False), (True, False), (False, True)])
def test_a_strategy_that_fails_is_left_out_wherever_it_does(
    monkeypatch: pytest.MonkeyPatch, warmup: bool, memory: bool
) -> None:
    failing(monkeypatch, "vanilla_sd")
    report = run_bench(
        table_pair(),
        [StrategyChoice("vanilla_sd"), StrategyChoice("prompt_lookup")],
        PROMPTS,
        StrategyResources(),
        SETTINGS.model_copy(update={"warmup": warmup}),
        memory=memory,
        left_out={},
    )
    assert list(report.strategies) == ["autoregressive", "prompt_lookup"]
    assert report.left_out["vanilla_sd"] == "RuntimeError: out of memory"


def test_without_plain_decoding_there_is_no_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "autoregressive")
    with pytest.raises(RuntimeError, match="out of memory"):
        run_bench(table_pair(), [], PROMPTS, StrategyResources(), SETTINGS, left_out={})


def test_throughput_leaves_out_who_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = "draftwell.components.bench.throughput.drive"
    from draftwell.components.bench import throughput

    run = throughput.drive

    def fails(engine, strategy, requests, at_once):  # type: ignore[no-untyped-def]
        if strategy.name == "vanilla_sd" and at_once > 1:
            raise RuntimeError("out of memory")
        return run(engine, strategy, requests, at_once)

    monkeypatch.setattr(drive, fails)
    report = batch_throughput(
        table_pair(slots=2),
        StrategyResources(),
        [PLAIN, StrategyChoice("vanilla_sd")],
        PROMPTS,
        SETTINGS.model_copy(update={"concurrency": 2}),
        left_out={},
    )
    assert list(report["configs"]) == ["autoregressive"]
    assert len(report["configs"]["autoregressive"]["alone_runs"]) == 2
    assert report["left_out"] == {"vanilla_sd": "RuntimeError: out of memory"}
