"""What strategies learn while they serve: bounded, never torn, by tenant where asked, on disk and
back."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import TypeAdapter

from draftwell.serving.artifacts import acceptance_table, correction_memory
from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.correction_memory import CorrectionMemory
from draftwell.serving.artifacts.decoding_config import DecodingConfig
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.drafting.adaptive import AdaptiveThreshold, HeuristicLength
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import Strategy, build_strategy
from draftwell.serving.runtime.types import Draft, Verdict
from draftwell.serving.server.model.strategy_pool import (
    EVERYBODY,
    Learnt,
    StrategyPool,
    UnknownStrategy,
)
from tests.support.errors import raises_code
from tests.support.models.resources import ORIGIN, table_pair, table_resources
from tests.support.server.pools import VOCAB, Pair, decode, pool


def table_of(strategy: Strategy) -> AcceptanceTable:
    return strategy.artifact(AcceptanceTable)


# bounds


def test_a_bin_forgets_by_halves_and_goes_on_learning() -> None:
    """A count that only grows would take as long to follow new traffic as the old traffic
    lasted."""
    table = AcceptanceTable.empty(ORIGIN)
    for i in range(3 * acceptance_table.MOST_JUDGED):
        table.update(0.95, kept=i % 4 != 0)
    assert max(table.total) <= acceptance_table.MOST_JUDGED
    assert table.alpha(0.95) == pytest.approx(0.75, abs=0.002)
    for _ in range(acceptance_table.MOST_JUDGED):
        table.update(0.95, kept=False)
    assert table.alpha(0.95) < 0.4, (
        "as many tokens again, and the old rate counts for less than half"
    )
    assert all(0 <= a <= t for a, t in zip(table.accepted, table.total, strict=True))


def test_a_table_of_a_long_calibration_keeps_its_rate() -> None:
    table = AcceptanceTable([10**9] * 20, [9 * 10**8] * 20, ORIGIN)
    table.update(0.5, kept=True)
    assert max(table.total) == 10**9, "other bins stay as they are until they are used"
    assert table.total[AcceptanceTable.bin_of(0.5)] <= acceptance_table.MOST_JUDGED
    assert table.alpha(0.5) == pytest.approx(0.9, abs=0.001)


def test_counts_of_a_memory_end_where_32_bits_do_not(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert correction_memory.MOST_SEEN < 2**31
    monkeypatch.setattr(correction_memory, "MOST_SEEN", 5)
    memory = CorrectionMemory.empty(ORIGIN)
    for _ in range(9):
        memory.update(1, 2)
    assert memory.count(1, 2) == 5
    memory.save(tmp_path / "memory")
    assert CorrectionMemory.load(tmp_path / "memory").counts == {(1, 2): 5}


# one moment, whoever looks


class Pausing(list[int]):
    """A list that stops in the middle of an update, between the first number and the second."""

    def __init__(self, numbers: list[int]):
        super().__init__(numbers)
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(index, value)
        self.reached.set()
        self.go_on.wait(60)


@pytest.fixture
def paused() -> Iterator[tuple[AcceptanceTable, Pausing]]:
    """A table whose update has written one of its two counts."""
    table = AcceptanceTable.empty(ORIGIN)
    table.total = numbers = Pausing(table.total)
    update = threading.Thread(target=table.update, args=(0.95, True))
    update.start()
    assert numbers.reached.wait(60)
    yield table, numbers
    numbers.go_on.set()
    update.join()


def test_a_copy_waits_for_an_update_that_is_half_done(
    paused: tuple[AcceptanceTable, Pausing],
) -> None:
    table, numbers = paused
    copies: list[AcceptanceTable] = []
    copier = threading.Thread(target=lambda: copies.append(table.copy()))
    copier.start()
    copier.join(0.2)
    torn = list(copies)
    numbers.go_on.set()
    copier.join(60)
    assert torn == []
    assert (sum(copies[0].total), sum(copies[0].accepted)) == (1, 1)


def test_a_memory_is_copied_whole_while_it_evicts() -> None:
    """Every copy has at most as many pairs as are allowed, and one more update than the copy before
    at least where it grew."""
    memory = CorrectionMemory({(i, i): 1 + i % 3 for i in range(512)}, ORIGIN, max_pairs=512)
    ended = threading.Event()

    def rewrite() -> None:
        for i in range(20_000):
            memory.update(1000 + i % 2000, i % 7)
        ended.set()

    thread = threading.Thread(target=rewrite)
    thread.start()
    sizes = []
    while not ended.is_set():
        sizes.append(len(memory.copy().counts))
    thread.join()
    assert sizes
    assert all(512 - 2 <= size <= 512 for size in sizes)


def test_an_adaptive_threshold_is_read_as_a_pair() -> None:
    """AR and th move together: rounds that are kept whole raise AR towards 1, and th with it while
    AR is below .9."""
    threshold, ended = AdaptiveThreshold(0.5, max_draft=4), threading.Event()
    allowed = set()
    for accepted in (0, 4):
        twin = AdaptiveThreshold(0.5, max_draft=4)
        twin.learn(Draft([1] * 4), Verdict(accepted, 9, min(4, accepted + 1)))
        allowed.add(tuple(twin.learnt().values()))

    def learn() -> None:
        while not ended.is_set():
            threshold._learnt = (0.5, 0.0)
            threshold.learn(Draft([1] * 4), Verdict(4, 9, 4))

    thread = threading.Thread(target=learn)
    thread.start()
    seen = {tuple(threshold.learnt().values()) for _ in range(20_000)}
    ended.set()
    thread.join()
    assert seen <= allowed | {(0.5, 0.0)}


@pytest.mark.parametrize(
    ("made", "wrong"),
    [
        (lambda: AdaptiveThreshold(0.4, max_draft=8), {"value": 1.5, "rate": 0.0}),
        (lambda: AdaptiveThreshold(0.4, max_draft=8), {"value": 0.5}),
        (lambda: AdaptiveThreshold(0.4, max_draft=8), {"value": float("nan"), "rate": 0.5}),
        (lambda: HeuristicLength(5, max_draft=8), {"value": 9}),
        (lambda: HeuristicLength(5, max_draft=8), {"value": "5"}),
    ],
)
def test_only_what_can_have_been_learnt_is_resumed(made: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be a number"):
        made().resume(wrong)


def test_requests_that_run_at_once_lose_no_update() -> None:
    """Every judged token is counted once and every rejection too, however many requests share a
    round."""
    it = pool("spide", parameters={"parallel": False})
    engine = Engine(table_pair(VOCAB, noise=0.6))
    for name in ("spide", "csd"):
        jobs = [
            engine.submit(
                [1 + i % 5], Sampling(max_tokens=50, temperature=0.9, seed=i), it.get(name)
            )
            for i in range(6)
        ]
        engine.run(jobs)
        judged, accepted = (
            sum(getattr(job.session.stats, count) for job in jobs)
            for count in ("judged", "accepted")
        )
        if name == "spide":
            table = table_of(it.get(name))
            assert (sum(table.total), sum(table.accepted)) == (judged, accepted)
        else:
            rescued = sum(job.session.stats.rescued for job in jobs)
            assert (
                sum(it.get(name).artifact(CorrectionMemory).counts.values())
                == judged - accepted + rescued
            )


def test_updates_of_several_threads_are_all_counted() -> None:
    """The scheduler's thread is the only one today; a state does not rely on it."""
    table, memory = AcceptanceTable.empty(ORIGIN), CorrectionMemory.empty(ORIGIN)

    def learn() -> None:
        for _ in range(5000):
            table.update(0.5, kept=True)
            memory.update(1, 2)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=learn) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert (sum(table.total), sum(table.accepted), memory.count(1, 2)) == (20_000, 20_000, 20_000)


# the pool


def test_the_tuned_strategy_comes_first_and_the_others_that_fit() -> None:
    it = pool("csd", parameters={"num_speculative_tokens": 3})
    names = it.names()
    assert names[:2] == ("csd", "autoregressive")
    assert {"vanilla_sd", "spide", "sprinter", "prompt_lookup"} <= set(names)
    assert "adaedl" not in names, "its settings have no default"
    assert not {"pyramid_fuzzy", "pyramid_assisted"} & set(names), "there is no qualifier"
    assert it.get() is it.get("csd") is it.get(None, "somebody")
    assert it.get().config.num_speculative_tokens == 3
    assert it.get("vanilla_sd").config.num_speculative_tokens == 5
    assert "pyramid_assisted" in pool("csd", pair=Pair("target", "draft", "qualifier")).names()
    lacking = pool(
        "csd", without=("acceptance_table", "hardware_profile", "verifier", "acceptance_head")
    ).names()
    assert not {"spide", "pearl", "sprinter", "specdec_pp"} & set(lacking)
    alone = pool("vanilla_sd", pair=Pair("target"), without=("verifier",)).names()
    assert alone == (
        "vanilla_sd",
        "autoregressive",
        "prompt_lookup",
        "suffix",
        "rest",
        "hybrid",
        "lookahead",
        "swift",
        "medusa",
    )


def test_an_artifact_that_a_strategy_can_do_without_is_handed_over_where_it_is_there() -> None:
    it, without = pool("suffix"), pool("suffix", without=("datastore",))
    store: Any = it.get("suffix").resources.artifacts["datastore"]
    assert store is it.get("rest").resources.artifacts["datastore"], (
        "nothing is learnt into it: all share one"
    )
    assert without.get("suffix").resources.artifacts == {}
    assert "rest" not in without.names()
    assert (
        decode(it.get("suffix")).session.text.output
        == decode(without.get("suffix")).session.text.output
    )


def test_a_strategy_that_is_not_offered_is_refused_with_those_that_are() -> None:
    with raises_code(
        "unknown_strategy", "'best'", "spide, autoregressive, ", error=UnknownStrategy
    ) as refused:
        pool().get("best")
    assert isinstance(refused.value, DraftwellError)
    with raises_code("unknown_strategy", "adaedl", error=UnknownStrategy):
        pool().get("adaedl")
    assert "adaedl" in pool("adaedl", parameters={"threshold": 0.5, "max_draft": 4}).names()


def test_only_what_is_offered_can_be_had_beside_the_tuned_strategy_and_plain_decoding() -> None:
    it = pool("spide", offered=("vanilla_sd", "csd", "pyramid_fuzzy"))
    assert set(it.names()) == {"spide", "autoregressive", "vanilla_sd", "csd"}, (
        "for one of those offered a qualifier is missing"
    )
    with raises_code(
        "unknown_strategy", "'lossy_sd'", "spide, autoregressive, ", error=UnknownStrategy
    ):
        it.get("lossy_sd")
    assert pool("spide", offered=()).names() == ("spide", "autoregressive")


def test_the_bundle_is_never_written_to() -> None:
    artifacts = dict(table_resources(VOCAB).artifacts)
    for mode in ("shared", "tenant", "off"):
        it = StrategyPool(Pair(), artifacts, DecodingConfig("spide", {}, {}, ORIGIN), mode=mode)  # type: ignore[arg-type]
        decode(it.get())
        decode(it.get("csd", "a"))
    assert sum(artifacts["acceptance_table"].total) == 0  # type: ignore[attr-defined]
    assert artifacts["correction_memory"].counts == {}  # type: ignore[attr-defined]


def test_shared_state_is_shared_by_strategies_and_clients() -> None:
    it = pool("spide", "shared")
    decode(it.get(None, "a"))
    assert sum(table_of(it.get(None, "b")).total) > 0
    assert it.learnt().keys() == {EVERYBODY}


def test_without_state_an_answer_depends_on_no_other() -> None:
    it = pool("spide", "off")
    first = decode(it.get()).session.stats.drafted
    decode(it.get(), prompt=5)
    assert decode(it.get()).session.stats.drafted == first
    assert sum(table_of(it.get()).total) == 0
    assert it.learnt() == {}


def poison(strategy: Strategy) -> None:
    """What a client does whose every draft is wrong: the table says that nothing is ever kept."""
    for _ in range(500):
        for b in range(20):
            table_of(strategy).update(acceptance_table.MIDPOINTS[b], kept=False)


@pytest.mark.parametrize(("mode", "harmed"), [("shared", True), ("tenant", False)])
def test_a_client_that_poisons_its_state_harms_itself_alone(mode: str, harmed: bool) -> None:
    """Drafts shorten to one token where the table says that nothing is kept; in shared mode for
    everybody."""
    serial = {"parallel": False}
    clean = decode(pool("spide", mode, parameters=serial).get(None, "honest"))
    it = pool("spide", mode, parameters=serial)
    poison(it.get(None, "mallory"))
    others = [decode(it.get(None, "alice")), decode(it.get())]
    for other in others:
        assert other.output == clean.output, "SPIDE is lossless whatever its table says"
        calls = other.session.stats.target_calls, clean.session.stats.target_calls
        assert calls[0] > calls[1] if harmed else calls[0] == calls[1]
    assert (
        decode(it.get(None, "mallory")).session.stats.target_calls
        > clean.session.stats.target_calls
    )


def test_a_poisoned_memory_rescues_for_its_own_tenant_alone() -> None:
    it = pool("csd", "tenant", parameters={"use_gate": False})
    clean = decode(it.get(None, "alice")).output
    memory = it.get(None, "mallory").artifact(CorrectionMemory)
    for drafted in range(VOCAB):
        for correction in range(VOCAB):
            for _ in range(9):
                memory.update(drafted, correction)
    assert decode(it.get(None, "mallory")).output != clean, (
        "everything is rescued: the draft writes alone"
    )
    assert (
        decode(pool("csd", "tenant", parameters={"use_gate": False}).get(None, "bob")).output
        == clean
    )
    assert decode(it.get(None, "bob")).output == clean


def test_tenants_are_bounded_and_the_least_recently_used_goes() -> None:
    it = pool("spide", "tenant", most_tenants=3)
    for name in ("a", "b", "c"):
        decode(it.get(None, name), max_tokens=20)
    running = it.get(None, "b")
    it.get(None, "a")
    it.get(None, "d")
    it.get(None, "e")
    assert list(it.learnt()) == ["a", "d", "e"]
    decode(running)  # a request that still runs with a state that is gone
    assert sum(table_of(it.get(None, "a")).total) > 0
    assert sum(table_of(it.get(None, "b")).total) == 0, "it begins anew"


def test_a_state_goes_on_where_a_copy_of_it_was_taken() -> None:
    it = pool("hf_dynamic", "tenant", parameters={"heuristic": True, "threshold": 0.0})
    for name in (None, "spide", "csd"):
        decode(it.get(name, "a"))
    learnt = it.learnt()["a"]
    assert learnt.table is not None
    assert learnt.memory
    assert learnt.strategies == {"hf_dynamic": {"value": it.get(None, "a").shared.value}}  # type: ignore[attr-defined]
    again = pool("hf_dynamic", "tenant", parameters={"heuristic": True, "threshold": 0.0})
    again.resume("a", learnt)
    assert again.learnt()["a"] == learnt
    assert again.get(None, "a").shared.value == it.get(None, "a").shared.value  # type: ignore[attr-defined]
    assert table_of(again.get("spide", "a")).total == table_of(it.get("spide", "a")).total
    assert (
        again.get("csd", "a").artifact(CorrectionMemory).counts
        == it.get("csd", "a").artifact(CorrectionMemory).counts
    )
    decode(again.get("spide", "a"))
    assert again.learnt()["a"] != learnt, "and learns on"
    assert again.get("spide", "b").artifact(AcceptanceTable).total == [0] * 20, (
        "others begin with the bundle"
    )


def test_greedy_and_sampled_requests_count_apart_where_the_table_does() -> None:
    """A shared table would hold greedy counts, of drafts that are the target's first choice,
    against sampled requests."""
    warm = ORIGIN.model_copy(update={"parameters": {"temperature": 0.7}})
    table = AcceptanceTable(
        [0] * 20,
        [0] * 20,
        ORIGIN,
        AcceptanceTable([0] * 20, [0] * 20, warm, prior_weight=316),
        prior_weight=56,
    )
    both: dict[str, Any] = {**table_resources(VOCAB).artifacts, "acceptance_table": table}

    def fresh() -> StrategyPool:
        return StrategyPool(
            Pair(), both, DecodingConfig("spide", {}, {}, ORIGIN).with_greedy_for_sampled()
        )  # type: ignore[arg-type]

    it = fresh()
    sampled = it.get(None, temperature=1.0)
    Engine(table_pair(VOCAB, noise=0.6)).generate(
        [1], Sampling(max_tokens=60, temperature=1.0, seed=3), sampled
    )
    before = it.learnt()[EVERYBODY]
    assert before.table == ([0] * 20, [0] * 20)
    assert before.sampled_table is not None
    assert sum(before.sampled_table[0]) > 0
    decode(it.get(None))
    learnt = it.learnt()[EVERYBODY]
    assert learnt.table is not None
    assert sum(learnt.table[0]) > 0
    assert learnt.sampled_table == before.sampled_table
    again = fresh()
    again.resume(EVERYBODY, learnt)
    assert again.learnt()[EVERYBODY] == learnt
    resumed = table_of(again.get(None))
    assert (resumed.prior_weight, resumed.at(1.0).prior_weight) == (56, 316), (
        "the bundle's, whatever was counted since"
    )
    assert table.sampled is not None
    assert sum(table.total) == sum(table.sampled.total) == 0, "the bundle's own stays"


def test_what_hybrid_counted_of_each_class_is_resumed() -> None:
    def fresh() -> StrategyPool:
        return pool("hybrid", parameters={"drafter": "draft"})

    it = fresh()
    for temperature in (0.0, 1.0):
        for prompt in range(3):
            Engine(table_pair(VOCAB, noise=0.6)).generate(
                [prompt],
                Sampling(max_tokens=60, temperature=temperature, seed=3),
                it.get(None, temperature=temperature),
            )
    learnt = it.learnt()[EVERYBODY]
    counted = learnt.strategies["hybrid"]
    assert {name.split(".")[0] for name in counted} == {"greedy", "sampled"}
    for kind in ("greedy", "sampled"):
        assert counted[f"{kind}.draft.rounds"] > 3
        assert any(name.startswith(f"{kind}.lookup.total.") for name in counted)
    again = fresh()
    written = TypeAdapter(Learnt).dump_json(learnt)
    again.resume(EVERYBODY, TypeAdapter(Learnt).validate_json(written))
    assert again.learnt()[EVERYBODY].strategies == learnt.strategies
    before, after = (one.get(None).seen["greedy"].models["draft"] for one in (it, again))  # type: ignore[attr-defined]
    assert (after.gain, after.ahead, after.rounds) == (before.gain, before.ahead, before.rounds)
    assert (after.table.total, after.table.accepted) == (before.table.total, before.table.accepted)
    decode(again.get(None))
    assert again.learnt()[EVERYBODY].strategies != learnt.strategies, "and learns on"


def test_what_eagle3_counted_is_resumed() -> None:
    strategy, again = (
        build_strategy("eagle3", {"stop": "acceptance", "threshold": 0.2}) for _ in range(2)
    )
    assert strategy.learnt() == {}
    Engine(table_pair(VOCAB, noise=0.6)).generate([1], Sampling(max_tokens=40), strategy)
    learnt = strategy.learnt()
    assert sum(value for name, value in learnt.items() if name.startswith("total.")) > 10
    again.resume({name: float(value) for name, value in learnt.items()})
    assert again.learnt() == learnt


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("hybrid", {"greedy.draft.gain": 1.0}),
        ("hybrid", {"greedy.draft.gain": 1.0, "greedy.draft.ahead": 2.0, "greedy.draft.rounds": 1}),
        ("hybrid", {"greedy.lookup.total.3": -1}),
        ("hybrid", {"greedy.lookup.total.3": 1.5}),
        ("hybrid", {"greedy.lookup.total.20": 1}),
        ("hybrid", {"greedy.lookup.accepted.3": 1}),
        ("hybrid", {"warm.lookup.total.3": 1}),
        (
            "hybrid",
            {
                "greedy.draft.gain": float("nan"),
                "greedy.draft.ahead": 0.5,
                "greedy.draft.rounds": 1,
            },
        ),
        ("eagle3", {"total.3": float("inf")}),
        ("eagle3", {"value": 1}),
        ("eagle3", {"total.3": 1, "accepted.3": 2}),
    ],
)
def test_numbers_that_were_not_counted_are_refused(name: str, wrong: dict[str, float]) -> None:
    with pytest.raises((ValueError, DraftwellError)):
        build_strategy(name, {}, table_resources(VOCAB)).resume(wrong)


def test_a_state_is_resumed_only_where_it_belongs() -> None:
    learnt = Learnt(table=([9] * 20, [9] * 20))
    for mode, tenant, kept in (
        ("shared", EVERYBODY, 180),
        ("shared", "a", 0),
        ("tenant", "a", 180),
        ("off", EVERYBODY, 0),
    ):
        it = pool("spide", mode)
        it.resume(tenant, learnt)
        assert sum(table_of(it.get(None, tenant)).total) == kept, (mode, tenant)
    with pytest.raises(ValueError, match="must be a number"):
        pool("hf_dynamic").resume(EVERYBODY, Learnt(strategies={"hf_dynamic": {"value": 10**6}}))
    with pytest.raises(ValueError, match="learns nothing"):
        pool("spide").resume(EVERYBODY, Learnt(strategies={"spide": {"value": 1}}))


def test_requests_and_copies_may_come_from_many_threads() -> None:
    it, ended, wrong = pool("spide", "tenant", most_tenants=4), threading.Event(), []

    def ask(start: int) -> None:
        try:
            n = start
            while not ended.is_set():
                table_of(
                    it.get(("spide", "csd", None)[n % 3] if n % 3 != 1 else None, f"t{n % 9}")
                ).update(0.5, kept=True)
                n += 1
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 1
    while time.monotonic() < until:
        for learnt in it.learnt().values():
            assert learnt.table is None or learnt.table[0] == learnt.table[1], (
                "all were kept, so both counts are equal at any moment"
            )
    ended.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(it.learnt()) == 4
