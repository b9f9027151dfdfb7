"""`draftwell bench`: several configs of one strategy, equal cores, a padded target, a choice of
prompts, and what it writes."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftwell.components.bench.settings import BenchSettings
from draftwell.flows.cli.bench_run import parse_wanted, positions_for
from draftwell.serving.artifacts.pair_files import draftwell_home
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.strategies import PLAIN, StrategyChoice
from tests.support.loop.publishing import artifacts
from tests.support.patching import replace_everywhere

PADDED = 120_000.0


@pytest.mark.parametrize(
    ("strategies", "settings", "wanted"),
    [
        ("spide", {}, [("spide", {})]),
        (
            "vanilla_sd,vanilla_sd:num_speculative_tokens=2",
            {},
            [("vanilla_sd", {}), ("vanilla_sd", {"num_speculative_tokens": "2"})],
        ),
        ("csd:tau=0.1:lambda_=3, autoregressive", {}, [("csd", {"tau": "0.1", "lambda_": "3"})]),
        (
            "spide@1+1:tau=0.5,vanilla_sd@1+1",
            {},
            [("spide@1+1", {"tau": "0.5"}), ("vanilla_sd@1+1", {})],
        ),
        (
            "spide,spide:tau=0.5",
            {"spide.tau": "0.9"},
            [("spide", {"tau": "0.9"}), ("spide", {"tau": "0.5"})],
        ),
    ],
)
def test_configs_are_read(strategies: str, settings: dict[str, str], wanted: list[Any]) -> None:
    named = [StrategyChoice(*config) for config in wanted]
    assert parse_wanted(strategies, settings) == [PLAIN, *named]


@pytest.mark.parametrize(
    ("strategies", "settings", "words"),
    [
        ("vanilla_sd@2+2", {}, "1+1"),
        ("vanila_sd:num_speculative_tokens=2", {}, "vanilla_sd"),
        ("vanilla_sd:5", {}, "key=value"),
        ("vanilla_sd", {"spide.tau": "1"}, "strategy.key=value"),
    ],
)
def test_mistakes_in_configs_are_named(
    strategies: str, settings: dict[str, str], words: str
) -> None:
    with pytest.raises(DraftwellError) as error:
        parse_wanted(strategies, settings)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("given", "positions"),
    [
        ({}, None),
        ({"max_prompt_tokens": 4032}, None),
        ({"max_prompt_tokens": 4033}, 4097),
        ({"max_prompt_tokens": 16_000, "max_tokens": 100}, 16_100),
        ({"max_prompt_tokens": 90_000}, 20_000),
    ],
)
def test_named_lengths_make_room_as_far_as_the_target_was_trained(
    given: dict[str, int],
    positions: int | None,
    pair_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from draftwell.flows.workspace import Workspace

    space = Workspace(str(pair_file))
    target = shutil.copytree(space.files().target, tmp_path / "target")
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 20_000}))
    monkeypatch.setattr(space, "_files", replace(space.files(), target=target))
    assert positions_for(space, "cpu", BenchSettings(**given)) == positions


def test_nothing_is_downloaded_to_see_that_a_pair_does_not_fit(
    pair_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftwell.flows.cli import bench_run
    from draftwell.flows.workspace import Workspace

    def refuse(*_: object) -> None:
        raise DraftwellError("too large", code="pair_too_large")

    space = Workspace(str(pair_file))
    monkeypatch.setattr(bench_run, "check_fits", refuse)
    monkeypatch.setattr(space, "files", lambda: pytest.fail("models were asked for"))
    assert positions_for(space, "cpu", BenchSettings()) is None
    with pytest.raises(DraftwellError, match="too large"):
        positions_for(space, "cpu", BenchSettings(max_prompt_tokens=9000))


@pytest.fixture(scope="module")
def written(
    pair_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], Path]:
    """The report of a padded bench, and the folder with all that it wrote."""
    from typer.testing import CliRunner

    from draftwell.flows.cli.main import app

    folder = tmp_path_factory.mktemp("bench")
    texts = [
        ("a", "the man in the inn"),
        ("a", "on the other hand"),
        ("a", "ten men"),
        ("b", "an onion " * 24),
        ("b", "the end then"),
    ]
    rows: list[dict[str, Any]] = [
        {"task": task, "prompt": text, "reference": "the inn"} for task, text in texts
    ]
    rows[1]["turns"] = [texts[1][1], "and then?"]
    (folder / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    configs = (
        "vanilla_sd:num_speculative_tokens=2,vanilla_sd:num_speculative_tokens=4,vanilla_sd@1+1,"
        "spide,lossy_sd"
    )
    done = CliRunner().invoke(
        app,
        [
            "bench",
            "--pair",
            str(pair_file),
            "--strategies",
            configs,
            "--prompts",
            str(folder / "p.jsonl"),
            "--set",
            "mix=true",
            "--limit",
            "3",
            "--set",
            "max_prompt_tokens=60",
            "--set",
            "max_tokens=10",
            "--set",
            "threads=1",
            "--set",
            "peers=transformers",
            "--set",
            f"pad_target={PADDED}",
            "--set",
            f"artifacts={artifacts(pair_file)}",
            "--out",
            str(folder / "r.json"),
            "--out",
            str(folder / "r.md"),
            "--out",
            str(folder / "plots"),
        ],
    )
    assert done.exit_code == 0, (done.output, done.exception)
    assert "padded" in done.stdout
    assert "best lossless" in done.stdout
    return json.loads((folder / "r.json").read_text()), folder


@pytest.mark.slow
def test_every_table_says_that_the_target_is_padded(written: tuple[dict[str, Any], Path]) -> None:
    report, folder = written
    assert abs(report["padded_to"] - PADDED) < 0.2 * PADDED
    text = (folder / "r.md").read_text()
    assert "target padded with zeros" in text
    for words in (
        "### Ratios",
        "### Time and memory",
        "### Quality",
        "1 run",
        "float32",
    ):
        assert words in text, words


@pytest.mark.slow
def test_the_chosen_prompts_are_short_and_mixed(written: tuple[dict[str, Any], Path]) -> None:
    report, _ = written
    assert report["prompt_ids"] == ["line-1", "line-5", "line-2"]
    assert report["longest_prompt"] <= 60
    assert report["settings"]["mix"] is True
    assert report["settings"]["max_prompt_tokens"] == 60


def test_the_tables_say_what_the_figures_rest_on(written: tuple[dict[str, Any], Path]) -> None:
    report, folder = written
    assert (report["several_turns"], report["references"]) == (1, 3)
    text = (folder / "r.md").read_text()
    assert "3 prompts (of 1 with several turns the first only)" in text
    assert "ROUGE-L (3 references)" in text


def test_padding_changes_no_output(written: tuple[dict[str, Any], Path]) -> None:
    report, _ = written
    for label, entry in report["strategies"].items():
        if entry["lossless"]:
            assert entry["identical_outputs"] == 3, label
    assert report["peers"]["transformers"]["assisted"]["identical_outputs"] == 3, (
        "transformers ran the padded module too"
    )


def test_a_padded_profile_is_never_kept(
    written: tuple[dict[str, Any], Path], run: Any, pair_file: Path, tmp_path: Path
) -> None:
    """duo_decoding, or spide, asks for a hardware profile: that of a padded target must not be
    found by the plain one."""
    from draftwell.flows.steps.profile import find_or_measure_profile
    from draftwell.flows.workspace import Workspace

    workspace = Workspace(str(pair_file), say=lambda line: None)
    pair = workspace.load(pad_target=PADDED)
    made: Any = find_or_measure_profile(workspace, pair, ["pearl"])
    assert made.provenance.parameters["padded_to"] == pair.padded_to
    assert not (workspace.folder("hardware_profile")).exists()
    assert draftwell_home() in workspace.artifacts.parents
    plain: Any = find_or_measure_profile(workspace, workspace.load(), ["pearl"])
    assert (workspace.folder("hardware_profile")).is_dir()
    again: Any = find_or_measure_profile(workspace, pair, ["pearl"])
    assert again.provenance.parameters["padded_to"] == pair.padded_to, (
        "a profile of the plain target does not serve the padded one"
    )
    kept: Any = find_or_measure_profile(workspace, workspace.load(), ["pearl"])
    assert kept.digest == plain.digest


@pytest.mark.slow
def test_the_draft_can_compute_elsewhere(
    run: Any, pair_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The place reaches the loader, the report names one that is not the target's, and a profile of
    such a pair is not kept."""
    from draftwell.components.bench.report import tables as bench_report
    from draftwell.components.bench.schema import BenchReport
    from draftwell.components.report import machine
    from draftwell.flows.steps import profile
    from draftwell.flows.workspace import Workspace
    from draftwell.serving.runtime import pair as pair_module

    places: list[Any] = []
    load = pair_module.load_pair

    def watched(files: Any, settings: Any, **how: Any) -> Any:
        places.append(how["draft_device"])
        return load(files, settings, **how)

    replace_everywhere(monkeypatch, pair_module, "load_pair", watched)
    for command in (
        "generate --prompt 'ten men' --max-tokens 4",
        "bench --limit 1 --set max_tokens=4",
    ):
        for more in ("", "--set draft_device=cpu"):
            done = run(command, f"--pair {pair_file} --device cpu", more)
            assert done.exit_code == 0, done.output
    assert places == [None, "cpu", None, "cpu"]
    workspace = Workspace(str(pair_file), say=lambda line: None)
    pair = workspace.load()
    assert machine.draft_device_of(pair) is None
    pair.device = "cuda"  # as if the target were there
    assert machine.draft_device_of(pair) == "cpu"
    pair.device = "cpu"
    report = BenchReport(
        schema_version=3,
        pair="tiny",
        prompts=1,
        strategies={},
        settings={"temperature": 0, "max_tokens": 4, "runs": 1},
        machine=machine.describe_machine(pair) | {"draft_device": "cuda"},
    )
    assert ", draft on cuda, " in bench_report.caption(report)
    kept = workspace.folder("hardware_profile")
    there = kept.exists()
    replace_everywhere(monkeypatch, machine, "draft_device_of", lambda pair: "cuda")
    made: Any = profile.find_or_measure_profile(workspace, pair, ["pearl"])
    assert made.provenance.parameters == {"draft_device": "cuda"}
    assert kept.exists() == there


def test_plots_are_drawn(written: tuple[dict[str, Any], Path]) -> None:
    _, folder = written
    names = {path.name for path in (folder / "plots").iterdir()}
    assert names == {"speedup.png", "acceptance_by_position.png", "time_split.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (folder / "plots").iterdir())


def test_generate_says_that_the_target_is_padded(run: Any, pair_file: Path) -> None:
    arguments = f"generate --pair {pair_file} --prompt 'the man in the inn' --max-tokens 12"
    plain, padded = (
        json.loads(run(arguments, "--json", more).stdout)
        for more in ("", f"--set pad_target={PADDED}")
    )
    assert plain["padded_to"] is None
    assert padded["padded_to"] > plain["stats"]["emitted"]
    assert padded["token_ids"] == plain["token_ids"]
    assert "padded to" in run(arguments, f"--set pad_target={PADDED}").stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--strategies spide,spide", "twice"),
        ("--set pad_target=5", "larger number"),
        ("--set pad_target=1e15", "fewer parameters"),
        ("--set concurrency=4 --out r.md", "throughput only"),
        ("--set max_prompt_tokens=1", "at most 1 tokens"),
        ("--set check_cpu=true --device cpu", "--device cuda"),
        ("--set draft_device=tpu", "choose cpu or cuda"),
        ("--device cpu --set draft_device=cuda", "--device cuda too"),
        ("--out nowhere/plots", "nowhere"),
        ("--out nowhere/r.md", "nowhere"),
        ("--strategies vanilla_sd:tau=1", "tau"),
    ],
)
def test_mistakes_are_one_line(
    run: Any,
    pair_file: Path,
    arguments: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(f"bench --pair {pair_file}", arguments)
    assert done.exit_code == 2, done.output
    lines = [line for line in done.stderr.splitlines() if line.startswith("Error:")]
    assert len(lines) == 1
    assert words in lines[0]
    assert not list(tmp_path.iterdir())


def test_plots_without_matplotlib_are_refused_before_anything_is_loaded(
    run: Any, pair_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # importing it raises ImportError
    done = run(f"bench --pair {pair_file} --out {tmp_path}/plots")
    assert done.exit_code == 2, done.output
    assert done.stderr.splitlines() == [
        "Error: plots need the package matplotlib: in the checkout pip install "
        "-c constraints.txt -e '.[pipeline]'"
    ]
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_gpu_bench_is_refused_where_there_is_none(run: Any, pair_file: Path) -> None:
    done = run(f"bench --pair {pair_file} --device cuda --set check_cpu=true")
    assert done.exit_code == 2
    assert "CUDA" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "options", ["--set concurrency=2", "--set temperature=1", "--set runs=9", "--out a.md"]
)
def test_exactness_goes_with_no_other_measurement(run: Any, pair_file: Path, options: str) -> None:
    done = run(f"bench --pair {pair_file} --set exactness=true {options}")
    assert done.exit_code == 2
    assert "exactness compares greedy answers" in done.stderr


def test_exactness_is_written_before_a_difference_ends_the_command(
    run: Any, pair_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftwell.flows.cli import bench_run
    from draftwell.serving.runtime.pair import LoadedPair

    found = {"vanilla_sd": {"alone": [None, 3]}}
    monkeypatch.setattr(LoadedPair, "exact", property(lambda self: True))
    monkeypatch.setattr(bench_run, "exactness", lambda *asked, **options: found)
    done = run(
        f"bench --pair {pair_file} --set exactness=true --limit 1 --out {tmp_path}/found.json"
    )
    assert done.exit_code == 1, (done.output, done.exception)
    assert json.loads((tmp_path / "found.json").read_text()) == found


def test_exactness_of_passes_that_are_not_exact_is_refused(
    run: Any, pair_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTWELL_COMPILE", "off")
    done = run(f"bench --pair {pair_file} --set exactness=true --limit 1")
    assert done.exit_code == 2
    assert "not exact here" in done.stderr
