"""Eight requests at once give what each gives alone, on tables and on networks, for every
strategy."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.models.transformers_model import TransformersModel
from draftwell.serving.runtime.pair import over_slots
from draftwell.serving.runtime.strategies import STRATEGIES, build_strategy
from tests.support.cases import in_turn, quick_only
from tests.support.models.eight_requests import check_together, requests
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
        for i, (prompt, sampling) in enumerate(requests(8, temperature))
    ]

    def build() -> Any:
        return build_strategy(name, parameters, table_resources(8))

    alone = check_together(engine, build, wanted)
    late = [output.index(2) == len(output) - 1 >= 5 for output in alone[1::2] if 2 in output]
    assert late
    assert all(late), "who stops does so later than it might"


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


ADAPTED = quick_only(
    product(LOSSLESS, (over_slots, TransformersModel), (0.0, 1.0)),
    # serial, overlapping and branching strategies, and those that read hidden states or trees
    ("vanilla_sd", over_slots, 1.0),
    ("spide", over_slots, 0.0),
    ("duo_decoding", over_slots, 1.0),
    ("eagle3", over_slots, 1.0),
    ("medusa", over_slots, 0.0),
    ("specdec_pp", over_slots, 0.0),
    ("swift", over_slots, 1.0),
    ("lookahead", over_slots, 0.0),
    ("vanilla_sd", TransformersModel, 0.0),
    ("spide", TransformersModel, 1.0),
    ("duo_decoding", TransformersModel, 0.0),
)


@pytest.mark.parametrize(("name", "adapter", "temperature"), ADAPTED)
def test_random_llamas_in_float32(name, adapter, temperature):
    engine = Engine(networks(adapter))
    wanted = requests(VOCAB, temperature)[:4]  # one of each kind

    _, head = random_eagle3(near(llama(2), 0.0), VOCAB - 4)
    resources = table_resources(HIDDEN, datastore=random_datastore(VOCAB), eagle3_head=head)

    def build() -> Any:
        return build_strategy(name, NEEDED.get(name, {}), resources)

    check_together(engine, build, wanted)
