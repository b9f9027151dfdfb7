"""A draft or qualifier with a shorter context than the text needs: from where it has no room the
target decodes alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftwell.serving.errors import ContextTooLong
from draftwell.serving.runtime.custom_generate import draftwell_generate
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import STRATEGIES, build_strategy
from tests.support.cases import in_turn
from tests.support.errors import raises_code
from tests.support.models.enumeration import law_error
from tests.support.models.resources import NEEDED, decode, table_pair, table_resources
from tests.support.models.table_model import TableModel
from tests.support.models.tiny import llama, near
from tests.support.models.variants import VARIANTS

DRAFTING = [name for name, strategy in STRATEGIES.items() if len(strategy.roles) > 1]


def short(
    models: dict[str, Any], context: int, roles: tuple[str, ...] = ("draft", "qualifier")
) -> dict[str, Any]:
    """The same pair, some of whose models hold `context` positions; feeding them more is an
    error."""
    return {
        role: TableModel(model.table, max_context=context) if role in roles else model
        for role, model in models.items()
    }


@pytest.mark.parametrize(
    ("name", "parameters", "context"), in_turn(VARIANTS, [2, 3, 4, 5]), ids=str
)
def test_the_joint_law_is_the_targets_wherever_the_border_is(name, parameters, context):
    """Before the prompt's end, at it, and within the three tokens after it."""
    models, sampling = (
        short(table_pair(), context),
        Sampling(max_tokens=3, temperature=1.0, stop_token_ids=frozenset({2})),
    )

    assert (
        law_error(
            lambda: build_strategy(name, parameters, table_resources()), models, [0, 1, 0], sampling
        )
        < 1e-6
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("name", "role"),
    [(name, role) for name in DRAFTING for role in STRATEGIES[name].roles if role != "target"],
)
def test_a_text_crosses_the_border_in_its_middle(name, role, temperature):
    """Tokens are drafted before it; all after it are the target's, and no smaller model is asked
    any more."""
    models = short(table_pair(vocab=8), 30, (role,))
    engine = Engine(models)
    job = engine.submit([1, 2, 3], Sampling(max_tokens=60, temperature=temperature), usual(name))
    session, calls = job.session, (0, 0)
    while len(session.text.ids) < 30:
        engine.step()
        calls = session.stats.draft_calls, session.stats.qualifier_calls
    engine.run([job])
    assert len(job.output) == 60
    assert set(session.origins[:27]) & {"accepted", "rescued"}
    assert set(session.origins[27:]) == {"target"}
    assert (session.stats.draft_calls, session.stats.qualifier_calls) == calls
    if STRATEGIES[name].lossless and temperature == 0.0:
        assert job.output == decode(models, [1, 2, 3], "autoregressive", max_tokens=60).output
    assert {len(model.slots._free) for model in models.values()} == {8}


def usual(name: str) -> Any:
    return build_strategy(name, NEEDED.get(name, {}), table_resources(8))


def test_a_prompt_beyond_the_drafts_context_is_decoded_plainly():
    models = short(table_pair(vocab=8), 5)
    job = decode(models, [1, 2, 3, 4, 5, 6, 7], "vanilla_sd", max_tokens=9)
    assert (len(job.output), job.session.stats.draft_calls, job.session.stats.target_calls) == (
        9,
        0,
        8,
    )


def test_the_targets_context_is_still_a_limit():
    with raises_code("context_too_long", "target's context of 20", error=ContextTooLong):
        Engine(short(table_pair(vocab=8), 20, ("target",))).submit(
            [1] * 10, Sampling(max_tokens=11), build_strategy("vanilla_sd")
        )


def test_cores_are_joined_where_an_overlapping_strategy_has_no_room_left():
    models = short(table_pair(vocab=8), 12)
    engine = Engine(models)
    job = engine.submit(
        [1, 2, 3], Sampling(max_tokens=40), build_strategy("pearl", {"num_speculative_tokens": 2})
    )
    split = []
    while not job.finished:
        engine.step()
        split.append((len(job.session.text.ids) < 12, engine._workers is not None))
    assert (True, True) in split
    assert (False, False) in split


def test_a_real_draft_is_never_fed_beyond_the_positions_it_was_trained_for():
    """Learned tables of positions end there; `generate` knows of no limit but the target's."""
    target = llama.__wrapped__(2)
    draft = near(target, 0.05)
    draft.config.max_position_embeddings = 12
    prompt = torch.tensor([[3, 8, 5, 7]])
    asked: dict[str, Any] = {
        "max_new_tokens": 30,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    plain = target.generate(prompt, **asked)
    longest = []
    forward = draft.model.forward
    draft.model.forward = lambda *a, **k: (
        longest.append(int(k["position_ids"].max())),
        forward(*a, **k),
    )[1]
    assert torch.equal(
        target.generate(
            prompt, **asked, custom_generate=draftwell_generate("vanilla_sd", assistant_model=draft)
        ),
        plain,
    )
    assert 0 < max(longest) < 12
