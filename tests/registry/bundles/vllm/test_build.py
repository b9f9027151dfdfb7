"""Bundles for vLLM: numbered, whole or not there, the same one not twice, and `current` moves at
the end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftwell.registry.bundles.requirements import engine_lock
from draftwell.registry.bundles.retention import prune
from draftwell.registry.bundles.vllm.build import (
    activate_vllm_bundle,
    build_vllm_bundle,
    bundles_of,
    keep_own_files,
)
from draftwell.registry.bundles.vllm.settings import VllmServing, gated_serving
from tests.support.errors import raises_code

RECORD: dict[str, Any] = {
    "engine": "vllm",
    "version": "0.32.0",
    "device_class": "cpu-x",
    "dtype": "bfloat16",
    "fingerprint": "f" * 64,
    "passed": True,
    "settings": {
        "method": "draft_model",
        "model": "/where/it/was/measured",
        "num_speculative_tokens": 2,
    },
}


@pytest.fixture
def models(tmp_path: Path) -> dict[str, Path]:
    """Two model folders, with a file that no bundle takes."""
    found = {}
    for role in ("target", "draft"):
        folder = tmp_path / role
        folder.mkdir()
        for name in (
            "config.json",
            "model.safetensors",
            "tokenizer.json",
            ".weights.sha256.json",
            "notes.md",
        ):
            (folder / name).write_text(f"{role} {name}")
        found[f"models/{role}"] = folder
    return found


@pytest.fixture
def build(tmp_path: Path, models: dict[str, Path]) -> Callable[..., Path]:
    def made(*, activate: bool = True, **changes: Any) -> Path:
        def settings(number: int) -> VllmServing:
            return gated_serving(
                RECORD,
                device="cpu",
                fingerprint="f" * 64,
                draft="models/draft",
                pair="tiny",
                release=number,
                model="models/target",
                **changes,
            )

        return build_vllm_bundle(
            tmp_path / "dist",
            "tiny",
            "cpu",
            settings,
            models=models,
            files={"requirements-engine.txt": b"vllm==1\n"},
            activate=activate,
        )

    return made


def test_bundles_are_numbered_and_the_same_one_is_not_built_twice(
    build: Callable[..., Path], tmp_path: Path
) -> None:
    home = bundles_of(tmp_path / "dist", "tiny")
    first = build()
    assert (first, (home / "current").resolve()) == (home / "1-cpu", first)
    before = {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    names = {path.relative_to(first).as_posix() for path in before}
    assert {
        "models/target/model.safetensors",
        "models/draft/tokenizer.json",
        "requirements-engine.txt",
        "serve.sh",
        "check.py",
    } <= names
    assert not {name for name in names if "notes" in name or "weights.sha" in name}
    assert (
        json.loads((first / "manifest.json").read_text())["settings"]["speculative"]["model"]
        == "models/draft"
    )
    assert build() == first
    second = build(max_num_seqs=4)
    assert (second.name, (home / "current").resolve()) == ("2-cpu", second)
    assert {path: path.read_bytes() for path in first.rglob("*") if path.is_file()} == before
    assert {path.name for path in home.iterdir()} == {"1-cpu", "2-cpu", "current"}
    assert (second / "serve.sh").stat().st_mode & 0o777 == 0o755
    assert [path.name for path in prune(home, 1)] == []


def test_one_that_has_to_be_tried_first_leaves_current_until_then(
    build: Callable[..., Path], tmp_path: Path
) -> None:
    home, first = bundles_of(tmp_path / "dist", "tiny"), build()
    second = build(max_num_seqs=4, activate=False)
    assert (second.name, (home / "current").resolve()) == ("2-cpu", first)
    activate_vllm_bundle(second)
    assert (home / "current").resolve() == second


def test_the_threads_that_were_measured_are_in_the_bundle_where_the_record_has_them(
    build: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = build()
    monkeypatch.setitem(RECORD, "threads", 3)
    made = build()
    assert [
        json.loads((one / "manifest.json").read_text())["settings"]["gate"]["threads"]
        for one in (old, made)
    ] == [None, 3]
    assert "cpu.py cores 3)" in (made / "serve.sh").read_text()
    assert "cpu.py cores)" in (old / "serve.sh").read_text()


def test_a_damaged_bundle_is_built_again_under_the_next_number(build: Callable[..., Path]) -> None:
    first = build()
    (first / "models" / "draft" / "config.json").write_text("changed")
    second = build()
    assert second.name == "2-cpu"
    assert (second / "models" / "draft" / "config.json").read_text() == "draft config.json"


def test_a_users_own_files_are_in_the_bundle_that_follows(build: Callable[..., Path]) -> None:
    first, second = build(), build(max_num_seqs=4)
    (first / ".env").write_text("VLLM_API_KEY=secret\n")
    (first / ".env").chmod(0o600)
    (first / "notes.txt").write_text("not one of them")
    (first / "compose.override.yaml").write_text(
        "services: {vllm: {image: draftwell-tiny:1-cpu, mem_limit: 8g}}\n"
    )
    assert keep_own_files(first, second) == [".env", "compose.override.yaml"]
    assert (second / ".env").stat().st_mode & 0o777 == 0o600
    assert (second / "compose.override.yaml").read_text() == (
        "services: {vllm: {image: draftwell-tiny:2-cpu, mem_limit: 8g}}\n"
    ), "the name of its own image holds its number"
    (second / ".env").write_text("newer")
    assert keep_own_files(first, second) == []
    (first / "values.override.yaml").mkdir()
    with raises_code("unreadable_file", str(first / "values.override.yaml")):
        keep_own_files(first, second)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_refused_and_current_stays(
    build: Callable[..., Path], models: dict[str, Path], tmp_path: Path, name: str
) -> None:
    first = build()
    (models["models/draft"] / name).unlink()
    with raises_code("missing_file", "draft"):
        build(max_num_seqs=4)
    home = bundles_of(tmp_path / "dist", "tiny")
    assert {path.name for path in home.iterdir()} == {"1-cpu", "current"}
    assert (home / "current").resolve() == first


def test_settings_that_were_not_judged_leave_nothing(
    build: Callable[..., Path], tmp_path: Path
) -> None:
    with raises_code("bad_value", "dtype float16"):
        build(dtype="float16")
    assert not (tmp_path / "dist").exists()


def test_one_that_breaks_off_leaves_current(
    build: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build()

    def killed(bundle: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("draftwell.registry.bundles.vllm.build.sign", killed)
    with pytest.raises(KeyboardInterrupt):
        build(max_num_seqs=4)
    assert (bundles_of(tmp_path / "dist", "tiny") / "current").resolve() == first


def test_the_environment_is_locked_with_hashes_where_all_are_known(tmp_path: Path) -> None:
    entry = {
        "metadata": {"name": "One", "version": "1.0"},
        "download_info": {"archive_info": {"hashes": {"sha256": "a" * 64}}},
    }
    (tmp_path / "1.json").write_text(json.dumps({"install": [entry]}))
    file, beside = "requirements-engine.txt", "requirements-engine-torch.txt"

    def lines(name: str, **packages: str) -> list[str]:
        return engine_lock(packages, tmp_path)[name].decode().splitlines()

    assert lines(file, one="1.0")[1:] == [f"one==1.0 --hash=sha256:{'a' * 64}"]
    without = lines(file, one="1.0", two="2.0")
    assert "not recorded here which files were installed of two" in without[1]
    assert without[2:] == ["one==1.0", "two==2.0"]
    builds = {"torch": "2.9.0+cpu", "torchaudio": "2.9.0+cpu"}
    whole = lines(file, **builds, one="1.0", torchcodec="0.8")
    assert whole[2:] == ["one==1.0", "torch==2.9.0+cpu", "torchaudio==2.9.0+cpu", "torchcodec==0.8"]
    own = lines(beside, **builds, one="1.0", torchcodec="0.8")
    assert own[1] == "--index-url https://download.pytorch.org/whl/cpu", "PyPI has no such build"
    assert own[3:] == ["torch==2.9.0+cpu", "torchaudio==2.9.0+cpu"], "it is asked for no more"
    assert "index" not in "".join(whole)
    assert list(engine_lock({"torch": "2.9.0"}, tmp_path)) == [file]
