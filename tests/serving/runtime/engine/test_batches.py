"""Eight requests at once give what each gives alone, on tables and on networks, for every
strategy."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.models.transformers_model import TransformersModel
from draftwell.serving.runtime.pair import over_slots
from draftwell.serving.runtime.strategies import STRATEGIES, build_strategy
from tests.support.cases import in_turn
from tests.support.models.eight_requests import outputs, requests
from tests.support.models.heads import random_eagle3
from tests.support.models.resources import NEEDED, random_datastore, table_pair, table_resources
from tests.support.models.tiny import VOCAB, llama, near
from tests.support.models.variants import VARIANTS

LOSSLESS = [name for name, strategy in STRATEGIES.items() if strategy.lossless]
LOSSY = [
    (name, NEEDED.get(name, {})) for name, strategy in STRATEGIES.items() if not strategy.lossless
]
HIDDEN = 32


@pytest.mark.parametrize(
    ("name", "parameters", "temperature"), in_turn([*VARIANTS, *LOSSY], [1.0, 0.0]), ids=str
)
def test_tables(name, parameters, temperature):
    engine = Engine(table_pair(vocab=8))
    wanted = requests(8, temperature)

    def build() -> Any:
        return build_strategy(name, parameters, table_resources(8))

    assert outputs(engine, build, wanted, together=True) == outputs(
        engine, build, wanted, together=False
    )
    assert {len(model.slots._free) for model in engine.models.values()} == {8}


@pytest.mark.parametrize(("name", "parameters"), VARIANTS, ids=str)
def test_tables_with_requests_that_alter_their_logits_beside_others(name, parameters):
    """Every second request has a repetition penalty, tokens before which it may not stop, and a
    least probability."""
    engine = Engine(table_pair(vocab=8))
    wanted = [
        (
            prompt,
            replace(
                sampling,
                repetition_penalty=1.5,
                min_tokens=5,
                min_p=0.05,
                stop_token_ids=frozenset({2}),
            )
            if i % 2
            else sampling,
        )
        for i, (prompt, sampling) in enumerate(requests(8, 1.0))
    ]

    def build() -> Any:
        return build_strategy(name, parameters, table_resources(8))

    alone = outputs(engine, build, wanted, together=False)
    assert outputs(engine, build, wanted, together=True) == alone
    assert any(2 in output and output.index(2) == len(output) - 1 >= 5 for output in alone[1::2]), (
        "one has stopped, later than it might"
    )


@pytest.mark.parametrize("name", ["vanilla_sd", "svip", "sprinter", "csd"])
def test_the_target_runs_once_for_all_however_long_they_draft(name, monkeypatch):
    """Eight requests with drafts of different lengths need as many target forwards as the one that
    needs most of them."""
    engine = Engine(table_pair(vocab=8))
    target = engine.models["target"]
    forwards = []
    original = target.forward
    monkeypatch.setattr(
        target, "forward", lambda rows: forwards.append(len(rows)) or original(rows)
    )
    jobs = [
        engine.submit(
            prompt, sampling, build_strategy(name, NEEDED.get(name, {}), table_resources(8))
        )
        for prompt, sampling in requests(8, 1.0)
    ]
    engine.run(jobs)
    prefills = 1
    assert len({job.session.stats.drafted for job in jobs}) > 1
    assert len(forwards) == prefills + max(job.session.stats.target_calls for job in jobs)
    assert forwards[0] == 8


@functools.cache
def networks(adapter: Any) -> dict[str, Any]:
    target = near(llama(2), 0.0)
    return {
        role: adapter(module, slots=8)
        for role, module in (
            ("target", target),
            ("draft", near(target, 0.06)),
            ("qualifier", near(target, 0.03, seed=2)),
        )
    }


BOTH = ("vanilla_sd", "spide", "duo_decoding")
"""A serial, an overlapping and a branching strategy: these run over the library's own layers in the
quick tests too."""
ADAPTED = [
    *in_turn([(name, over_slots) for name in LOSSLESS], [0.0, 1.0]),
    *in_turn([(name, TransformersModel) for name in BOTH], [0.0, 1.0], start=1),
    *[
        pytest.param(name, TransformersModel, temperature, marks=[pytest.mark.slow])
        for name in LOSSLESS
        if name not in BOTH
        for temperature in (0.0, 1.0)
    ],
]


@pytest.mark.parametrize(("name", "adapter", "temperature"), ADAPTED)
def test_random_llamas_in_float32(name, adapter, temperature):
    engine = Engine(networks(adapter))
    wanted = requests(VOCAB, temperature)

    _, head = random_eagle3(near(llama(2), 0.0), VOCAB - 4)
    resources = table_resources(HIDDEN, datastore=random_datastore(VOCAB), eagle3_head=head)

    def build() -> Any:
        return build_strategy(name, NEEDED.get(name, {}), resources)

    assert outputs(engine, build, wanted, together=True) == outputs(
        engine, build, wanted, together=False
    )
