"""A request ends and its slots are free, whatever fails on the way."""

from __future__ import annotations

import logging

import pytest

from draftwell.serving.runtime.commands import Forward, Overlap
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import build_strategy
from draftwell.serving.runtime.strategies.compose import compose
from tests.support.models.asking import submit
from tests.support.models.resources import table_pair


class CloseError(RuntimeError):
    """What a generator raises while it is closed."""


def clumsy(overlap: bool = False):
    """A strategy whose generators raise in their `finally`, as many of them as run at once."""

    def reading(lane, text):
        try:
            while True:
                yield from lane.read(text)
        finally:
            raise CloseError(lane.role)

    def steps(session):
        if overlap:
            yield Overlap(
                reading(session.draft, session.text.ids), reading(session.target, session.text.ids)
            )
        yield from reading(session.target, session.text.ids)

    return compose(steps, overlaps=overlap)


def free(engine: Engine) -> set[int]:
    return {len(model.slots._free) for model in engine.models.values()}


@pytest.mark.parametrize("overlap", [False, True])
def test_a_strategy_that_raises_while_it_is_closed_leaves_all_slots_free(overlap, caplog):
    engine = Engine(table_pair(vocab=5))
    job = engine.submit([1, 2], Sampling(), clumsy(overlap))
    other = submit(engine, [1, 2], 5, build_strategy("vanilla_sd"))
    engine.step()
    with caplog.at_level(logging.WARNING):
        engine.cancel(job)
    assert (job.finished, isinstance(job.error, CloseError)) == (True, True)
    assert "ended cleanly" in caplog.text
    engine.run([other])
    assert free(engine) == {8}
    assert engine.jobs == []


def test_both_sides_of_an_overlap_are_closed_though_the_first_raises():
    closed = []

    def side(lane, text):
        try:
            while True:
                yield from lane.read(text)
        finally:
            closed.append(lane.role)
            raise CloseError

    def steps(session):
        try:
            yield Overlap(
                side(session.draft, session.text.ids), side(session.target, session.text.ids)
            )
        finally:
            closed.append("whole")

    engine = Engine(table_pair(vocab=5))
    job = engine.submit([1], Sampling(), compose(steps, overlaps=True))
    engine.step()
    engine.cancel(job)
    assert set(closed) == {"draft", "target", "whole"}
    assert free(engine) == {8}


def test_an_error_is_the_requests_even_if_ending_it_fails_too(monkeypatch):
    """The first failure is what happened; that the times could not be read is its consequence."""

    def steps(session):
        yield from session.target.read(session.text.ids)
        raise ValueError("the strategy's own")

    def broken(marks):
        raise RuntimeError("no event can be read")

    monkeypatch.setattr("draftwell.serving.runtime.engine.engine.read_marks", broken)
    engine = Engine(table_pair(vocab=5))
    job = engine.submit([1], Sampling(), compose(steps))
    while not job.finished:
        engine.step()
    assert isinstance(job.error, ValueError)
    assert free(engine) == {8}


@pytest.mark.parametrize("broken", ["target", "draft"])
def test_a_model_that_cannot_close_a_slot_does_not_keep_the_others(monkeypatch, broken):
    models = table_pair(vocab=5)

    def fault(slot):
        raise RuntimeError("cache fault")

    monkeypatch.setattr(models[broken], "close", fault)
    engine = Engine(models)
    job = submit(engine, [1], 3, build_strategy("vanilla_sd"))
    while not job.finished:
        engine.step()
    assert "cache fault" in str(job.error)
    assert len(models["draft" if broken == "target" else "target"].slots._free) == 8


def test_commands_that_are_waiting_are_given_up_with_their_request():
    engine = Engine(table_pair(vocab=5))
    job = engine.submit([1], Sampling(), clumsy())
    assert isinstance(next(iter(job.task.leaves())).waiting, Forward)
    engine.cancel(job)
    engine.step()
    assert engine.jobs == []
