"""Drift over time: every check is remembered once, and drawn."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from PIL import Image

from draftwell.components.drift import history
from draftwell.components.drift.history import drift_over_time, read_history, remember
from draftwell.components.drift.schema import DriftReport
from tests.support.loop.drift_traffic import compared, rows

NOON = datetime.datetime(2026, 11, 30, 12, tzinfo=datetime.UTC)
DAY = datetime.timedelta(days=1)


@pytest.fixture(scope="module")
def reports() -> list[DriftReport]:
    """Of steady traffic, and of traffic that drifted."""
    return [compared(rows(1), rows(2)), compared(rows(1), rows(2, sure=-1.5, kept=0.5))]


def test_each_report_is_remembered_once_with_its_shares(
    reports: list[DriftReport], tmp_path: Path
) -> None:
    file = tmp_path / "report" / "drift_history.json"
    for day, report in enumerate([reports[0], reports[0], reports[1], reports[0]]):
        remember(report, file, NOON + day * DAY)
    looks = read_history(file).looks
    assert [look.at for look in looks] == [NOON, NOON + 2 * DAY, NOON + 3 * DAY]
    assert [look.verdict for look in looks] == ["steady", "drift", "steady"]
    check = reports[1].checks[0]
    assert looks[1].shares[check.name] == pytest.approx(check.value / check.limit)
    assert max(looks[1].shares.values()) >= 1


def test_the_newest_are_kept(
    reports: list[DriftReport], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "MOST_LOOKS", 2)
    for day in range(5):
        remember(reports[day % 2], tmp_path / "history.json", NOON + day * DAY)
    looks = read_history(tmp_path / "history.json").looks
    assert [look.at for look in looks] == [NOON + 3 * DAY, NOON + 4 * DAY]


@pytest.mark.parametrize("content", ["{", '{"format": 2, "looks": []}', "[]"])
def test_what_is_no_history_begins_anew(
    reports: list[DriftReport], tmp_path: Path, content: str
) -> None:
    (tmp_path / "history.json").write_text(content)
    assert len(remember(reports[0], tmp_path / "history.json", NOON).looks) == 1
    assert len(read_history(tmp_path / "history.json").looks) == 1


def test_two_checks_are_a_picture(reports: list[DriftReport], tmp_path: Path) -> None:
    path, found = tmp_path / "over_time.png", tmp_path / "history.json"
    assert drift_over_time(remember(reports[0], found, NOON).looks, "tiny", path) is None
    assert not path.exists()
    looks = remember(reports[1], found, NOON + DAY).looks
    assert drift_over_time(looks, "tiny", path) == path
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        colours = {rgb for _, rgb in picture.convert("RGB").getcolors(1 << 24) or []}
    assert (0xC5, 0x5A, 0x11) in colours, "the drift is ringed"
    steady = [look.model_copy(update={"verdict": "steady"}) for look in looks]
    assert drift_over_time(steady[:1], "tiny", path) is None
