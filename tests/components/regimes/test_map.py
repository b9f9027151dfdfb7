"""Points, pictures and the table of the regime map."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from PIL import Image

from draftwell.components.regimes import picture
from draftwell.components.regimes.page import rows
from draftwell.components.regimes.points import (
    LEFT_OUT,
    Point,
    our_points,
    published_points,
)
from draftwell.components.regimes.speedups import METHODS, Placement, sd
from tests.support.paths import REPO


def test_the_papers_pairs_name_their_tables() -> None:
    points = list(published_points())
    assert all(re.search(r"Table \d", point.source) for point in points)
    deepseek = next(point for point in points if point.name.startswith("DeepSeek"))
    assert deepseek.pair.c == pytest.approx(1 / 7)
    assert deepseek.pair.alpha == pytest.approx(0.951, abs=0.001)
    # c is solved so that the formula gives the paper's own speed at its γ
    csd = [point.pair for point in points if point.source.startswith("CSD")]
    assert [round(sd(pair), 1) for pair in csd] == [1.9, 1.9]
    assert {point.source.partition(",")[0].partition(":")[0] for point in points} == {
        *("SPIDE", "CSD", "DuoDecoding")
    }
    assert set(LEFT_OUT) == {"SPRINTER", "PyramidSD"}


def test_replays_of_our_pairs_agree_with_the_formulas() -> None:
    """Counts on real texts, whose tokens are not independent."""
    replayed = [point for point in our_points() if point.over_sd]
    assert len(replayed) >= 6
    for point in replayed:
        assert point.placement is Placement.OWN
        for name, speed in point.over_sd.items():
            expected = METHODS[name](point.pair, Placement.OWN) / sd(point.pair)
            assert speed == pytest.approx(expected, abs=0.08), point


def cell(folder: Path, name: str, strategies: dict, **more: object) -> None:
    data = {"cell": {"pair": "made", **more.pop("cell", {})}, "report": {"strategies": strategies}}  # type: ignore[dict-item]
    (folder / f"{name}.json").write_text(json.dumps(data | more))


def entry(strategy: str, speed: float, rate: float | None = None, **parameters: str) -> dict:
    return {
        "strategy": strategy,
        "parameters": parameters,
        "decode_tokens_per_second": speed,
        "acceptance_rate": rate,
    }


def test_a_cell_becomes_a_point_with_its_own_costs(tmp_path: Path) -> None:
    drafts = {
        "slow": entry("vanilla_sd", 1.0, 0.9),
        "fast": entry("vanilla_sd", 2.0, 0.7),
        "other": entry("vanilla_sd", 9.0, 0.2, drafter="qualifier"),
        "spide": entry("spide", 2.5),
        "serial": entry("spide", 8.0, parallel="false"),
    }
    cell(tmp_path, "a", drafts, costs={"t_draft": 0.1, "t_verify": {"1": 0.5, "8": 0.75}})
    cell(tmp_path, "b", drafts, cell={"replay": 7})
    cell(tmp_path, "c", {"plain": entry("autoregressive", 1.0)}, cell={"replay": 7})
    (tmp_path / "emulated.json").write_text(json.dumps({"rows": {}, "ratios": []}))
    timed, counted = our_points(tmp_path)
    assert (timed.pair, timed.placement) == ((0.2, 0.7, {1: 1.0, 8: 1.5}), Placement.IN_TURN)
    assert counted.pair.c == pytest.approx(1 / 7.25)
    assert counted.over_sd == {"SPIDE": 1.25}


def test_the_page_has_the_table_and_both_pictures() -> None:
    text = (REPO / "docs" / "choose.md").read_text(encoding="utf-8")
    found = rows()
    assert len(found) <= 8
    for row in found:
        assert f"| {' | '.join(row)} |" in text
    for name in picture.FILES.values():
        assert re.search(rf"!\[[^\]]+\]\(images/{name}\)", text)
        with Image.open(REPO / "docs" / "images" / name) as image:
            assert image.width >= 800


@pytest.mark.parametrize("placement", Placement)
def test_a_map_is_drawn_with_its_own_points(
    placement: Placement, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(picture, "GRID", 12)
    named: list[Point] = []

    def name_of(point: Point) -> str:
        named.append(point)
        return point.name

    monkeypatch.setattr(picture, "name_of", name_of)
    path = picture.draw_map(placement, list(published_points()), tmp_path / "map.png")
    with Image.open(path) as image:
        assert image.convert("RGB").getpixel((2, 2)) == (255, 255, 255)
    assert {point.placement for point in named} == {placement}
