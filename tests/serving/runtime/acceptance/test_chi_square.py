"""Sampled outputs against the target's own law, on the default pair; and that the test would see a
strategy that errs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from draftwell.serving.runtime.acceptance import exact
from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.engine import decisions
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import build_strategy
from tests.support.models.chi_square import p_value
from tests.support.models.default_pair import WHOLE, default_pair, strategy_of
from tests.support.models.enumeration import true_law
from tests.support.models.resources import table_pair, table_resources

SAMPLES, BATCH = 400, 8
SAMPLES_OF_THE_PAIR = SAMPLES if WHOLE else 200
BOUND = 1e-3
"""Smallest p-value that passes; the seeds are fixed, so that a pass stays a pass."""
TEXT = "The cat sat on the mat. The cat sat on the chair. The cat sat on the"
COUNTED, EMITTED = 3, 5
"""The first token comes from the prompt's forward; drafts reach the second and third only where
more may follow."""


def first_tokens(
    engine: Engine, prompt: list[int], build: Any, samples: int = SAMPLES, **settings: Any
) -> list[tuple[int, ...]]:
    """The first tokens of seeded requests, eight at once."""
    outputs = []
    for start in range(0, samples, BATCH):
        jobs = [
            engine.submit(prompt, Sampling(max_tokens=EMITTED, seed=seed, **settings), build())
            for seed in range(start, start + BATCH)
        ]
        engine.run(jobs)
        outputs += [tuple(job.output[:COUNTED]) for job in jobs]
    return outputs


def law_of(model: Any, prompt: list[int], sampling: Sampling) -> dict[tuple[int, ...], float]:
    """The target's law of the first tokens, from one forward for every beginning."""
    law = {(): 1.0}
    for _ in range(COUNTED):
        longer = {}
        for text, mass in law.items():
            slot = model.open()
            row = model.forward([Forward("target", slot, (*prompt, *text), prefill=True)])[0].under(
                sampling
            )
            model.close(slot)
            longer |= {
                (*text, token): mass * p for token, p in enumerate(row.probs(0).tolist()) if p > 0
            }
        law = longer
    return law


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vanilla_sd", "spide", "prompt_lookup", "duo_decoding"])
def test_samples_of_the_default_pair_follow_the_targets_law(name):
    pair = default_pair()
    prompt = pair.encode(TEXT)
    settings = {"temperature": 1.0, "top_k": 3}
    law = law_of(pair.models["target"], prompt, Sampling(**settings))
    samples = first_tokens(
        pair.engine(), prompt, lambda: strategy_of(pair, name), SAMPLES_OF_THE_PAIR, **settings
    )
    found = p_value(samples, law)
    print(
        f"{name}: p = {found:.3f} over {len(law)} outcomes, {len(samples)} samples, "
        f"commonest {Counter(samples).most_common(2)}"
    )
    assert found > BOUND


def table_p_value(name: str) -> float:
    models = table_pair(vocab=4, noise=1.5)
    sampling = Sampling(max_tokens=COUNTED, temperature=1.0)
    samples = first_tokens(
        Engine(models),
        [0, 1],
        lambda: build_strategy(name, {}, table_resources(4)),
        temperature=1.0,
    )
    return p_value(samples, true_law(models["target"], [0, 1], sampling))


@pytest.mark.parametrize("name", ["vanilla_sd", "spide", "prompt_lookup", "duo_decoding"])
def test_what_is_right_passes(name):
    assert table_p_value(name) > BOUND


def test_a_correction_from_the_target_instead_of_the_residual_is_seen(monkeypatch):
    monkeypatch.setattr(decisions, "remainders", lambda laws, asked: laws)
    assert table_p_value("vanilla_sd") < BOUND


def test_a_draft_probability_of_another_temperature_is_seen(monkeypatch):
    """q reported from a distribution other than the one that was sampled: here the raw one of a
    request at temperature .5."""
    models = table_pair(vocab=4, noise=1.5, sharpness=0.7)
    settings = {"temperature": 0.5}
    keeps = exact.keeps

    def raw_q(draft, i, target, rng):
        q = float(draft.rows[i].raw(0)[draft.tokens[i]])
        return rng.test.accepts((yield from target.chance(i, draft.tokens[i])), q)

    law = true_law(models["target"], [0, 1], Sampling(max_tokens=COUNTED, **settings))
    for rule, right in ((keeps, True), (raw_q, False)):
        monkeypatch.setattr(exact, "keeps", rule)
        samples = first_tokens(
            Engine(models), [0, 1], lambda: build_strategy("vanilla_sd"), **settings
        )
        assert (p_value(samples, law) > BOUND) is right


def test_the_p_value_is_that_of_the_tables():
    """Chi-square of 1 degree of freedom: 3.84 at 5 %; of 2: 13.82 at 0.1 %."""
    one = p_value(["a"] * 598 + ["b"] * 402, {"a": 0.55, "b": 0.45})
    assert one == pytest.approx(0.00228, rel=0.02), "(598 − 550)²/550 + (402 − 450)²/450 = 9.309"
    assert p_value(["c"], {"a": 1.0}) == 0.0, "impossible outcomes are no matter of chance"
