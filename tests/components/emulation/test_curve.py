"""Curves of emulated devices: read, interpolated, refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftwell.components.emulation.curve import curve_of, find_curve, read_curves
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.commands import Forward
from tests.support.paths import REPO


def fields(**changes: Any) -> dict[str, Any]:
    return {"source": "a card", "target": {1: 1.0, 4: 2.0}, "draft": {1: 0.25}} | changes


def test_a_pass_takes_the_time_of_all_its_tokens() -> None:
    line, steps = curve_of("a", fields()), curve_of("b", fields(between="steps"))
    assert [line.at("target", tokens) for tokens in (1, 3, 7)] == pytest.approx([1.0, 5 / 3, 3.0])
    assert [steps.at("target", tokens) for tokens in (1, 2, 4, 7)] == [1.0, 2.0, 2.0, 2.0]
    rows = [Forward("target", 0, (1, 2, 3)), Forward("target", 1, (4,))]
    assert line.time_of("target", rows) == 2.0
    assert line.cost == 0.25
    assert curve_of("c", fields(draft=None)).time_of("draft", rows) is None


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"target": {1: 1.0, 2: 0.9}}, "curve_not_monotone"),
        ({"draft": {1: 0.2, 10: 0.3, 9: 0.4}}, "curve_not_monotone"),
        ({"target": {2: 1.0}}, "bad_curve"),
        ({"draft": {1: 0.0}}, "bad_curve"),
        ({"source": ""}, "bad_curve"),
        ({"colour": "red"}, "bad_curve"),
    ],
)
def test_a_curve_that_cannot_be_is_refused(
    changes: dict[str, Any], code: str, tmp_path: Path
) -> None:
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"own": fields(**changes)}))
    with pytest.raises(DraftwellError) as refused:
        find_curve(str(path))
    assert refused.value.code == code


def test_a_curve_is_found_by_its_name_or_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"own": fields()}))
    assert find_curve(str(path)) == curve_of("own", fields())
    assert find_curve("c0.1").cost == 0.1
    for wanted, text in (("unheard", ""), (str(path), "{}")):
        path.write_text(text)
        with pytest.raises(DraftwellError) as refused:
            find_curve(wanted)
        assert refused.value.code == "unknown_curve"
    path.write_text("[1]")
    with pytest.raises(DraftwellError) as refused:
        read_curves(path)
    assert refused.value.code == "bad_curve"


def test_the_projects_curves_hold_what_the_cards_measured() -> None:
    file = REPO / "docs/measured/padded-7b/csd-code.json"
    measured = json.loads(file.read_text())["costs"]
    curve = find_curve("h200-7b")
    assert curve.draft == {1: measured["t_draft"]}
    known = {int(tokens): seconds for tokens, seconds in measured["t_verify"].items()}
    for tokens, seconds in curve.target.items():
        assert seconds == pytest.approx(known[tokens], rel=0.005)
        assert seconds <= known[tokens]
