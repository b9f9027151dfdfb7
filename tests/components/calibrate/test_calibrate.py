"""Acceptance table and correction memory equal a slow recount."""

from collections import Counter

import pyarrow as pa
import pytest
import torch

from components.calibrate.calibrate import build_acceptance_table, build_correction_memory, correction_memory_from_trace
from components.collect.collect import collect_traces
from components.prompts.prompt import Prompt, prompts_digest
from serving.artifacts.acceptance_table import AcceptanceTable
from serving.artifacts.base import Provenance
from serving.errors import ContextTooLong, DraftwellError
from serving.runtime.random_streams import Streams
from serving.runtime.sampling import residual, warp
from serving.runtime.strategies import build_strategy
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
    for build in (build_acceptance_table, correction_memory_from_trace):
        with pytest.raises(DraftwellError, match="kind target"):
            build(drafted, ORIGIN)


def test_a_sampled_trace_makes_no_table_but_a_memory(tmp_path):
    """Its rollouts begin with tokens that the target rejects, so that hardly any of them looks accepted."""
    sampled = collect_traces(table_pair(), PROMPTS, tmp_path / "t", max_tokens=24, temperature=0.6, rollout=3)
    for trace in (sampled, sampled.read()):
        with pytest.raises(DraftwellError, match=r"sampled at temperature 0\.6.*collect one at temperature 0"):
            build_acceptance_table(trace, ORIGIN)
    assert correction_memory_from_trace(sampled, ORIGIN).counts


def with_column(rows: pa.Table, name: str, values: list) -> pa.Table:
    place = rows.schema.get_field_index(name)
    return rows.set_column(place, rows.schema.field(place), pa.array(values, rows.schema.field(place).type))


def test_rows_without_rollouts_or_with_nan_are_refused(tmp_path):
    rows = collect_traces(table_pair(), PROMPTS, tmp_path / "t", max_tokens=6, rollout=3).read()
    figures = rows.column("rollout_confidence").to_pylist()
    figures[4] = [0.5, float("nan"), 0.5]
    cases = {"no rollouts": with_column(rows, "rollout_tokens", [None] * len(rows)),
             "NaN or infinity in rollout_confidence": with_column(rows, "rollout_confidence", figures), "no rows": rows.slice(0, 0)}
    for words, bad in cases.items():
        with pytest.raises(DraftwellError, match=words):
            build_acceptance_table(bad, ORIGIN)


def slow_rejections(pair, prompt: Prompt, seed: int, max_tokens: int, gamma: int) -> tuple[list[int], Counter]:
    """Leviathan's algorithm on the tables, written out."""
    sampling = pair.sampling(max_tokens=max_tokens, temperature=0.6, seed=seed)
    target, draft = pair.models["target"], pair.models["draft"]

    def probs(model, context):
        return warp(model.next_logits(context), sampling)

    rng, counts = Streams(seed), Counter()
    ids = pair.encode_prompt(prompt.prompt)
    first = len(ids)
    ids.append(rng.sample.draw(probs(target, ids)))
    stops = sampling.stop_token_ids
    while len(ids) - first < max_tokens and ids[-1] not in stops:
        tokens: list[int] = []
        while len(tokens) < min(gamma, max_tokens - (len(ids) - first) - 1) and not (tokens and tokens[-1] in stops):
            tokens.append(rng.draft.draw(probs(draft, ids + tokens)))
        for i, token in enumerate(tokens):
            p, q = probs(target, ids + tokens[:i]), probs(draft, ids + tokens[:i])
            if not rng.test.accepts(float(p[token]), float(q[token])):
                fixed = rng.sample.draw(residual(p, q))
                counts[token, fixed] += 1
                ids += [*tokens[:i], fixed]
                break
        else:
            ids += tokens
            if not (tokens and tokens[-1] in stops):
                ids.append(rng.sample.draw(probs(target, ids)))
    return ids[first:], counts


def test_the_memory_counts_the_rejections_of_standard_speculative_decoding():
    pair = table_pair()
    expected: Counter = Counter()
    for i, prompt in enumerate(PROMPTS):
        expected += slow_rejections(pair, prompt, seed=7 + i, max_tokens=40, gamma=6)[1]
    memory = build_correction_memory(pair, PROMPTS, ORIGIN, max_tokens=40, seed=7)
    assert memory.counts == dict(expected)
    assert sum(memory.counts.values()) > 20
    assert memory.provenance.metrics == {"rejections": float(sum(expected.values())), "patterns": float(len(expected))}
    assert memory.provenance.parameters["temperature"] == 0.6
    assert memory.provenance.parameters["prompts_digest"] == prompts_digest(PROMPTS)


def test_requests_at_once_change_nothing():
    one = build_correction_memory(table_pair(), PROMPTS, ORIGIN, max_tokens=24)
    many = build_correction_memory(table_pair(slots=3), PROMPTS, ORIGIN, max_tokens=24, batch=8)
    assert list(one.counts.items()) == list(many.counts.items())


def test_at_temperature_0_the_trace_gives_every_disagreement(tmp_path):
    pair = table_pair()
    traces = collect_traces(pair, PROMPTS, tmp_path / "t", max_tokens=16, rollout=2)
    expected: Counter = Counter()
    for prompt in PROMPTS:
        ids = pair.encode_prompt(prompt.prompt)
        for token in pair.engine().generate(ids, pair.sampling(max_tokens=16), build_strategy("autoregressive")).output:
            drafted = int(pair.models["draft"].next_logits(ids).argmax())
            if drafted != token:
                expected[drafted, token] += 1
            ids = [*ids, token]
    assert correction_memory_from_trace(traces, ORIGIN).counts == dict(expected)


def test_in_a_sampled_trace_tokens_are_rejected_as_often_as_their_ratio_says(tmp_path):
    pair = table_pair()
    prompts = [Prompt(f"q{i}", None, [f"word {i}"]) for i in range(30)]
    traces = collect_traces(pair, prompts, tmp_path / "t", max_tokens=40, temperature=0.6, rollout=1, batch=4)
    rows = traces.read(["draft_p", "draft_q"]).to_pydict()
    chance = sum(max(0.0, 1 - p / q) for p, q in zip(rows["draft_p"], rows["draft_q"], strict=True))
    found = sum(correction_memory_from_trace(traces, ORIGIN).counts.values())
    assert found == pytest.approx(chance, abs=4 * chance**0.5)


def test_a_failed_request_leaves_no_slot_taken():
    pair = table_pair(slots=2)
    good, broken = pair.models["target"].table.clone(), pair.models["target"]
    broken.table = torch.full_like(good, float("nan"))
    with pytest.raises(DraftwellError, match="NaN"):
        build_correction_memory(pair, PROMPTS, ORIGIN, batch=2)
    broken.table = good
    assert build_correction_memory(pair, PROMPTS, ORIGIN, batch=2, max_tokens=8).counts


def test_a_prompt_that_is_too_long_is_named_before_any_is_decoded():
    done = []
    long = Prompt("the long one", None, ["a" * 490])
    with pytest.raises(ContextTooLong, match=r"prompt the long one has 490 tokens.*context of 512"):
        build_correction_memory(table_pair(), [*PROMPTS, long], ORIGIN, max_tokens=24, progress=lambda *told: done.append(told))
    assert done == []


def test_no_prompts_is_a_mistake():
    with pytest.raises(DraftwellError, match="no prompts"):
        build_correction_memory(table_pair(), [], ORIGIN)


def test_a_transformer_pair_calibrates_too(tmp_path):
    pair = llama_pair()
    traces = collect_traces(pair, PROMPTS, tmp_path / "t", max_tokens=16, rollout=4)
    assert build_acceptance_table(traces, replace_digest(traces.digest())).provenance.trace_digest == traces.digest()
    assert build_correction_memory(pair, PROMPTS[:2], ORIGIN, max_tokens=12, batch=2).counts


def replace_digest(digest: str) -> Provenance:
    return ORIGIN.model_copy(update={"trace_digest": digest})
