"""Collection: every column against the models asked directly, resumption, prefix kinds, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from components import collection
from components.collection import collect
from components.prompts import Prompt
from serving.runtime.pair import LoadedPair
from serving.runtime.sampling import LogitRows
from serving.runtime.strategies import build_strategy
from serving.runtime.trace import TraceSet
from serving.runtime.types import DraftwellError, Forward, Output, Role, Sampling
from tests.components.tiny import EOS, llama_pair, pair_of, table_pair

PROMPTS = [Prompt(f"p{i}", "qa", [text], None) for i, text in enumerate(["hello world", "abc", "a longer prompt of words", "xyzzy!"])]
GREEDY = Sampling(max_tokens=16, stop_token_ids=frozenset({EOS}))


@pytest.fixture(scope="module")
def pair() -> LoadedPair:
    return llama_pair()


@pytest.fixture(scope="module")
def trace(pair: LoadedPair, tmp_path_factory: pytest.TempPathFactory) -> TraceSet:
    return collect(pair, PROMPTS, tmp_path_factory.mktemp("trace"), max_tokens=16, rollout=5, batch=3)


def texts_of(trace: TraceSet) -> list[list[dict[str, Any]]]:
    """Rows by text."""
    texts: list[list[dict[str, Any]]] = []
    for row in trace.read().to_pylist():
        if row["position"] == 0:
            texts.append([])
        assert row["position"] == len(texts[-1])
        texts[-1].append(row)
    return texts


def ask(pair: LoadedPair, role: Role, ids: list[int]) -> Output:
    """A model's output behind `ids`, each prefix fed alone: the slow reference."""
    model = pair.models[role]
    slot = model.open()
    try:
        return model.forward([Forward(role, slot, tuple(ids), prefill=True)])[0]
    finally:
        model.close(slot)


def test_texts_are_the_targets_own_as_if_each_ran_alone(pair: LoadedPair, trace: TraceSet) -> None:
    texts = texts_of(trace)
    assert [rows[0]["prompt_id"] for rows in texts] == [p.id for p in PROMPTS]
    for prompt, rows in zip(PROMPTS, texts, strict=True):
        ids = pair.encode_prompt(prompt.prompt)
        assert rows[0]["prompt_tokens"] == ids
        assert all(row["prompt_tokens"] is None for row in rows[1:])
        alone = pair.engine().generate(ids, GREEDY, build_strategy("autoregressive")).output
        assert [row["token"] for row in rows] == alone == [row["target_token"] for row in rows]


def test_every_column_is_what_the_models_say_there(pair: LoadedPair, trace: TraceSet) -> None:
    rows = texts_of(trace)[2]
    prefix = list(rows[0]["prompt_tokens"])
    agreed = 0
    for row in rows:
        target, draft = (LogitRows(ask(pair, role, prefix).logits, GREEDY) for role in ("target", "draft"))
        x, t = row["draft_token"], row["target_token"]
        p, q = target.raw(0), draft.raw(0)
        assert (x, t, row["correction"]) == (draft.top[0], target.top[0], target.top[0])
        agreed += x == t
        assert (row["draft_q"], row["draft_p"], row["rank"]) == (1.0, float(x == t), 0)
        top = target.logits[0].sort(descending=True).values
        expected = {"target_p": p[t], "correction_p": p[t], "target_gap": top[0] - top[1], "draft_raw_q": q[x], "draft_raw_p": p[x],
                    "ratio": q[x] / p[x], "confidence": draft.confidence(0), "entropy": draft.entropy(0)}
        assert {name: row[name] for name in expected} == pytest.approx({n: float(v) for n, v in expected.items()}, rel=1e-4)
        assert row["candidates"] == q.topk(8).indices.tolist()
        assert row["candidate_q"] == pytest.approx(q.topk(8).values.tolist(), rel=1e-4)
        prefix.append(row["token"])
    assert 0 < agreed < len(rows)  # a trace without both kinds would prove nothing


def test_rollouts_and_states_equal_feeding_each_prefix_separately(pair: LoadedPair, trace: TraceSet) -> None:
    for rows in texts_of(trace)[:2]:
        prefix = list(rows[0]["prompt_tokens"])
        for row in rows:
            branch, tokens, confidence, entropy = list(prefix), [], [], []
            for _ in range(5):
                said = LogitRows(ask(pair, "draft", branch).logits, GREEDY)
                tokens.append(said.top[0])
                confidence.append(said.confidence(0))
                entropy.append(said.entropy(0))
                branch.append(said.top[0])
            assert row["rollout_tokens"] == tokens
            assert row["rollout_confidence"] == pytest.approx(confidence, rel=1e-4)
            assert row["rollout_entropy"] == pytest.approx(entropy, rel=1e-4)
            for name, ids in (("hidden_before", prefix), ("hidden_after", [*prefix, row["draft_token"]])):
                state = ask(pair, "draft", ids).hidden
                assert state is not None
                assert row[name] == pytest.approx(state[0].tolist(), abs=2e-3)
            prefix.append(row["token"])


def test_a_sampled_trace_draws_the_draft_and_its_correction(pair: LoadedPair, tmp_path: Path) -> None:
    rows = [row for rows in texts_of(collect(pair, PROMPTS, tmp_path, max_tokens=16, temperature=1.0, rollout=2)) for row in rows]
    assert any(row["rank"] > 0 for row in rows)
    assert any(row["rollout_tokens"][0] != row["draft_token"] for row in rows)
    prefix = list(rows[0]["prompt_tokens"])
    for row in rows[:6]:
        x = row["draft_token"]
        warped = Sampling(temperature=1.0)
        p, q = (LogitRows(ask(pair, role, prefix).logits, warped).probs(0) for role in ("target", "draft"))
        assert (row["draft_p"], row["draft_q"]) == pytest.approx((float(p[x]), float(q[x])), rel=1e-4)
        assert float((p - q)[row["correction"]]) > 0  # only the residual gives corrections
        state = ask(pair, "draft", [*prefix, x]).hidden
        assert state is not None
        assert row["hidden_after"] == pytest.approx(state[0].tolist(), abs=2e-3)
        prefix.append(row["token"])


def test_a_cut_run_resumes_and_ends_with_the_same_digest(pair: LoadedPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collection, "SHARD_PROMPTS", 2)
    settings: dict[str, Any] = {"max_tokens": 8, "rollout": 2, "batch": 2}
    whole = collect(pair, PROMPTS, tmp_path / "whole", **settings)
    assert len(whole.shards) == 2

    def kill(done: int, total: int, note: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect(pair, PROMPTS, tmp_path / "cut", progress=kill, **settings)
    (tmp_path / "cut" / ".shard-00001.parquet.abc").write_bytes(b"half")
    assert [path.name for path in TraceSet(tmp_path / "cut").shards] == ["shard-00000.parquet"]
    written = (tmp_path / "cut" / "shard-00000.parquet").stat().st_mtime_ns
    seen: list[int] = []
    resumed = collect(pair, PROMPTS, tmp_path / "cut", progress=lambda done, total, note: seen.append(done), **settings)
    assert seen == [4]
    assert resumed.shard(0).stat().st_mtime_ns == written
    assert resumed.digest() == whole.digest()
    assert sorted(path.name for path in (tmp_path / "cut").iterdir()) == [
        "digest.json", "plan.json", "shard-00000.parquet", "shard-00001.parquet"]


def test_other_inputs_in_the_same_folder_are_refused(pair: LoadedPair, trace: TraceSet) -> None:
    digest = trace.digest()
    for prompts, settings in ((PROMPTS[:3], {}), (PROMPTS, {"rollout": 4}), (PROMPTS, {"hidden": False}), (PROMPTS, {"seed": 1})):
        with pytest.raises(DraftwellError, match="holds a trace of other inputs"):
            collect(pair, prompts, trace.folder, **{"max_tokens": 16, "rollout": 5, **settings})
    (trace.folder / "plan.json").rename(trace.folder / "elsewhere")
    with pytest.raises(DraftwellError, match=r"holds shards but no plan.json"):
        collect(pair, PROMPTS, trace.folder, max_tokens=16, rollout=5)
    (trace.folder / "elsewhere").rename(trace.folder / "plan.json")
    assert trace.digest() == digest


def test_prefix_kinds_come_in_equal_parts_and_are_what_they_say(pair: LoadedPair, tmp_path: Path) -> None:
    kinds = ("draft", "bare", "mixed", "target")
    trace = collect(pair, PROMPTS, tmp_path, max_tokens=24, rollout=1, prefix_kinds=kinds, hidden=False)
    texts = texts_of(trace)
    assert [rows[0]["kind"] for rows in texts] == list(kinds) * len(PROMPTS)
    assert trace.read().column("hidden_before").null_count == trace.read().num_rows
    mixed = [row for rows in texts for row in rows if row["kind"] == "mixed"]
    foreign = [row["token"] != row["target_token"] for row in mixed]
    assert any(foreign)  # the draft wrote some of it
    assert any(row["token"] != row["draft_token"] for row in mixed)  # and the target the rest
    for rows in texts:
        if rows[0]["kind"] == "draft":
            assert [row["token"] for row in rows[:]] == [row["draft_token"] for row in rows]
            assert any(row["token"] != row["target_token"] for row in rows)
        if rows[0]["kind"] == "bare":
            prompt = next(p for p in PROMPTS if p.id == rows[0]["prompt_id"])
            assert rows[0]["prompt_tokens"] + [row["token"] for row in rows] == pair.encode_prompt(prompt.prompt)


def test_further_turns_read_the_targets_answers(tmp_path: Path) -> None:
    pair = llama_pair()
    prompts = [Prompt("two", None, ["hello", "again"]), Prompt("one", None, ["hello"])]
    texts = texts_of(collect(pair, prompts, tmp_path, max_tokens=6, rollout=1, turns=2, prefix_kinds=("draft",)))
    assert [(rows[0]["prompt_id"], rows[0]["turn"]) for rows in texts] == [("two", 0), ("two", 1), ("one", 0)]
    first = pair.engine().generate(pair.encode("hello"), Sampling(max_tokens=6, stop_token_ids=frozenset({EOS})),
                                   build_strategy("autoregressive")).output
    assert texts[1][0]["prompt_tokens"] == pair.encode("hello\n\n" + pair.decode(first) + "\n\nagain")


def test_long_prompts_keep_their_end_and_are_counted(pair: LoadedPair, tmp_path: Path) -> None:
    prompts = [Prompt("long", None, ["x" * 300 + "end"]), PROMPTS[0]]
    figures: dict[str, float] = {}

    def log(name: str, value: float, step: int) -> None:
        figures[name] = value

    trace = collect(pair, prompts, tmp_path, max_tokens=16, rollout=4, hidden=False, log=log)
    assert figures["cut_prompts"] == 1
    assert json.loads((tmp_path / "plan.json").read_text())["cut_prompts"] == 1
    assert texts_of(trace)[0][0]["prompt_tokens"] == pair.encode("x" * 300 + "end")[-(256 - 16 - 4) :]


def test_tables_and_pairs_with_few_slots_work(tmp_path: Path) -> None:
    trace = collect(table_pair(slots=1), PROMPTS, tmp_path, max_tokens=6, rollout=3, batch=8)
    assert [rows[0]["prompt_id"] for rows in texts_of(trace)] == [p.id for p in PROMPTS]


def test_what_cannot_be_collected_is_refused_before_anything_is_written(pair: LoadedPair, tmp_path: Path) -> None:
    alone = pair_of(pair.models["target"], None)
    twice = [PROMPTS[0], PROMPTS[0]]
    cases: list[tuple[LoadedPair, list[Prompt], dict[str, Any], str]] = [
        (pair, [], {}, "no prompts"), (alone, PROMPTS, {}, "has no draft model"), (pair, twice, {}, "same id"),
        (pair, PROMPTS, {"prefix_kinds": ("dratf",)}, "not dratf"), (pair, PROMPTS, {"prefix_kinds": ()}, "not none"),
        (pair, PROMPTS, {"max_tokens": 250}, "leave no room"), (pair, PROMPTS, {"rollout": 0}, "rollout must be")]
    for which, prompts, settings, message in cases:
        with pytest.raises(DraftwellError, match=message) as error:
            collect(which, prompts, tmp_path / "new", **settings)
        assert "\n" not in str(error.value)
    assert not (tmp_path / "new").exists()
