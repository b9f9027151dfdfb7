"""`draftwell reproduce papers`: measured, resumed and rendered on a tiny pair."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftwell.components.papers.cells import FULL, Scale
from draftwell.components.papers.tables import Paper, papers_named
from draftwell.flows.cli import papers_run
from draftwell.serving.artifacts.pair_files import fingerprint
from tests.support.markdown import commands
from tests.support.models.tiny import table_pair
from tests.support.papers import paper_of, tiny_cell
from tests.support.paths import REPO

TINY = Scale("tiny", prompts=2, max_tokens=6, repeats=1)


@pytest.fixture
def tiny_paper(pair_file: Path, monkeypatch: pytest.MonkeyPatch) -> Paper:
    """One paper with one table on the tiny pair, and counts of it, in the place of all."""
    contenders = {
        "SD": ["vanilla_sd@1+1:num_speculative_tokens=2"],
        "SPIDE": ["spide@1+1:tau=0.7"],
    }
    cell = {
        "pair": str(pair_file),
        "data": "code",
        "contenders": contenders,
        "max_tokens": 6,
        "pad_target": 120_000.0,
    }
    rows = (
        {"what": "SD over plain", "role": "SD", "over": "plain", "paper": "tiny.a"},
        {"what": "SPIDE over SD", "role": "SPIDE", "over": "SD", "paper": "tiny.b"},
    )
    paper = paper_of(
        [one | {"metric": "speed", "claim": "fast"} for one in rows],
        name="spide",
        table={"picture": True},
        cells={
            "tiny-code": cell,
            "tiny-counts": cell
            | {"replay": 5, "pad_target": None, "contenders": {"SPIDE": ["spide:tau=0.7"]}},
        },
    )
    paper.tables[0].each[0] |= {"theirs": "", "data": ""}
    monkeypatch.setattr(papers_run, "papers_named", lambda only=None: [paper])
    monkeypatch.setattr("draftwell.components.papers.page.gains", lambda *_: {})
    return paper


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    (tmp_path / "sets" / "eval").mkdir(parents=True)
    (tmp_path / "sets" / "eval" / "humaneval.jsonl").write_text(
        '{"prompt": "the man in the inn"}\n{"prompt": "ten men"}\n'
    )
    return tmp_path / "sets"


@pytest.mark.usefixtures("tiny_paper")
def test_a_run_is_measured_once_and_ends_on_a_page(
    run: Callable[..., Any], prompts: Path, tmp_path: Path
) -> None:
    arguments = (
        f"reproduce papers --set quick=true --set only=spide --data {prompts} --set "
        f"out={tmp_path}/run "
        "--set dtype=float32 --set threads=1"
    )
    first = run(arguments)
    assert first.exit_code == 0, (first.output, first.exception)
    files = list((tmp_path / "run" / "quick").glob("tiny-code-*.json"))
    assert len(files) == 1
    folder = tmp_path / "run" / "papers-quick"
    before = files[0].stat().st_mtime_ns
    again = run(arguments, f"--set page={tmp_path}/page.md")
    assert again.exit_code == 0
    assert "measured before" in again.stderr
    assert files[0].stat().st_mtime_ns == before
    text = (tmp_path / "page.md").read_text()
    assert "| spide: it is fast | 1.20 to 1.50 | none | measured: " in text
    page = (tmp_path / "page" / "spide.md").read_text()
    assert page == (folder / "spide.md").read_text().replace("papers-quick", "page")
    assert "HumanEval, 2 prompts" in page
    assert "](../images/page-spide-1.png)" in page
    assert (
        "Made by `draftwell reproduce papers --data data --set quick=true --set only=spide "
        "--set dtype=float32 --set device=cpu --set threads=1`"
    ) in page
    assert (tmp_path / "images" / "page-spide-1.png").is_file()
    assert (tmp_path / "page" / "rows.csv").read_text().count("\n") == 3
    other = run(arguments.replace("float32", "bfloat16"), "--set render=true")
    assert "cells: 0 of 2 measured in this run" in other.stderr, (
        "another number format is another run"
    )


def test_another_padding_is_another_run_with_a_page_of_its_own(
    run: Callable[..., Any], prompts: Path, tmp_path: Path, tiny_paper: Paper
) -> None:
    """Its cells and its page do not take the place of the usual ones, and what padding does not
    change is left out."""
    del tiny_paper.cells["tiny-code"]["pad_target"]
    arguments = (
        f"reproduce papers --set quick=true --data {prompts} --set out={tmp_path}/run "
        f"--set dtype=float32 --set threads=1"
    )
    done = run(arguments, "--set pad_target=200000")
    assert done.exit_code == 0, (done.output, done.exception)
    text = (tmp_path / "run" / "papers-padded-0.0002b-quick.md").read_text()
    assert "# The papers' tables with targets padded to 0.0002 B parameters" in text
    assert "--set device=cpu --set threads=1 --set pad_target=200000`" in text
    assert "tiny-counts" not in text
    assert "This is a quick run" in text
    assert not (tmp_path / "run" / "images").exists()
    assert "cells: 1 of 1 measured in this run" in done.stderr
    assert (
        "cells: 0 of 1 measured in this run"
        in run(arguments, "--set pad_target=300000 --set render=true").stderr
    )


@pytest.mark.usefixtures("tiny_paper")
def test_a_cell_that_fails_is_on_the_page_and_in_the_exit_code(
    run: Callable[..., Any], tmp_path: Path, pair_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftwell.serving.errors import DraftwellError

    def refuse(*arguments: Any) -> Any:
        raise DraftwellError("the models are too large", code="pair_too_large")

    monkeypatch.setattr(papers_run, "open_cells", refuse)
    done = run(f"reproduce papers --set quick=true --set out={tmp_path}/run --set dtype=float32")
    assert done.exit_code == 1
    assert (
        "tiny-code: the models are too large"
        in (tmp_path / "run" / "papers-quick" / "spide.md").read_text()
    )


@pytest.mark.usefixtures("tiny_paper")
def test_a_page_that_cannot_be_written_is_refused_before_anything_is_measured(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(papers_run, "run_cells", lambda *_, **__: pytest.fail("measured"))
    done = run(
        f"reproduce papers --set quick=true --set out={tmp_path}/run --set "
        f"page={tmp_path}/nowhere/page.md"
    )
    assert done.exit_code == 2
    assert "nowhere does not exist" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("tiny_paper")
def test_the_page_is_there_after_every_cell(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is ended by hand leaves what it has on the page."""

    def interrupted(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(papers_run, "open_cells", interrupted)
    assert (
        run(
            f"reproduce papers --set quick=true --set out={tmp_path}/run --set dtype=float32"
        ).exit_code
        != 0
    )
    assert "| none | open |" in (tmp_path / "run" / "papers-quick.md").read_text()


@pytest.mark.usefixtures("tiny_paper")
def test_pictures_are_kept_in_mlflow_where_there_is_a_registry(
    run: Callable[..., Any], prompts: Path, tmp_path: Path, own_stores: Path, empty_database: Path
) -> None:
    from draftwell.registry.connection import SQLITE, connect, default_uri

    arguments = (
        f"reproduce papers --set quick=true --data {prompts} --set out={tmp_path}/run "
        f"--set dtype=float32 --set threads=1 --set cell=tiny-code"
    )
    done = run(arguments)
    assert done.exit_code == 0, (done.output, done.exception)
    assert "MLflow" not in done.stderr, "no registry is made for it"
    database = Path(default_uri().removeprefix(SQLITE))
    database.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(empty_database, database)
    assert "MLflow" not in run(arguments, "--set", "publish=false").stderr
    assert "draftwell/papers" in run(arguments).stderr
    client = connect(default_uri())
    experiment = client.get_experiment_by_name("draftwell/papers")
    assert experiment is not None
    (kept,) = client.search_runs([experiment.experiment_id])
    assert [file.path for file in client.list_artifacts(kept.info.run_id)] == [
        "images",
        "papers-quick",
        "papers-quick.md",
    ]
    pages = {
        Path(file.path).name for file in client.list_artifacts(kept.info.run_id, "papers-quick")
    }
    assert pages == {"spide.md", "emulated.md", "rows.csv", "contenders.csv"}


@pytest.fixture
def shipping_pair(own_stores: Path, pair_file: Path) -> Path:
    """A pair that ships an acceptance table, while the workspace holds another one."""
    from draftwell.flows.workspace import Workspace
    from draftwell.registry.pairs import fetch, find_pair
    from draftwell.serving.artifacts.acceptance_table import MIDPOINTS, AcceptanceTable
    from draftwell.serving.artifacts.base import Provenance

    copy = pair_file.with_name("shipping.yaml")
    copy.write_text(pair_file.read_text().replace("name: tiny", "name: shipping", 1))
    space = Workspace(str(copy), "float32", device="cpu")
    assert space.spec.name == "shipping"
    made = Provenance(
        pair="shipping",
        fingerprint=fingerprint(fetch(find_pair(str(copy))), "float32"),
        training_prompts=["a" * 16],
    )
    space.begin()
    counts = {"shipped": 5, "local": 9}
    for place, folder in (
        ("shipped", space.shipped / "acceptance_table"),
        ("local", space.folder("acceptance_table")),
    ):
        AcceptanceTable([counts[place]] * len(MIDPOINTS), [3] * len(MIDPOINTS), made).save(folder)
    return copy


def test_the_shipped_artifacts_are_measured_and_no_local_ones(shipping_pair: Path) -> None:
    """What was calibrated on this machine has no part in the papers' tables; the file and the key
    name what has."""
    from draftwell.flows.steps.papers import made_of, open_cells
    from draftwell.flows.workspace import Workspace
    from draftwell.serving.artifacts.base import digest_of

    cell = tiny_cell(
        TINY, "shipped", pair=str(shipping_pair), data="code", contenders={"SPIDE": ("spide",)}
    )
    said: list[str] = []
    pair, resources = open_cells([cell], "float32", "cpu", said.append)
    space = Workspace(str(shipping_pair), "float32", device="cpu")
    table = resources.artifacts["acceptance_table"]
    assert table.digest == digest_of(space.shipped / "acceptance_table")
    assert table.digest != digest_of(space.folder("acceptance_table"))
    made = made_of(cell, "float32", "cpu", said.append)
    assert made.digests == {"pair": pair.fingerprint, "acceptance_table": table.digest}
    assert made.prompts.hashes == {"a" * 16}, "prompts that it was made from are left out"


def test_shipped_artifacts_of_other_files_are_left_out_and_named(shipping_pair: Path) -> None:
    """Another version of transformers may write another tokenizer: who is asked to make artifacts
    should know why those are not used."""
    from draftwell.flows.workspace import Workspace

    said: list[str] = []
    space = Workspace(str(shipping_pair), "float32", said.append, "cpu")
    assert space.shipped_folder("acceptance_table") == space.shipped / "acceptance_table"
    assert said == []
    manifest = space.shipped / "acceptance_table" / "artifact.json"
    manifest.write_text(
        manifest.read_text().replace(fingerprint(space.files(), "float32"), "0" * 64)
    )
    assert space.shipped_folder("acceptance_table") is None
    assert space.shipped_folder("acceptance_table") is None
    (line,) = said
    assert "the artifacts that come with shipping are left out" in line
    assert str(space.files().target) in line


def test_mistakes_are_one_line(run: Callable[..., Any], tmp_path: Path) -> None:
    done = run("reproduce papers --set only=eagle")
    assert done.exit_code == 2
    assert "choose from spide, sprinter, csd, pyramidsd, duodecoding" in done.stderr
    assert "there is no folder" in run(f"reproduce papers --data {tmp_path}/datsets").stderr
    (tmp_path / "file").write_text("")
    done = run(f"reproduce papers --set out={tmp_path}/file")
    assert done.exit_code == 2
    assert "name another folder" in done.stderr


@pytest.mark.slow
def test_a_fresh_clone_has_the_kept_cells_on_a_page_of_its_own(
    run: Callable[..., Any], own_stores: Path
) -> None:
    """Nothing is measured or fetched for it, on whatever machine: values do not turn into
    "open"."""
    done = run("reproduce papers --set render=true --set dtype=float32 --set threads=1")
    assert done.exit_code == 0, (done.output, done.exception)
    page = own_stores / "draftwell" / "papers" / "papers-shipped.md"
    text = page.read_text()
    assert "measured: 1.04 [0.99, 1.09], 1.06 [0.98, 1.15]" in text
    kept = (REPO / "docs" / "papers.md").read_text()
    assert text == kept.replace("](papers/", "](papers-shipped/")


@pytest.mark.slow
def test_a_run_without_data_sets_leaves_the_projects_page_alone(
    run: Callable[..., Any], own_stores: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it measured on shipped prompts is on its own page, which says so however it is written,
    and not among the kept cells."""
    from draftwell.components.papers.committed import committed_cells
    from draftwell.components.papers.public import STAND_IN

    (csd,) = papers_named("csd")
    monkeypatch.setattr(papers_run, "papers_named", lambda only=None: [csd])
    folder = own_stores / "draftwell" / "papers"
    folder.mkdir(parents=True)
    show_kept = f"reproduce papers --set kept=true --set page={folder}/docs.md --set dtype=float32"
    assert run(show_kept).exit_code == 0
    before = (folder / "docs.md").read_text()
    kept = committed_cells([*csd.measured_in(FULL).values()])["csd-code"]
    own = kept.model_copy(
        update={"seconds": 1.0, "source": "shipped prompts of the kind `code`, 12 prompts"}
    )
    monkeypatch.setattr(papers_run, "measured_cells", lambda cells, run: {"csd-code": own})
    assert run("reproduce papers --set render=true --set dtype=float32").exit_code == 0
    assert STAND_IN in (folder / "papers-shipped.md").read_text()
    assert own.source in (folder / "papers-shipped" / "csd.md").read_text()
    assert STAND_IN not in before
    assert run(show_kept).exit_code == 0
    assert (folder / "docs.md").read_text() == before


def test_a_cells_profile_leaves_out_what_only_whole_requests_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No table predicts one, and prompts of 512 tokens take long on a padded target."""
    from draftwell.components.calibrate import hardware_profile
    from draftwell.flows.steps import papers as steps

    seen: dict[str, Any] = {}
    monkeypatch.setattr(steps, "measure_profile", lambda pair, made, **given: seen.update(given))
    steps.measured_profile(table_pair(), 3, lambda line: None)
    assert (seen["requests"], seen["repeats"], seen["sizes"]) == (False, 3, steps.FEW_SIZES)
    steps.measured_profile(table_pair(), 9, lambda line: None)
    assert (seen["repeats"], seen["sizes"]) == (9, hardware_profile.SIZES), (
        "a full run times all passes"
    )
    assert set(steps.FEW_SIZES) < set(hardware_profile.SIZES)


def test_a_replay_needs_no_profile(
    own_stores: Path, pair_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its costs are the paper's ratio; a profile takes minutes on a real pair."""
    from draftwell.flows.steps import papers as steps

    def refuse(*arguments: Any) -> Any:
        raise AssertionError("a profile is measured")

    monkeypatch.setattr(steps, "measured_profile", refuse)
    measured, replay = (
        tiny_cell(
            TINY,
            "tiny",
            pair=str(pair_file),
            data="code",
            contenders={"SPIDE": ("spide",)},
            **more,
        )
        for more in ({}, {"replay": 3})
    )
    _, resources = steps.open_cells([replay], "float32", "cpu", lambda line: None)
    assert "hardware_profile" not in resources.artifacts
    with pytest.raises(AssertionError, match="a profile is measured"):
        steps.open_cells([measured], "float32", "cpu", lambda line: None)


@pytest.mark.usefixtures("tiny_paper")
def test_one_cell_can_be_named(run: Callable[..., Any], tmp_path: Path) -> None:
    done = run("reproduce papers --set quick=true --set", "cell=other-*", f"--set out={tmp_path}")
    assert done.exit_code == 2
    assert "no cell is named other-*: choose from tiny-code, tiny-counts" in done.stderr


@pytest.mark.slow
def test_the_commands_for_a_pair_of_ones_own_run_on_a_tiny_one(
    run: Callable[..., Any],
    pair_file: Path,
    own_stores: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slow: the page's commands collect, train, calibrate and bench, one after the other."""
    monkeypatch.chdir(tmp_path)
    for name, texts in {
        "learn.jsonl": ("the man in the inn", "ten men", "no one else", "an inn", "one man"),
        "test.jsonl": ("an onion", "the end", "the tin man"),
        "more.jsonl": ("then a man", "ten onions", "in the end"),
    }.items():
        Path(name).write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    place = "docs/papers/own-pair.md:"
    called = [words[1:] for at, words in commands("draftwell") if at.startswith(place)]
    assert len(called) == 6
    for words in called:
        own = [str(pair_file) if word == "pair.yaml" else word for word in words]
        done = run(shlex.join([*own, "--set", "dtype=float32", "--set", "threads=1"]))
        assert done.exit_code == 0, (words, done.output, done.exception)
    report = json.loads(Path("report.json").read_text())
    assert [entry["strategy"] for entry in report["strategies"].values()] == [
        *("autoregressive", "vanilla_sd", "vanilla_sd", "sprinter"),
    ]
