"""`draftwell tune` on two tiny models in folders: from conversations to a card that is kept with a
release and served by its bundle. Slow: it trains, tunes and judges, as the command does."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftwell.registry.releases import find_release
from draftwell.registry.store import Store
from tests.support.loop.thresholds import ANY_PREDICTION, ANY_SPEED
from tests.support.own_models import sharegpt

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet_prefect")]


@pytest.fixture
def tune(
    run: Any, pair_file: Path, own_stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Runs the command on copies of the tiny pair's models."""
    for name, role in (("big", "target"), ("small", "draft")):
        shutil.copytree(pair_file.parent / role, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DRAFTWELL_MODELS", str(tmp_path / "models"))
    (tmp_path / "gates").mkdir()
    (tmp_path / "gates" / "gates.yaml").write_text(json.dumps(ANY_SPEED | ANY_PREDICTION))
    monkeypatch.setenv("DRAFTWELL_GATES", str(tmp_path / "gates"))
    prompts = sharegpt(tmp_path / "chats.json", 40)
    few = "--set trials=6 --set sampled_temperature=0 --set max_tokens=24"
    words = f"tune --target big --prompts {prompts} --device cpu --minutes 1 --json {few}"
    return lambda *more: run(words, *more)


def begun(done: Any) -> list[str]:
    """The steps that a run announced."""
    return [line.partition(" ")[2] for line in done.stderr.splitlines() if line[1:3] == "/7"]


def test_two_folders_and_forty_conversations_become_a_card(
    tune: Callable[..., Any], own_stores: Path, tmp_path: Path
) -> None:
    done = tune("--draft small")
    assert done.exit_code == 0, (done.output, done.exception)
    card = json.loads(done.stdout)
    assert (card["pair"], card["verdict"], card["release"]) == ("big", "passed", 1)
    assert card["tried"]
    assert card["next_command"] == "draftwell serve --pair big"
    confirming = re.search(r"(\d+) to confirm with", done.stderr)
    assert confirming is not None
    assert int(confirming[1]) >= 16
    bundle = Path(card["bundle"])
    served = json.loads((bundle / "card.json").read_text())
    assert {**served, "bundle": None} == {**card, "bundle": None}
    kept = find_release(Store(), "big", "cpu", "champion")
    assert Store().read_file(kept.published, "card/card.html")

    again = tune("--draft small")
    assert again.exit_code == 0, (again.output, again.exception)
    second = json.loads(again.stdout)
    assert (second["pair"], second["verdict"]) == ("big", "passed")
    assert begun(again) == begun(done)
    traces = own_stores / "draftwell" / "pairs" / "big" / "bfloat16" / "traces"
    was = {file.name: file.stat().st_mtime_ns for file in traces.glob("shard-*")}
    assert was, "collected texts stay"
    fresh = tune("--draft small --fresh")
    assert fresh.exit_code == 0, (fresh.output, fresh.exception)
    assert {file.name: file.stat().st_mtime_ns for file in traces.glob("shard-*")} != was


def test_a_target_alone_is_tuned_among_what_needs_no_draft(
    tune: Callable[..., Any], own_stores: Path
) -> None:
    done = tune()
    assert done.exit_code == 0, (done.output, done.exception)
    card = json.loads(done.stdout)
    assert (card["draft"], card["verdict"], card["exact"]) == (None, "passed", True)
    # The card has room for some of them, by their speeds; the evidence has all.
    (evidence,) = (own_stores / "draftwell" / "pairs" / "big").rglob("tuning.json")
    names = {figure["strategy"] for figure in json.loads(evidence.read_text())["measured"]}
    assert "prompt_lookup" in names
    assert not names & {"vanilla_sd", "spide", "pearl"}
