"""`make deploy`: a bundle holds what the release pins, twice the same bytes, or nothing at all."""

import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import draftwell.registry.bundles.build
from draftwell.registry.bundles.build import build_bundle, relink
from draftwell.registry.bundles.places import bundle_bytes, link_current
from draftwell.registry.bundles.requirements import locked, pinned_torch
from draftwell.registry.bundles.retention import prune
from draftwell.registry.bundles.wheel import Wheel, runtime_wheel
from draftwell.registry.pairs import PairSpec, fetch, model_records
from draftwell.registry.promotion import promote, rollback
from draftwell.registry.promotion_log import history
from draftwell.registry.releases import create_release, find_release, record_gate
from draftwell.registry.store import Store
from draftwell.serving.artifacts.base import digest_of
from draftwell.serving.artifacts.compiled_libraries import libraries_folder, own_folder
from draftwell.serving.artifacts.pair_files import PairFiles, fingerprint, models_root
from draftwell.serving.bundle.bundle import open_bundle
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.models.native.library import key
from tests.support.errors import raises_code
from tests.support.loop.publishing import (
    Make,
    config,
    distilled,
    model_folder,
    publish,
    verdict,
)


@pytest.mark.parametrize(("method", "listed"), [("fp8", True), ("mxfp4", False)])
def test_the_requirements_list_what_the_models_weights_need(
    build: Make, champion: Store, files: PairFiles, method: str, listed: bool
) -> None:
    """transformers reads FP8 with accelerate alone, which no other bundle needs."""
    config = files.target / "config.json"
    quantised = {"quantization_config": {"quant_method": method}}
    config.write_text(json.dumps(json.loads(config.read_text()) | quantised))
    built = build()
    line = f"accelerate=={importlib.metadata.version('accelerate')}"
    assert (line in (built / "requirements-cpu.txt").read_text().splitlines()) is listed
    names = [one["name"] for one in json.loads((built / "sbom.cdx.json").read_text())["components"]]
    assert ("accelerate" in names) is listed


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine whose compiled layers no bundle brings along."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        p.relative_to(folder).as_posix(): (p.read_bytes(), p.stat().st_mode)
        for p in folder.rglob("*")
        if p.is_file()
    }


def put_library(name: str) -> Path:
    """A compiled library in this machine's cache."""
    data = b"machine code"
    file = own_folder("compiled", name) / f"{hashlib.sha256(data).hexdigest()}.so"
    file.write_bytes(data)
    file.chmod(0o600)
    return file


def instructions(bundle: Path) -> str:
    """The first words of a Dockerfile's instructions."""
    lines = (bundle / "Dockerfile").read_text().replace("\\\n", "").splitlines()
    return " ".join(line.partition(" ")[0] for line in lines if not line.startswith("#"))


def test_a_bundle_opens_and_finds_its_models(
    build: Make, champion: Store, files: PairFiles, tmp_path: Path
) -> None:
    built = build()
    assert built == tmp_path / "dist" / "tiny" / "1-cpu"
    assert os.readlink(tmp_path / "dist" / "tiny" / "current") == "1-cpu"
    bundle = open_bundle(tmp_path / "dist" / "tiny" / "current")
    assert bundle.path == built
    manifest = bundle.manifest
    assert (manifest.gated, manifest.ungated_reason, manifest.dtype) == (True, None, "float32")
    assert manifest.versions == {"acceptance_table": 1, "decoding_config": 1}
    assert set(manifest.runs) == {"release", "acceptance_table", "decoding_config"}
    assert sorted(bundle.artifacts()) == ["acceptance_table", "decoding_config"]
    found = bundle.files(models_root())
    assert found.target.resolve() == files.target
    assert fingerprint(found, manifest.dtype) == manifest.fingerprint
    wheel = runtime_wheel()
    assert set(contents(built)) == {
        "Dockerfile",
        "README.md",
        "manifest.json",
        "requirements-cpu.txt",
        "requirements-torch.txt",
        "sbom.cdx.json",
        "serve.sh",
        wheel.name,
        "artifacts/acceptance_table/artifact.json",
        "artifacts/acceptance_table/table.json",
        "artifacts/decoding_config/artifact.json",
        "artifacts/decoding_config/config.json",
    }
    assert manifest.runtime == wheel.version
    assert {name for name in contents(built) if os.access(built / name, os.X_OK)} == {
        "serve.sh"
    } or os.geteuid() == 0
    place = str(tmp_path.parent).encode()
    assert not any(place in data for data, _ in contents(built).values())


def test_the_compiled_layers_of_this_machine_come_along(build: Make, champion: Store) -> None:
    put_library("of another machine")
    place = put_library(key()).relative_to(libraries_folder().parent)
    bundle = open_bundle(build())
    assert {name for name in bundle.manifest.files if name.startswith("compiled/")} == {str(place)}
    (bundle.path / place).write_bytes(b"other code")
    with raises_code("changed_file", f"compiled/{key()}"):
        open_bundle(bundle.path)


def test_a_library_that_somebody_may_have_planted_enters_no_bundle(
    build: Make, champion: Store, tmp_path: Path
) -> None:
    planted = put_library(key())
    planted.chmod(0o666)
    with raises_code("foreign_library", str(planted)):
        build()
    planted.chmod(0o600)
    planted.write_bytes(b"other code")
    with raises_code("forged_library", str(planted)):
        build()
    assert not (tmp_path / "dist" / "tiny" / "current").exists()


@pytest.mark.slow
@pytest.mark.parametrize("with_weights", [False, True])
def test_two_builds_are_byte_identical(
    build: Make,
    champion: Store,
    tmp_path: Path,
    with_weights: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of it, with rights, in another folder, a year later, by a user with another umask and
    time zone."""
    one = build(out=tmp_path / "a", with_weights=with_weights)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 365 * 86400)
    monkeypatch.setenv("TZ", "Asia/Kathmandu")
    runtime_wheel.cache_clear()
    before = os.umask(0o077)
    try:
        two = build(out=tmp_path / "far" / "b", with_weights=with_weights)
    finally:
        os.umask(before)
    assert contents(one) == contents(two)
    assert {p.stat().st_mode & 0o777 for p in [two, *two.rglob("*")] if p.is_dir()} == {0o755}
    again = build(out=tmp_path / "a", with_weights=with_weights)
    assert contents(again) == contents(two)
    assert sorted(p.name for p in (tmp_path / "a" / "tiny").iterdir()) == ["1-cpu", "current"]


def test_with_weights_it_needs_no_models_folder(
    build: Make, champion: Store, files: PairFiles, tmp_path: Path
) -> None:
    built = build(with_weights=True)
    found = open_bundle(built).files(tmp_path / "nowhere")
    assert found.target == built / "models" / "target"
    assert fingerprint(found, "float32") == fingerprint(files, "float32")
    # the digests that were just kept beside the weights are no foreign file
    manifest = open_bundle(built).manifest
    assert {role: record.source for role, record in manifest.models.items()} == {
        "target": "bundled",
        "draft": "bundled",
    }
    assert manifest.origins == {"target": "local", "draft": "local"}
    assert "All weights are in the bundle" in (built / "README.md").read_text()
    assert "DRAFTWELL_MODELS" not in (built / "README.md").read_text()


def test_every_file_that_is_changed_cut_or_missing_is_named(build: Make, champion: Store) -> None:
    built = build(with_weights=True)
    names = sorted(contents(built))
    assert len(names) == 18
    for name in names:
        file = built / name
        data = file.read_bytes()
        for spoiled in (data[:-1] + bytes([data[-1] ^ 1]), data[: len(data) // 2], b"", None):
            if spoiled is None:
                file.unlink()
            else:
                file.write_bytes(spoiled)
            with pytest.raises(DraftwellError) as caught:
                open_bundle(built)
            assert name in str(caught.value), f"{name} is not named: {caught.value}"
            assert "\n" not in str(caught.value)
        file.write_bytes(data)
    open_bundle(built)


def test_people_shells_and_docker_are_told_the_same_installation(
    build: Make, champion: Store, tmp_path: Path
) -> None:
    built = build()
    wheel = runtime_wheel().name
    install = [
        "pip install --no-deps -r requirements-torch.txt",
        f"pip install -r requirements-cpu.txt ./{wheel}",
    ]
    for name in ("README.md", "serve.sh", "Dockerfile"):
        text = (built / name).read_text()
        assert [text.count(command) for command in install] == [1, 1], name
    index, pin = (built / "requirements-torch.txt").read_text().splitlines()[1::2]
    assert index == "--index-url https://download.pytorch.org/whl/cpu"
    assert pin == f"torch=={locked('cpu').versions['torch']}"
    assert [name for name, (data, _) in contents(built).items() if b"extra-index" in data] == []
    assert instructions(built) == (
        "FROM RUN COPY WORKDIR RUN RUN COPY ENV USER WORKDIR EXPOSE HEALTHCHECK ENTRYPOINT"
    )
    (base,) = re.findall(r"^FROM (.+)$", (built / "Dockerfile").read_text(), re.MULTILINE)
    pinned = re.fullmatch(r"python:3\.11\.\d+-slim-\w+@sha256:[0-9a-f]{64}", base)
    assert pinned or sys.version_info[:2] != (3, 11)
    subprocess.run(["sh", "-n", str(built / "serve.sh")], check=True)
    done = subprocess.run(
        [str(tmp_path / "dist" / "tiny" / "current" / "serve.sh")],
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert " && ".join(install) in done.stderr


def test_the_container_is_published_on_loopback_with_a_key(build: Make, champion: Store) -> None:
    """It listens on all addresses inside; `-p 8000:8000` let everybody in, without a key."""
    built = build()
    for name in ("README.md", "Dockerfile"):
        text = (built / name).read_text()
        (line,) = [line for line in text.splitlines() if "docker run" in line]
        assert "-p 127.0.0.1:8000:8000 " in line
        assert line.endswith(" draftwell-tiny --api-key-file /keys")
        assert '-v "$KEYS:/keys:ro"' in line


def test_serve_sh_names_the_link_it_was_called_through(
    build: Make, champion: Store, tmp_path: Path
) -> None:
    """A server that was given the folder itself would never see `current` move."""
    build()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "draftwell-serve").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "bin" / "draftwell-serve").chmod(0o755)
    current = tmp_path / "dist" / "tiny" / "current"
    done = subprocess.run(
        [str(current / "serve.sh"), "--port", "9"],
        env={"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["--bundle", str(current), "--port", "9"]


def test_serve_sh_keeps_what_the_server_writes_out_of_the_bundle(
    build: Make, champion: Store, tmp_path: Path
) -> None:
    """Started in the bundle's folder, as its README says, and twice: the second start finds the
    bundle as it was built."""
    built = build()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "draftwell-serve").write_text(
        '#!/bin/sh\nhome="${DRAFTWELL_HOME:-$PWD/.draftwell}"\nmkdir -p '
        '"$home/onnx"\ntouch "$home/onnx/graph"\necho "$home"\n'
    )
    (tmp_path / "bin" / "draftwell-serve").chmod(0o755)
    found = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "HOME": str(tmp_path / "user")}
    named = found | {"DRAFTWELL_HOME": str(tmp_path / "state")}
    kept = tmp_path / "user" / ".draftwell"
    for folder, environment, home in (
        (built, found, kept),
        (built, found, kept),
        (built / "artifacts", found, kept),
        (built, named, tmp_path / "state"),
        (tmp_path, named, tmp_path / "state"),
        # where a checkout has its models
        (tmp_path, found, tmp_path / ".draftwell"),
    ):
        done = subprocess.run(
            [built / "serve.sh"],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == f"{home}\n"
        open_bundle(built)
    assert "`~/.draftwell` where that is this\nfolder" in (built / "README.md").read_text()
    state = (built / "Dockerfile").read_text().partition("DRAFTWELL_HOME=")[2].split()[0]
    assert not state.startswith("/bundle")


def test_a_bundle_for_cuda_says_so(
    make_release: Make, build: Make, store: Store, spec: PairSpec, files: PairFiles
) -> None:
    made = make_release("release")
    cuda = create_release(store, "tiny", "cuda", made.pins, model_records(spec, files), {})
    promote(store, "tiny", "cuda", 1, verdict(cuda))
    built = build(device="cuda")
    assert built.name == "1-cuda"
    assert open_bundle(built).manifest.device == "cuda"
    pinned = pinned_torch({"torch": importlib.metadata.version("torch")}, "cuda", {})
    assert f"\ntorch=={pinned}\n" in (built / "requirements-cuda.txt").read_text()
    assert not (built / "requirements-cpu.txt").exists()
    assert ' -v "$KEYS:/keys:ro" --gpus all ' in (built / "README.md").read_text()
    assert "NVIDIA_VISIBLE_DEVICES" in (built / "Dockerfile").read_text()
    assert instructions(built).startswith("FROM RUN RUN COPY WORKDIR RUN")
    assert "whl/cpu" not in (built / "README.md").read_text()


def test_a_bundle_that_stands_is_not_touched_by_one_with_another_runtime(
    build: Make, champion: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "dist"
    first = build(out=out)
    before = contents(first)
    newer = Wheel("draftwell_runtime-9-py3-none-any.whl", "9", b"another")
    monkeypatch.setattr(draftwell.registry.bundles.build, "runtime_wheel", lambda: newer)
    second = build(out=out)
    assert (first.name, second.name) == ("1-cpu", "1-cpu.2")
    assert os.readlink(out / "tiny" / "current") == "1-cpu.2"
    assert build(out=out) == second
    assert contents(first) == before
    assert relink(champion, find_release(champion, "tiny", "cpu", 1), out) == second, "the newest"
    (second / "README.md").write_text("changed")
    assert relink(champion, find_release(champion, "tiny", "cpu", 1), out) == first, (
        "the newest that is whole"
    )
    assert build(out=out).name == "1-cpu.3"


def test_a_gap_that_prune_left_hides_no_newer_bundle_and_is_not_filled(
    build: Make, champion: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "dist"
    build(out=out)
    for number in ("9", "10"):
        newer = Wheel(f"draftwell_runtime-{number}-py3-none-any.whl", number, number.encode())
        monkeypatch.setattr(
            draftwell.registry.bundles.build, "runtime_wheel", lambda newer=newer: newer
        )
        if number == "10":
            (out / "tiny" / "current").unlink()
            assert [path.name for path in prune(out / "tiny", keep=1)] == ["1-cpu"]
            again = relink(champion, find_release(champion, "tiny", "cpu", 1), out)
            assert again is not None
            assert again.name == "1-cpu.2"
        built = build(out=out)
    assert built.name == "1-cpu.3"


def test_an_ungated_release_needs_a_reason(
    make_release: Make, build: Make, store: Store, tmp_path: Path
) -> None:
    made = make_release("release")
    store.set_alias(made.published, "champion")  # by hand, in the UI
    with raises_code("not_deployable", "version 1", "no gate record", "--set ungated=REASON"):
        build()
    assert not (tmp_path / "dist").exists()
    built = build(ungated_reason="a trial")
    manifest = open_bundle(built).manifest
    assert (manifest.gated, manifest.ungated_reason) == (False, "a trial")
    assert "deployed because: a trial" in (built / "README.md").read_text()
    record_gate(store, verdict(made))
    built = build(ungated_reason="a trial")
    assert open_bundle(built).manifest.gated
    assert os.readlink(tmp_path / "dist" / "tiny" / "current") == built.name
    assert sorted(p.name for p in (tmp_path / "dist" / "tiny").iterdir()) == [
        "1-cpu",
        "1-cpu.2",
        "current",
    ]


def test_a_champion_named_by_hand_is_deployed_if_its_gate_stands(
    make_release: Make, build: Make, champion: Store
) -> None:
    made = make_release("two", accepted=2)
    champion.set_alias(made.published, "champion")  # by hand, in the UI
    with raises_code("not_deployable", "version 2", "no gate record"):
        build()
    record_gate(champion, verdict(made))
    built = build()
    assert open_bundle(built).manifest.release_version == 2
    assert champion.get_aliases("acceptance_table", "tiny")["champion-cpu"] == 2
    assert rollback(champion, "tiny", "cpu", "the hand was wrong")[1].version == 1


def test_what_was_rolled_back_is_not_deployed_by_naming_it_again(
    make_release: Make, build: Make, champion: Store
) -> None:
    made = make_release("two", accepted=2)
    promote(champion, "tiny", "cpu", 2, verdict(made, beside=1))
    rollback(champion, "tiny", "cpu", "too slow")
    champion.set_alias(made.published, "champion")
    fix = "draftwell release promote --pair tiny --set device=cpu --release 2 --set reason=…"
    with raises_code("not_deployable", "version 2", "rolled back on 20", "(too slow)", fix):
        build()
    built = build(ungated_reason="for an experiment")
    assert open_bundle(built).manifest.ungated_reason == "for an experiment"


def test_the_bundle_before_is_linked_again_if_it_is_whole_and_the_releases_own(
    make_release: Make, build: Make, champion: Store, tmp_path: Path
) -> None:
    out = tmp_path / "dist"
    first = build(out=out)
    made = make_release("two", accepted=2)
    promote(champion, "tiny", "cpu", 2, verdict(made, beside=1))
    build(out=out)
    _, good = rollback(champion, "tiny", "cpu", "too slow")
    assert relink(champion, good, tmp_path / "elsewhere") is None
    assert relink(champion, good, out) == first
    assert os.readlink(out / "tiny" / "current") == "1-cpu"
    with raises_code(
        "current_not_moved", "release.tiny.cpu version 2", "not the champion any more", "`current`"
    ):
        relink(champion, find_release(champion, "tiny", "cpu", 2), out)
    assert os.readlink(out / "tiny" / "current") == "1-cpu"
    link_current(out / "tiny", out / "tiny" / "2-cpu", "cpu")
    (first / "README.md").write_text("changed")
    assert relink(champion, good, out) is None
    assert os.readlink(out / "tiny" / "current") == "2-cpu"


def test_the_size_of_a_bundle_is_that_of_its_files(build: Make, champion: Store) -> None:
    built = build()
    assert bundle_bytes(built) == sum(len(data) for data, _ in contents(built).values())


def test_a_failed_build_leaves_the_old_bundle(
    make_release: Make, build: Make, champion: Store, tmp_path: Path
) -> None:
    build()
    made = make_release("two", accepted=2)
    promote(champion, "tiny", "cpu", 2, verdict(made, beside=1))
    source = Path(champion.resolve("acceptance_table", "tiny", 2).source)
    (source / "table.json").write_text("{}")
    with raises_code("changed_file", "table.json"):
        build()
    assert open_bundle(tmp_path / "dist" / "tiny" / "current").manifest.release_version == 1
    assert sorted(p.name for p in (tmp_path / "dist" / "tiny").iterdir()) == ["1-cpu", "current"]


def test_what_a_killed_deployment_left_is_removed(
    build: Make, champion: Store, tmp_path: Path
) -> None:
    left = tmp_path / "dist" / "tiny" / ".build.killed"
    (left / "models").mkdir(parents=True)
    (left / "models" / "half.safetensors").write_bytes(b"half")
    build()
    assert sorted(p.name for p in (tmp_path / "dist" / "tiny").iterdir()) == ["1-cpu", "current"]


def test_deployments_of_a_pair_wait_for_each_other(
    build: Make, champion: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise one would remove what the other is building."""
    free = (
        "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX | "
        "fcntl.LOCK_NB)"
    )
    home, tried = tmp_path / "dist" / "tiny", []

    def wheel() -> Wheel:
        tried.append(
            subprocess.run(
                [sys.executable, "-c", free, str(home)], capture_output=True, check=False
            ).returncode
        )
        return runtime_wheel()

    monkeypatch.setattr(draftwell.registry.bundles.build, "runtime_wheel", wheel)
    build()
    assert tried == [1]
    assert subprocess.run([sys.executable, "-c", free, str(home)], check=False).returncode == 0


@pytest.fixture
def second(make_release: Make, build: Make, champion: Store) -> Store:
    """The first champion is deployed, the second is promoted and has no bundle yet."""
    build()
    made = make_release("two", accepted=2)
    promote(champion, "tiny", "cpu", 2, verdict(made, beside=1))
    return champion


def beside(work: Callable[[], object], seconds: float) -> threading.Thread:
    """Do something in a thread, and wait so long for it."""
    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    worker.join(seconds)
    return worker


def newest_champion(store: Store) -> int | None:
    return history(store, "tiny", "cpu").champion


@pytest.mark.parametrize("alias", ["champion", "2"])
def test_a_rollback_is_not_undone_by_a_build_that_still_runs(
    build: Make, second: Store, tmp_path: Path, alias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it wait for the build, which may take minutes."""
    out = tmp_path / "dist"

    def held_up() -> Wheel:
        _, good = rollback(second, "tiny", "cpu", "too slow")
        assert not beside(lambda: relink(second, good, out), 60).is_alive(), (
            "it waits for the build"
        )
        return runtime_wheel()

    monkeypatch.setattr(draftwell.registry.bundles.build, "runtime_wheel", held_up)
    with raises_code(
        "current_not_moved",
        "release.tiny.cpu version 2",
        "it was rolled back on",
        "too slow",
        "`current`",
    ):
        build(alias=alias, out=out)
    assert os.readlink(out / "tiny" / "current") == "1-cpu"
    assert newest_champion(second) == 1
    assert open_bundle(out / "tiny" / "2-cpu").manifest.release_version == 2


def test_a_hands_change_of_the_champion_is_not_undone_by_a_build_that_still_runs(
    build: Make, second: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def held_up() -> Wheel:
        second.set_alias(second.resolve("release", "tiny.cpu", 1), "champion")
        return runtime_wheel()

    with monkeypatch.context() as patch:
        patch.setattr(draftwell.registry.bundles.build, "runtime_wheel", held_up)
        with raises_code("current_not_moved", "not the champion"):
            build(alias="2")
    assert os.readlink(tmp_path / "dist" / "tiny" / "current") == "1-cpu"
    assert build(alias="2").name == "2-cpu", "who names a number knows what it is"
    assert os.readlink(tmp_path / "dist" / "tiny" / "current") == "2-cpu"


@pytest.mark.slow
def test_a_rollback_between_the_last_look_and_the_link_has_the_last_word(
    build: Make, second: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, workers = tmp_path / "dist", []

    def slowly(home: Path, bundle: Path, device: str) -> None:
        if bundle.name == "2-cpu":
            workers.append(
                beside(
                    lambda: relink(second, rollback(second, "tiny", "cpu", "too slow")[1], out), 3
                )
            )
        link_current(home, bundle, device)

    monkeypatch.setattr(draftwell.registry.bundles.build, "link_current", slowly)
    build(out=out)
    workers[0].join(60)
    assert os.readlink(out / "tiny" / "current") == "1-cpu"
    assert newest_champion(second) == 1


def test_other_models_than_the_releases_are_refused(
    build: Make, champion: Store, spec: PairSpec, files: PairFiles, tmp_path: Path
) -> None:
    other = PairFiles("tiny", model_folder(tmp_path / "other", seed=9), files.draft)
    with raises_code("other_weights", "release.tiny.cpu version 1", "pair tiny"):
        build_bundle(champion, spec, other)
    with raises_code("not_registered", "alias challenger2", "release.tiny.cpu"):
        build(alias="challenger2")


@pytest.mark.parametrize("pinned", [True, False])
def test_a_distilled_draft_travels_in_the_bundle(
    store: Store, tmp_path: Path, pinned: bool
) -> None:
    target = model_folder(tmp_path / "local" / "target")
    distilled().save(tmp_path / "local" / "draft")
    spec = PairSpec.model_validate(
        {
            "name": "tiny",
            "description": "d",
            "licence": "l",
            "target": {"path": str(target)},
            "draft": {"artifact": str(tmp_path / "local" / "draft")},
        }
    )
    files = fetch(spec)
    publish(store, config(fingerprint(files, "bfloat16")), tmp_path / "config")
    publish(store, distilled(), tmp_path / "draft")
    pins = {"decoding_config": 1, **({"distilled_draft": 1} if pinned else {})}
    made = create_release(store, "tiny", "cpu", pins, model_records(spec, files), {})
    promote(store, "tiny", "cpu", 1, verdict(made))
    bundle = open_bundle(build_bundle(store, spec, files, out=tmp_path / "dist"))
    found = bundle.files(models_root())
    assert found.draft == bundle.path / ("artifacts/distilled_draft" if pinned else "models/draft")
    assert digest_of(found.draft) == digest_of(tmp_path / "local" / "draft")
    assert bundle.manifest.dtype == "bfloat16"
    assert ("distilled_draft" in bundle.artifacts()) is pinned
