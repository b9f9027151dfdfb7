"""What a tuning and its card say of a device of its own for the draft."""

from __future__ import annotations

from typing import Any

import pytest

from draftwell.components.card.words import facts
from draftwell.components.formulas import expected_tokens
from draftwell.components.regimes.own_device import acceptance_in, own_device
from draftwell.components.regimes.speedups import Pair, Placement, sd, spide
from draftwell.components.tune.evidence import OwnDevice, Trial, TuningEvidence
from draftwell.components.tune.report.tables import facts as tuning_facts
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.runtime.strategies import PLAIN
from tests.support.cards import CARD, changed
from tests.support.models.resources import ORIGIN


def trial(alpha: float, gamma: int, seconds: float = 1.0, **values: Any) -> Trial:
    """SD's replay with rounds of this acceptance."""
    known = {
        "strategy": "vanilla_sd",
        "parameters": {"num_speculative_tokens": gamma},
        "predicted_seconds_per_token": seconds,
        "target_calls_per_token": 1 / expected_tokens(alpha, gamma),
    }
    return Trial(**known | values)


def profile(t_draft: float | None = 0.145, rest: float = 0.0) -> HardwareProfile:
    return HardwareProfile(t_draft, {1: 1.0, 32: 1.0}, rest, ORIGIN)


def test_acceptance_is_that_of_the_fastest_replay_of_sd() -> None:
    trials = [
        trial(0.5, 3, 2.0),
        trial(0.8, 5, 1.5),
        trial(0.1, 5, 1.0, exact=False),
        trial(0.1, 5, 1.0, source="measured"),
        trial(0.1, 5, 0.5, strategy="svip", parameters={}),
    ]
    assert acceptance_in(trials) == pytest.approx(0.8)
    assert acceptance_in(trials[2:]) is None
    assert acceptance_in([trial(1.0, 4)]) == 0.999
    assert acceptance_in([trial(0.0, 4)]) == 0.0


def test_a_pair_is_asked_with_its_own_cost_and_acceptance() -> None:
    found = own_device(profile(), [trial(0.9, 5)])
    assert found is not None
    assert (found.c, found.acceptance) == (0.145, pytest.approx(0.9))
    assert found.speedup == pytest.approx(spide(Pair(0.145, 0.9), Placement.OWN), rel=0.03)
    assert found.in_turn == pytest.approx(sd(Pair(0.145, 0.9)))
    # time outside passes is spent on every token of plain decoding, too
    slower = own_device(profile(rest=1.0), [trial(0.9, 5)])
    assert slower is not None
    assert slower.c == pytest.approx(0.0725)


def test_without_a_draft_or_a_replay_nothing_is_said() -> None:
    assert own_device(profile(None), [trial(0.9, 5)]) is None
    assert own_device(profile(), []) is None


def test_report_and_card_say_it_is_by_formula() -> None:
    found = OwnDevice(c=0.1, acceptance=0.9, method="SPIDE", speedup=4.21, in_turn=3.44)
    evidence = TuningEvidence(choice=PLAIN, own_device=found)
    again = TuningEvidence.read(evidence.to_json())
    assert again.own_device == found
    for words in (
        tuning_facts(again)["own device"],
        facts(changed(own_device=found.words))["formula"],
    ):
        assert "about 4.2 times plain decoding (SPIDE), in turn about 3.4" in words
        assert words.endswith("by formula, not measured")
    assert "formula" not in facts(CARD)
    assert "own device" not in tuning_facts(TuningEvidence(choice=PLAIN))
    even = found.model_copy(update={"in_turn": 4.23}).words
    assert "as much as in turn; by formula" in even
