"""What strategy classes say about themselves to the tuner and the exporter, and the worked example of docs/add_a_strategy.md."""

from __future__ import annotations

import re
import types
from typing import Any

import pytest

from components.tune.search.space import MEASURED, REPLAYED, combinations
from serving.artifacts.hardware_profile import HardwareProfile
from serving.runtime.strategies import STRATEGIES, StrategyResources, build_strategy
from serving.runtime.strategies.search_space import Span
from tests.support.models.resources import ORIGIN
from tests.support.paths import REPO

PROFILE = HardwareProfile(1.0, {1: 10.0, 4: 11.0, 8: 12.0}, 0.1, ORIGIN)


def test_the_searched_strategies_and_their_order() -> None:
    """The order is that of trials where spaces are equally large: a new strategy goes where its study shall come."""
    assert list(REPLAYED) == ["vanilla_sd", "svip", "draft_verify", "adaedl", "hf_dynamic", "spide", "pearl", "specdec_pp", "prompt_lookup"]
    assert list(MEASURED) == ["sprinter", "duo_decoding", "csd", "fuzzy_sd", "mentored", "lossy_sd", "pyramid_assisted", "pyramid_fuzzy"]
    assert set(STRATEGIES) - set(REPLAYED) - set(MEASURED) == {"autoregressive"}, "plain decoding has nothing to tune"


SIZES = {"vanilla_sd": 12, "svip": 30, "draft_verify": 15, "adaedl": 15, "hf_dynamic": 28, "spide": 288, "pearl": 9, "specdec_pp": 27,
         "prompt_lookup": 16, "sprinter": 6, "duo_decoding": 2, "csd": 27, "fuzzy_sd": 12, "mentored": 12, "lossy_sd": 12,
         "pyramid_assisted": 40, "pyramid_fuzzy": 100}


@pytest.mark.parametrize("name", SIZES)
def test_the_number_of_configurations(name: str) -> None:
    assert len(combinations(name)) == SIZES[name]


@pytest.mark.parametrize("name", [*REPLAYED, *MEASURED])
def test_every_value_of_a_space_is_a_valid_config(name: str) -> None:
    for choice in combinations(name):
        strategy = build_strategy(name, dict(choice.parameters), StrategyResources({PROFILE.kind: PROFILE}))
        assert strategy.rollout_needed() >= 0
    for values in STRATEGIES[name].search_space.values():
        assert len(values.values if isinstance(values, Span) else values) > 1


def test_the_worked_example_of_the_guide_is_a_strategy() -> None:
    text = (REPO / "docs" / "add_a_strategy.md").read_text(encoding="utf-8")
    [source] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    module: Any = types.ModuleType("patient_sd")
    exec(compile(source, "patient_sd.py", "exec", dont_inherit=True), module.__dict__)
    cls = module.PatientSD
    assert (cls.name, cls.lossless, cls.replayable) == ("patient_sd", True, True)
    assert set(cls.search_space) <= set(cls.Config.model_fields)
    assert cls.speculation(cls.Config()).threshold == 0.3
