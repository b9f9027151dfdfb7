"""Many requests, several in flight: order, room, and what an error leaves behind."""

from __future__ import annotations

import pytest

from draftwell.components.collect.decoding import decode_all, room
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import build_strategy
from tests.support.models.tiny import table_pair

REQUESTS = [([3, i], Sampling(max_tokens=3 + i)) for i in range(6)]


def test_requests_with_strategies_of_their_own_come_back_in_order():
    strategies = [build_strategy(name) for name in ("autoregressive", "vanilla_sd") * 3]
    done: list[int] = []
    together = decode_all(Engine(table_pair().models), REQUESTS, strategies, 3, done.append)
    assert together == decode_all(Engine(table_pair().models), REQUESTS, strategies, 1)
    assert [len(output) for output in together] == [3 + i for i in range(6)]
    assert done == [1, 2, 3, 4, 5, 6]


def test_the_first_error_ends_all_and_gives_the_slots_back():
    engine, calls = Engine({"target": table_pair(slots=2).models["target"]}), 0
    target = engine.models["target"]
    forward = target.forward

    def failing(rows):
        nonlocal calls
        calls += 1
        # the second request's prompt, fed with others or alone
        if any(row.tokens[-1] == 1 for row in rows):
            raise ValueError("a bad request")
        return forward(rows)

    target.forward = failing
    with pytest.raises(ValueError, match="a bad request"):
        decode_all(engine, REQUESTS, [build_strategy("autoregressive")] * 6, 2)
    assert not engine.jobs
    assert calls < 6, "nothing continues after an error"
    slots = [target.open(), target.open()]  # both are free again
    assert len(set(slots)) == 2


def test_room_is_what_the_models_have():
    engine = Engine(table_pair(slots=4).models)
    assert (room(engine, 3), room(engine, 9)) == (3, 4)
