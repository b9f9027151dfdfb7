"""A bundle is all that a machine needs: installed by its own one command into an empty environment,
it serves. Real processes.

Two environments: one with links to just those installed packages that the bundle's requirements
name, which shows that the list is complete; and one that pip fills from a package index, as a
user's would be.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from draftwell.registry.bundles.build import build_bundle
from draftwell.registry.bundles.requirements import locked
from draftwell.registry.bundles.text import install_commands
from draftwell.registry.pairs import PairSpec, fetch, find_pair, model_records
from draftwell.registry.releases import create_release
from draftwell.registry.store import Store
from draftwell.serving.artifacts.base import Artifact, Provenance
from draftwell.serving.artifacts.decoding_config import DecodingConfig
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.artifacts.pair_files import fingerprint
from draftwell.serving.device import device_class
from tests.support.loop.publishing import config, publish
from tests.support.server.served_pair import tiny_pair

READY = 10
"""Seconds from the start of the process until it answers; a tiny model's weights take no time to
read."""
PIPELINE = (
    "prefect",
    "mlflow",
    "datasets",
    "sklearn",
    "draftwell.flows",
    "draftwell.components",
    "draftwell.registry",
)


@pytest.fixture
def bundle(store: Store, tmp_path: Path) -> Path:
    """A bundle of a tiny pair that can decode, with weights."""
    pair = tiny_pair(1)
    for role, module in pair.modules.items():
        module.set_attn_implementation("eager")
        module.save_pretrained(tmp_path / "models" / role)
        pair.tokenizer.save_pretrained(tmp_path / "models" / role)
    spec = PairSpec.model_validate(
        {
            "name": "tiny",
            "description": "two tiny models",
            "licence": "none",
            "dtype": "float32",
            "target": {"path": str(tmp_path / "models" / "target")},
            "draft": {"path": str(tmp_path / "models" / "draft")},
        }
    )
    files = fetch(spec)
    made = config(fingerprint(files, "float32"), strategy="vanilla_sd")
    made.parameters = {}
    publish(store, made, tmp_path / "config")
    create_release(store, "tiny", "cpu", {"decoding_config": 1}, model_records(spec, files), {})
    built = build_bundle(
        store,
        spec,
        files,
        alias="candidate",
        out=tmp_path / "dist",
        ungated_reason="a test",
        with_weights=True,
    )
    (tmp_path / "models").rename(tmp_path / "gone")
    return built


def fill_by_links(site: Path, bundle: Path) -> None:
    """Let an environment see those packages of ours that the bundle's requirements name, and its
    wheel."""
    lines = (bundle / "requirements-cpu.txt").read_text().splitlines()
    for name in {Requirement(line).name for line in lines if line and not line.startswith("#")}:
        distribution = importlib.metadata.distribution(name)
        for top in {
            file.parts[0]
            for file in distribution.files or []
            if file.parts[0] not in ("..", "__pycache__")
        }:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution.locate_file(top))))
    wheel = next(bundle.glob("*.whl"))
    command = ["install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    run(
        [sys.executable, "-m", "pip", "--python", str(site.parents[2] / "bin" / "python"), *command]
    )


def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    return done  # type: ignore[no-any-return]


def clean(venv: Path) -> dict[str, str]:
    """What a service manager would set: the environment's commands first, a home of its own, no
    network for models."""
    return {
        "PATH": f"{venv / 'bin'}:/usr/bin:/bin",
        "HOME": str(venv / "home"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


def check_clean(venv: Path) -> None:
    """Nothing of the pipeline can be imported there, but the runtime can."""
    code = (
        "import importlib.util as u; from draftwell import serving; "
        f"print([n for n in {PIPELINE} if "
        "u.find_spec(n)]); print(serving.__file__)"
    )
    done = run([str(venv / "bin" / "python"), "-c", code], cwd=venv, env=clean(venv))
    assert done.stdout.splitlines()[0] == "[]"
    assert str(venv) in done.stdout.splitlines()[1]


@contextmanager
def serving_from(bundle: Path, venv: Path, *options: str) -> Iterator[tuple[str, float]]:
    """`serve.sh`, started elsewhere: the address that it prints, and after how many seconds."""
    begin = time.perf_counter()
    command = [
        str(bundle.parent / "current" / "serve.sh"),
        "--port",
        "0",
        "--threads",
        "1",
        *options,
    ]
    process = subprocess.Popen(
        command,
        cwd=venv,
        env=clean(venv),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - begin
        found = re.search(r"http://\S+", line)
        assert found, line + process.communicate()[1]
        yield found.group(), seconds
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def ask(address: str) -> dict[str, object]:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 3,
        "temperature": 0,
    }
    request = urllib.request.Request(
        f"{address}/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return dict(json.load(response))


def make_linked(venv: Path, bundle: Path) -> None:
    """Make an environment that `fill_by_links` fills."""
    run([sys.executable, "-m", "venv", "--without-pip", str(venv)])
    fill_by_links(next((venv / "lib").glob("python3*/site-packages")), bundle)


@pytest.fixture
def linked(bundle: Path, tmp_path: Path) -> Path:
    make_linked(tmp_path / "venv", bundle)
    return tmp_path / "venv"


@pytest.mark.slow
def test_the_requirements_are_all_that_the_server_needs(bundle: Path, linked: Path) -> None:
    check_clean(linked)
    assert run([str(linked / "bin" / "draftwell-serve"), "--help"], env=clean(linked)).stdout.count(
        "--bundle"
    )
    before = sorted(path for path in bundle.rglob("*") if not path.name.startswith("."))
    with serving_from(bundle, linked) as (address, _):
        answer = ask(address)
    assert answer["speculation"]["strategy"] == "vanilla_sd"  # type: ignore[index]
    assert sorted(path for path in bundle.rglob("*") if not path.name.startswith(".")) == before


@pytest.mark.slow
@pytest.mark.timed
def test_it_is_ready_in_time(bundle: Path, linked: Path) -> None:
    with serving_from(bundle, linked):  # once for Python's and the system's caches
        pass
    with serving_from(bundle, linked) as (_, seconds):
        assert seconds < READY


def default_bundle(store: Store, folder: Path, machine: str) -> Path:
    """A bundle of the default pair, with weights, whose hardware profile was measured on a machine
    class."""
    spec = find_pair("default")
    files = fetch(spec)
    provenance = Provenance(
        pair=spec.name, fingerprint=fingerprint(files, spec.dtype), device_class=machine
    )
    made: list[Artifact] = [
        HardwareProfile(0.002, {1: 0.01, 8: 0.02, 64: 0.1}, 0.001, provenance),
        DecodingConfig("vanilla_sd", {}, {}, provenance),
    ]
    pins = {}
    for artifact in made:
        artifact.save(folder / artifact.kind)
        pins[artifact.kind] = store.publish(folder / artifact.kind, pair=spec.name).version
    create_release(store, spec.name, "cpu", pins, model_records(spec, files), {})
    return build_bundle(
        store,
        spec,
        files,
        alias="candidate",
        out=folder / "dist",
        ungated_reason="a test",
        with_weights=True,
    )


def seconds_to_read(bundle: Path) -> float:
    """How long it takes to read the files of all weights, once."""
    begin = time.perf_counter()
    weights = [path for path in bundle.rglob("*.safetensors") if path.read_bytes()]
    assert sum(path.stat().st_size for path in weights) > 50 << 20
    return time.perf_counter() - begin


@pytest.mark.slow
@pytest.mark.timed
@pytest.mark.parametrize("elsewhere", [False, True], ids=["profiled here", "profiled elsewhere"])
def test_the_default_pair_is_ready_in_time(store: Store, tmp_path: Path, elsewhere: bool) -> None:
    """With its weights in the bundle and eight slots, whose batches the server times first."""
    bundle, venv = (
        default_bundle(store, tmp_path, "abacus" if elsewhere else device_class("cpu")),
        tmp_path / "venv",
    )
    make_linked(venv, bundle)
    with serving_from(bundle, venv, "--slots", "8"):  # once for Python's and the system's caches
        pass
    reading = seconds_to_read(bundle)
    begin = time.perf_counter()
    with (
        serving_from(bundle, venv, "--slots", "8") as (address, _),
        urllib.request.urlopen(address.removesuffix("/v1") + "/ready", timeout=60) as answer,
    ):
        seconds = time.perf_counter() - begin
        assert answer.status == 200
    print(f"ready after {seconds:.1f} s; its weights are read in {reading:.1f} s")
    assert seconds < READY + reading


@pytest.mark.slow
def test_a_tampered_bundle_is_one_line_of_the_command(bundle: Path, linked: Path) -> None:
    file = bundle / "models" / "target" / "config.json"
    file.write_text(file.read_text().replace("256", "257", 1))
    done = subprocess.run(
        [str(bundle / "serve.sh")],
        env=clean(linked),
        cwd=linked,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(
        (
            r"draftwell-serve: \S*models/target/config\.json was changed since it was made .*: "
            r"deploy again\n"
        ),
        done.stderr,
    )


@pytest.mark.slow
def test_one_command_installs_it_from_a_package_index(bundle: Path, tmp_path: Path) -> None:
    """The commands of its README, word by word; the first only where the usual index has no CPU
    build of PyTorch."""
    venv, wheel = tmp_path / "fresh", next(bundle.glob("*.whl")).name
    run([sys.executable, "-m", "venv", str(venv)])
    probe = subprocess.run(
        [
            str(venv / "bin" / "pip"),
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            str(tmp_path / "probe"),
            f"h11=={importlib.metadata.version('h11')}",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if probe.returncode:
        pytest.skip("no package index is in reach")
    commands = install_commands("cpu", wheel, locked("cpu"))
    assert all(command in (bundle / "README.md").read_text() for command in commands)
    environment = {**os.environ, "PATH": clean(venv)["PATH"]}
    for words in (commands[-1], " && ".join(commands)):
        done = subprocess.run(
            ["sh", "-c", words],
            cwd=bundle,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if "No matching distribution found for torch" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    run([str(venv / "bin" / "pip"), "check"])
    check_clean(venv)
    with serving_from(bundle, venv) as (address, _):
        assert ask(address)["speculation"]["strategy"] == "vanilla_sd"  # type: ignore[index]
