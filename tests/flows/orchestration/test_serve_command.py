"""`draftwell serve` finds the bundle of a pair and leaves everything else to the server's own
command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftwell.flows.cli import engine
from draftwell.serving.server import main as server
from draftwell.serving.server.settings import ServerSettings
from tests.support.peers.environments import install


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[ServerSettings]:
    """What the server was started with, instead of starting it."""
    found: list[ServerSettings] = []
    monkeypatch.setattr(server, "run", found.append)
    return found


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where the default pair's bundle would be."""
    monkeypatch.chdir(tmp_path)
    folder = Path("dist") / "smollm2-135m" / "current"
    folder.mkdir(parents=True)
    return folder


def test_every_option_of_the_server_reaches_it(
    run: Any, bundle: Path, asked: list[ServerSettings], tmp_path: Path
) -> None:
    options = {
        "signature_key": "release.pub",
        "signature_flags": "x",
        "host": "0.0.0.0",
        "port": 9000,
        "slots": 3,
        "queue": 5,
        "threads": 2,
        "max_context": 128,
        "api_key_file": tmp_path / "keys",
        "request_timeout": 4.5,
        "drain_seconds": 2.0,
        "generation_config": "none",
        "strategies": "vanilla_sd,spide",
        "prefix_caching": "request",
        "state": "tenant",
        "state_dir": tmp_path / "state",
        "feedback_dir": tmp_path / "spool",
        "feedback_rate": 0.5,
        "feedback_days": 3,
        "root_path": "/llm",
    }
    words = [
        word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)
    ]
    done = run(
        "serve",
        *words,
        "--pair default --deterministic --allow-parameters --cors-origin "
        "https://a.example --cors-origin https://b.example --allowed-host a.example "
        "--feedback-text --shared-datastore --insecure",
    )
    assert done.exit_code == 0, done.output
    [given] = asked
    options |= {
        "bundle": bundle,
        "deterministic": True,
        "allow_parameters": True,
        "feedback_text": True,
        "shared_datastore": True,
        "insecure": True,
        "cors_origin": ("https://a.example", "https://b.example"),
        "allowed_host": ("a.example",),
    }
    assert given.model_dump() == options
    assert options.keys() == ServerSettings.model_fields.keys(), "none was forgotten here"


def test_without_options_the_servers_own_defaults_apply(
    run: Any, bundle: Path, asked: list[ServerSettings]
) -> None:
    (bundle.parent / "2-cpu").mkdir()
    assert run(f"serve --bundle {bundle.parent}/2-cpu").exit_code == 0
    assert asked == [ServerSettings(bundle=bundle.parent / "2-cpu")]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--port 99999", "--port"),
        ("--nope", "--nope"),
        ("--dtype float32", "--dtype is no option any more"),
        ("--slots 0", "--slots"),
        ("--feedback-rate 0.5", "--feedback-dir"),
        ("again", "again"),
    ],
)
def test_what_the_server_does_not_take_is_refused_by_name(
    run: Any, bundle: Path, asked: list[ServerSettings], words: str, named: str
) -> None:
    done = run("serve", words)
    assert (done.exit_code, done.stdout, asked) == (2, "", [])
    assert named in done.stderr
    assert "Traceback" not in done.stderr


def test_its_help_says_where_the_other_options_are(run: Any) -> None:
    page = " ".join(run("serve --help").output.split())
    assert "draftwell-serve --help" in page
    assert "--allow-parameters" in page


def test_vllms_options_reach_the_bundles_script(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    install(tmp_path / "peers", monkeypatch, ("vllm",))
    monkeypatch.setattr(engine.os, "execve", lambda *of: started.append(of))
    monkeypatch.chdir(tmp_path)
    bundle = Path("dist") / "vllm" / "smollm2-135m" / "current"
    assert "no bundle at dist/vllm/smollm2-135m/current" in " ".join(
        run("serve --engine vllm").stderr.split()
    )
    bundle.mkdir(parents=True)
    (bundle / "serve.sh").touch()
    run("serve --engine vllm --port 9000")
    [(script, given, variables)] = started
    assert (script, given[1:]) == (str(bundle / "serve.sh"), ["--port", "9000"])
    assert variables["PYTHON"] == str(tmp_path / "peers" / "vllm" / "bin" / "python")


def test_a_bundle_of_vllm_is_verified_before_anything_of_it_runs(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    install(tmp_path / "peers", monkeypatch, ("vllm",))
    monkeypatch.setattr(engine.os, "execve", lambda *of: started.append(of))
    (bundle := tmp_path / "bundle").mkdir()
    for name in ("serve.sh", "manifest.json"):
        (bundle / name).touch()
    words = f"serve --engine vllm --bundle {bundle} --port 9000"
    for key in ("--signature-key /keys/cosign.pub", "--signature-key=/keys/cosign.pub"):
        done = run(words, key)
        assert done.exit_code == 2
        assert "has no signature" in " ".join(done.stderr.split())
    assert "--signature-key has no value" in run(words, "--signature-key").stderr
    assert started == []
    checked: list[Any] = []

    def check(*given: Any) -> Path:
        checked.append(given)
        return tmp_path

    monkeypatch.setattr(engine, "check_signed_files", check)
    run(words, "--signature-flags --insecure-ignore-tlog --signature-key k --api-key x")
    [(place, verify, _)] = checked
    assert (place, verify.keywords) == (bundle, {"key": "k", "flags": ["--insecure-ignore-tlog"]})
    [(script, given, _)] = started
    assert (script, given[1:]) == (
        str(tmp_path / "serve.sh"),
        ["--port", "9000", "--api-key", "x"],
    )
