"""The notebook and the pair of one's own: run as they stand, on tiny models."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

import draftwell
from draftwell.components.card.card import Speed
from draftwell.components.prompts.sources import load_prompts
from draftwell.registry.pairs import PairSpec
from tests.support.paths import REPO
from tests.support.server.bundles import make_bundle, save_tiny_models

EXAMPLES = REPO / "examples"
NOTEBOOK: dict[str, Any] = json.loads((EXAMPLES / "quickstart.ipynb").read_text(encoding="utf-8"))
CELLS = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
CARD = draftwell.Card(
    version="1",
    made=datetime(2026, 1, 1, tzinfo=UTC),
    seconds=1,
    pair="smollm2-135m",
    target="target",
    draft="draft",
    engine="draftwell",
    machine="a machine",
    dtype="float32",
    fits="it fits",
    memory_bytes=None,
    strategy="vanilla_sd",
    parameters={},
    speed=Speed(name="choice", ratio=1.5, low=1.25, high=1.75, prompts=16),
    exact=True,
    verdict="passed",
    next_command="draftwell serve",
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the bundle that the notebook names; of tiny models, and with a card."""
    models = save_tiny_models(tmp_path / "models")
    folder = tmp_path / "dist" / "smollm2-135m" / "1-cpu"
    folder.mkdir(parents=True)
    (folder / "card.json").write_text(CARD.model_dump_json())
    (folder / "card.html").write_text("<p>a card</p>")
    make_bundle(folder, models, "vanilla_sd", {"num_speculative_tokens": 2}, chat=True)
    (folder.parent / "current").symlink_to(folder.name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_notebook_runs_from_top_to_bottom(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {}
    for number, cell in enumerate(CELLS):
        exec(compile(cell, f"cell {number}", "exec"), names)
    shown = capsys.readouterr().out
    assert "release 1, decodes with vanilla_sd" in shown
    assert "1.50 times as fast (1.25 to 1.75, 16 prompts)" in shown
    assert "autoregressive: 1.00 times as fast as plain decoding" in shown
    assert names["report"].prompts == 3


def test_the_notebook_holds_no_outputs_and_is_short() -> None:
    cells = NOTEBOOK["cells"]
    assert len(cells) <= 14
    for cell in cells:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 4)


def test_the_own_pair_is_measured_on_its_prompts(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(EXAMPLES / "own_pair", tmp_path / "own_pair"))
    spec = PairSpec.model_validate(yaml.safe_load((folder / "pair.yaml").read_text()))
    for role, models in save_tiny_models(tmp_path / "models").items():
        (folder / role).symlink_to(models)
    assert set(spec.sources()) == {"target", "draft"}
    report = draftwell.bench(
        folder / "pair.yaml", folder / "prompts.jsonl", limit=2, max_tokens=6, device="cpu"
    )
    assert (report.pair, report.prompts, report.left_out) == ("own-pair", 2, {})


def test_the_own_prompts_are_enough_for_every_step_of_a_tuning() -> None:
    """Fewer would leave a step less than it asks for, and a choice that rests on nothing."""
    from draftwell.flows.settings import PipelineSettings

    rows = load_prompts(EXAMPLES / "own_pair" / "prompts.jsonl")
    settings = PipelineSettings(device="cpu")
    wanted = ("collect_prompts", "calibrate_prompts", "tune_prompts", "bench_prompts")
    assert len({row.prompt for row in rows}) == len(rows)
    assert len(rows) >= sum(getattr(settings, name) for name in wanted)
    assert all(row.task for row in rows)
