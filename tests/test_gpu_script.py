"""`.ci/gpu`: wheels that the machine lacks are installed, also where they came in pieces, and
others are left alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.paths import REPO

STAND_IN = """#!/bin/bash
if [ "$1 $2" = "-m draftwell.flows.cli.main" ]; then
  echo "called: ${*:3}"
  exec "$REAL" -c 'import kit_probe; print("probe", kit_probe.VALUE)'
fi
exec "$REAL" "$@"
"""
"""An interpreter that shows what it is asked for in place of measuring."""


def wheel(folder: Path, name: str) -> Path:
    """A wheel with one module."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    about = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": "VALUE = 7\n",
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": f"{name}.py,,\n{about}/METADATA,,\n{about}/WHEEL,,\n{about}/RECORD,,\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return path


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    """A kit with a wheel in two pieces, a part of another, and one that is installed already, of a
    version that pip would refuse."""
    wheels = tmp_path / "kit" / "wheels"
    wheels.mkdir(parents=True)
    whole = wheel(wheels, "kit_probe")
    data = whole.read_bytes()
    for number, piece in enumerate((data[:100], data[100:]), 1):
        Path(f"{whole}.{number}of2").write_bytes(piece)
    whole.unlink()
    Path(f"{wheels}/weights-1.0-py3-none-any.whl.1of3").write_bytes(b"a third")
    (wheels / "torch-99.0-cp999-cp999-linux_x86_64.whl").write_bytes(b"not for this machine")
    return tmp_path / "kit"


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_what_is_lacking_is_installed_and_nothing_else(kit: Path, tmp_path: Path) -> None:
    stand_in = tmp_path / "python"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(stand_in), "REAL": sys.executable, "KIT": str(kit)}
    done = subprocess.run(
        [REPO / ".ci" / "gpu", "--set", "minutes=3"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"called: reproduce gpu --set kit={kit} --set minutes=3",
        "probe 7",
    ]
    assert "weights-1.0-py3-none-any.whl: 1 of 3 pieces are here" in done.stderr
    assert sorted(path.name for path in (kit / "site").glob("*.dist-info")) == [
        "kit_probe-1.0.dist-info"
    ]
