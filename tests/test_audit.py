"""`make audit` tells apart: nothing known, something found, nobody asked, and no tool to ask
with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import REPO

STUB = """
import sys
out = sys.argv[sys.argv.index("--output") + 1]
packages = open(sys.argv[sys.argv.index("--requirement") + 1]).read().split()
assert "--no-deps" in sys.argv and [name for name in packages if name.startswith("pytest==")]
assert not [name for name in packages if "+" in name or not "==" in name], packages
print({said!r}, file=sys.stderr)
if {table!r}:
    open(out, "w").write({table!r})
sys.exit({code})
"""
FOUND = "Name Version ID\n---- ------- --\nlibx 1.0     PYSEC-1\n"
SKIPPED = """Name    Skip Reason
------- -------------------------------------------------------------------------
torch   Dependency not found on PyPI and could not be audited: torch (2.9.0+cpu)
inhouse Dependency not found on PyPI and could not be audited: inhouse (1.0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("said", "table", "code", "ends", "shown"),
    [
        ("No known vulnerabilities found", "", 0, 0, "No known vulnerabilities found"),
        ("Found 1 known vulnerability in 1 package", FOUND, 1, 1, "libx 1.0     PYSEC-1"),
        (
            "ERROR:pip_audit._cli:Failed to resolve pypi.org",
            "",
            1,
            3,
            "audit: nothing was looked up, because the service of advisories",
        ),
        (
            "No known vulnerabilities found, ignored 1",
            SKIPPED,
            0,
            3,
            "PyPI does not know them: torch inhouse",
        ),
        ("Found 1 known vulnerability in 1 package", FOUND + SKIPPED, 1, 1, "torch"),
    ],
)
def test_what_the_exit_code_means(
    tmp_path: Path, said: str, table: str, code: int, ends: int, shown: str
) -> None:
    (tmp_path / "pip_audit").mkdir()
    (tmp_path / "pip_audit" / "__init__.py").write_text("")
    (tmp_path / "pip_audit" / "__main__.py").write_text(
        STUB.format(said=said, table=table, code=code)
    )
    done = audit({"PYTHONPATH": str(tmp_path)})
    assert done.returncode == ends, done.stderr
    assert shown in done.stdout + done.stderr
    assert said.split(":")[-1] in done.stdout + done.stderr, "the reason is told"


def test_without_pip_audit_the_mend_is_told(tmp_path: Path) -> None:
    (tmp_path / "pip_audit.py").write_text("raise ImportError")
    done = audit({"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 2
    assert "make setup" in done.stderr


def audit(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(REPO / ".ci" / "audit")],
        env={**os.environ, "PYTHON": sys.executable, **environment},
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
    )
