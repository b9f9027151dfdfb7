"""What pairs and fixed prompts tell."""

from __future__ import annotations

import math

import numpy as np
import pytest

from draftwell.components.engines.port import Acceptance
from draftwell.components.watch.probes import ProbePrompt
from draftwell.components.watch.probing import (
    Versus,
    change_since,
    crossing,
    longer_prompts,
    pairs,
    tokens_of_round,
)
from draftwell.components.watch.report import probe_rows
from tests.support.watch.probes import probe


def measured(rng: np.random.Generator, crosses: float, n: int = 60) -> list[Versus]:
    """Seconds that cross at a load, with 5 % of noise on each side."""
    load = np.exp(rng.uniform(0, math.log(32), n))
    plain = 0.02 + 0.0005 * load
    slope = (0.02 + 0.0005 * crosses - 0.01) / crosses
    seconds = 0.01 + slope * load
    noise = np.exp(0.05 * rng.normal(size=(2, n)))
    rows = zip(range(n), load, seconds * noise[0], plain * noise[1], strict=True)
    return [Versus(*map(float, row)) for row in rows]


def test_the_interval_of_the_crossing_covers_it() -> None:
    rng = np.random.default_rng(0)
    found = [crossing(measured(rng, 12.0)) for _ in range(200)]
    covered = [c for c in found if c is not None and c.low <= 12.0 <= c.high]
    assert len(covered) >= 180
    assert np.median([c.load for c in covered]) == pytest.approx(12.0, rel=0.03)
    assert np.median([c.high / c.low for c in covered]) < 1.3


def test_speculation_that_never_pays_has_no_crossing() -> None:
    rows = [Versus(float(i), 1.0 + i, 0.03 + 0.001 * i, 0.02 + 0.0001 * i) for i in range(20)]
    assert crossing(rows) is None
    assert crossing(rows[:5]) is None
    turned = [row._replace(seconds=row.plain, plain=row.seconds) for row in rows]
    assert crossing(turned) is None, "nor has one that pays only above a load"


def test_a_crossing_by_one_measurement_has_no_upper_end() -> None:
    """Without that one all are of one load."""
    idle = [Versus(float(i), 1.0, 0.01 + 0.0001 * i, 0.02) for i in range(19)]
    assert crossing(idle) is None
    found = crossing([*idle, Versus(19.0, 32.0, 0.04, 0.03)])
    assert found is not None
    assert (found.low, found.high) == (1.0, math.inf)
    assert 1 < found.load < 32


def test_pairs_are_of_one_prompt_and_close_in_time() -> None:
    probes = [
        probe(0.0, "code-1", 2.5),
        probe(10.0, "code-1", 1.0, plain=True),
        probe(0.0, "chat-1", 2.5),
        probe(4000.0, "chat-1", 1.0, plain=True),
    ]
    assert [pair.at for pair in pairs(probes)] == [0.0]


def test_pairs_are_of_about_one_load() -> None:
    """An idle replica says nothing of an engine under load."""
    probes = [
        probe(0.0, "code-1", 2.5).model_copy(update={"at_once": 30.0}),
        probe(1.0, "code-1", 1.0, plain=True).model_copy(update={"at_once": 1.0}),
        probe(0.0, "chat-1", 2.5).model_copy(update={"at_once": 30.0}),
        probe(1.0, "chat-1", 1.0, plain=True).model_copy(update={"at_once": 20.0}),
    ]
    assert [pair.load for pair in pairs(probes)] == [25.0]


def test_the_newest_answer_is_shown_and_not_that_none_came() -> None:
    prompt = ProbePrompt("code-1", "code", (7,) * 200)
    for plain in (False, True):
        known = probe(0.0, "code-1", 2.5, plain=plain)
        none = prompt.unanswered(10.0, plain=plain, elsewhere=False)
        assert probe_rows([known, none]) == probe_rows([known])


def test_drafts_whose_rounds_were_not_counted_are_not_known() -> None:
    """llama.cpp's answers say none while others ask."""
    uncounted = Acceptance(drafted=60, accepted=27)
    found = probe(0.0, "code-1", 2.5).model_copy(update={"acceptance": uncounted})
    assert tokens_of_round(found) is None
    nothing = found.model_copy(update={"acceptance": Acceptance(rounds=4)})
    assert tokens_of_round(nothing) == 1.0


def test_fixed_prompts_are_compared_each_with_itself() -> None:
    # after: more of the easy prompt, which a mean over all probes takes for a rise
    before = [
        probe(t, name, x) for t in (0, 1, 2) for name, x in (("code-1", 4.0), ("chat-1", 2.0))
    ]
    after = [probe(10 + t, "code-1", 3.6) for t in range(5)] + [probe(10, "chat-1", 1.8)]
    found = change_since([*before, *after], 5.0, tokens_of_round)
    assert found is not None
    assert found.mean == pytest.approx(math.log(0.9), abs=0.01)
    assert change_since(before, 5.0, tokens_of_round) is None


def test_longer_prompts_are_compared_within_their_kind() -> None:
    probes = [
        probe(0, "code-256", 4.0, tokens=256),
        probe(0, "code-4096", 2.0, tokens=4096),
        probe(0, "chat-256", 2.0, tokens=256),
        probe(0, "chat-4096", 1.0, tokens=4096),
    ]
    found = longer_prompts(probes, 256, 1024)
    assert found is not None
    assert found.mean == pytest.approx(math.log(0.5) / 2, abs=0.01)
    assert longer_prompts(probes[:2], 256, 1024) is None
