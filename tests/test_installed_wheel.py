"""An installed wheel: beside somebody's own packages of the same names as our folders."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import REPO

FOLDERS = ("draftwell", "components", "flows", "registry", "serving")
CODE = """
import sys; sys.path.insert(0, sys.argv[1])
import components, draftwell.components.gate.settings as settings, draftwell.flows.cli.main
from draftwell.registry.pairs.catalogue import find_pair
print(components.OWNER, settings.__file__, find_pair("smollm2-135m").name, sep="\\n")
"""


@pytest.mark.slow
def test_it_puts_one_name_at_the_top_of_site_packages(tmp_path: Path) -> None:
    source, site = tmp_path / "source", tmp_path / "site"
    for folder in FOLDERS:
        unwanted = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPO / folder, source / folder, symlinks=True, ignore=unwanted)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(REPO / file, source / file)
    (site / "components").mkdir(parents=True)
    (site / "components" / "__init__.py").write_text("OWNER = 'somebody else'\n")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(site), str(source)], check=True, capture_output=True)
    top = {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")}
    assert top == {"bin", "components", "draftwell"}
    assert not [path for path in site.rglob("*") if path.is_symlink()]
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(site)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [
        "somebody else",
        str(site / "draftwell" / "components" / "gate" / "settings.py"),
        "smollm2-135m",
    ]
