"""The acceptance table equals a slow recount."""

import pyarrow as pa

from components.calibrate.acceptance_table import build_acceptance_table
from components.prompts.prompt import Prompt
from serving.artifacts.acceptance_table import AcceptanceTable
from serving.artifacts.base import Provenance
from serving.artifacts.hardware_profile import HardwareProfile
from serving.runtime.pair import LoadedPair
from serving.runtime.strategies import StrategyResources, build_strategy
from tests.support.collecting import collect_traces
from tests.support.errors import raises_code
from tests.support.models.tiny import llama_pair, table_pair

ORIGIN = Provenance(pair="tiny", fingerprint="f" * 64)
PROMPTS = [Prompt(f"p{i}", None, [text]) for i, text in enumerate(["abcab cabinet", "hello hello", "zebra", "one two three"])]


def likened_pair(noise: float) -> LoadedPair:
    """The draft is the target with so much of its usual noise."""
    pair = table_pair()
    target, draft = pair.models["target"], pair.models["draft"]
    draft.table = target.table + noise * (draft.table - target.table)
    return pair


def test_the_table_counts_what_spide_judges(tmp_path):
    """SPIDE itself, with overlap, from an empty table: what it counts while it decodes is what a trace of the same prompts gives.

    To begin a draft at every position counts a position once for each draft that reaches it.
    """
    pair = likened_pair(0.4)
    traces = collect_traces(pair, PROMPTS, tmp_path / "t", max_tokens=48, rollout=5, batch=2)
    table = build_acceptance_table(traces, ORIGIN)
    learnt = AcceptanceTable.empty(ORIGIN)
    profile = HardwareProfile(1.0, {1: 4.0, 32: 4.0}, 0.1, ORIGIN)
    spide = build_strategy("spide", {"tau": 0.3}, StrategyResources({"acceptance_table": learnt, "hardware_profile": profile}))
    for prompt in PROMPTS:
        pair.engine().generate(pair.encode_prompt(prompt.prompt), pair.sampling(max_tokens=48), spide)
    # What may differ is the end of a text: there the budget leaves no token to draft.
    assert sum(table.total) - len(PROMPTS) <= sum(learnt.total) <= sum(table.total)
    assert max(abs(a - b) for a, b in zip(table.total, learnt.total, strict=True)) <= len(PROMPTS)
    assert max(abs(a - b) for a, b in zip(table.accepted, learnt.accepted, strict=True)) <= len(PROMPTS)
    assert table.provenance.metrics["judged"] == sum(table.total)
    assert table.provenance.parameters["counting"] == "judged once"


def test_a_position_is_counted_once_however_many_drafts_reach_it(tmp_path):
    """A draft that is the target: every position but the first, which the prompt's own pass decides, whatever the rollouts' length."""
    pair = likened_pair(0.0)
    for depth in (1, 6):
        traces = collect_traces(pair, PROMPTS, tmp_path / str(depth), max_tokens=20, rollout=depth)
        table = build_acceptance_table(traces, ORIGIN)
        rows = traces.read(["prompt_id"]).num_rows
        assert sum(table.total) == sum(table.accepted) == rows - len(PROMPTS)


def test_texts_by_others_than_the_target_do_not_count(tmp_path):
    pair = table_pair()
    mixed = collect_traces(pair, PROMPTS, tmp_path / "m", max_tokens=12, rollout=3, prefix_kinds=("draft", "target"))
    own = collect_traces(pair, PROMPTS, tmp_path / "t", max_tokens=12, rollout=3)
    assert build_acceptance_table(mixed, ORIGIN).total == build_acceptance_table(own, ORIGIN).total
    drafted = collect_traces(pair, PROMPTS, tmp_path / "d", max_tokens=12, rollout=3, prefix_kinds=("draft",))
    with raises_code("no_target_texts", "target"):
        build_acceptance_table(drafted, ORIGIN)


def test_a_sampled_trace_makes_no_table(tmp_path):
    """Its rollouts begin with tokens that the target rejects, so that hardly any of them looks accepted."""
    sampled = collect_traces(table_pair(), PROMPTS, tmp_path / "t", max_tokens=24, temperature=0.6, rollout=3)
    for trace in (sampled, sampled.read()):
        with raises_code("sampled_trace", "temperature 0.6", "draftwell collect --temperature 0"):
            build_acceptance_table(trace, ORIGIN)


def with_column(rows: pa.Table, name: str, values: list) -> pa.Table:
    place = rows.schema.get_field_index(name)
    return rows.set_column(place, rows.schema.field(place), pa.array(values, rows.schema.field(place).type))


def test_rows_without_draft_tokens_or_with_nan_are_refused(tmp_path):
    rows = collect_traces(table_pair(), PROMPTS, tmp_path / "t", max_tokens=6, rollout=3).read()
    confidence = rows.column("confidence").to_pylist()
    confidence[4] = float("nan")
    cases = {"no_draft_tokens": with_column(rows, "draft_token", [None] * len(rows)),
             "not_finite": with_column(rows, "confidence", confidence), "empty_trace": rows.slice(0, 0)}
    for code, bad in cases.items():
        with raises_code(code):
            build_acceptance_table(bad, ORIGIN)


def test_texts_of_one_token_hold_nothing_to_judge(tmp_path):
    traces = collect_traces(table_pair(), PROMPTS[:1], tmp_path / "t", max_tokens=1, rollout=3)
    with raises_code("no_judged_tokens", "target"):
        build_acceptance_table(traces, ORIGIN)


def test_a_transformer_pairs_trace_makes_a_table(tmp_path):
    traces = collect_traces(llama_pair(), PROMPTS, tmp_path / "t", max_tokens=16, rollout=4)
    origin = ORIGIN.model_copy(update={"trace_digest": traces.digest()})
    assert build_acceptance_table(traces, origin).provenance.trace_digest == traces.digest()
