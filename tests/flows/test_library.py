"""`draftwell.tune`: the whole loop from a program, to a card and a bundle that answers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import yaml

import draftwell
from draftwell.flows import library, loading
from draftwell.flows.orchestration import whole
from tests.support.errors import raises_code
from tests.support.loop.thresholds import ANY_PREDICTION, ANY_SPEED


@pytest.mark.slow  # the whole loop of a tiny pair: a minute
def test_a_tuning_ends_in_a_card_whose_bundle_answers(
    prefect_server: None,
    place: Path,
    pair_file: Path,
    prompts_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Judged by thresholds of one's own: how fast the tiny models are says nothing."""
    gates = place / "gates"
    gates.mkdir()
    (gates / "gates.yaml").write_text(yaml.safe_dump(ANY_SPEED | ANY_PREDICTION))
    monkeypatch.setenv("DRAFTWELL_GATES", str(gates))
    card = draftwell.tune(
        pair=pair_file,
        prompts=prompts_file,
        device="cpu",
        collect_prompts=8,
        max_tokens=16,
        calibrate_prompts=2,
        sampled_temperature=0.0,
        tune_prompts=2,
        trials=3,
        bench_prompts=2,
        threads=1,
    )
    assert isinstance(card, draftwell.Card)
    assert (card.pair, card.release, card.verdict) == ("tiny", 1, "passed")
    assert card.bundle is not None
    with draftwell.load(card.bundle) as model:
        assert (model.strategy, model.release) == (card.strategy, "1")
        assert model.generate("the man in the inn", max_tokens=8).tokens
        kept = draftwell.Card.model_validate(model.card)
    assert (kept.pair, kept.strategy, kept.speed) == (card.pair, card.strategy, card.speed)


def test_what_is_asked_for_reaches_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(whole, "tune_models", lambda settings, say: asked.append(settings))
    monkeypatch.setattr(whole, "refuse_mistakes", lambda settings: None)
    monkeypatch.setattr(loading, "_kept", {"the last pair": "its models"})
    draftwell.tune(Path("big"), "small", prompts="chats.json", minutes=5, bench_prompts=32)
    [settings] = asked
    named = settings.model_dump(exclude_defaults=True)
    assert named == {
        "target": "big",
        "draft": "small",
        "prompts": Path("chats.json"),
        "minutes": 5,
        "more": {"bench_prompts": 32},
    }
    assert loading._kept == {}, "what is loaded takes no memory from the next call"
    for mistake in ({"pair": "default"}, {"source": "drift"}):
        with raises_code("bad_tune_setting"):
            draftwell.tune("big", **mistake)


def test_without_the_pipeline_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        library, "find_spec", lambda name: None if name == "mlflow" else found(name)
    )
    with raises_code("missing_package", "pipeline"):
        draftwell.tune("big")
