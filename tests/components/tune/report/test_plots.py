"""What a tuning's plots show, read back from the axes they were drawn on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from draftwell.components.tune.evidence import TuningEvidence
from draftwell.components.tune.report import plots as tuning_plots
from draftwell.components.tune.report.plots import (
    LENGTHS,
    THRESHOLDS,
    lower_left,
    pareto_plot,
    speed_over,
)
from draftwell.components.tune.search.space import MEASURED, REPLAYED
from tests.support.loop import tuning_evidence
from tests.support.loop.tuning_evidence import CHOICE, trial

ALL = [
    "tuning_pareto.png",
    "tuning_speed_over_tau.png",
    "tuning_speed_over_gamma.png",
]
NOWHERE = Path("nowhere.png")
LOSSLESS, LOSSY = (
    TuningEvidence.read(one) for one in (tuning_evidence.LOSSLESS, tuning_evidence.LOSSY)
)


def lossless(**changed: Any) -> TuningEvidence:
    return TuningEvidence.read({**tuning_evidence.LOSSLESS, **changed})


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The axes of every plot, which are not written anywhere."""
    found: list[Any] = []

    @contextmanager
    def record(path: Path, title: str, x: str, y: str) -> Iterator[Any]:
        axes = Figure().add_subplot()
        axes.set(title=title, xlabel=x, ylabel=y)
        found.append(axes)
        yield axes

    monkeypatch.setattr(tuning_plots, "drawing", record)
    return found


def marks(axes: Any, label: str) -> list[tuple[float, float]]:
    """The places of the marks with a label."""
    (found,) = [collection for collection in axes.collections if collection.get_label() == label]
    return [(round(float(x), 6), round(float(y), 6)) for x, y in found.get_offsets()]


def line(axes: Any, label: str) -> list[tuple[float, float]]:
    """The points of the line with a label."""
    (found,) = [one for one in axes.lines if one.get_label() == label]
    return [(float(x), round(float(y), 6)) for x, y in zip(*found.get_data(), strict=True)]


def test_all_plots_are_written_and_those_of_an_older_tuning_go_away(tmp_path: Path) -> None:
    assert [path.name for path in tuning_plots.tuning_plots(LOSSLESS, tmp_path)] == ALL
    for name in ALL:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    (tmp_path / "roc.png").write_bytes(b"of the verifier")
    only = LOSSLESS.model_copy(update={"trials": [], "measured": []})
    assert tuning_plots.tuning_plots(only, tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["roc.png"]


def test_the_front_of_lossless_trials_is_of_time_and_target_calls(drawn: list[Any]) -> None:
    assert pareto_plot(LOSSLESS, NOWHERE)
    (axes,) = drawn
    assert "target calls" in axes.get_xlabel()
    assert line(axes, "front") == [(0.5, 29.0), (0.52, 20.0)]
    assert marks(axes, "vanilla_sd") == [(0.7, 30.0), (0.55, 28.0), (0.5, 29.0)]
    assert marks(axes, "spide parallel, measured") == [(0.5, 21.0)]
    # where it was measured, not where it was predicted
    assert marks(axes, "chosen") == [(0.5, 21.0)]


def test_with_lossy_trials_the_front_is_of_time_and_divergence(drawn: list[Any]) -> None:
    assert pareto_plot(LOSSY, NOWHERE)
    (axes,) = drawn
    assert "divergence" in axes.get_xlabel()
    assert line(axes, "front") == [(0.0, 20.0), (0.06, 18.0)]
    assert marks(axes, "csd, measured") == [(0.06, 18.0), (0.08, 19.0), (0.07, 17.5)]
    # nothing of it was predicted
    assert [one.get_label() for one in axes.collections].count("csd") == 0
    assert marks(axes, "chosen") == [(0.07, 17.5)]


def test_speed_over_tau_is_the_fastest_prediction_of_each_value_and_the_choice_as_measured(
    drawn: list[Any],
) -> None:
    assert speed_over(LOSSLESS, THRESHOLDS, "tau", NOWHERE)
    (axes,) = drawn
    # not 1000 / 24, with max_draft = 4
    assert line(axes, "spide parallel (tau), predicted") == [
        (0.4, 50.0),
        (0.6, round(1000 / 22, 6)),
    ]
    assert line(axes, "spide (tau), predicted") == [
        (0.4, round(1000 / 27, 6)),
        (0.6, round(1000 / 26, 6)),
    ]
    assert marks(axes, "chosen") == [(0.4, round(1000 / 21, 6))]
    assert line(axes, "autoregressive, measured")[0][1] == round(1000 / 33, 6)


def test_measured_speeds_have_the_interval_of_their_speedup(drawn: list[Any]) -> None:
    assert speed_over(LOSSLESS, THRESHOLDS, "tau", NOWHERE)
    (bars,) = [
        container
        for container in drawn[0].containers
        if container.get_label() == "spide parallel (tau), measured"
    ]
    (segment,) = bars.lines[2][0].get_segments()
    base = 1000 / 33.0
    assert np.allclose(segment[:, 1], [(1.5714 - 0.05) * base, (1.5714 + 0.07) * base], atol=0.01)


def test_a_value_that_is_no_number_has_no_place_and_one_value_is_no_curve(drawn: list[Any]) -> None:
    assert speed_over(LOSSLESS, LENGTHS, "gamma", NOWHERE)
    (axes,) = drawn
    assert line(axes, "vanilla_sd (num_speculative_tokens), predicted") == [
        (1.0, round(1000 / 30, 6)),
        (2.0, round(1000 / 28, 6)),
        (3.0, round(1000 / 29, 6)),
    ]
    assert not [one for one in axes.lines if "pearl" in str(one.get_label())]  # None and 4
    assert (
        speed_over(
            lossless(
                trials=[trial("svip", 20.0, 0.5, threshold=0.3)],
                measured=[],
                rungs=[],
                confirmation={},
            ),
            THRESHOLDS,
            "tau",
            NOWHERE,
        )
        is None
    )


def test_every_searched_parameter_is_drawn_or_left_out_by_name() -> None:
    """Else a new strategy's is missing from the plots, silently."""
    searched = {name for space in (REPLAYED | MEASURED).values() for name in space}
    assert searched - {*THRESHOLDS, *LENGTHS} == {
        *("alpha", "drafter", "gate", "guess_tokens", "guesses", "heuristic", "max_branches"),
        *("max_depth", "passes"),
        *("max_matching_ngram_size", "max_sequences", "min_count", "num_draft_tokens"),
        *("overlap_tau", "parallel", "tau_qualifier", "top_k", "tree_tokens", "window"),
    }


def test_lower_left_against_brute_force() -> None:
    rng = np.random.default_rng(3)
    points = [(float(x), float(y)) for x, y in rng.integers(0, 6, (40, 2))]
    best = {p for p in points if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)}
    assert set(lower_left(points)) == best
    assert len(lower_left(points)) == len(best)


def test_the_choice_is_found_whatever_the_order_of_its_parameters(drawn: list[Any]) -> None:
    turned = {"strategy": "spide", "parameters": dict(reversed(CHOICE["parameters"].items()))}
    assert speed_over(lossless(choice=turned), THRESHOLDS, "tau", NOWHERE)
    assert marks(drawn[0], "chosen") == [(0.4, round(1000 / 21, 6))]
