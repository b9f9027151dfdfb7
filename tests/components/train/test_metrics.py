"""Metrics of a verifier: AUCs and their intervals, by prefix kind, and the report."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pytest
from hypothesis import given, strategies as st
from sklearn.metrics import roc_auc_score

from draftwell.components.train.examples import Examples, VerifierLabel
from draftwell.components.train.metrics import intervals, ranking, reliability_bins, weighted_auc
from draftwell.components.train.report.plots import verifier_plots
from draftwell.components.train.report.verifier_page import verifier_markdown
from draftwell.components.train.reports import VerifierReport
from draftwell.components.train.settings import VerifierSettings
from draftwell.components.train.verifier import train_verifier
from tests.support.loop.verifier_trace import ORIGIN, trace


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


def examples(
    label: np.ndarray,
    confidence: np.ndarray,
    prompt: np.ndarray,
    accepted: np.ndarray | None = None,
) -> Examples:
    return Examples(
        {},
        np.where(label, 1.0, 2.0).astype(np.float32),
        confidence.astype(np.float32),
        np.char.add("p", prompt.astype(str)),
        accepted=accepted,
    )


def test_a_ranking_has_its_interval_around_it_and_none_where_nothing_can_be_said() -> None:
    label, score, confidence, prompt = some()
    found = ranking(examples(label, confidence, prompt), score, VerifierLabel())
    assert (found.test_prompts, found.test_rows) == (12, 600)
    assert found.auc > found.baseline_auc + 0.1
    assert found.gain == found.auc - found.baseline_auc
    for name in ("auc", "baseline_auc", "prevalence", "gain"):
        low, high = found.intervals[name]
        assert low < getattr(found, name) < high
    assert found.intervals["gain"][0] > 0
    alone = ranking(examples(label, confidence, np.zeros(600, int)), score, VerifierLabel())
    assert (alone.auc, alone.intervals) == (found.auc, None)
    one_class = ranking(examples(np.ones(600, bool), confidence, prompt), score, VerifierLabel())
    nothing = (one_class.auc, one_class.gain, one_class.intervals)
    assert (one_class.prevalence, *nothing) == (1.0, None, None, None)


def test_reliability_bins_hold_every_row_once() -> None:
    bins = reliability_bins(np.array([False, True, True, True]), np.array([0.0, 0.05, 0.95, 1.0]))
    assert [(b.count, b.observed) for b in bins] == [(2, 0.5), (2, 1.0)]
    (soft,) = reliability_bins(np.array([0.25, 0.5]), np.array([0.31, 0.33]))
    assert (soft.observed, soft.score) == (0.375, pytest.approx(0.32))


def test_figures_by_prefix_kind_are_those_of_its_rows() -> None:
    learnt, other = trace(), trace(rows=1200, prompts=8, name="q", seed=1)
    settings = VerifierSettings(features=("before",))
    report = train_verifier(learnt, ORIGIN, settings, test=other)[1].metrics
    assert list(report.kinds) == ["bare", "draft", "mixed", "target"]
    assert sum(found.test_rows for found in report.kinds.values()) == report.test_rows == 1200
    mixed = other.filter(pc.equal(other.column("kind"), "mixed"))
    alone = train_verifier(learnt, ORIGIN, settings, test=mixed)[1].metrics
    assert report.kinds["mixed"] == alone.kinds["mixed"]
    assert report.kinds["mixed"].auc == alone.auc


@pytest.fixture(scope="module")
def report() -> VerifierReport:
    return train_verifier(trace(), ORIGIN, VerifierSettings(features=("before",)))[1]


def test_the_report_is_plain_json_and_a_readable_page(report: VerifierReport) -> None:
    plain = report.to_json()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain["auc"] == report.metrics.auc, "metrics are at the top"
    page = verifier_markdown(report)
    assert f"AUC {report.metrics.auc:.3f} [" in page
    assert "| λ = 1.2 (this verifier)" in page
    first_cells = {line.split("|")[1].strip() for line in page.splitlines() if "|" in line}
    assert first_cells >= {"bare", "draft", "mixed", "target", "λ = 1.5"}


def test_plots_are_png_files(report: VerifierReport, tmp_path: Path) -> None:
    paths = verifier_plots(report, tmp_path)
    assert [path.name for path in paths] == ["roc.png", "reliability.png", "roc_by_lambda.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    alone = report.model_copy(update={"lambda_grid": {"1": None}})
    assert [path.name for path in verifier_plots(alone, tmp_path)] == ["roc.png", "reliability.png"]
