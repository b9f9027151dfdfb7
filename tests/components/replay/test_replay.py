"""Replay equals real runs, round by round and prompt by prompt; its seconds are checked by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from draftwell.components.prompts.prompt import Prompt
from draftwell.components.replay.replay import ReplayResult, replay_strategy
from draftwell.components.replay.texts import Texts, read_texts
from draftwell.components.replay.trace_model import (
    NotInTrace,
    RolloutExhausted,
    TracedText,
    TraceModel,
)
from draftwell.components.tune.search.space import REPLAYED
from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.hardware_profile import (
    HardwareProfile,
    RequestTimes,
    RoundOverheads,
)
from draftwell.serving.errors import DraftwellError
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.session.stats import Stats
from draftwell.serving.runtime.strategies import StrategyResources, build_strategy
from tests.support.cases import first_of_each
from tests.support.collecting import collect_traces
from tests.support.errors import raises_code
from tests.support.models.counters import counters, rounds_of
from tests.support.models.resources import random_head
from tests.support.models.tiny import VOCAB, llama_pair, table_pair

WORDS = ["hello world", "abc", "so it goes", "xyzzy!", "one two three one two three", "ok?", "1984"]
PROMPTS = [Prompt(f"p{i}", None, [text]) for i, text in enumerate(WORDS)]
ORIGIN = Provenance(pair="tiny", fingerprint="f" * 64)
MAX_TOKENS = 20
K = 24


@pytest.fixture(scope="module", params=[table_pair, llama_pair], ids=["tables", "llamas"])
def traced(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[LoadedPair, TraceSet]:
    make: Callable[[], LoadedPair] = request.param
    pair = make()
    folder = tmp_path_factory.mktemp("trace")
    return pair, collect_traces(
        pair, PROMPTS, folder, max_tokens=MAX_TOKENS, rollout=K, batch=4, hidden=False
    )


def resources_of(deterministic: bool = True, ratio: float = 3.0) -> StrategyResources:
    """A profile on which 3 draft forwards fit into a verification, and a table that has seen
    something."""
    table = AcceptanceTable([20] * 20, [min(20, i + 3) for i in range(20)], ORIGIN)
    profile = HardwareProfile(1.0, {1: ratio, 5: ratio * 1.1}, 0.1, ORIGIN)
    return StrategyResources(
        {"acceptance_table": table, "hardware_profile": profile}, deterministic=deterministic
    )


def with_head(resources: StrategyResources, pair: LoadedPair, seed: int = 4) -> StrategyResources:
    """The resources with a random acceptance head for the pair's draft, whose hidden states are its
    logits where it is a table."""
    module = pair.modules.get("draft")
    head = random_head(VOCAB if module is None else module.config.hidden_size, seed)
    return replace(resources, artifacts={**resources.artifacts, "acceptance_head": head})


def profile_of(resources: StrategyResources) -> HardwareProfile:
    profile = resources.artifacts["hardware_profile"]
    assert isinstance(profile, HardwareProfile)
    return profile


def replay(
    trace: TraceSet | Texts,
    name: str,
    parameters: dict[str, Any],
    resources: StrategyResources,
    **settings: Any,
) -> ReplayResult:
    """With the resources' own profile."""
    return replay_strategy(trace, name, parameters, resources, profile_of(resources), **settings)


def real_runs(
    pair: LoadedPair,
    name: str,
    parameters: dict[str, Any],
    resources: StrategyResources,
    max_tokens: int = MAX_TOKENS,
) -> list[Stats]:
    """Every prompt in order, one at a time, on the real models; state is carried where the
    resources say so."""
    engine, strategy = pair.engine(), build_strategy(name, parameters, resources)
    sampling = pair.sampling(max_tokens=max_tokens)
    return [
        engine.generate(pair.encode_prompt(prompt.prompt), sampling, strategy).session.stats
        for prompt in PROMPTS
    ]


CASES: list[tuple[str, dict[str, Any], bool]] = [
    ("autoregressive", {}, True),
    *[("vanilla_sd", {"num_speculative_tokens": gamma}, True) for gamma in (1, 2, 5, 18)],
    *[
        ("spide", {"tau": tau, "parallel": parallel}, deterministic)
        for tau in (0.0, 0.05, 0.3)
        for parallel in (False, True)
        for deterministic in (False, True)
    ],
    ("spide", {"dynamic": False, "num_speculative_tokens": 4, "parallel": True}, False),
    *[("spide", {"tau": 0.3, "overlap_tau": overlap_tau}, False) for overlap_tau in (0.05, 0.5)],
    *[("pearl", {"num_speculative_tokens": gamma}, True) for gamma in (1, 3, 6, None)],
    ("svip", {}, True),
    ("svip", {"threshold": 0.55, "max_draft": 6}, True),
    *[("draft_verify", {"threshold": threshold}, True) for threshold in (None, 0.3)],
    *[
        ("adaedl", {"threshold": threshold, "max_draft": 8}, deterministic)
        for threshold in (0.3, 0.5)
        for deterministic in (False, True)
    ],
    ("hf_dynamic", {"threshold": 0.3}, True),
    *[
        ("hf_dynamic", {"threshold": 0.2, "heuristic": True}, deterministic)
        for deterministic in (False, True)
    ],
    ("prompt_lookup", {}, True),
    ("prompt_lookup", {"max_matching_ngram_size": 1, "prompt_lookup_num_tokens": 4}, True),
]


@pytest.mark.parametrize(("name", "parameters", "deterministic"), first_of_each(CASES))
def test_replay_equals_a_real_run(
    traced: tuple[LoadedPair, TraceSet],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    parameters: dict[str, Any],
    deterministic: bool,
) -> None:
    pair, trace = traced
    resources = resources_of(deterministic)
    rounds = rounds_of(monkeypatch)
    # first: replay must not write to them
    result = replay(trace, name, parameters, resources)
    replayed = rounds.take()
    over_traces = engine_runs(read_texts(trace), name, parameters, resources.private())
    assert rounds.take() == replayed
    real = real_runs(pair, name, parameters, resources)
    assert rounds.take() == replayed
    assert [one.name for one in result.per_prompt] == [prompt.id for prompt in PROMPTS]
    for one, engine, stats in zip(result.per_prompt, over_traces, real, strict=True):
        assert counters(one.stats) == counters(engine) == counters(stats)
    assert counters(result.stats) == counters(Stats.total(real))
    assert bool(replayed) == (name != "autoregressive")
    assert result.exact


def test_what_looks_into_a_datastore_is_refused(traced: tuple[LoadedPair, TraceSet]) -> None:
    """It is made of the very texts that a replay reads."""
    resources = resources_of()
    with raises_code("not_in_trace", "measure"):
        replay(traced[1], "prompt_lookup", {"use_datastore": True}, resources)


def engine_runs(
    texts: Texts, name: str, parameters: dict[str, Any], resources: StrategyResources
) -> list[Stats]:
    """The same strategy over the same trace models, driven by the engine that drives real ones."""
    strategy = build_strategy(name, parameters, resources)
    sampling = Sampling(max_tokens=texts.max_tokens, stop_token_ids=texts.stop_token_ids)
    engines = [
        (Engine({role: TraceModel(text, role) for role in strategy.roles}), text)
        for text in texts.texts
    ]
    return [
        engine.generate(text.prompt, sampling, strategy).session.stats for engine, text in engines
    ]


def test_the_traces_end_both_ways_and_drafts_are_kept_and_dropped(
    traced: tuple[LoadedPair, TraceSet],
) -> None:
    """Without all of these the test above would prove little."""
    _, trace = traced
    resources = resources_of()
    lengths = [len(text.output) for text in read_texts(trace).texts]
    assert MAX_TOKENS in lengths
    assert min(lengths) < MAX_TOKENS
    stats = replay(trace, "vanilla_sd", {"num_speculative_tokens": 4}, resources).stats
    assert 0.1 < stats.accepted / stats.judged < 0.9
    assert replay(trace, "prompt_lookup", {}, resources).stats.accepted > 0


def test_carried_state_matters_and_replay_leaves_it_alone(
    traced: tuple[LoadedPair, TraceSet],
) -> None:
    _, trace = traced
    carried, copied = resources_of(False), resources_of(True)
    table = carried.artifacts["acceptance_table"]
    assert isinstance(table, AcceptanceTable)
    before = list(table.total)
    parameters = {"tau": 0.3, "parallel": False}
    first = replay(trace, "spide", parameters, carried)
    assert table.total == before
    assert counters(replay(trace, "spide", parameters, carried).stats) == counters(first.stats)
    assert counters(replay(trace, "spide", parameters, copied).stats) != counters(first.stats)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("svip", {"threshold": 0.55}),
        ("draft_verify", {"threshold": 0.3}),
        ("adaedl", {"threshold": 0.3, "max_draft": 8}),
        ("hf_dynamic", {"threshold": 0.3}),
    ],
)
def test_the_replayed_rules_stop_some_drafts_and_not_all(
    traced: tuple[LoadedPair, TraceSet], name: str, parameters: dict[str, Any]
) -> None:
    """A rule that never stopped a draft, or always, would replay exactly whatever it read."""
    _, trace = traced
    resources = resources_of()
    stats = replay(trace, name, parameters, resources).stats
    assert stats.judged_at[0] > stats.judged_at[1] > stats.judged_at[2] > 0


@pytest.mark.parametrize("parameters", [{"drafter": "qualifier"}, {"draft_first": True}], ids=str)
def test_drafts_that_no_trace_holds_are_measured_not_replayed(
    traced: tuple[LoadedPair, TraceSet], parameters: dict[str, Any]
) -> None:
    """Or the draft model's tokens would be taken for the qualifier's, and called exact."""
    resources = resources_of()
    with raises_code("not_in_trace", "measure instead", error=NotInTrace):
        replay(traced[1], "vanilla_sd", parameters, resources)


def test_a_trained_head_is_measured_not_replayed(
    traced: tuple[LoadedPair, TraceSet],
) -> None:
    pair, trace = traced
    resources = with_head(resources_of(), pair)
    with raises_code("not_in_trace", "hidden", error=NotInTrace):
        replay(trace, "specdec_pp", {}, resources)


EVERY = {name: (parameters, deterministic) for name, parameters, deterministic in reversed(CASES)}
"""One case of every strategy."""


@pytest.mark.slow
@pytest.mark.parametrize("budget", [1, 2, 9])
def test_a_smaller_budget_is_that_of_a_real_run(
    traced: tuple[LoadedPair, TraceSet], monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    pair, trace = traced
    texts, rounds = read_texts(trace), rounds_of(monkeypatch)
    for name, (parameters, deterministic) in EVERY.items():
        resources = resources_of(deterministic)
        result = replay(texts, name, parameters, resources, max_tokens=budget)
        replayed = rounds.take()
        real = real_runs(pair, name, parameters, resources, budget)
        assert [counters(one.stats) for one in result.per_prompt] == [
            counters(stats) for stats in real
        ], name
        assert rounds.take() == replayed, name


def test_a_larger_budget_than_the_traces_is_refused(traced: tuple[LoadedPair, TraceSet]) -> None:
    _, trace = traced
    with raises_code("texts_too_short", "20 tokens", "21"):
        replay(trace, "autoregressive", {}, resources_of(), max_tokens=21)


def test_prompt_lookup_meets_repetition(traced: tuple[LoadedPair, TraceSet]) -> None:
    """Long matches, in the prompt and in the text itself: drafts that are kept whole, cut by the
    budget and by a stop token."""
    _, trace = traced
    resources = resources_of()
    stats = replay(trace, "prompt_lookup", {"max_matching_ngram_size": 2}, resources).stats
    assert stats.accepted_at[2] > 0
    assert 0 < stats.accepted < stats.judged


def test_rollouts_bound_the_drafts_that_can_be_replayed(
    traced: tuple[LoadedPair, TraceSet],
) -> None:
    _, trace = traced
    resources, texts = resources_of(), read_texts(trace)
    cut_texts = [replace(text, tokens=[row[:4] for row in text.tokens]) for text in texts.texts]
    short = replace(texts, texts=cut_texts, rollout=4)
    whole = replay(texts, "vanilla_sd", {"num_speculative_tokens": 4}, resources)
    cut = replay(short, "vanilla_sd", {"num_speculative_tokens": 4}, resources)
    assert counters(cut.stats) == counters(whole.stats)
    with raises_code("rollout_exhausted", "rollouts of 4", error=RolloutExhausted) as error:
        replay(short, "vanilla_sd", {"num_speculative_tokens": 5}, resources)
    assert (error.value.needed, error.value.recorded) == (5, 4)
    on = replay(
        short,
        "vanilla_sd",
        {"num_speculative_tokens": 7},
        resources,
        extend=True,
    )
    full = replay(texts, "vanilla_sd", {"num_speculative_tokens": 7}, resources)
    assert not on.exact
    assert (on.stats.accepted, on.stats.target_calls) == (
        full.stats.accepted,
        full.stats.target_calls,
    )


def text_of(ids: list[int], prompt_length: int, tokens: list[list[int]]) -> TracedText:
    flat = [[0.5] * len(row) for row in tokens]
    return TracedText("text", ids, prompt_length, tokens, flat, flat)


def test_time_is_the_sum_of_forwards_and_overlaps_take_their_longer_side() -> None:
    # The draft is right twice and then wrong; texts of four tokens behind a prompt of two.
    text = text_of([3, 4, 5, 6, 7, 8], 2, [[9, 9], [6, 9], [7, 9], [9, 9]])
    texts = Texts([text], 4, frozenset(), 2)
    profile = HardwareProfile(1.0, {1: 10.0, 2: 11.0, 3: 12.0}, 0.25, ORIGIN)
    resources = StrategyResources(
        {"acceptance_table": AcceptanceTable.empty(ORIGIN), "hardware_profile": profile}
    )
    plain = replay_strategy(texts, "autoregressive", {}, resources, profile)
    assert plain.predicted_seconds_per_token * 4 == pytest.approx(11.0 + 3 * 10.0 + 3 * 0.25)
    # Prefill 11; draft reads 3 tokens (1 × 12/10), then 1 (1.0); the target judges two and adds a
    # bonus (3 tokens: 12).
    serial = replay_strategy(texts, "vanilla_sd", {"num_speculative_tokens": 2}, resources, profile)
    assert serial.predicted_seconds_per_token * 4 == pytest.approx(11.0 + 1.2 + 1.0 + 12.0 + 0.25)
    # A draft of one (1.2); a verification of 2 (11) beside the two further drafts that the budget
    # allows (2); the second of them is wrong, and its verification (2 tokens: 11) has no draft
    # beside it.
    together = {"dynamic": False, "num_speculative_tokens": 1}
    overlapped = replay_strategy(texts, "spide", together, resources, profile)
    assert overlapped.predicted_seconds_per_token * 4 == pytest.approx(
        11.0 + 1.2 + 11.0 + 11.0 + 2 * 0.25
    )


def test_details_price_prompts_contexts_figures_and_what_is_left_of_an_overlap() -> None:
    """The text and the drafts of the test above, under a profile in which everything has a price of
    its own."""
    text = text_of([3, 4, 5, 6, 7, 8], 2, [[9, 9], [6, 9], [7, 9], [9, 9]])
    texts = Texts([text], 4, frozenset(), 2)
    details = RequestTimes(
        t_draft={1: 1.0, 3: 2.0},
        prefill={"target": {2: 20.0, 3: 21.0}, "draft": {3: 5.0}},
        per_context_token={"target": 0.5, "draft": 0.0},
        context=4,
        split_alone=(1.5, {1: 12.0, 3: 12.0}),
        rest=RoundOverheads(round=0.25, token=0.125, figure=0.0625),
    )
    profile = HardwareProfile(
        1.0,
        {1: 10.0, 2: 11.0, 3: 12.0},
        99.0,
        ORIGIN,
        (2.0, {1: 15.0, 2: 15.0, 3: 15.0}),
        details=details,
    )
    resources = StrategyResources(
        {"acceptance_table": AcceptanceTable.empty(ORIGIN), "hardware_profile": profile}
    )

    def seconds(name: str, parameters: dict[str, Any], **settings: Any) -> float:
        return (
            replay_strategy(texts, name, parameters, resources, profile, **settings)
            .per_prompt[0]
            .seconds
        )

    # The prompt; then forwards over one token behind 2, 3 and 4 in the slot, of which 4 is where
    # they were timed.
    assert seconds("autoregressive", {}) == pytest.approx(
        20 + (10 - 1) + (10 - 0.5) + 10 + 3 * 0.25
    )
    # Draft: a prompt of 3 (5), one token (1), each with its rest; the target judges both behind 2
    # tokens.
    assert seconds("vanilla_sd", {"num_speculative_tokens": 2}) == pytest.approx(
        20 + 5 + 1 + 2 * 0.125 + (12 - 1) + 0.25
    )
    # The same drafts, whose entropy was read: both figures; the last is charged with a draft
    # forward that never comes.
    svip = {"threshold": 2.0, "max_draft": 2}
    assert seconds("svip", svip) == pytest.approx(20 + 5 + 1 + 2 * 0.125 + 0.0625 + (12 - 1) + 0.25)
    # Overlapping: all on cores of its own. Alone: the prompt (20 · 12/12), a draft prompt (5 ·
    # 1.5). Then a verification of 2 tokens behind 2 (busy 15 − .5 · 15/12 · 2, alone 12 − 1) beside
    # two drafts (busy 2 · 2), and one of 2 behind 4, alone.
    fixed = {"dynamic": False, "num_speculative_tokens": 1}
    drafts, busy, left = 2 * 2 + 2 * 0.125 + 2 * 0.0625, 15 - 0.5 * 15 / 12 * 2, 12 - 1
    together = drafts + left * (1 - drafts / busy)
    assert seconds("spide", fixed) == pytest.approx(20 + 5 * 1.5 + 0.125 + together + 12 + 2 * 0.25)


def test_a_chain_counts_and_costs_all_its_steps() -> None:
    """A draft that chooses its tokens itself goes on behind a stop token: real runs count those
    steps, and so does a replay."""
    text = text_of([3, 4, 5, 6, 1], 2, [[5, 9, 9], [6, 9, 9], [1, 9, 9]])
    texts = Texts([text], 8, frozenset({1}), 3)
    rest = RoundOverheads(round=0.0, token=0.0, figure=0.0)
    details = RequestTimes(t_draft={1: 1.0}, prefill={}, per_context_token={}, context=0, rest=rest)
    profile = HardwareProfile(1.0, {1: 10.0}, 0.0, ORIGIN, details=details)
    single = replay_strategy(
        texts, "vanilla_sd", {"num_speculative_tokens": 3}, StrategyResources(), profile
    )
    chaining = HardwareProfile(
        1.0, {1: 10.0}, 0.0, ORIGIN, details=details.model_copy(update={"chains": True})
    )
    chain = replay_strategy(
        texts, "vanilla_sd", {"num_speculative_tokens": 3}, StrategyResources(), chaining
    )
    assert (single.stats.draft_calls, chain.stats.draft_calls) == (2, 3)
    assert chain.stats.accepted == single.stats.accepted == 2
    assert [one.per_prompt[0].seconds for one in (single, chain)] == [
        10 + 2 * 1 + 10,
        10 + 3 * 1 + 10,
    ]
    assert chain.exact
    for longer in (4, 5):  # the steps behind the stop token feed on one another
        again = replay_strategy(
            texts, "vanilla_sd", {"num_speculative_tokens": longer}, StrategyResources(), chaining
        )
        assert (again.stats.draft_calls, again.stats.accepted, again.stats.target_calls) == (
            longer,
            2,
            chain.stats.target_calls,
        )


def test_a_prompt_longer_than_the_profile_never_costs_less() -> None:
    text = text_of([3] * 60, 58, [[9], [9]])
    falling = HardwareProfile(1.0, {1: 10.0, 8: 12.0, 16: 11.9}, 0.0, ORIGIN)
    result = replay_strategy(
        Texts([text], 2, frozenset(), 1), "autoregressive", {}, StrategyResources(), falling
    )
    assert result.per_prompt[0].seconds == pytest.approx(11.9 + 10.0)


def test_trace_models_follow_a_rollback_onto_the_text() -> None:
    text = text_of([3, 4, 5, 6, 7], 2, [[5, 6, 1], [9, 8, 1], [7, 7, 1]])
    model = TraceModel(text, "draft")
    greedy = Sampling()

    def feed(*tokens: int) -> list[int]:
        return model.forward([Forward("draft", 0, tokens, keep=1)])[0].under(greedy).top

    assert feed(3, 4) == [5]
    assert feed(5) == [9]
    assert feed(9) == [8]  # beside the text since position 3
    model.rollback(0, 3)
    assert feed(6) == [7]
    target = TraceModel(text, "target")
    rows = target.forward([Forward("target", 0, (3, 4, 5, 9, 8), keep=4)])[0].under(greedy)
    assert rows.top == [5, 6, -1, -1]


def draft_rows(text: TracedText) -> Any:
    """The draft's row behind the prompt."""
    return (
        TraceModel(text, "draft")
        .forward([Forward("draft", 0, tuple(text.prompt))])[0]
        .under(Sampling())
    )


def test_what_a_trace_cannot_answer_is_refused() -> None:
    text = text_of([3, 4, 5, 6], 2, [[5, 6], [9, 8]])
    draft = TraceModel(text, "draft")
    with raises_code("not_in_trace", "text", error=NotInTrace):
        draft.forward([Forward("draft", 0, (3, 4, 5, 1))])
    output = TraceModel(text, "target").forward([Forward("target", 0, (3, 4))])[0]
    with raises_code("not_in_trace", "temperature 0", "0.5", error=NotInTrace):
        output.under(Sampling(temperature=0.5))
    rows = output.under(Sampling())
    drafted = draft_rows(text)
    assert drafted.raw_prob(0, 5) == drafted.confidence(0) == 0.5
    asked = (
        lambda: drafted.raw_prob(0, 6),
        lambda: rows.raw_prob(0, 5),
        lambda: rows.raw(0),
        lambda: rows.probs(0),
        lambda: rows.hidden(0),
        lambda: rows.confidence(0),
    )
    for ask in asked:
        with raises_code("not_in_trace", "measured instead", error=NotInTrace):
            ask()


def test_unfit_traces_and_strategies_are_refused_in_one_line(
    traced: tuple[LoadedPair, TraceSet], tmp_path: Path
) -> None:
    pair, trace = traced
    resources = resources_of()
    with raises_code("cannot_replay_lossy", "csd"):
        replay(trace, "csd", {}, resources)
    with raises_code("bad_parameter", "num_speculative_tokens"):
        replay(trace, "vanilla_sd", {"num_speculative_tokens": 0}, resources)
    drafted = collect_traces(
        pair, PROMPTS[:1], tmp_path / "d", max_tokens=4, rollout=1, prefix_kinds=("draft",)
    )
    sampled = collect_traces(
        pair, PROMPTS[:1], tmp_path / "s", max_tokens=4, rollout=1, temperature=0.7
    )
    for unfit, code, named in (
        (drafted, "no_target_texts", "target"),
        (sampled, "sampled_trace", "temperature 0.7"),
    ):
        with raises_code(code, named):
            read_texts(unfit)
    for name, values, words in (
        ("rollout_entropy", [[float("nan")]] * 4, "NaN or infinity in rollout_entropy"),
        ("rollout_tokens", [None] * 4, "no rollouts along"),
    ):
        rows = collect_traces(
            pair, PROMPTS[:1], tmp_path / f"{name}-good", max_tokens=4, rollout=1
        ).read()
        place = rows.schema.get_field_index(name)
        bad = TraceSet(tmp_path / name)
        bad.write_shard(
            0,
            rows.set_column(
                place,
                rows.schema.field(place),
                pa.array(values[: len(rows)], rows.schema.field(place).type),
            ),
        )
        with pytest.raises(DraftwellError, match=words):
            read_texts(bad)


def test_every_replayed_strategy_is_compared_with_real_runs() -> None:
    assert {name for name, *_ in CASES} - {"autoregressive"} == set(REPLAYED)
