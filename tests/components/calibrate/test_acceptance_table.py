"""The acceptance table equals a slow recount."""

import pyarrow as pa
import pytest

from components.calibrate.acceptance_table import build_acceptance_table
from components.prompts.prompt import Prompt
from serving.artifacts.acceptance_table import AcceptanceTable
from serving.artifacts.base import Provenance
from serving.errors import DraftwellError
from serving.runtime.strategies import build_strategy
from tests.support.collecting import collect_traces
from tests.support.errors import raises_code
from tests.support.models.tiny import llama_pair, table_pair

ORIGIN = Provenance(pair="tiny", fingerprint="f" * 64)
PROMPTS = [Prompt(f"p{i}", None, [text]) for i, text in enumerate(["abcab cabinet", "hello hello", "zebra", "one two three"])]


def test_the_table_counts_what_greedy_speculative_decoding_judges(tmp_path):
    """A slow recount: from every position draft greedily with the model itself, and judge against the text."""
    pair, depth = table_pair(), 5
    traces = collect_traces(pair, PROMPTS, tmp_path / "t", max_tokens=20, rollout=depth, batch=2)
    table = build_acceptance_table(traces, ORIGIN)
    total, accepted = [0] * 20, [0] * 20
    draft, plain = pair.models["draft"], build_strategy("autoregressive")
    for prompt in PROMPTS:
        ids = pair.encode_prompt(prompt.prompt)
        text = pair.engine().generate(ids, pair.sampling(max_tokens=20), plain).output
        for start in range(len(text)):
            context = ids + text[:start]
            for expected in text[start : start + depth]:
                probs = draft.next_logits(context).softmax(-1)
                token = int(probs.argmax())
                b = AcceptanceTable.bin_of(float(probs.max()))
                total[b] += 1
                accepted[b] += token == expected
                if token != expected:
                    break
                context = [*context, token]
    assert table.total == total
    assert table.accepted == accepted
    assert 0 < sum(accepted) < sum(total)
    assert table.provenance.metrics["judged"] == sum(total)


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


def test_rows_without_rollouts_or_with_nan_are_refused(tmp_path):
    rows = collect_traces(table_pair(), PROMPTS, tmp_path / "t", max_tokens=6, rollout=3).read()
    confidence = rows.column("rollout_confidence").to_pylist()
    confidence[4] = [0.5, float("nan"), 0.5]
    cases = {"no rollouts": with_column(rows, "rollout_tokens", [None] * len(rows)),
             "rollout_confidence": with_column(rows, "rollout_confidence", confidence), "no rows": rows.slice(0, 0)}
    for named, bad in cases.items():
        with pytest.raises(DraftwellError, match=named):
            build_acceptance_table(bad, ORIGIN)


def test_rollouts_without_a_token_are_refused(tmp_path):
    rows = collect_traces(table_pair(), PROMPTS[:1], tmp_path / "t", max_tokens=6, rollout=3).read()
    with raises_code("no_judged_tokens", "target"):
        build_acceptance_table(with_column(rows, "rollout_tokens", [[]] * len(rows)), ORIGIN)


def test_a_transformer_pairs_trace_makes_a_table(tmp_path):
    traces = collect_traces(llama_pair(), PROMPTS, tmp_path / "t", max_tokens=16, rollout=4)
    origin = ORIGIN.model_copy(update={"trace_digest": traces.digest()})
    assert build_acceptance_table(traces, origin).provenance.trace_digest == traces.digest()
