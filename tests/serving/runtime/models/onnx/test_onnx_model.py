"""The draft in ONNX Runtime gives torch's logits: step by step, behind rollbacks, in ragged
batches, on forked slots."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from draftwell.components.calibrate.hardware_profile import measure_profile
from draftwell.components.report.provenance import provenance
from draftwell.registry.pairs import fetch, find_pair
from draftwell.serving.artifacts.pair_files import PairFiles, draftwell_home
from draftwell.serving.errors import ContextTooLong
from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.models.onnx.onnx_export import cached, export_llama, exportable
from draftwell.serving.runtime.models.onnx.onnx_model import OnnxModel, neighbours
from draftwell.serving.runtime.models.transformers_model import TransformersModel
from draftwell.serving.runtime.pair import LoadSettings, in_onnx, load_pair
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import StrategyResources, build_strategy
from tests.support.models.llama_shapes import LLAMA3
from tests.support.models.resources import table_resources
from tests.support.server.served_pair import tiny_tokenizer

SIZES = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
HEAD = torch.tensor([0, 2, 3, 5, 8, 13, 21, 34, 55, 60])


def tiny_llama(**changes):
    """A tiny random Llama, float32."""
    import transformers as tf

    torch.manual_seed(0)
    return (
        tf.AutoModelForCausalLM.from_config(
            tf.LlamaConfig(**SIZES | changes), attn_implementation="eager"
        )
        .float()
        .eval()
    )


def both(module, slots: int = 1, max_context: int = 256, head=None):
    """The module in torch and in ONNX Runtime, over slots."""
    torch_model = TransformersModel(module, slots=slots, max_context=max_context, head_tokens=head)
    graph = export_llama(module, torch_model.head_weight).SerializeToString()
    return torch_model, OnnxModel(
        graph, module, slots=slots, max_context=max_context, head_tokens=head
    )


def compare(models, rows: list[Forward]) -> None:
    for a, b in zip(*(model.forward(rows) for model in models), strict=True):
        assert torch.equal(a.logits.isfinite(), b.logits.isfinite())
        assert float((a.logits - b.logits).nan_to_num(0.0).abs().max()) < 1e-4
        assert float((a.states - b.states).abs().max()) < 1e-4


def drive(models, steps: int, *prompts: int, vocab: int = SIZES["vocab_size"]) -> None:
    """Incremental steps with ragged batches, several tokens at once, and rollbacks; the same on
    both models."""
    rng, slots = random.Random(7), len(prompts)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocab) for _ in range(count))

    for model in models:
        assert [model.open() for _ in range(slots)] == list(range(slots))
    compare(models, [Forward("draft", slot, tokens(prompts[slot]), 2) for slot in range(slots)])
    lengths = list(prompts)
    for _ in range(steps):
        counts = [rng.choice((1, 1, 1, 1, 2, 5)) for _ in range(slots)]
        rows = [
            Forward("draft", slot, tokens(count), rng.randint(1, count))
            for slot, count in enumerate(counts)
            if rng.random() < 0.9
        ]
        if not rows:
            continue
        compare(models, rows)
        for row in rows:
            lengths[row.slot] += len(row.tokens)
            if rng.random() < 0.2:
                lengths[row.slot] -= rng.randint(1, 3)
                for model in models:
                    model.rollback(row.slot, lengths[row.slot])


@pytest.mark.parametrize(
    "changes",
    [{}, {"rope_parameters": LLAMA3}, {"num_key_value_heads": 4}, {"num_key_value_heads": 1}],
    ids=str,
)
def test_one_request_gives_torchs_logits_over_64_steps_with_rollbacks(changes):
    drive(both(tiny_llama(**changes)), 64, 20)


def test_ragged_batches_give_torchs_logits_over_64_steps_with_rollbacks():
    drive(both(tiny_llama(), slots=3, max_context=512, head=HEAD), 64, 5, 31, 12)


def test_bfloat16_weights_are_the_same_weights_in_float32():
    half = tiny_llama().bfloat16()
    model = OnnxModel(
        export_llama(half, half.lm_head.weight).SerializeToString(), half, max_context=64
    )
    exact = tiny_llama().bfloat16().float()
    drive((TransformersModel(exact, max_context=64), model), 12, 9)


def test_branches_go_their_own_way_and_leave_the_others_alone():
    models = both(tiny_llama(), max_context=64)
    slots = []
    for model in models:
        main = model.open()
        slots.append([main, *(model.open_branch() for _ in range(3))])
    assert slots[0] == slots[1] == [0, 1, 2, 3]
    compare(models, [Forward("draft", 0, (1, 2, 3, 4, 5, 6))])
    for model in models:
        for branch in (1, 2, 3):
            model.fork(0, branch, 4)
    steps = [Forward("draft", slot, (slot,)) for slot in (2, 0, 1, 3)]
    assert [[row.slot for row in group] for group in neighbours(steps)] == [[0, 1, 2, 3]]
    for step in range(5):
        compare(models, [Forward("draft", slot, (slot + step,)) for slot in (2, 0, 1, 3)])
    for model in models:
        model.fork(2, 0, 9, known=4)
    compare(models, [Forward("draft", 0, (7, 8), 2), Forward("draft", 3, (9,))])
    with pytest.raises(ValueError, match="cannot fork"):
        models[1].fork(1, 0, 10)


def test_a_failed_forward_leaves_slots_as_they_were():
    _, model = both(tiny_llama(), slots=2, max_context=8)
    a, b = model.open(), model.open()
    model.forward([Forward("draft", a, (1, 2)), Forward("draft", b, (1, 2, 3))])
    with pytest.raises(ContextTooLong):
        model.forward([Forward("draft", a, (4,)), Forward("draft", b, (1,) * 6)])
    assert model.slots.lengths == [2, 3]


def test_its_threads_do_not_spin():
    _, model = both(tiny_llama(), max_context=8)
    assert (
        model.session.get_session_options().get_session_config_entry(
            "session.intra_op.allow_spinning"
        )
        == "0"
    )


def test_a_graph_is_written_once_and_whole(tmp_path: Path, monkeypatch):
    module = tiny_llama()
    head, digests = module.lm_head.weight, {"draft": "a", "target": "b"}
    first = cached(module, head, digests, tmp_path)
    written = first.stat().st_mtime_ns
    assert cached(module, head, digests, tmp_path).stat().st_mtime_ns == written
    assert sorted(p.name for p in first.parent.iterdir()) == ["draft.onnx", "draft.weights"]
    half = tiny_llama().bfloat16()
    others = {
        cached(module, head, digests | {"draft": "c"}, tmp_path),
        cached(module, head[:10], digests, tmp_path),
        cached(half, half.lm_head.weight, digests, tmp_path),
    }
    assert len({first, *others}) == 4
    read_back = OnnxModel(first, module, max_context=16)
    drive((TransformersModel(module, max_context=16), read_back), 2, 4)

    def broken(graph, folder):
        (folder / "draft.onnx").write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr("draftwell.serving.runtime.models.onnx.onnx_export.save", broken)
    before = sorted((tmp_path / "onnx").iterdir())
    with pytest.raises(OSError, match="no space"):
        cached(module, module.lm_head.weight, {"draft": "new"}, tmp_path)
    assert sorted((tmp_path / "onnx").iterdir()) == before


def test_what_the_graph_cannot_say_is_not_exported():
    import transformers as tf

    assert exportable(tiny_llama())
    assert not exportable(tiny_llama(hidden_size=32))  # heads of 8
    assert not exportable(tiny_llama(attention_bias=True))
    assert not exportable(
        tf.AutoModelForCausalLM.from_config(
            tf.GPT2Config(vocab_size=61, n_embd=32, n_layer=1, n_head=2)
        )
    )


def save_pair(folder: Path, draft) -> PairFiles:
    """Model folders of a target and a draft over the letters of the server's tests."""
    tokenizer = tiny_tokenizer()
    for role, module in (
        ("target", tiny_llama(vocab_size=len(tokenizer), eos_token_id=2, bos_token_id=None)),
        ("draft", draft),
    ):
        module.save_pretrained(folder / role)
        tokenizer.save_pretrained(folder / role)
    return PairFiles("tiny", folder / "target", folder / "draft")


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_pair_is_loaded_with_it_on_request_and_its_graph_is_kept_in_the_home(
    tmp_path: Path, monkeypatch, dtype
):
    size = len(tiny_tokenizer())
    files = save_pair(
        tmp_path,
        tiny_llama(vocab_size=size, num_hidden_layers=1, eos_token_id=2, bos_token_id=None),
    )
    home = draftwell_home()
    before = set(home.glob("onnx/*/draft.onnx"))
    plain, pair = (
        load_pair(files, LoadSettings(dtype=dtype)),
        load_pair(files, LoadSettings(dtype=dtype), onnx_draft=True),
    )
    assert set(plain.models) == {"target", "draft"}
    assert set(pair.models) == {"target", "draft", "draft_onnx"}
    assert plain.fingerprint == pair.fingerprint
    assert len(set(home.glob("onnx/*/draft.onnx")) - before) == 1
    assert {model.vocab_size for model in pair.models.values()} == {size}
    assert {model.max_context for model in pair.models.values()} == {
        SIZES["max_position_embeddings"]
    }
    made = measure_profile(pair, provenance(pair), sizes=(1,), repeats=2, context=8)
    assert made.t_draft_onnx > 0
    assert (
        measure_profile(plain, provenance(plain), sizes=(1,), repeats=2, context=8).t_draft_onnx
        is None
    )
    strategy = build_strategy("duo_decoding", {}, StrategyResources({"hardware_profile": made}))
    sampling = pair.sampling(max_tokens=24, stop_token_ids=frozenset())
    monkeypatch.setattr(pair.models["draft"], "forward", None)  # the torch draft is not asked
    job = pair.engine().generate([5, 6, 7], sampling, strategy)
    assert len(job.output) == 24
    if dtype == "float32":
        assert (
            job.output
            == plain.engine().generate([5, 6, 7], sampling, build_strategy("autoregressive")).output
        )


def test_a_home_that_cannot_be_written_to_is_only_slower(monkeypatch):
    def refuse(*arguments):
        raise OSError("read-only file system")

    monkeypatch.setattr("draftwell.serving.runtime.pair.cached", refuse)
    monkeypatch.setattr("draftwell.serving.runtime.pair.model_digest", str)
    module = tiny_llama()
    torch_draft = TransformersModel(module, max_context=64)
    files = PairFiles("tiny", Path("target"), Path("draft"))
    drive((torch_draft, in_onnx(torch_draft, files, "cpu", 1)), 4, 9)


def test_a_draft_that_cannot_be_exported_stays_in_torch(tmp_path: Path):
    size = len(tiny_tokenizer())
    files = save_pair(
        tmp_path, tiny_llama(vocab_size=size, hidden_size=32, eos_token_id=2, bos_token_id=None)
    )
    assert set(load_pair(files, LoadSettings(dtype="float32"), onnx_draft=True).models) == {
        "target",
        "draft",
    }


def test_a_draft_that_lacks_tokens_of_its_target_reads_its_own_end_in_their_place(tmp_path: Path):
    size = len(tiny_tokenizer())
    files = save_pair(
        tmp_path,
        tiny_llama(vocab_size=size - 3, num_hidden_layers=1, eos_token_id=2, bos_token_id=None),
    )
    pair = load_pair(files, LoadSettings(dtype="float32"), onnx_draft=True)
    drafts = pair.models["draft"], pair.models["draft_onnx"]
    assert [list(one.stand_ins) for one in drafts] == 2 * [[size - 3, size - 2, size - 1]]
    drive(drafts, 8, 40, vocab=size)


@pytest.mark.slow
def test_the_default_draft_gives_torchs_logits_over_64_steps_with_rollbacks():
    from tests.support.models.default_pair import default_pair

    pair = default_pair()
    torch_draft = TransformersModel(
        pair.modules["draft"],
        slots=3,
        max_context=512,
        head_tokens=pair.models["draft"].head_tokens,
        vocab_size=pair.models["draft"].vocab_size,
    )
    onnx_draft = in_onnx(torch_draft, fetch(find_pair("default")), "cpu", 3)
    drive((torch_draft, onnx_draft), 64, 40, 7, 100, vocab=torch_draft.vocab_size)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_duo_decoding_with_it_writes_the_targets_text(temperature):
    """Greedy: exactly the target's; sampled: the same as with the torch draft, whose choices are
    the same here."""
    module, other = tiny_llama(), tiny_llama()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    sampling = Sampling(max_tokens=60, temperature=temperature, seed=3)
    outputs = []
    for use_onnx in (False, True):
        target = TransformersModel(module, max_context=256)
        torch_draft, onnx_draft = both(other)
        strategy = build_strategy(
            "duo_decoding", {"num_speculative_tokens": 6}, table_resources(61)
        )
        job = Engine({"target": target, "draft": onnx_draft if use_onnx else torch_draft}).generate(
            [1, 2, 3], sampling, strategy
        )
        outputs.append((job.output, job.session.stats.accepted))
    assert outputs[0] == outputs[1]
    if temperature == 0.0:
        target = TransformersModel(module, max_context=256)
        plain = Engine({"target": target}).generate(
            [1, 2, 3], sampling, build_strategy("autoregressive")
        )
        assert outputs[0][0] == plain.output
