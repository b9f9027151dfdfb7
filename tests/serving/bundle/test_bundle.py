"""Opening a bundle: all of it is checked before anything is read, and what is wrong is named in one
line."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.decoding_config import DecodingConfig
from draftwell.serving.artifacts.pair_files import (
    SIDECAR,
    PairFiles,
    combine_digests,
    fingerprint,
    models_root,
    tokenizer_digest,
    weights_digest,
)
from draftwell.serving.bundle.bundle import (
    Bundle,
    BundleError,
    FileRecord,
    Manifest,
    ModelRecord,
    open_bundle,
)
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import sha256_file
from draftwell.serving.format import FORMAT
from tests.support.errors import raises_code


def model_folder(folder: Path, seed: int) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}\n")
    (folder / "tokenizer.json").write_text("{}\n")
    save_file({"weight": np.full((2, 2), seed, np.float32)}, folder / "model.safetensors")
    return folder


def seal(folder: Path, **changes) -> None:
    """Write the manifest of a bundle folder anew, so that only what a test plants is wrong."""
    data = json.loads((folder / "manifest.json").read_text()) | changes
    if "files" not in changes:
        data["files"] = {
            p.relative_to(folder).as_posix(): FileRecord(
                sha256=sha256_file(p), size=p.stat().st_size
            )
            for p in sorted(folder.rglob("*"))
            if p.is_file() and p.name != "manifest.json"
        }
    manifest = Manifest.model_validate(data)
    (folder / "manifest.json").write_text(
        manifest.model_copy(update={"digest": manifest.computed_digest()}).to_json()
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bundle/` with a bundled draft, and `models/` with its target."""
    root = tmp_path_factory.mktemp("made")
    target, bundle = model_folder(root / "models" / "big", 1), root / "bundle"
    draft = model_folder(bundle / "models" / "draft", 2)
    mark = fingerprint(PairFiles("tiny", target, draft), "float32")
    (draft / SIDECAR).unlink()
    provenance = Provenance(pair="tiny", fingerprint=mark)
    AcceptanceTable([5] * 20, [3] * 20, provenance).save(bundle / "artifacts" / "acceptance_table")
    DecodingConfig("spide", {}, {}, provenance).save(bundle / "artifacts" / "decoding_config")
    models = {
        "target": ModelRecord(source="local", weights_sha256=weights_digest(target), folder="big"),
        "draft": ModelRecord(
            source="bundled",
            weights_sha256=sha256_file(draft / "model.safetensors"),
            folder="models/draft",
        ),
    }
    manifest = Manifest(
        pair="tiny",
        device="cpu",
        dtype="float32",
        fingerprint=mark,
        release_version=1,
        models=models,
        release_digest="r",
        gated=True,
        versions={"acceptance_table": 1, "decoding_config": 1},
        runs={},
        files={},
    )
    (bundle / "manifest.json").write_text(manifest.to_json())
    seal(bundle)
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copy"))


@pytest.fixture
def bundle(root: Path) -> Path:
    return root / "bundle"


def refused(path: Path, code: str, *names: str) -> None:
    with raises_code(code, *names, error=BundleError) as caught:
        open_bundle(path)
    assert "\n" not in str(caught.value)
    assert ": " in str(caught.value)


def test_a_whole_bundle_opens(root: Path, bundle: Path) -> None:
    opened = open_bundle(bundle)
    artifacts = opened.artifacts()
    assert isinstance(artifacts["acceptance_table"], AcceptanceTable)
    assert isinstance(artifacts["decoding_config"], DecodingConfig)
    assert opened.files(root / "models") == PairFiles(
        "tiny", root / "models" / "big", bundle / "models" / "draft"
    )


FILES = [
    "artifacts/acceptance_table/artifact.json",
    "artifacts/acceptance_table/table.json",
    "artifacts/decoding_config/artifact.json",
    "artifacts/decoding_config/config.json",
    "models/draft/config.json",
    "models/draft/model.safetensors",
    "models/draft/tokenizer.json",
]


def test_the_list_below_is_complete(bundle: Path) -> None:
    assert sorted(open_bundle(bundle).manifest.files) == FILES


@pytest.mark.parametrize("name", FILES)
def test_a_changed_cut_or_missing_file_is_named(bundle: Path, name: str) -> None:
    file = bundle / name
    data = file.read_bytes()
    file.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    refused(bundle, "changed_file", name, "sha256")
    file.write_bytes(data[:-1])
    refused(bundle, "changed_file", name, f"{len(data) - 1} bytes", str(len(data)))
    file.unlink()
    refused(bundle, "missing_file", name, "deploy again")


def test_a_changed_manifest_is_refused(bundle: Path) -> None:
    file = bundle / "manifest.json"
    text = file.read_text()
    file.write_text(text.replace('"release_version": 1', '"release_version": 2'))
    refused(bundle, "changed_file", "manifest.json", "digest")
    file.write_text(text[:-20])
    refused(bundle, "damaged_manifest", "manifest.json", "JSON")
    file.write_text(text.replace('"pair"', '"pear"'))
    refused(bundle, "damaged_manifest", "manifest.json", "pair: ")
    file.write_text("[]")
    refused(bundle, "damaged_manifest", "manifest.json")


def test_what_is_no_bundle_is_named(bundle: Path, tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "no_bundle", "nowhere", "draftwell deploy")
    (bundle / "manifest.json").unlink()
    refused(bundle, "no_bundle", "manifest.json", "draftwell deploy")


@pytest.mark.parametrize(
    ("format", "code", "remedy"),
    [
        (FORMAT + 1, "newer_format", "upgrade draftwell"),
        (FORMAT - 1, "older_format", "deploy its release again"),
    ],
)
def test_a_bundle_of_another_format_is_refused_by_name(
    bundle: Path, format: int, code: str, remedy: str
) -> None:
    data = json.loads((bundle / "manifest.json").read_text())
    (bundle / "manifest.json").write_text(
        json.dumps({**data, "schema_version": format, "new_field": 1})
    )
    refused(bundle, code, bundle.name, remedy)


def test_an_artifact_of_another_schema_is_refused_before_any_is_loaded(bundle: Path) -> None:
    file = bundle / "artifacts" / "decoding_config" / "artifact.json"
    written = json.loads(file.read_text())
    for schema, code, remedy in ((7, "newer_schema", "upgrade"), (1, "older_schema", "deploy")):
        file.write_text(json.dumps(written | {"schema_version": schema}))
        seal(bundle)
        refused(bundle, code, "decoding_config", f"schema {schema}", "reads 2", remedy)


def test_a_bundle_for_an_unknown_device_is_refused(bundle: Path) -> None:
    data = json.loads((bundle / "manifest.json").read_text())
    (bundle / "manifest.json").write_text(json.dumps({**data, "device": "tpu"}))
    refused(bundle, "damaged_manifest", "manifest.json", "device: ")


def test_a_bundle_for_cuda_is_refused_where_there_is_none(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any artifact is read: none of this bundle's would be good for a server."""
    import torch

    from tests.support.server.bundles import load_bundle

    seal(bundle, device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(Bundle, "artifacts", lambda self: pytest.fail("artifacts were loaded"))
    with raises_code("no_cuda_device", "cuda", "DEVICE=cpu"):
        load_bundle(bundle)


def test_other_libraries_than_a_bundle_pins_are_named_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A machine with a GPU often brings its own PyTorch."""
    from draftwell.serving.server.model.loading import log_other_libraries

    here = {name: version(name) for name in ("torch", "transformers")}
    bundle: Any = SimpleNamespace(path=tmp_path, manifest=SimpleNamespace(device="cuda"))
    pins = tmp_path / "requirements-cuda.txt"
    for torch, lines in ((here["torch"], 0), ("1.0+cu90", 1)):
        pins.write_text(
            f"# Exact versions\nnumpy==0.1\ntorch=={torch} --hash=sha256:0\n"
            f"transformers=={here['transformers']}\n"
        )
        log_other_libraries(bundle)
        assert len(caplog.messages) == lines
    assert f"torch {here['torch']}, not 1.0+cu90" in caplog.messages[0]
    assert "transformers" not in caplog.messages[0]
    pins.unlink()
    log_other_libraries(bundle)
    assert len(caplog.messages) == 1


def test_a_folder_that_holds_another_kind_is_refused(bundle: Path) -> None:
    shutil.rmtree(bundle / "artifacts" / "acceptance_table")
    shutil.copytree(
        bundle / "artifacts" / "decoding_config", bundle / "artifacts" / "acceptance_table"
    )
    seal(bundle)
    refused(bundle, "wrong_artifact", "a decoding_config", "a acceptance_table")


def test_links_are_not_followed(bundle: Path) -> None:
    """Even where the bytes behind them are those of the manifest: they may be others a moment
    later."""
    file = bundle / "artifacts" / "acceptance_table" / "table.json"
    outside = bundle.parent / "table.json"
    file.rename(outside)
    file.symlink_to(outside)
    refused(bundle, "link_in_bundle", "table.json")
    file.unlink()
    outside.rename(file)
    elsewhere = bundle.parent / "elsewhere"
    (bundle / "artifacts").rename(elsewhere)
    (bundle / "artifacts").symlink_to(elsewhere, target_is_directory=True)
    refused(bundle, "link_in_bundle", "artifacts")


def test_a_manifest_that_is_nested_without_end_is_refused(bundle: Path) -> None:
    (bundle / "manifest.json").write_text("[" * 200_000)
    refused(bundle, "damaged_manifest", "manifest.json", "JSON")


def test_a_manifest_that_is_too_large_is_not_read(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftwell.serving.bundle.manifest.MAX_BYTES", 100)
    refused(bundle, "damaged_manifest", "manifest.json", "larger")


def test_files_that_are_not_listed_are_refused(bundle: Path) -> None:
    (bundle / "artifacts" / "extra.py").write_text("")
    refused(bundle, "unlisted_file", "extra.py")
    (bundle / "artifacts" / "extra.py").unlink()
    # digests that the runtime keeps are no data
    (bundle / "models" / "draft" / SIDECAR).write_text("{}")
    open_bundle(bundle)
    os.symlink("/etc", bundle / "artifacts" / "link")
    refused(bundle, "link_in_bundle", "link is")
    (bundle / "artifacts" / "link").unlink()
    (bundle / SIDECAR).write_text("{}")  # but only beside weights
    refused(bundle, "unlisted_file", SIDECAR)


def test_digests_that_a_kill_left_half_written_harm_no_bundle(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do those that another server is writing."""
    draft = bundle / "models" / "draft"
    with monkeypatch.context() as killed:
        killed.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        killed.setattr(Path, "unlink", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            weights_digest(draft)
    left = next(draft.glob(f".{SIDECAR}.*"))
    open_bundle(bundle)
    outside = left.rename(bundle / left.name)
    refused(bundle, "unlisted_file", outside.name)
    outside.rename(draft / f"{left.name}.py")
    refused(bundle, "unlisted_file", ".py")
    (draft / f"{left.name}.py").unlink()
    left.symlink_to("/etc/passwd")
    refused(bundle, "link_in_bundle")


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "artifacts/../../secret", ""])
def test_no_path_leaves_the_bundle(bundle: Path, name: str) -> None:
    (bundle.parent / "secret").write_text("s")
    seal(bundle, files={name: {"sha256": sha256_file(bundle.parent / "secret"), "size": 1}})
    refused(bundle, "damaged_manifest", f"'{name}'")
    target = ModelRecord(source="local", weights_sha256="w", folder=name).model_dump()
    seal(bundle, models={"target": target})
    refused(bundle, "damaged_manifest", f"'{name}'")


def test_an_artifact_of_another_pair_is_refused(bundle: Path) -> None:
    made = Provenance(pair="other", fingerprint="e" * 64)
    AcceptanceTable([5] * 20, [3] * 20, made).save(bundle / "artifacts" / "acceptance_table")
    seal(bundle)
    refused(bundle, "another_pair", "acceptance_table", "eeeeeeeeeeee")


def test_an_artifact_that_the_runtime_does_not_know_is_refused(bundle: Path) -> None:
    shutil.copytree(bundle / "artifacts" / "acceptance_table", bundle / "artifacts" / "oracle")
    seal(bundle, versions={"oracle": 1})
    refused(bundle, "newer_bundle", "oracle", "upgrade draftwell")
    seal(bundle, versions={"verifier": 1})
    refused(bundle, "missing_file", "verifier")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda big: shutil.rmtree(big),
            r"the target of pair tiny \(local\) is not at .*big: fetch it there",
        ),
        (
            lambda big: save_file({"weight": np.zeros(3)}, big / "model.safetensors"),
            "has weights .*, the bundle needs",
        ),
        (
            lambda big: (big / "model.safetensors").unlink(),
            "holds no safetensors weights: fetch the model again",
        ),
        (
            lambda big: (big / "tokenizer.json").write_text("{ }"),
            "was made for fingerprint .* the models here give",
        ),
        (lambda big: (big / "tokenizer.json").unlink(), "holds no tokenizer"),
    ],
)
def test_other_weights_or_tokenizers_are_refused(
    root: Path, bundle: Path, spoil: Callable[[Path], object], message: str
) -> None:
    spoil(root / "models" / "big")
    with pytest.raises(DraftwellError, match=message) as caught:
        open_bundle(bundle).files(root / "models")
    assert "\n" not in str(caught.value)


def test_digests_of_weights_are_kept_and_made_anew_when_a_file_changes(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", 1)
    file = folder / "model.safetensors"
    assert weights_digest(folder) == sha256_file(file)
    kept = json.loads((folder / SIDECAR).read_text())
    stat = file.stat()
    assert kept["model.safetensors"] == {
        "size": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "sha256": sha256_file(file),
    }
    (folder / SIDECAR).write_text(
        (folder / SIDECAR).read_text().replace(sha256_file(file), "0" * 64)
    )
    assert weights_digest(folder) == "0" * 64  # it was not read again
    assert weights_digest(folder, in_full=True) == sha256_file(file)
    assert weights_digest(folder) == "0" * 64
    os.utime(file, ns=(1, 1))
    assert weights_digest(folder) == sha256_file(file)
    (folder / SIDECAR).write_text("no JSON")
    assert weights_digest(folder) == sha256_file(file)
    save_file({"weight": np.full((2, 2), 9, np.float32)}, file)
    assert weights_digest(folder) == sha256_file(file)


def test_a_folder_that_cannot_be_written_to_is_only_slower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder(tmp_path / "model", 1)

    def read_only(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr("draftwell.serving.artifacts.pair_files.write_atomically", read_only)
    assert weights_digest(folder) == sha256_file(folder / "model.safetensors")
    assert not (folder / SIDECAR).exists()


def test_every_part_of_a_pair_enters_its_fingerprint(tmp_path: Path) -> None:
    one, two, three = (model_folder(tmp_path / str(n), n) for n in (1, 2, 3))
    files = [
        PairFiles("a", one, two),
        PairFiles("a", two, one),
        PairFiles("a", one),
        PairFiles("a", one, two, three),
    ]
    formats = ("float32", "bfloat16", "bfloat16-int8", "bfloat16-int4", "float32-int8")
    marks = {fingerprint(f, dtype) for f in files for dtype in formats}
    assert len(marks) == 20
    assert fingerprint(PairFiles("b", one, two), "float32") in marks  # names and paths do not
    (one / "tokenizer.json").write_text("{ }")
    assert fingerprint(files[0], "float32") not in marks
    with pytest.raises(DraftwellError, match="unknown dtype int8: choose from bfloat16"):
        fingerprint(files[0], "int8")


def test_shards_and_other_tokenizers_have_digests(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", 1)
    save_file({"more": np.ones(2)}, folder / "more.safetensors")
    both = combine_digests(
        {name: sha256_file(folder / name) for name in ("model.safetensors", "more.safetensors")}
    )
    assert weights_digest(folder) == weights_digest(folder, in_full=True) == both
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    assert tokenizer_digest(folder) == sha256_file(folder / "tokenizer.model")


def test_the_models_folder_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DRAFTWELL_MODELS", str(tmp_path / "m"))
    assert models_root() == tmp_path / "m"
    monkeypatch.delenv("DRAFTWELL_MODELS")
    monkeypatch.setenv("DRAFTWELL_HOME", str(tmp_path / "h"))
    assert models_root() == tmp_path / "h" / "models"
    monkeypatch.delenv("DRAFTWELL_HOME")
    monkeypatch.chdir(tmp_path)
    assert models_root() == tmp_path / ".draftwell" / "models"


def test_a_bundle_opens_where_mlflow_prefect_and_the_registry_cannot_be_imported(
    bundle: Path,
) -> None:
    code = """
import sys
for name in ("mlflow", "prefect", "draftwell.registry", "draftwell.components", "draftwell.flows"):
    sys.modules[name] = None
from pathlib import Path
from draftwell.serving.bundle.bundle import open_bundle
assert "torch" not in sys.modules
print(sorted(open_bundle(Path(sys.argv[1])).artifacts()))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(bundle)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "['acceptance_table', 'decoding_config']"
