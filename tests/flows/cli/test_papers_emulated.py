"""`draftwell reproduce papers --set only=emulated`, on a tiny pair."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftwell.components.emulation import cells as emulated, run as emulation
from draftwell.components.emulation.result import read_run
from draftwell.flows.cli import papers_run
from tests.support.papers import paper_of


def test_emulated_cells_are_run_once_and_stand_on_their_page_and_the_summary(
    run: Callable[..., Any], pair_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a given stretch, and never void, whatever else runs here."""
    monkeypatch.setattr(emulation, "needed_stretch", lambda passes: 0.002)
    monkeypatch.setattr(emulation, "MOST_LATE", 1.0)
    cell = emulated.EmulatedCell(
        name="spide-c0.3",
        pair=str(pair_file),
        curve="c0.3",
        strategies=["vanilla_sd", "spide", "pearl"],
        alpha=0.9,
        tau=0.9,
        prompts=2,
        max_tokens=8,
    )
    for module in (emulated, papers_run):
        monkeypatch.setattr(module, "emulated_cells", lambda quick=False: [cell])
    paper = paper_of([], name="spide", cells={})
    paper.claims["fast"] = paper.claims["fast"].model_copy(
        update={"emulated": ["spide", "vanilla_sd"]}
    )
    monkeypatch.setattr(papers_run, "papers_named", lambda only=None: [paper])
    monkeypatch.setattr("draftwell.components.papers.page.gains", lambda *_: {})
    data = tmp_path / "data"
    data.mkdir()
    texts = "".join(f'{{"prompt": "{text}"}}\n' for text in ("ten men", "the inn", "an onion"))
    (data / "humaneval.jsonl").write_text(texts)
    command = (
        f"reproduce papers --data {data} --set only=emulated --set quick=true --set out={tmp_path}"
    )
    first = run(command, "--set dtype=float32")
    assert first.exit_code == 0, (first.output, first.exception)
    found = read_run(tmp_path / "quick" / "emulated" / "spide-c0.3.json")
    assert len(found.prompt_ids) == 2
    page = (tmp_path / "papers-quick" / "emulated.md").read_text()
    assert "| `spide-c0.3` | 0.3 | two |" in page
    assert f"spide over vanilla_sd | {found.ratios[0].ratio:.3f} [" in page
    summary = (tmp_path / "papers-quick.md").read_text()
    assert "| emulated: " in summary
    again = run(command, "--set dtype=float32")
    assert "spide-c0.3: measured before" in again.stderr
    refused = run(command, "--set cell=other")
    assert refused.exit_code == 2
    assert "no cell is named other: choose from spide-c0.3" in refused.stderr
