"""The package as a library: what `import draftwell` costs, its example, and its bench."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from textwrap import dedent

import pytest

import draftwell
from tests.support.base_install import BASE
from tests.support.errors import raises_code
from tests.support.loop.tiny_files import PROMPTS, write_pair, write_prompts
from tests.support.server.bundles import make_bundle, save_tiny_models

EXAMPLE = dedent((draftwell.__doc__ or "").split("of your own:\n\n", 1)[1].split("\n\n`", 1)[0])
LIGHT = """
import sys, time
began = time.perf_counter()
import draftwell
took, heavy = time.perf_counter() - began, {"torch", "pydantic", "numpy", "draftwell.serving"}
print(sorted(heavy & set(sys.modules)), took < 0.25, set(dir(draftwell)) >= set(draftwell.__all__))
"""
ALONE = """
import draftwell
with draftwell.load(sys.argv[1]) as model:
    print(len(model.generate("ten men", max_tokens=5).tokens))
print(len(draftwell.bench(sys.argv[1], ["ten men"], max_tokens=5).strategies) > 1)
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """At `dist/smollm2-135m/current`, as the example names it."""
    root = tmp_path_factory.mktemp("deployed")
    models = save_tiny_models(root / "models")
    pair = root / "dist" / "smollm2-135m"
    made = make_bundle(pair / "1", models, "vanilla_sd", {"num_speculative_tokens": 4}, chat=True)
    (pair / "current").symlink_to(made.name)
    return pair / "current"


def test_importing_it_loads_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=True)
    assert done.stdout.split(" ")[0] == "[]"
    assert done.stdout.split()[1:] == ["True", "True"]


def test_every_public_name_is_there() -> None:
    assert all(getattr(draftwell, name) is not None for name in draftwell.__all__)
    assert draftwell.__version__ == version("draftwell")
    with pytest.raises(AttributeError, match="generate"):
        _ = draftwell.generate
    assert (Path(draftwell.__file__).parent / "py.typed").is_file()


def test_the_example_runs(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len([line for line in EXAMPLE.splitlines() if line.strip()]) <= 5
    ast.parse(EXAMPLE)
    monkeypatch.chdir(bundle.parents[2])
    exec(compile(EXAMPLE, "draftwell", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_a_pairs_name_means_its_bundle_here(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(bundle.parents[2])
    with draftwell.load("smollm2-135m") as model:
        assert model.path == bundle.resolve()


@pytest.mark.slow  # a process of its own loads torch
def test_it_works_in_the_base_install(bundle: Path) -> None:
    """Where neither the server's packages nor the pipeline's are."""
    done = subprocess.run(
        [sys.executable, "-c", BASE + ALONE, str(bundle)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["5", "True"]


def test_bench_measures_a_bundles_choice(bundle: Path) -> None:
    report = draftwell.bench(bundle, PROMPTS[:2], max_tokens=8, runs=2)
    tuned = report.strategies["vanilla_sd"]
    assert tuned.parameters["num_speculative_tokens"] == 4
    assert tuned.speedup is not None
    assert tuned.identical_outputs == 2
    assert (report.prompts, report.settings.runs, report.left_out) == (2, 2, {})


def test_bench_measures_named_strategies_of_a_pair(tmp_path: Path) -> None:
    report = draftwell.bench(
        write_pair(tmp_path),
        write_prompts(tmp_path / "prompts.jsonl"),
        strategies=["prompt_lookup", ("vanilla_sd", {"num_speculative_tokens": 3})],
        limit=2,
        max_tokens=8,
        device="cpu",
    )
    assert {"autoregressive", "prompt_lookup", "vanilla_sd"} <= set(report.strategies)
    assert report.strategies["vanilla_sd"].parameters["num_speculative_tokens"] == 3


def test_a_benchs_mistakes_are_found_before_models_are_loaded(bundle: Path) -> None:
    with raises_code("unknown_strategy", "vanilla_sd"):
        draftwell.bench(bundle, ["a"], strategies=["vanila_sd"])
    with raises_code("no_prompts"):
        draftwell.bench(bundle, [])
