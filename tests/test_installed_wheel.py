"""An installed wheel: beside somebody's own packages of the same names as our folders, and as a
library."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import REPO
from tests.support.server.bundles import make_bundle, save_tiny_models

FOLDERS = ("draftwell", "components", "flows", "registry", "serving")
CODE = """
import sys; sys.path.insert(0, sys.argv[1])
import components, draftwell.components.gate.settings as settings, draftwell.flows.cli.main
from draftwell.registry.pairs.catalogue import find_pair
print(components.OWNER, settings.__file__, find_pair("smollm2-135m").name, sep="\\n")
"""
LIBRARY = """
import sys; sys.path.insert(0, sys.argv[1])
import draftwell
with draftwell.load(sys.argv[2]) as model:
    print(draftwell.__file__, len(model.generate("ten men", max_tokens=6).tokens), sep="\\n")
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages into which the wheel was installed by its path."""
    place = tmp_path_factory.mktemp("installed")
    source, site = place / "source", place / "site"
    for folder in FOLDERS:
        unwanted = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPO / folder, source / folder, symlinks=True, ignore=unwanted)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(REPO / file, source / file)
    (site / "components").mkdir(parents=True)
    (site / "components" / "__init__.py").write_text("OWNER = 'somebody else'\n")
    pip = [sys.executable, "-m", "pip"]
    build = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(place)]
    subprocess.run([*pip, *build, str(source)], check=True, capture_output=True)
    [wheel] = place.glob("draftwell-*.whl")
    install = ["install", "--quiet", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run([*pip, *install], check=True, capture_output=True)
    return site


def run(code: str, *given: Path, cwd: Path) -> list[str]:
    """The lines that a program prints which has only the installed wheel of the project."""
    command = [sys.executable, "-c", code, *map(str, given)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.slow  # pip builds and installs a wheel
def test_it_puts_one_name_at_the_top_of_site_packages(site: Path, tmp_path: Path) -> None:
    top = {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")}
    assert top == {"bin", "components", "draftwell"}
    assert not [path for path in site.rglob("*") if path.is_symlink()]
    assert run(CODE, site, cwd=tmp_path) == [
        "somebody else",
        str(site / "draftwell" / "components" / "gate" / "settings.py"),
        "smollm2-135m",
    ]


@pytest.mark.slow  # as above, and torch is loaded
def test_it_is_a_typed_library(site: Path, tmp_path: Path) -> None:
    models = save_tiny_models(tmp_path / "models")
    bundle = make_bundle(tmp_path / "bundle", models, "vanilla_sd")
    assert run(LIBRARY, site, bundle, cwd=tmp_path) == [
        str(site / "draftwell" / "__init__.py"),
        "6",
    ]
    assert (site / "draftwell" / "py.typed").is_file()
