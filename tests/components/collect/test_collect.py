"""Collection: every column against the models asked directly, resumption, prefix kinds, and
refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftwell.components.collect import work as collection
from draftwell.components.collect.collect import cuts
from draftwell.components.collect.plan import exclusive_folder, is_complete
from draftwell.components.drift.prompts import prompts_of_trace
from draftwell.components.prompts.prompt import Prompt
from draftwell.serving.artifacts.correction_memory import CorrectionMemory
from draftwell.serving.errors import DraftwellError
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.runtime.commands import Forward, Role
from draftwell.serving.runtime.logits import Logits, Span
from draftwell.serving.runtime.models.transformers_model import TransformersModel
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import Strategy, StrategyResources, build_strategy
from tests.support.collecting import collect_traces
from tests.support.errors import raises_code
from tests.support.models.spans import span_of
from tests.support.models.tiny import EOS, VOCAB, llama, llama_pair, near, pair_of, table_pair

PROMPTS = [
    Prompt(f"p{i}", "qa", [text], None)
    for i, text in enumerate(["hello world", "abc", "a longer prompt of words", "xyzzy!"])
]
GREEDY = Sampling(max_tokens=16, stop_token_ids=frozenset({EOS}))


@pytest.fixture(scope="module")
def pair() -> LoadedPair:
    return llama_pair()


@pytest.fixture(scope="module")
def trace(pair: LoadedPair, tmp_path_factory: pytest.TempPathFactory) -> TraceSet:
    return collect_traces(
        pair, PROMPTS, tmp_path_factory.mktemp("trace"), max_tokens=16, rollout=5, batch=3
    )


def texts_of(trace: TraceSet) -> list[list[dict[str, Any]]]:
    """Rows by text."""
    texts: list[list[dict[str, Any]]] = []
    for row in trace.read().to_pylist():
        if row["position"] == 0:
            texts.append([])
        assert row["position"] == len(texts[-1])
        texts[-1].append(row)
    return texts


def ask(pair: LoadedPair, role: Role, ids: list[int]) -> Span:
    """A model's output after `ids`, each prefix fed alone: the slow reference."""
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
        target, draft = (
            span_of(ask(pair, role, prefix).logits, GREEDY) for role in ("target", "draft")
        )
        x, t = row["draft_token"], row["target_token"]
        p, q = target.raw(0), draft.raw(0)
        assert (x, t, row["correction"]) == (draft.top[0], target.top[0], target.top[0])
        agreed += x == t
        assert (row["draft_q"], row["draft_p"], row["rank"]) == (1.0, float(x == t), 0)
        assert (row["text_q"], row["text_p"]) == (float(x == row["token"]), 1.0)
        top = target.logits[0].sort(descending=True).values
        expected = {
            "target_p": p[t],
            "correction_p": p[t],
            "target_gap": top[0] - top[1],
            "draft_raw_q": q[x],
            "draft_raw_p": p[x],
            "ratio": q[x] / p[x],
            "text_raw_q": q[row["token"]],
            "confidence": draft.confidence(0),
            "entropy": draft.entropy(0),
        }
        assert {name: row[name] for name in expected} == pytest.approx(
            {n: float(v) for n, v in expected.items()}, rel=1e-4
        )
        assert row["candidates"] == q.topk(8).indices.tolist()
        assert row["candidate_q"] == pytest.approx(q.topk(8).values.tolist(), rel=1e-4)
        prefix.append(row["token"])
    assert 0 < agreed < len(rows)  # a trace without both kinds would prove nothing


def test_rollouts_and_states_equal_feeding_each_prefix_separately(
    pair: LoadedPair, trace: TraceSet
) -> None:
    for rows in texts_of(trace)[:2]:
        prefix = list(rows[0]["prompt_tokens"])
        for row in rows:
            branch, tokens, raw_q, confidence, entropy = list(prefix), [], [], [], []
            for _ in range(5):
                said = span_of(ask(pair, "draft", branch).logits, GREEDY)
                tokens.append(said.top[0])
                raw_q.append(said.raw_prob(0, said.top[0]))
                confidence.append(said.confidence(0))
                entropy.append(said.entropy(0))
                branch.append(said.top[0])
            assert row["rollout_tokens"] == tokens
            assert row["rollout_q"] == pytest.approx(raw_q, rel=1e-4)
            assert row["rollout_confidence"] == pytest.approx(confidence, rel=1e-4)
            assert row["rollout_entropy"] == pytest.approx(entropy, rel=1e-4)
            for name, ids in (
                ("hidden_before", prefix),
                ("hidden_after", [*prefix, row["draft_token"]]),
            ):
                state = ask(pair, "draft", ids).states
                assert state is not None
                assert row[name] == pytest.approx(state[0].tolist(), abs=2e-3)
            prefix.append(row["token"])


def test_a_sampled_trace_draws_the_draft_its_correction_and_a_rejected_token(
    pair: LoadedPair, tmp_path: Path
) -> None:
    warped = Sampling(temperature=1.2, top_p=0.9, max_tokens=16)
    rows = [
        row
        for rows in texts_of(
            collect_traces(
                pair, PROMPTS, tmp_path, max_tokens=16, temperature=1.2, top_p=0.9, rollout=3
            )
        )
        for row in rows
    ]
    assert any(row["rank"] > 0 for row in rows)
    # the draft continued by sampling
    assert any(row["rollout_q"][1] < row["rollout_confidence"][1] - 0.01 for row in rows)
    prefix = list(rows[0]["prompt_tokens"])
    for row in rows[:6]:
        x, token, rejected = row["draft_token"], row["token"], row["rollout_tokens"][0]
        target, draft = (
            span_of(ask(pair, role, prefix).logits, warped) for role in ("target", "draft")
        )
        p, q = target.probs(0), draft.probs(0)
        expected = [p[x], q[x], p[token], q[token], draft.raw(0)[token], draft.raw(0)[rejected]]
        found = [row[name] for name in ("draft_p", "draft_q", "text_p", "text_q", "text_raw_q")] + [
            row["rollout_q"][0]
        ]
        assert found == pytest.approx([float(value) for value in expected], rel=1e-4)
        assert float((p - q)[row["correction"]]) > 0  # only the residual gives corrections
        assert float((q - p)[rejected]) > 0  # and only the draft's excess is ever rejected
        follows = span_of(ask(pair, "draft", [*prefix, rejected]).logits, warped)
        assert row["rollout_q"][1] == pytest.approx(
            follows.raw_prob(0, row["rollout_tokens"][1]), rel=1e-4
        )
        assert row["rollout_entropy"][1] == pytest.approx(follows.entropy(0), rel=1e-4)
        state = ask(pair, "draft", [*prefix, x]).states
        assert state is not None
        assert row["hidden_after"] == pytest.approx(state[0].tolist(), abs=2e-3)
        prefix.append(row["token"])


def test_draws_follow_their_distributions_and_never_share_a_uniform(tmp_path: Path) -> None:
    """Many texts of one prompt: after it, each drawn column has the distribution that it claims,
    also given the text's token."""
    pair = table_pair()
    prompts = [Prompt(f"p{i}", None, ["a"]) for i in range(800)]
    rows = [
        rows[0]
        for rows in texts_of(
            collect_traces(
                pair, prompts, tmp_path, max_tokens=1, temperature=1.0, rollout=2, hidden=False
            )
        )
    ]
    p, q = (
        span_of(ask(pair, role, pair.encode("a")).logits, Sampling(temperature=1.0)).probs(0)
        for role in ("target", "draft")
    )
    distributions = {
        "draft_token": q,
        "correction": (p - q).clamp(min=0),
        "rejected": (q - p).clamp(min=0),
    }
    for row in rows:
        row["rejected"] = row["rollout_tokens"][0]
    commonest = int(p.argmax())
    for name, weights in distributions.items():
        for some in (rows, [row for row in rows if row["token"] == commonest]):
            share = torch.bincount(
                torch.tensor([row[name] for row in some]), minlength=VOCAB
            ) / len(some)
            assert float((share - weights / weights.sum()).abs().max()) < 2.5 / len(some) ** 0.5, (
                name
            )


def test_a_cut_run_resumes_and_ends_with_the_same_digest(
    pair: LoadedPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collection, "SHARD_PROMPTS", 2)
    settings: dict[str, Any] = {"max_tokens": 8, "rollout": 2}
    whole = collect_traces(pair, PROMPTS, tmp_path / "whole", batch=2, **settings)
    assert len(whole.shards) == 2
    cut = tmp_path / "cut"

    def stop(done: int, total: int, words: str) -> None:
        if (cut / "shard-00000.parquet").is_file():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect_traces(pair, PROMPTS, cut, batch=2, progress=stop, **settings)
    for name in (".shard-00001.parquet.abc", ".plan.json.abc"):
        (cut / name).write_bytes(b"half")
    assert [path.name for path in TraceSet(cut).shards] == ["shard-00000.parquet"]
    assert not is_complete(cut)
    written = (cut / "shard-00000.parquet").stat().st_mtime_ns
    seen: list[tuple[int, str]] = []
    resumed = collect_traces(
        pair,
        PROMPTS,
        cut,
        batch=2,
        progress=lambda done, total, words: seen.append((done, words)),
        **settings,
    )
    assert [done for done, _ in seen] == [3, 4]
    assert seen[-1][1].endswith("tokens/s, 0.0 min left")
    assert resumed.shard(0).stat().st_mtime_ns == written
    assert (resumed.digest(), resumed.header.batch) == (whole.digest(), 2)
    assert is_complete(cut)
    assert sorted(path.name for path in cut.iterdir()) == [
        ".lock",
        "digest.json",
        "plan.json",
        "shard-00000.parquet",
        "shard-00001.parquet",
    ]


def test_two_collections_do_not_share_a_folder(pair: LoadedPair, tmp_path: Path) -> None:
    with (
        exclusive_folder(tmp_path),
        raises_code("folder_in_use", str(tmp_path), "collection") as error,
    ):
        collect_traces(pair, PROMPTS, tmp_path)
    assert "\n" not in str(error.value)
    assert len(collect_traces(pair, PROMPTS, tmp_path, max_tokens=4).shards) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"prompts": PROMPTS[:3]},
        {"prompts": [replace(PROMPTS[0], raw=True), *PROMPTS[1:]]},
        {"rollout": 4},
        {"hidden": False},
        {"seed": 1},
        {"batch": 2},  # its further texts could differ
    ],
)
def test_other_inputs_in_the_same_folder_are_refused(
    pair: LoadedPair, trace: TraceSet, changes: dict[str, Any]
) -> None:
    digest = trace.digest()
    settings = {"max_tokens": 16, "rollout": 5, "batch": 3, **changes}
    prompts = settings.pop("prompts", PROMPTS)
    with raises_code("foreign_trace", str(trace.folder), "texts at once"):
        collect_traces(pair, prompts, trace.folder, **settings)
    assert trace.digest() == digest


def test_shards_without_a_plan_are_refused(pair: LoadedPair, tmp_path: Path) -> None:
    collect_traces(pair, PROMPTS[:1], tmp_path, max_tokens=4)
    (tmp_path / "plan.json").unlink()
    with raises_code("foreign_trace", str(tmp_path), "plan.json"):
        collect_traces(pair, PROMPTS[:1], tmp_path, max_tokens=4)


def test_a_fresh_start_keeps_the_old_trace_until_its_prompts_are_read(
    pair: LoadedPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = collect_traces(pair, PROMPTS, tmp_path, max_tokens=4).digest()

    def refuse(*_: object) -> list[int]:
        raise DraftwellError("the chat template refuses this conversation", code="refused")

    with monkeypatch.context() as patch:
        patch.setattr(LoadedPair, "encode_messages", refuse)
        with raises_code("refused"):
            collect_traces(pair, PROMPTS, tmp_path, max_tokens=6, fresh=True)
    assert TraceSet(tmp_path).digest() == old
    assert collect_traces(pair, PROMPTS, tmp_path, max_tokens=6, fresh=True).digest() != old


class WholeHead(TransformersModel):
    """Gives the logits of a reduced head as those of the whole vocabulary, the others −∞."""

    def logits_of(self, states: torch.Tensor) -> Logits:
        return Logits(Span.of(super().logits_of(states)).logits, states)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_reduced_head_gives_the_same_trace_as_over_the_whole_vocabulary(
    tmp_path: Path, temperature: float
) -> None:
    target = llama(2)
    tables = []
    for kind in (TransformersModel, WholeHead):
        draft = kind(near(target, 0.06), slots=4, head_tokens=torch.arange(2, VOCAB, 2))
        pair = pair_of(TransformersModel(target, slots=4), draft, {"target": target})
        tables.append(
            collect_traces(
                pair,
                PROMPTS,
                tmp_path / kind.__name__,
                max_tokens=12,
                rollout=4,
                temperature=temperature,
                top_p=0.95,
                prefix_kinds=("bare", "draft", "target"),
            )
            .read()
            .to_pydict()
        )
    one, other = tables
    # tokens that the draft cannot say are there
    assert any(ratio == 0 for ratio in one["text_raw_q"])
    for name, values in one.items():
        for a, b in zip(values, other[name], strict=True):
            assert (
                a == pytest.approx(b, rel=1e-4, abs=1e-6) if isinstance(a, float | list) else a == b
            ), name


def test_only_the_kinds_asked_for_have_rollouts(
    pair: LoadedPair, trace: TraceSet, tmp_path: Path
) -> None:
    mixed = collect_traces(
        pair, PROMPTS, tmp_path, max_tokens=16, rollout=5, batch=3, prefix_kinds=("draft", "target")
    )
    assert mixed.header.rollout_kinds == ("target",)
    rows = [row for rows in texts_of(mixed) for row in rows]
    own, drafted = ([row for row in rows if row["kind"] == kind] for kind in ("target", "draft"))
    assert {(row["rollout_tokens"], row["rollout_entropy"]) for row in drafted} == {(None, None)}
    assert [row["rollout_tokens"] for row in own] == [
        row["rollout_tokens"] for rows in texts_of(trace) for row in rows
    ]
    prefix: list[int] = []
    for row in (row for row in drafted if row["prompt_id"] == "p2"):  # states are kept all the same
        prefix = prefix or list(row["prompt_tokens"])
        state = ask(pair, "draft", [*prefix, row["draft_token"]]).states
        assert state is not None
        assert row["hidden_after"] == pytest.approx(state[0].tolist(), abs=2e-3)
        prefix.append(row["token"])


def test_prefix_kinds_come_in_equal_parts_and_are_what_they_say(
    pair: LoadedPair, tmp_path: Path
) -> None:
    kinds = ("draft", "bare", "mixed", "target")
    trace = collect_traces(
        pair, PROMPTS, tmp_path, max_tokens=24, rollout=1, prefix_kinds=kinds, hidden=False
    )
    texts = texts_of(trace)
    assert [rows[0]["kind"] for rows in texts] == list(kinds) * len(PROMPTS)
    assert trace.read().column("hidden_before").null_count == trace.read().num_rows
    mixed = [row for rows in texts for row in rows if row["kind"] == "mixed"]
    assert any(row["token"] != row["target_token"] for row in mixed), "the draft wrote some of it"
    assert any(row["token"] != row["draft_token"] for row in mixed), "and the target the rest"
    asked = {prompt.id: pair.encode_prompt(prompt.prompt) for prompt in PROMPTS}
    for rows in texts:
        said = [row["token"] for row in rows]
        if rows[0]["kind"] == "draft":
            assert said == [row["draft_token"] for row in rows]
            assert said != [row["target_token"] for row in rows]
        if rows[0]["kind"] == "bare":
            assert rows[0]["prompt_tokens"] + said == asked[rows[0]["prompt_id"]]


def test_further_turns_read_the_targets_answers(pair: LoadedPair, tmp_path: Path) -> None:
    prompts = [Prompt("two", None, ["hello", "again"]), Prompt("one", None, ["hello"])]
    texts = texts_of(
        collect_traces(
            pair, prompts, tmp_path, max_tokens=6, rollout=1, turns=2, prefix_kinds=("draft",)
        )
    )
    assert [(rows[0]["prompt_id"], rows[0]["turn"]) for rows in texts] == [
        ("two", 0),
        ("two", 1),
        ("one", 0),
    ]
    first = (
        pair.engine()
        .generate(
            pair.encode("hello"),
            Sampling(max_tokens=6, stop_token_ids=frozenset({EOS})),
            build_strategy("autoregressive"),
        )
        .output
    )
    assert texts[1][0]["prompt_tokens"] == pair.encode(
        "hello\n\n" + pair.decode(first) + "\n\nagain"
    )


def test_later_turns_draw_uniforms_of_their_own(tmp_path: Path) -> None:
    """Tables look at the last token only, which is the same in both turns: with the same uniforms
    the texts would be the same."""
    prompts = [Prompt(f"p{i}", None, ["a", "a"], answers=("b",)) for i in range(4)]
    texts = texts_of(
        collect_traces(
            table_pair(), prompts, tmp_path, max_tokens=12, rollout=1, temperature=1.0, turns=2
        )
    )
    first, second = (
        [[row["token"] for row in rows] for rows in texts if rows[0]["turn"] == turn]
        for turn in (0, 1)
    )
    assert len(first) == len(second) == 4
    assert all(one != other for one, other in zip(first, second, strict=True))


def test_recorded_answers_and_messages_are_kept_verbatim(pair: LoadedPair, tmp_path: Path) -> None:
    prompt = Prompt(
        "p",
        None,
        ["one", "two", "three"],
        messages=({"role": "system", "content": "be kind"},),
        answers=("yes", "no"),
    )
    texts = texts_of(collect_traces(pair, [prompt], tmp_path, max_tokens=4, rollout=1, turns=0))
    said = ["be kind", "one", "yes", "two", "no", "three"]
    assert [rows[0]["prompt_tokens"] for rows in texts] == [
        pair.encode("\n\n".join(said[:end])) for end in (2, 4, 6)
    ]


def test_long_prompts_keep_their_end_and_every_turn_is_counted(
    pair: LoadedPair, tmp_path: Path
) -> None:
    long = "x" * 300 + "end"
    prompts = [Prompt("long", None, [long, "a", "b" * 250]), PROMPTS[0]]
    trace = collect_traces(
        pair,
        prompts,
        tmp_path,
        max_tokens=16,
        rollout=4,
        hidden=False,
        turns=0,
        prefix_kinds=("draft", "target"),
    )
    room = 256 - 16 - 4
    rows = [rows[0] for rows in texts_of(trace) if rows[0]["kind"] == "target"]
    assert rows[0]["prompt_tokens"] == pair.encode(long)[-room:]
    assert [row["cut_tokens"] > 0 for row in rows] == [True, True, True, False]
    assert rows[0]["cut_tokens"] == len(long) - room
    assert cuts(trace) == (3, sum(row["cut_tokens"] for row in rows))


def test_tables_and_pairs_with_few_slots_work(tmp_path: Path) -> None:
    trace = collect_traces(table_pair(slots=1), PROMPTS, tmp_path, max_tokens=6, rollout=3, batch=8)
    assert [rows[0]["prompt_id"] for rows in texts_of(trace)] == [p.id for p in PROMPTS]


def test_what_cannot_be_collected_is_refused_before_anything_is_written(
    pair: LoadedPair, tmp_path: Path
) -> None:
    target_only = pair_of(pair.models["target"], None)
    lossless = {"prefix_kinds": ("lossy",), "strategy": build_strategy("vanilla_sd")}
    cases: list[tuple[LoadedPair, list[Prompt], dict[str, Any], str, str]] = [
        (pair, [], {}, "no_prompts", ""),
        (target_only, PROMPTS, {}, "no_draft", "tiny"),
        (pair, [PROMPTS[0], PROMPTS[0]], {}, "duplicate_prompt_id", ""),
        (pair, PROMPTS, {"prefix_kinds": ("dratf",)}, "unknown_prefix_kind", "dratf"),
        (pair, PROMPTS, {"prefix_kinds": ()}, "unknown_prefix_kind", "none"),
        (pair, PROMPTS, {"max_tokens": 250}, "no_room", "250"),
        (pair, PROMPTS, {"rollout": 0}, "bad_collection_settings", "rollout"),
        (pair, PROMPTS, {"seed": -1}, "bad_collection_settings", "-1"),
        (pair, PROMPTS, {"prefix_kinds": ("lossy",)}, "no_lossy_strategy", "lossy"),
        (pair, PROMPTS, lossless, "lossless_strategy", "vanilla_sd"),
    ]
    for which, prompts, settings, code, name in cases:
        with raises_code(code, name) as error:
            collect_traces(which, prompts, tmp_path / "new", **settings)
        assert "\n" not in str(error.value)
    assert not (tmp_path / "new").exists()


def lossy(name: str = "lossy_sd", **parameters: Any) -> Strategy:
    return build_strategy(
        name, parameters, StrategyResources({"correction_memory": CorrectionMemory.empty()})
    )


def test_texts_of_a_lossy_strategy_are_what_it_decodes(pair: LoadedPair, tmp_path: Path) -> None:
    strategy = lossy(tau=0.2)
    kinds = {"prefix_kinds": ("lossy",), "strategy": strategy}
    texts = texts_of(collect_traces(pair, PROMPTS, tmp_path, max_tokens=16, rollout=1, **kinds))
    for rows in texts:
        alone = pair.engine().generate(rows[0]["prompt_tokens"], GREEDY, lossy(tau=0.2)).output
        assert [row["token"] for row in rows] == alone
        assert {row["kind"] for row in rows} == {"lossy"}
        assert [row["correction"] for row in rows] == [row["target_token"] for row in rows]
    assert any(row["token"] != row["correction"] for rows in texts for row in rows), (
        "or it is the target's own text"
    )


def test_another_config_does_not_resume_a_collection(pair: LoadedPair, tmp_path: Path) -> None:
    def again(learnt: int, name: str = "csd", **parameters: Any) -> str:
        strategy = lossy(name, **parameters)
        memory: Any = strategy.resources.artifacts["correction_memory"]
        memory.update(3, learnt)
        memory.save(tmp_path / f"memory{learnt}")
        settings = {"max_tokens": 4, "rollout": 1, "prefix_kinds": ("lossy",)}
        folder = tmp_path / "trace"
        return collect_traces(pair, PROMPTS[:1], folder, strategy=strategy, **settings).digest()

    assert again(4) == again(4)
    for learnt, name, parameters in ((5, "csd", {}), (4, "csd", {"tau": 0.5}), (4, "fuzzy_sd", {})):
        with raises_code("foreign_trace", str(tmp_path)):
            again(learnt, name, **parameters)


def test_prompts_of_a_trace_are_collected_on_again_token_by_token(
    pair: LoadedPair, tmp_path: Path
) -> None:
    """Conversations with their turns, and prompts that were cut."""
    asked = [Prompt("a", "qa", ["one", "two"]), Prompt("b", None, ["x" * 400])]
    settings: dict[str, Any] = {"max_tokens": 8, "rollout": 1, "turns": 0}
    kinds = ("bare", "target")
    first = collect_traces(pair, asked, tmp_path / "first", prefix_kinds=kinds, **settings)
    assert cuts(first)[0] == 1
    found = prompts_of_trace(first)
    assert [(prompt.id, prompt.task, len(prompt.turns)) for prompt in found] == [
        ("a", "qa", 2),
        ("b", None, 1),
    ]
    second = collect_traces(pair, found, tmp_path / "second", **settings)
    mine, theirs = (
        [row for rows in texts_of(trace) for row in rows if row["kind"] == "target"]
        for trace in (second, first)
    )
    for name in ("prompt_id", "turn", "prompt_tokens", "token", "correction"):
        assert [row[name] for row in mine] == [row[name] for row in theirs]
