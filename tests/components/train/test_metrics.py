"""Metrics of a verifier: AUCs and their intervals, by prefix kind and from task to task, the cost
of a score, and the report."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from draftwell.components.train import score_cost
from draftwell.components.train.examples import Examples, VerifierLabel
from draftwell.components.train.metrics import intervals, ranking, reliability_bins, weighted_auc
from draftwell.components.train.report.plots import verifier_plots
from draftwell.components.train.report.verifier_page import verifier_markdown
from draftwell.components.train.reports import ScoreCost, VerifierReport
from draftwell.components.train.score_cost import time_score
from draftwell.components.train.settings import VerifierSettings
from draftwell.components.train.verifier import train_verifier
from draftwell.serving.artifacts.base import Provenance
from draftwell.serving.artifacts.verifier import Verifier
from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.types import Rows
from tests.support.errors import raises_code
from tests.support.loop.verifier_trace import ORIGIN, trace
from tests.support.models.priced import Clock, Priced
from tests.support.models.tiny import llama_pair, pair_of


def some(
    rows: int = 600, prompts: int = 12, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Label, a score that says something, one that says little, and prompts that differ from each
    other."""
    rng = np.random.default_rng(seed)
    prompt = np.arange(rows) * prompts // rows
    label = rng.random(rows) < rng.uniform(0.2, 0.9, prompts)[prompt]
    score = np.round(label + rng.normal(size=rows), 1)  # with ties
    return label, score, np.round(label + 3 * rng.normal(size=rows), 1), prompt


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 4), st.integers(0, 3)), min_size=2, max_size=30
    )
)
def test_the_weighted_auc_is_scikit_learns(rows: list[tuple[bool, int, int]]) -> None:
    label, score, weight = (np.array(column) for column in zip(*rows, strict=True))
    if weight[label].sum() and weight[~label].sum():
        rank = np.unique(score, return_inverse=True)[1]
        assert weighted_auc(label, rank, weight) == pytest.approx(
            roc_auc_score(label, score, sample_weight=weight), abs=1e-12
        )


def test_intervals_are_those_of_resampled_prompts() -> None:
    """The slow way: put the rows of the drawn prompts together and ask scikit-learn."""
    label, score, confidence, prompt = some()
    found = intervals(label, score, confidence, prompt, resamples=200, seed=3)
    rng, slow = np.random.default_rng(3), []
    for _ in range(200):
        rows = np.concatenate(
            [np.flatnonzero(prompt == drawn) for drawn in rng.integers(0, 12, 12)]
        )
        aucs = [roc_auc_score(label[rows], values[rows]) for values in (score, confidence)]
        slow.append([label[rows].mean(), *aucs, aucs[0] - aucs[1]])
    for i, name in enumerate(("prevalence", "auc", "baseline_auc", "gain")):
        assert found[name] == pytest.approx(
            np.quantile(np.array(slow)[:, i], [0.025, 0.975]).tolist(), abs=1e-9
        ), name


def test_intervals_are_over_prompts_not_over_tokens() -> None:
    """Tokens of a prompt that are all alike are one observation, however many there are."""
    rng = np.random.default_rng(0)
    label, score, prompt = rng.random(40) < 0.5, rng.random(40), np.arange(40)
    few = intervals(label, score, score, prompt)
    many = intervals(*(np.repeat(values, 25) for values in (label, score, score, prompt)))
    assert many == {name: pytest.approx(ends) for name, ends in few.items()}
    assert few["auc"][1] - few["auc"][0] > 0.15


def examples(label: np.ndarray, confidence: np.ndarray, prompt: np.ndarray) -> Examples:
    return Examples(
        {},
        np.where(label, 1.0, 2.0).astype(np.float32),
        confidence.astype(np.float32),
        np.char.add("p", prompt.astype(str)),
    )


def test_a_ranking_has_its_interval_around_it_and_none_where_nothing_can_be_said() -> None:
    label, score, confidence, prompt = some()
    found = ranking(examples(label, confidence, prompt), score, VerifierLabel())
    assert (found.test_prompts, found.test_rows) == (12, 600)
    assert found.auc is not None
    assert found.baseline_auc is not None
    assert found.intervals is not None
    assert found.auc > found.baseline_auc + 0.1
    assert found.gain == found.auc - found.baseline_auc
    for name in ("auc", "baseline_auc", "prevalence", "gain"):
        low, high = found.intervals[name]
        assert low < getattr(found, name) < high
    assert found.intervals["gain"][0] > 0
    alone = ranking(examples(label, confidence, np.zeros(600, int)), score, VerifierLabel())
    assert alone.auc == found.auc
    assert alone.intervals is None
    one_class = ranking(examples(np.ones(600, bool), confidence, prompt), score, VerifierLabel())
    assert (one_class.prevalence, one_class.auc, one_class.gain, one_class.intervals) == (
        1.0,
        None,
        None,
        None,
    )


def test_reliability_bins_hold_every_row_once() -> None:
    bins = reliability_bins(np.array([False, True, True, True]), np.array([0.0, 0.05, 0.95, 1.0]))
    assert [(b.count, b.observed) for b in bins] == [(2, 0.5), (2, 1.0)]
    (soft,) = reliability_bins(np.array([0.25, 0.5]), np.array([0.31, 0.33]))
    assert (soft.observed, soft.score) == (0.375, pytest.approx(0.32))


def without(table: pa.Table, kinds: tuple[str, ...]) -> pa.Table:
    return table.filter(pc.invert(pc.is_in(table.column("kind"), pa.array(kinds))))


def test_figures_by_prefix_kind_are_those_of_its_rows() -> None:
    learnt, other = trace(), trace(rows=1200, prompts=8, name="q", seed=1)
    report = train_verifier(learnt, ORIGIN, VerifierSettings(features=("before",)), test=other)[1]
    assert list(report.metrics.kinds) == ["bare", "draft", "mixed", "target"]
    assert (
        sum(found.test_rows for found in report.metrics.kinds.values())
        == report.metrics.test_rows
        == 1200
    )
    alone = train_verifier(
        learnt,
        ORIGIN,
        VerifierSettings(features=("before",)),
        test=without(other, ("bare", "draft", "target")),
    )[1]
    assert report.metrics.kinds["mixed"] == alone.metrics.kinds["mixed"]
    assert report.metrics.kinds["mixed"].auc == alone.metrics.auc


@pytest.fixture(scope="module")
def crossed() -> VerifierReport:
    """Two tasks that are alike, one where everything is the other way round, and one with too few
    prompts."""
    tasks = ("maths", "code", "other", "maths", "code", "other", "other", "maths", "code", "other")
    learnt = trace(rows=6000, prompts=40, tasks=tasks, turned=("other",))
    rare = trace(rows=100, prompts=1, name="r", tasks=("rare",))
    tested = trace(
        rows=3000,
        prompts=20,
        tasks=("maths", "code", "other", "new"),
        turned=("other",),
        name="q",
        seed=1,
    )
    return train_verifier(
        pa.concat_tables([learnt, rare]),
        ORIGIN,
        VerifierSettings(features=("before",)),
        test=tested,
    )[1]


def test_every_task_is_tested_on_every_other(crossed: VerifierReport) -> None:
    transfer = crossed.transfer
    assert transfer is not None
    assert transfer.tasks == ["code", "maths", "new", "other"]
    assert list(transfer.trained) == ["code", "maths", "other"]
    assert transfer.left_out == {"rare": "too few prompts to learn from"}
    assert transfer.test_prompts == dict.fromkeys(transfer.tasks, 5)
    auc = {task: row.auc for task, row in transfer.trained.items()}
    for task in ("code", "maths"):
        assert min(auc[task][same] for same in ("code", "maths", "new")) > 0.95
        assert auc[task]["other"] < 0.1
    assert auc["other"]["other"] > 0.95 > 0.1 > auc["other"]["maths"]
    assert all(abs(value - 0.5) < 0.1 for value in transfer.baseline.values())
    means = transfer.means
    assert means["own"] == pytest.approx(np.mean([auc[task][task] for task in auc]))
    assert means["other"] == pytest.approx(
        np.mean([auc[a][b] for a in auc for b in transfer.tasks if a != b])
    )
    assert (means["own"] or 0) > 0.95 > 0.7 > (means["other"] or 1)


def test_prompts_of_one_task_or_of_none_do_not_transfer() -> None:
    for tasks in ((None,), ("maths",)):
        assert (
            train_verifier(trace(tasks=tasks), ORIGIN, VerifierSettings(features=("before",)))[
                1
            ].transfer
            is None
        )


def test_transfer_reaches_the_registry() -> None:
    logged: dict[str, float] = {}
    table = trace(tasks=("maths", "code"))
    verifier, report = train_verifier(
        table,
        ORIGIN,
        VerifierSettings(features=("before",)),
        log=lambda name, value, step: logged.update({name: value}),
    )
    assert report.transfer is not None
    assert (
        verifier.provenance.metrics["transfer_other_auc"]
        == report.transfer.means["other"]
        == logged["transfer_other_auc"]
    )
    assert {"gain", "prevalence", "baseline_auc"} <= verifier.provenance.metrics.keys()


def test_the_report_is_plain_json_and_a_readable_page(crossed: VerifierReport) -> None:
    plain = crossed.to_json()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert list(plain) == [
        "features",
        "label",
        "ratio",
        "temperature",
        "strength",
        "threshold",
        "validation_auc",
        "candidates",
        "rows",
        "prompts",
        "left_out",
        "test_trace",
        "test_rows",
        "test_prompts",
        "prevalence",
        "auc",
        "baseline_auc",
        "gain",
        "intervals",
        "eta_tp",
        "eta_fp",
        "eta_tp_ratio",
        "eta_fp_ratio",
        "brier",
        "calibration_error",
        "reliability",
        "roc",
        "baseline_roc",
        "kinds",
        "lambda_grid",
        "transfer",
    ]
    assert (
        plain["intervals"]["auc"] == list(crossed.metrics.intervals["auc"])
        if crossed.metrics.intervals
        else False
    )
    timed = crossed.model_copy(
        update={"cost": ScoreCost(score_us=20.0, draft_us=4000.0, share=0.005)}
    )
    assert timed.to_json() == {
        **plain,
        "cost": {"score_us": 20.0, "draft_us": 4000.0, "share": 0.005},
    }
    page = verifier_markdown(timed)
    assert "A score takes 20 µs, 0.5 % of a draft forward pass (4000 µs)." in page
    assert f"AUC {crossed.metrics.auc:.3f} [" in page
    lines = page.splitlines()
    (header,) = [line for line in lines if line.startswith("| trained on")]
    assert header == "| trained on | code (5) | maths (5) | new (5) | other (5) |"
    (maths,) = [line for line in lines if line.startswith("| maths (")]
    assert crossed.transfer is not None
    own = crossed.transfer.trained["maths"].auc["maths"]
    assert maths.split("|")[3].strip() == f"**{own:.3f}**"
    assert "left out: rare, too few prompts to learn from" in page
    assert [line for line in lines if line.startswith("| λ = 1.2 (this verifier)")]
    first_cells = {line.split("|")[1].strip() for line in lines if "|" in line}
    assert first_cells >= {
        "bare",
        "draft",
        "mixed",
        "target",
        "score = C",
        "all of them",
        "λ = 1.5",
    }


def scorer(width: int, features: tuple[str, ...]) -> Verifier:
    origin = Provenance(pair="tiny", fingerprint="f" * 64)
    size = width * sum(name != "scalars" for name in features) + 4 * ("scalars" in features)
    return Verifier(torch.zeros(size), 0.0, features, 0.5, 1.2, origin)


def test_a_score_and_the_draft_pass_are_timed_apart_and_the_cold_runs_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair, clock, seen, passes = llama_pair(slots=1), Clock(), list[int](), list[int]()
    monkeypatch.setattr(score_cost, "time", clock)

    def price(row: Forward, length: int) -> float:
        passes.append(length)
        return 0.04 if len(passes) <= 4 else 0.004  # the context, and three cold passes

    timed = pair_of(pair.models["target"], Priced(pair.models["draft"], clock, price))

    def score(row: Rows, token: int) -> float:
        assert row.hidden(0).shape == (32,)
        seen.append(token)
        clock.now += 0.02 if len(seen) <= 3 else 0.0005
        return 0.5

    for _ in range(2):  # the second time finds the one slot free again
        seen.clear()
        passes.clear()
        found = time_score(timed, score, repeats=5)
        assert len(seen) == 8
        assert (found.score_us, found.draft_us, found.share) == pytest.approx(
            (500.0, 4000.0, 0.125)
        )
    with raises_code("no_draft", pair.name):
        time_score(pair_of(pair.models["target"], None), score)


def test_the_score_of_a_verifier_can_be_timed() -> None:
    verifier = scorer(32, ("before", "after", "scalars"))
    found = time_score(
        llama_pair(slots=1), lambda row, token: verifier.score_drafted(row, row, token), repeats=5
    )
    assert min(found.score_us, found.draft_us) > 0
    assert found.share == pytest.approx(found.score_us / found.draft_us)


@pytest.mark.timed
def test_the_score_of_a_verifier_takes_little_time() -> None:
    verifier = scorer(32, ("before", "after", "scalars"))
    assert (
        time_score(
            llama_pair(slots=1), lambda row, token: verifier.score_drafted(row, row, token)
        ).score_us
        < 5_000
    )


def test_plots_are_png_files(crossed: VerifierReport, tmp_path: Path) -> None:
    paths = verifier_plots(crossed, tmp_path)
    assert [path.name for path in paths] == ["roc.png", "reliability.png", "roc_by_lambda.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    alone = crossed.model_copy(update={"lambda_grid": {"1": None}})
    assert [path.name for path in verifier_plots(alone, tmp_path)] == ["roc.png", "reliability.png"]
