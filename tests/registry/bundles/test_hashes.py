"""Requirements with hashes: pip's own report says which files were installed, and pip then takes no
other ones."""

from __future__ import annotations

import hashlib
import importlib.metadata
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftwell.registry.bundles import requirements
from draftwell.registry.bundles.hashes import recorded_hashes
from draftwell.registry.bundles.requirements import closure, locked, runtime_requirements
from draftwell.registry.bundles.text import install_commands
from tests.support.loop.pip_reports import reported


def tiny_wheel(
    folder: Path, name: str, version: str = "1.0", needs: str | None = None, body: str = ""
) -> Path:
    """A wheel of one empty module."""
    path, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    needed = f"Requires-Dist: {needs}\n" if needs else ""
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", body)
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needed}"
        )
        wheel.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(
            f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n"
        )
    return path


def pip(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """pip without any index but a folder."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--find-links",
        str(cwd),
        *map(str, words),
    ]
    return subprocess.run(
        command,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": str(cwd)},
    )


@pytest.mark.slow
def test_pips_own_report_is_read_and_its_files_alone_are_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reports: Path
) -> None:
    """pip installs two wheels and reports; the requirements made of that install the same two, and
    refuse a changed one."""
    links, site = tmp_path / "links", tmp_path / "site"
    links.mkdir()
    first, second = (
        tiny_wheel(links, "firstpart", needs="secondpart"),
        tiny_wheel(links, "secondpart"),
    )
    done = pip("--target", site, "--report", reports / "1.json", "firstpart", cwd=links)
    assert done.returncode == 0, done.stderr
    sha = {
        path.name.partition("-")[0]: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (first, second)
    }
    assert recorded_hashes({"firstpart": "1.0", "secondpart": "1.0"}) == sha
    assert recorded_hashes({"firstpart": "1.1"}) == {}, "a record of another version does not count"

    needs = {
        "draftwell": ["firstpart", "torch"],
        "firstpart": ["secondpart"],
        "secondpart": [],
        "torch": [],
    }
    torch = tiny_wheel(links, "torch", "1.0+cpu")
    reported(reports, "2", {"torch": ("1.0+cpu", hashlib.sha256(torch.read_bytes()).hexdigest())})
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: needs[name])
    monkeypatch.setattr(
        importlib.metadata,
        "distribution",
        lambda name: SimpleNamespace(
            version="1.0+cpu" if name == "torch" else "1.0", requires=needs[name]
        ),
    )
    runtime = tiny_wheel(links, "draftwell_runtime", needs="firstpart")
    lock = locked("cpu", wheel=(runtime.name, runtime.read_bytes()))
    (links / "requirements-cpu.txt").write_text(lock.text)
    assert lock.missing == []
    assert lock.text.count("--hash=sha256:") == 4
    assert lock.torch_text is not None
    assert lock.torch_text.endswith(lock.text.splitlines()[-2] + "\n")
    commands = install_commands("cpu", runtime.name, lock)
    assert commands == [
        "pip install --no-deps --require-hashes -r requirements-torch.txt",
        "pip install --require-hashes -r requirements-cpu.txt",
    ]
    installs = commands[1].split()[2:]
    done = pip(*installs, "--target", tmp_path / "again", cwd=links)
    assert done.returncode == 0, done.stderr
    assert {path.stem for path in (tmp_path / "again").glob("*.py")} == {
        "firstpart",
        "secondpart",
        "draftwell_runtime",
        "torch",
    }
    tiny_wheel(links, "secondpart", body="changed = True")
    refused = pip(*installs, "--target", tmp_path / "third", cwd=links)
    assert refused.returncode != 0
    assert "DO NOT MATCH THE HASHES" in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize("hashed", [False, True])
def test_pytorchs_index_is_asked_for_pytorch_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hashed: bool
) -> None:
    """What else it has is not taken, not even a build that pip prefers (1.0+other to 1.0)."""
    bundle, pypi, theirs = (tmp_path / name for name in ("bundle", "pypi", "theirs"))
    bundle.mkdir()
    pages = (
        (pypi, "firstpart", "1.0"),
        (theirs / "cpu", "torch", "1.0+cpu"),
        (theirs / "cpu", "firstpart", "1.0+other"),
    )
    hashes: dict[str, str] = {}
    for index, name, version in pages:
        (index / name).mkdir(parents=True)
        wheel = tiny_wheel(index / name, name, version)
        (index / name / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
        hashes.setdefault(name, hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(requirements, "TORCH_INDEX", theirs.as_uri())
    runtime = tiny_wheel(bundle, "draftwell_runtime", needs="torch")
    versions = {"firstpart": "1.0", "torch": "1.0+cpu"}
    lines = [f"{name}=={version}" for name, version in versions.items()]
    if hashed:
        own = hashlib.sha256(runtime.read_bytes()).hexdigest()
        lines = [f"{line} --hash=sha256:{hashes[line.partition('=')[0]]}" for line in lines]
        lines.append(f"./{runtime.name} --hash=sha256:{own}")
    lock = requirements.Lock("\n".join(lines), versions, hashes if hashed else {})
    (bundle / "requirements-cpu.txt").write_text(lock.text)
    (bundle / requirements.TORCH_FILE).write_text(str(lock.torch_text))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    for command in install_commands("cpu", runtime.name, lock):
        done = subprocess.run(
            [sys.executable, "-m", "pip", "--python", tmp_path / "env", *command.split()[1:]],
            cwd=bundle,
            capture_output=True,
            text=True,
            check=False,
            env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PIP_INDEX_URL": pypi.as_uri()},
        )
        assert done.returncode == 0, done.stderr
    (site,) = tmp_path.glob("env/lib/python*/site-packages")
    assert {path.stem for path in site.glob("*.dist-info")} == {
        "torch-1.0+cpu",
        "firstpart-1.0",
        "draftwell_runtime-1.0",
    }


def test_the_last_report_counts_and_broken_ones_are_passed_over(reports: Path) -> None:
    reported(reports, "1", {"Some_Thing": ("1", "a" * 64), "other": ("1", "b" * 64)})
    reported(reports, "2", {"some-thing": ("1", "c" * 64), "other": ("2", "d" * 64)})
    (reports / "3.json").write_text('{"install": [')
    (reports / "4.json").write_text("[]")
    assert recorded_hashes({"some-thing": "1", "other": "1"}) == {
        "some-thing": "c" * 64,
        "other": "b" * 64,
    }


def test_one_unknown_file_and_there_are_no_hashes_but_a_line_that_names_it(reports: Path) -> None:
    """pip takes hashes of all requirements or of none."""
    versions = closure(runtime_requirements())
    reported(
        reports,
        "1",
        {name: (version, "a" * 64) for name, version in versions.items() if name != "uvicorn"},
    )
    lock = locked("cpu")
    assert "uvicorn" in lock.missing
    assert "--hash" not in lock.text
    assert "# Without hashes: it is not recorded here which files were installed of " in lock.text
    reported(
        reports,
        "2",
        {"uvicorn": (versions["uvicorn"], "a" * 64), "torch": (versions["torch"], "a" * 64)},
    )
    if locked("cpu").versions["torch"] == versions["torch"]:
        assert locked("cpu").missing == []
