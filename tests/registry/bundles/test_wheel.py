"""The wheel in a bundle: the same sources give the same bytes, and it holds the runtime and the
server, nothing else."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from draftwell import serving
from draftwell.registry.bundles.wheel import Wheel, runtime_wheel

PACKAGE = Path(serving.__file__).parent
BUILD = """
import os, sys
from pathlib import Path
os.umask(int(sys.argv[1], 8))
from draftwell.registry.bundles.wheel import build_wheel
wheel = build_wheel(Path(sys.argv[2]))
Path(sys.argv[3]).write_bytes(wheel.data)
print(wheel.name)
"""


@pytest.fixture(scope="module")
def wheel() -> Wheel:
    return runtime_wheel()


@pytest.fixture(scope="module")
def unpacked(wheel: Wheel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    (folder / wheel.name).write_bytes(wheel.data)
    with zipfile.ZipFile(folder / wheel.name) as archive:
        archive.extractall(folder / "content")
    return folder / "content"


def built_elsewhere(place: Path, zone: str, umask: str, date: int) -> tuple[str, bytes]:
    """The wheel of a copy of the sources: other folder, dates, rights, time zone and locale, with
    what Python leaves behind."""
    place.mkdir()
    package = Path(
        shutil.copytree(PACKAGE, place / "serving", ignore=shutil.ignore_patterns("__pycache__"))
    )
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "types.cpython-311.pyc").write_bytes(zone.encode())
    (package / ".types.py.swp").write_text(zone)
    for file in package.rglob("*"):
        os.utime(file, (date, date))
        file.chmod(0o700 if umask == "077" else 0o755)
    environment = {**os.environ, "TZ": zone, "LC_ALL": "C", "TMPDIR": str(place)}
    done = subprocess.run(
        [sys.executable, "-c", BUILD, umask, str(package), str(place / "out.whl")],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip(), (place / "out.whl").read_bytes()


def test_the_same_sources_give_the_same_bytes_anywhere_and_at_any_time(
    wheel: Wheel, tmp_path: Path
) -> None:
    assert built_elsewhere(tmp_path / "one", "Pacific/Kiritimati", "077", 1_000_000_000) == (
        wheel.name,
        wheel.data,
    )
    assert built_elsewhere(tmp_path / "two", "America/New_York", "002", 1_700_000_000) == (
        wheel.name,
        wheel.data,
    )


def test_other_sources_have_another_version(wheel: Wheel, tmp_path: Path) -> None:
    """pip leaves a package alone whose version is installed already."""
    from draftwell.registry.bundles.wheel import build_wheel

    package = Path(
        shutil.copytree(PACKAGE, tmp_path / "serving", ignore=shutil.ignore_patterns("__pycache__"))
    )
    (package / "runtime" / "types.py").write_text(
        (PACKAGE / "runtime" / "types.py").read_text() + "\n# one more line\n"
    )
    other = build_wheel(package)
    assert other.version != wheel.version
    assert other.name != wheel.name
    assert other.version.partition("+")[0] == wheel.version.partition("+")[0]


def test_it_holds_every_file_of_serving_and_nothing_of_the_rest(unpacked: Path) -> None:
    expected = {
        f"draftwell/serving/{path.relative_to(PACKAGE).as_posix()}"
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
    }
    found = {
        path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()
    }
    assert {name for name in found if ".dist-info/" not in name} == {
        "draftwell/__init__.py"
    } | expected
    assert "draftwell/serving/runtime/strategies/PAPERS.md" in expected
    assert any(name.endswith("/licenses/LICENSE") for name in found)


def test_it_needs_what_runtime_and_server_need(unpacked: Path) -> None:
    info = next(unpacked.glob("*.dist-info"))
    lines = (info / "METADATA").read_text().splitlines()
    needed = {
        Requirement(line.removeprefix("Requires-Dist: ")).name
        for line in lines
        if line.startswith("Requires-Dist")
    }
    assert {"torch", "transformers", "safetensors", "pydantic", "fastapi", "uvicorn"} <= needed
    assert not {"prefect", "mlflow", "datasets", "pytest", "scikit-learn"} & needed
    assert not any("extra ==" in line for line in lines)
    assert (
        "draftwell-serve = draftwell.serving.server.main:main"
        in (info / "entry_points.txt").read_text()
    )


def test_pip_installs_it(wheel: Wheel, tmp_path: Path) -> None:
    file = tmp_path / wheel.name
    file.write_bytes(wheel.data)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
            "--target",
            str(tmp_path / "site"),
            str(file),
        ],
        check=True,
        capture_output=True,
    )
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import json, "
        "importlib.metadata as m; from draftwell import serving;"
        "print(json.dumps([serving.__file__, m.version('draftwell-runtime')]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "site")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    where, version = json.loads(done.stdout)
    assert Path(where).is_relative_to(tmp_path / "site")
    assert version == wheel.version
