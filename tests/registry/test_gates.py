"""Thresholds and baselines are data, read strictly."""

from pathlib import Path

import pytest

import draftwell.registry.gates
from draftwell.components.gate.baseline_counts import CountsReport
from draftwell.registry.gates import load_baseline, load_gates
from draftwell.serving.bundle.verdict import Thresholds
from tests.support.errors import raises_code

COUNTS = '{"target_calls": 10, "judged": 20, "accepted": 12, "output_digest": "ab"}'
BASELINE = (
    '{"pair": "tiny", "fingerprint": "f", "prompts_digest": "d", "prompts": 2, "max_tokens": 8, '
    '"strategies": {"vanilla_sd": %s}}'
)


def test_the_projects_thresholds() -> None:
    gates = load_gates()
    assert gates.max_regression == 0.05
    assert gates.min_speedup_lower_bound == 1.0
    assert gates.lossless_identical is True
    assert gates.min_quality_ratio == 0.9


def test_every_threshold_is_explained() -> None:
    lines = (Path(draftwell.registry.gates.__file__).parent / "gates.yaml").read_text().splitlines()
    for name in Thresholds.model_fields:
        at = next(i for i, line in enumerate(lines) if line.startswith(f"{name}:"))
        assert lines[at - 1].startswith("# ")


@pytest.mark.parametrize(
    ("change", "code", "named"),
    [
        (
            ("max_regression: 0.05", "max_regression: 0.05\nmax_regresion: 1"),
            "unknown_key",
            "max_regresion",
        ),
        (
            ("max_regression: 0.05", "max_regression: 5"),
            "bad_value",
            "max_regression: Input should be less than 1",
        ),
        (("max_regression: 0.05", "max_regression: ["), "bad_yaml", "line "),
        (("max_regression: 0.05", ""), "bad_value", "max_regression: Field required"),
    ],
)
def test_a_wrong_threshold_is_one_line(
    tmp_path: Path, change: tuple[str, str], code: str, named: str
) -> None:
    text = (Path(draftwell.registry.gates.__file__).parent / "gates.yaml").read_text()
    (tmp_path / "gates.yaml").write_text(text.replace(*change))
    with raises_code(code, named) as caught:
        load_gates(tmp_path / "gates.yaml")
    assert str(tmp_path / "gates.yaml") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_of_ones_own_changes_some_thresholds_and_has_its_baselines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    projects = load_gates()
    monkeypatch.setenv("DRAFTWELL_GATES", str(tmp_path / "gates"))
    with raises_code("no_gates_folder", "DRAFTWELL_GATES"):
        load_gates()
    (tmp_path / "gates" / "baselines").mkdir(parents=True)
    assert load_gates() == projects
    (tmp_path / "gates" / "gates.yaml").write_text("max_regression: 0.2\nmin_quality_ratio: 0.95\n")
    assert load_gates() == projects.model_copy(
        update={"max_regression": 0.2, "min_quality_ratio": 0.95}
    )
    assert load_baseline("smollm2-135m", CountsReport) is None, "the project's is for its checkout"
    (tmp_path / "gates" / "baselines" / "tiny.json").write_text(BASELINE % COUNTS)
    assert load_baseline("tiny", CountsReport) is not None
    (tmp_path / "gates" / "gates.yaml").write_text("max_regresion: 0.2\n")
    with raises_code("unknown_key", "max_regresion"):
        load_gates()
    (tmp_path / "gates" / "gates.yaml").write_text("max_regression: 5\n")
    with raises_code("bad_value", "max_regression"):
        load_gates()


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with raises_code("unreadable_file", "nowhere.yaml", "No such file"):
        load_gates(tmp_path / "nowhere.yaml")


def test_a_baseline_where_one_was_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draftwell.registry.gates, "HERE", tmp_path)
    (tmp_path / "baselines").mkdir()
    assert load_baseline("tiny", CountsReport) is None
    (tmp_path / "baselines" / "tiny.json").write_text(BASELINE % COUNTS)
    found = load_baseline("tiny", CountsReport)
    assert found is not None
    assert found.strategies["vanilla_sd"].accepted == 12
    (tmp_path / "baselines" / "tiny.json").write_text(BASELINE % "{}")
    with raises_code("bad_value", "strategies.vanilla_sd.target_calls: Field required"):
        load_baseline("tiny", CountsReport)
    (tmp_path / "baselines" / "tiny.json").write_text("{")
    with raises_code("bad_json", "tiny.json"):
        load_baseline("tiny", CountsReport)


def test_recorded_baselines_can_be_read() -> None:
    for path in (Path(draftwell.registry.gates.__file__).parent / "baselines").glob("*.json"):
        found = load_baseline(path.stem, CountsReport)
        assert found is not None
        assert found.pair == path.stem
