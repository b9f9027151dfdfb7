"""The acceptance table equals a slow recount."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from draftwell.components.calibrate.acceptance_table import (
    build_acceptance_table,
    build_sampled_table,
    with_sampled,
)
from draftwell.components.calibrate.plots import acceptance_plot, rejection_tail
from draftwell.components.prompts.prompt import Prompt
from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import StrategyResources, build_strategy
from tests.support.collecting import collect_traces
from tests.support.errors import raises_code
from tests.support.loop import trace_sets
from tests.support.models.tiny import table_pair

ORIGIN = Provenance(pair="tiny", fingerprint="f" * 64)
PROMPTS = [
    Prompt(f"p{i}", None, [text])
    for i, text in enumerate(["abcab cabinet", "hello hello", "zebra", "one two three"])
]


def likened_pair(noise: float) -> LoadedPair:
    """The draft is the target with so much of its usual noise."""
    pair = table_pair()
    target, draft = pair.models["target"], pair.models["draft"]
    draft.table = target.table + noise * (draft.table - target.table)
    return pair


def test_the_table_counts_what_spide_judges(tmp_path):
    """SPIDE itself, with overlap, from an empty table: what it counts while it decodes is what a
    trace of the same prompts gives.

    To begin a draft at every position counts a position once for each draft that reaches it.
    """
    pair = likened_pair(0.4)
    traces = collect_traces(pair, PROMPTS, tmp_path / "t", max_tokens=48, rollout=5, batch=2)
    table = build_acceptance_table(traces, ORIGIN)
    learnt = AcceptanceTable.empty(ORIGIN)
    profile = HardwareProfile(1.0, {1: 4.0, 32: 4.0}, 0.1, ORIGIN)
    spide = build_strategy(
        "spide",
        {"tau": 0.3},
        StrategyResources({"acceptance_table": learnt, "hardware_profile": profile}),
    )
    for prompt in PROMPTS:
        pair.engine().generate(
            pair.encode_prompt(prompt.prompt), pair.sampling(max_tokens=48), spide
        )
    # What may differ is the end of a text: there the budget leaves no token to draft.
    assert sum(table.total) - len(PROMPTS) <= sum(learnt.total) <= sum(table.total)
    assert max(abs(a - b) for a, b in zip(table.total, learnt.total, strict=True)) <= len(PROMPTS)
    assert max(abs(a - b) for a, b in zip(table.accepted, learnt.accepted, strict=True)) <= len(
        PROMPTS
    )
    assert table.provenance.metrics["judged"] == sum(table.total)


def test_a_position_is_counted_once_however_many_drafts_reach_it(tmp_path):
    """A draft that is the target: every position but the first, which the prompt's own pass
    decides, whatever the rollouts' length."""
    pair = likened_pair(0.0)
    for depth in (1, 6):
        traces = collect_traces(pair, PROMPTS, tmp_path / str(depth), max_tokens=20, rollout=depth)
        table = build_acceptance_table(traces, ORIGIN)
        rows = traces.read(["prompt_id"]).num_rows
        assert sum(table.total) == sum(table.accepted) == rows - len(PROMPTS)


def test_texts_by_others_than_the_target_do_not_count(tmp_path):
    pair = table_pair()
    mixed = collect_traces(
        pair, PROMPTS, tmp_path / "m", max_tokens=12, rollout=3, prefix_kinds=("draft", "target")
    )
    own = collect_traces(pair, PROMPTS, tmp_path / "t", max_tokens=12, rollout=3)
    assert build_acceptance_table(mixed, ORIGIN).total == build_acceptance_table(own, ORIGIN).total
    drafted = collect_traces(
        pair, PROMPTS, tmp_path / "d", max_tokens=12, rollout=3, prefix_kinds=("draft",)
    )
    with raises_code("no_target_texts", "target"):
        build_acceptance_table(drafted, ORIGIN)


def test_a_sampled_trace_makes_no_table(tmp_path):
    """Its rollouts begin with tokens that the target rejects, so that hardly any of them looks
    accepted."""
    sampled = collect_traces(
        table_pair(), PROMPTS, tmp_path / "t", max_tokens=24, temperature=0.6, rollout=3
    )
    for trace in (sampled, sampled.read()):
        with raises_code(
            "sampled_trace", "temperature 0.6", "draftwell step collect --set temperature=0"
        ):
            build_acceptance_table(trace, ORIGIN)


def with_column(rows: pa.Table, name: str, values: list) -> pa.Table:
    place = rows.schema.get_field_index(name)
    return rows.set_column(
        place, rows.schema.field(place), pa.array(values, rows.schema.field(place).type)
    )


def test_rows_without_draft_tokens_or_with_nan_are_refused(tmp_path):
    rows = collect_traces(table_pair(), PROMPTS, tmp_path / "t", max_tokens=6, rollout=3).read()
    confidence = rows.column("confidence").to_pylist()
    confidence[4] = float("nan")
    cases = {
        "no_draft_tokens": with_column(rows, "draft_token", [None] * len(rows)),
        "not_finite": with_column(rows, "confidence", confidence),
        "empty_trace": rows.slice(0, 0),
    }
    for code, bad in cases.items():
        with raises_code(code):
            build_acceptance_table(bad, ORIGIN)


def test_texts_of_one_token_hold_nothing_to_judge(tmp_path):
    traces = collect_traces(table_pair(), PROMPTS[:1], tmp_path / "t", max_tokens=1, rollout=3)
    with raises_code("no_judged_tokens", "target"):
        build_acceptance_table(traces, ORIGIN)


WARM = ORIGIN.model_copy(update={"parameters": {"temperature": 0.7}, "training_prompts": ["b"]})


def sampled_trace(folder, values):
    """A trace at temperature .7 with planted (draft_q, draft_p, confidence) from position 0 on; the
    draft's token is never the text's."""
    header = trace_sets.HEADER.model_copy(update={"temperature": 0.7})
    rows = [
        trace_sets.row(
            i,
            prompt_id="p",
            position=i,
            temperature=0.7,
            draft_token=99,
            draft_q=q,
            draft_p=p,
            confidence=c,
        )
        for i, (q, p, c) in enumerate(values)
    ]
    TraceSet(folder).write_shard(0, trace_sets.table(rows, header))
    return TraceSet(folder)


def test_sampled_texts_count_how_likely_a_draft_token_is_kept(tmp_path):
    """min(1, p/q) of the draft's own token, not whether it happens to be the text's; the bin is
    that of C; the first is not judged."""
    trace = sampled_trace(
        tmp_path / "t",
        [
            (0.5, 0.5, 0.55),
            (0.8, 0.2, 0.55),
            (0.4, 0.1, 0.55),
            (0.2, 0.7, 0.55),
            (0.5, 0.25, 0.945),
        ],
    )
    table = build_sampled_table(trace, WARM, 0.7)
    middle, high = (AcceptanceTable.bin_of(c) for c in (0.55, 0.945))
    assert (table.total[middle], table.accepted[middle]) == (3, 2)  # .25 + .25 + 1, rounded
    assert (table.total[high], table.accepted[high], sum(table.total)) == (1, 0, 4)
    assert table.provenance.metrics == {
        "judged": 4.0,
        "acceptance_rate": pytest.approx(0.5),
        "prior_weight": 1000,
    }
    assert table.provenance.parameters == {
        "temperature": 0.7,
        "prior_weight_from": "too few tasks (2): the largest",
    }


def test_the_counts_of_sampled_texts_are_what_spide_sees_at_that_temperature(tmp_path):
    """SPIDE decodes with seeds of its own; that a draft token is the text's by chance is far rarer
    than that it is kept."""
    pair = likened_pair(0.6)
    traces = collect_traces(
        pair, PROMPTS, tmp_path / "t", max_tokens=200, temperature=0.7, rollout=1
    )
    table = build_sampled_table(traces, WARM, 0.7)
    learnt = AcceptanceTable.empty(ORIGIN)
    both = AcceptanceTable(learnt.total, learnt.accepted, ORIGIN, AcceptanceTable.empty(WARM))
    profile = HardwareProfile(1.0, {1: 4.0, 32: 4.0}, 0.1, ORIGIN)
    spide = build_strategy(
        "spide",
        {"tau": 0.3},
        StrategyResources({"acceptance_table": both, "hardware_profile": profile}),
    )
    for seed in range(4):
        for prompt in PROMPTS:
            sampling = pair.sampling(max_tokens=200, temperature=0.7, seed=100 + seed)
            pair.engine().generate(pair.encode_prompt(prompt.prompt), sampling, spide)
    seen = both.sampled
    assert seen is not None
    assert sum(both.total) == 0, "greedy requests have counts of their own"
    rates = [sum(one.accepted) / sum(one.total) for one in (table, seen)]
    assert rates[0] == pytest.approx(rates[1], abs=0.06)
    rows = traces.read(["token", "draft_token"])
    by_chance = float(
        np.mean(rows.column("token").to_numpy() == rows.column("draft_token").to_numpy())
    )
    assert by_chance < rates[0] - 0.1


def test_greedy_texts_make_no_counts_for_sampled_requests(tmp_path):
    greedy = collect_traces(table_pair(), PROMPTS, tmp_path / "t", max_tokens=8, rollout=3)
    with raises_code(
        "trace_of_another_temperature",
        "temperature 0,",
        "draftwell step collect --set temperature=0.7",
    ):
        build_sampled_table(greedy, WARM, 0.7)
    without = sampled_trace(tmp_path / "w", [(None, None, 0.5), (None, None, 0.5)])
    with raises_code("no_draft_tokens"):
        build_sampled_table(without, WARM, 0.7)


def test_a_table_with_counts_of_both_names_temperature_and_prompts_of_both():
    greedy = AcceptanceTable(
        [4] * 20,
        [2] * 20,
        ORIGIN.model_copy(update={"training_prompts": ["c", "a"]}),
        prior_weight=56,
    )
    both = with_sampled(greedy, AcceptanceTable([10] * 20, [9] * 20, WARM, prior_weight=316))
    assert (both.prior_weight, both.at(1.0).prior_weight) == (56, 316)
    assert (both.total, both.accepted) == (greedy.total, greedy.accepted)
    assert both.provenance.training_prompts == ["a", "b", "c"]
    assert both.provenance.parameters["sampled_temperature"] == 0.7
    assert both.provenance.metrics == {
        "sampled_judged": 200.0,
        "sampled_acceptance_rate": 0.9,
        "sampled_prior_weight": 316,
    }
    assert with_sampled(greedy, None) is greedy


def test_prompts_that_one_side_does_not_record_stay_unknown():
    """An empty list would say that it has learnt from none, and the gate would judge on what was
    counted."""
    known, unknown = (
        ORIGIN.model_copy(update={"training_prompts": prompts}) for prompts in (["a"], None)
    )
    sampled = AcceptanceTable([10] * 20, [9] * 20, WARM)
    half = with_sampled(AcceptanceTable([4] * 20, [2] * 20, unknown), sampled).provenance
    assert (half.training_prompts, half.unknown_prompts) == (
        WARM.training_prompts,
        ["greedy counts"],
    )
    other = AcceptanceTable([10] * 20, [9] * 20, WARM.model_copy(update={"training_prompts": None}))
    half = with_sampled(AcceptanceTable([4] * 20, [2] * 20, known), other).provenance
    assert (half.training_prompts, half.unknown_prompts) == (["a"], ["sampled counts"])
    assert (
        with_sampled(
            AcceptanceTable([4] * 20, [2] * 20, unknown), other
        ).provenance.training_prompts
        is None
    )


def test_plots_are_png_files_even_of_nothing(tmp_path: Path) -> None:
    for number, table in enumerate(
        (AcceptanceTable([4] * 20, [2] * 20, ORIGIN), AcceptanceTable.empty())
    ):
        path = acceptance_plot(table, tmp_path / f"{number}.png")
        assert path.read_bytes().startswith(b"\x89PNG")
    for number, rejections in enumerate(([5, 1, 1], [])):
        path = rejection_tail(rejections, tmp_path / f"tail{number}.png")
        assert path.read_bytes().startswith(b"\x89PNG")
