"""`draftwell step train`: a test trace of its own, what it leaves behind, and that wrong input
leaves everything as it was."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from draftwell.components.report.drawing import drawn_of
from draftwell.serving.artifacts.base import digest_of
from draftwell.serving.recording.trace import TraceSet
from tests.support.loop.bad_traces import (
    BAD,
    changed,
    contents,
    foreign,
    refused,
    truncated,
    with_values,
)

WORDS = (
    "the man",
    "an onion",
    "on the hand",
    "then the end",
    "in an hour",
    "none other",
    "ten men",
    "one on one",
    "an inn",
    "her hat",
)
KIND = "acceptance_head"


def prompts(file: Path, beginning: str) -> Path:
    """Twenty prompts of two tasks in turn."""
    rows = [
        {"id": f"{i}", "task": ("maths", "chat")[i % 2], "prompt": f"{beginning} {word} {i}"}
        for i, word in enumerate(2 * WORDS)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def traces(pair_file: Path, isolated_stores: Path) -> dict[str, Path]:
    """Two traces of different prompts with the same ids."""
    from typer.testing import CliRunner

    from draftwell.flows.cli.main import app

    made = {}
    for name, beginning in (("learn", "see"), ("test", "and now")):
        made[name] = isolated_stores / name
        file = prompts(isolated_stores / f"{name}.jsonl", beginning)
        done = CliRunner().invoke(
            app,
            [
                str(word)
                for word in (
                    "step",
                    "collect",
                    "--pair",
                    pair_file,
                    "--prompts",
                    file,
                    "--set",
                    "max_tokens=16",
                    "--set",
                    "rollout=1",
                    "--set",
                    f"out={made[name]}",
                )
            ],
        )
        assert done.exit_code == 0, (done.output, done.exception)
    return made


@pytest.fixture
def train(
    run: Any, pair_file: Path, traces: dict[str, Path], own_stores: Path
) -> Callable[..., Any]:
    return lambda *more: run(
        f"step train --pair {pair_file}",
        "--set",
        f"traces={traces['learn']}",
        "--set",
        "publish=false",
        *more,
    )


@pytest.fixture
def space(own_stores: Path) -> Path:
    return own_stores / "draftwell" / "pairs" / "tiny" / "float32"


def test_a_test_trace_of_its_own(
    train: Callable[..., Any], space: Path, traces: dict[str, Path]
) -> None:
    from draftwell.serving.artifacts.verifier import Verifier

    done = train(
        "--set",
        f"test={traces['test']}",
        "--set ratio=1.5 --set eta_fp=0.2 --set features=scalars,before --set seed=3",
    )
    assert done.exit_code == 0, (done.output, done.exception)
    report = json.loads((space / "reports" / "verifier.json").read_text())
    rows = {name: TraceSet(folder).num_rows for name, folder in traces.items()}
    assert report["rows"] == {"train": rows["learn"], "test": rows["test"]}
    assert (report["ratio"], report["features"], report["left_out"]) == (
        1.5,
        ["before", "scalars"],
        [],
    )
    assert report["test_trace"] == TraceSet(traces["test"]).digest()
    assert set(report["kinds"]) == {"draft", "mixed", "target"}
    low, high = report["intervals"]["auc"]
    assert f"auc {report['auc']:.3f} [{low:.3f}, {high:.3f}]" in done.stdout
    page = (space / "reports" / "verifier.md").read_text()
    assert "## By prefix kind" in page
    for name in ("roc.png", "roc_by_lambda.png", "reliability.png"):
        assert (space / "reports" / name).read_bytes().startswith(b"\x89PNG")
        assert drawn_of(space / "reports" / name) == digest_of(space / "artifacts" / "verifier")
    made = Verifier.load(space / "artifacts" / "verifier")
    assert (made.ratio, made.features) == (1.5, ("before", "scalars"))
    assert made.provenance.metrics["auc"] == report["auc"]
    assert made.provenance.parameters["test_trace"] == report["test_trace"]


def test_a_head_with_its_reliability(
    train: Callable[..., Any], space: Path, traces: dict[str, Path]
) -> None:
    done = train(f"--kind {KIND} --set", f"test={traces['test']}")
    assert done.exit_code == 0, (done.output, done.exception)
    report = json.loads((space / "reports" / "acceptance_head.json").read_text())
    assert len(report["prompts"]["train"]) == len(report["prompts"]["test"]) == 20

    assert f"baseline_auc {report['baseline_auc']:.3f} [" in done.stdout
    low, high = report["intervals"]["prevalence"]
    assert f"prevalence {report['prevalence']:.3f} [{low:.3f}, {high:.3f}]" in done.stdout
    metrics = json.loads((space / "artifacts" / KIND / "artifact.json").read_text())["provenance"][
        "metrics"
    ]
    assert metrics["auc"] == report["auc"]
    assert (space / "reports" / "acceptance_head.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in (space / "artifacts" / KIND).iterdir()} == {
        "artifact.json",
        "acceptance_head.safetensors",
    }


def test_medusa_heads_that_then_draft(
    train: Callable[..., Any], run: Any, pair_file: Path, space: Path, traces: dict[str, Path]
) -> None:
    done = train("--kind medusa_heads --set", f"test={traces['test']}")
    assert done.exit_code == 0, (done.output, done.exception)
    report = json.loads((space / "reports" / "medusa_heads.json").read_text())
    assert (
        "unseen places, with their likeliest token (three likeliest): "
        f"{100 * report['top1'][0]:.1f} %"
    ) in done.stdout
    assert len(report["top1"]) == report["heads"] == 3
    assert {path.name for path in (space / "artifacts" / "medusa_heads").iterdir()} == {
        "artifact.json",
        "medusa_heads.safetensors",
    }
    asked = ("generate", "--pair", pair_file, "--prompt", "the inn", "--max-tokens", 8)
    texts = [
        run(*asked, f"--strategy {name}").stdout.splitlines()[0]
        for name in ("medusa", "autoregressive")
    ]
    assert texts[0] == texts[1]
    refused(
        train("--kind medusa_heads --set ratio=1.5"), "--set ratio: not for --kind medusa_heads"
    )


def test_what_is_known_is_published_with_it(
    run: Any, pair_file: Path, traces: dict[str, Path], own_stores: Path, empty_database: Path
) -> None:
    """The report reaches MLflow as Markdown and JSON beside the pictures, and its metrics."""
    from draftwell.registry.store import Store

    shutil.copyfile(empty_database, own_stores / "mlflow.db")
    done = run(
        f"step train --pair {pair_file} --set",
        f"traces={traces['learn']}",
        "--set",
        f"test={traces['test']}",
        "--set features=scalars",
    )
    assert done.exit_code == 0, (done.output, done.exception)
    store = Store()
    kept = store.resolve("verifier", "tiny", 1)
    files = {Path(file.path).name for file in store.client.list_artifacts(kept.run_id, "plots")}
    assert files == {
        "roc.png",
        "roc_by_lambda.png",
        "reliability.png",
        "verifier.json",
        "verifier.md",
    }
    metrics = store.client.get_run(kept.run_id).data.metrics
    assert {
        "auc",
        "baseline_auc",
        "gain",
        "prevalence",
    } <= metrics.keys()


@pytest.fixture
def old(train: Callable[..., Any], space: Path) -> dict[str, str]:
    """What was trained and reported before."""
    for more in (("--set", "features=scalars"), ("--kind", KIND)):
        done = train(*more)
        assert done.exit_code == 0, (done.output, done.exception)
    return contents(space)


@pytest.mark.parametrize("place", ["traces", "test"])
def test_a_bad_trace_changes_nothing(
    old: dict[str, str],
    train: Callable[..., Any],
    run: Any,
    pair_file: Path,
    space: Path,
    traces: dict[str, Path],
    tmp_path: Path,
    place: str,
) -> None:
    for number, (name, (spoil, words)) in enumerate(BAD.items()):
        bad = spoil(traces["test"], tmp_path / f"bad{number}")
        given = (
            ("--set", f"traces={traces['learn']}", "--set", f"test={bad}")
            if place == "test"
            else ("--set", f"traces={bad}")
        )
        done = run(f"step train --pair {pair_file} --set publish=false", *given)
        try:
            refused(done, *words)
            assert contents(space) == old
        except AssertionError as error:
            error.add_note(name)
            raise


def test_a_bad_trace_is_refused_for_a_head_too(
    old: dict[str, str],
    run: Any,
    pair_file: Path,
    space: Path,
    traces: dict[str, Path],
    tmp_path: Path,
) -> None:
    bare = changed(
        traces["test"],
        tmp_path / "bare",
        lambda rows: rows.filter(
            pa.array([kind != "target" for kind in rows.column("kind").to_pylist()])
        ),
    )
    cases = {
        bare: ("no text written by the target",),
        truncated(traces["test"], tmp_path / "cut"): ("truncated",),
        foreign(traces["test"], tmp_path / "foreign"): ("stranger",),
        tmp_path / "none": ("no traces",),
        changed(
            traces["test"],
            tmp_path / "nan",
            lambda rows: with_values(rows, "ratio", [float("nan")] * len(rows)),
        ): ("NaN",),
    }
    for bad, words in cases.items():
        refused(
            run(
                f"step train --pair {pair_file} --set publish=false --kind {KIND} --set "
                f"traces={bad}"
            ),
            *words,
        )
        assert contents(space) == old


def test_scores_that_are_not_finite_change_nothing(
    old: dict[str, str], train: Callable[..., Any], space: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sklearn.linear_model import LogisticRegression

    real = LogisticRegression.fit

    def diverges(self: Any, *given: Any, **more: Any) -> Any:
        real(self, *given, **more)
        self.coef_ = self.coef_ * np.nan
        return self

    monkeypatch.setattr(LogisticRegression, "fit", diverges)
    refused(train("--set features=scalars"), "scores of the verifier are NaN")
    assert contents(space) == old


def test_wrong_options_change_nothing(
    old: dict[str, str], train: Callable[..., Any], space: Path, traces: dict[str, Path]
) -> None:
    for more, words in (
        (("--kind", KIND, "--set", "ratio=1.5"), ("--set ratio: not for --kind",)),
        (("--set", "features=befor"), ("befor", "before")),
        (("--set", f"test={traces['learn']}"), ("every prompt of the test trace",)),
        (("--kind", KIND, "--set", f"test={traces['learn']}"), ("every prompt of the test trace",)),
    ):
        refused(train(*more), *words)
        assert contents(space) == old
    for key, value in (("eta_fp", 1.5), ("ratio", -1)):
        done = train("--set", f"{key}={value}")
        assert (done.exit_code, done.stdout) == (2, "")
        assert f"--set {key}: " in done.stderr
        assert contents(space) == old


def test_a_datastore_of_the_targets_texts(
    train: Callable[..., Any], run: Any, pair_file: Path, space: Path, traces: dict[str, Path]
) -> None:
    from draftwell.serving.artifacts.datastore import Datastore

    done = train("--kind datastore")
    assert done.exit_code == 0, (done.output, done.exception)
    report = json.loads((space / "reports" / "datastore.json").read_text())
    assert done.stdout.startswith(
        f"datastore: {report['tokens']} tokens of {report['texts']} texts; on held-out prompts"
    )
    made = Datastore.load(space / "artifacts" / "datastore")
    assert len(made) == report["tokens"] > 0
    assert made.provenance.trace_digest == TraceSet(traces["learn"]).digest()
    assert len(made.provenance.training_prompts or ()) == 20
    before = contents(space)
    refused(train("--kind datastore --set", f"test={traces['test']}"), "--set test: not for")
    refused(train("--kind datastore --set ratio=1.5"), "--set ratio: not for --kind datastore")
    assert contents(space) == before
    for strategy in ("rest", "suffix"):
        done = run(
            f"generate --pair {pair_file} --strategy {strategy} --prompt",
            "see the man",
            "--max-tokens 8",
        )
        assert done.exit_code == 0, (done.output, done.exception)
