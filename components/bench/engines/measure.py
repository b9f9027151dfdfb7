"""Measuring an engine's settings beside its plain decoding: group by group in turn, so that a slow
minute of the machine hits both.

A group is what is sent at once: one prompt, or as many as a load level has. At a level above one
the prompts are taken round and round, until there are enough groups; a prompt that comes again is
no further one (`Beside.prompts`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from random import Random
from typing import Annotated, Any

from pydantic import Field

from draftwell.components.bench.interleaved import WARMUP_TOKENS, Progress, take_turns
from draftwell.components.engines.port import Acceptance, Answer, Decoded, Engine, Message
from draftwell.components.results import Results
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.engine.engine import Engine as OwnEngine
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.strategies import Strategy
from draftwell.serving.server.scheduling.draft_limits import draft_limit, limit_drafts

Group = Sequence[Sequence[int]]
"""Token ids of the prompts that are sent at once."""


class Side(Message):
    """What one engine did with all groups, in their order."""

    seconds: list[float]
    tokens: list[int]
    """New ones of each group."""
    acceptance: Acceptance = Acceptance()
    each_seconds: list[list[float]] = Field(default_factory=list)
    """Of each group the seconds of each prompt."""
    first_token_seconds: list[list[float]] = Field(default_factory=list)
    """Of each group the seconds to the first token of each prompt."""
    each_drafts: list[list[Annotated[tuple[int, int], Field(strict=False)]]] = Field(
        default_factory=list
    )
    """Of each group the rounds that drafted and the tokens that they kept, of each prompt."""
    outputs: list[list[list[int]]] = Field(default_factory=list)
    """Of each group the new tokens of each prompt."""

    def followed_by(self, rest: Side) -> Side:
        """These groups, and those of `rest`."""
        both = {
            name: getattr(self, name) + getattr(rest, name)
            for name in type(self).model_fields
            if name != "acceptance"
        }
        return Side(acceptance=Acceptance.total([self.acceptance, rest.acceptance]), **both)


class Beside(Message):
    """An engine's settings and its plain decoding, on the same groups."""

    at_once: int = Field(ge=1, description="prompts in a group")
    plain: Side
    other: Side
    prompts: list[list[int]] = Field(default_factory=list)
    """Of each group the places of its prompts among the distinct ones; empty: each group is a
    prompt of its own."""
    apart: bool = False
    """Whether they decoded one after the other, in two halves, instead of in turn."""


def measurements_of(
    subject: Any, file: Path | None = None, *, fresh: bool = False
) -> Results[Beside]:
    """The store of what was measured by name; `subject` is all that it depends on."""
    return Results(file, subject, Beside, fresh=fresh)


def groups_of(
    prompts: Sequence[Sequence[int]], at_once: int, groups: int
) -> list[list[Sequence[int]]]:
    """Groups of `at_once` prompts: every prompt once where one is sent at a time, else `groups` of
    them, round and round.

    Each round after the first has an order of its own, always the same one: else of twelve prompts,
    16 at once, only three groups would differ.

    >>> groups_of([[1], [2], [3]], 2, 3)[0], len(groups_of([[1], [2], [3]], 1, 8))
    ([[1], [2]], 3)
    """
    if not prompts:
        raise DraftwellError(
            "there are no prompts to measure on: name a file that holds some", code="no_prompts"
        )
    if at_once == 1:
        return [[ids] for ids in prompts]
    endless = rounds(prompts)
    return [list(islice(endless, at_once)) for _ in range(groups)]


def rounds(prompts: Sequence[Sequence[int]]) -> Iterator[Sequence[int]]:
    """All prompts, and again all of them in other orders, without end."""
    yield from prompts
    for seed in count():
        yield from Random(seed).sample(prompts, len(prompts))


def measure_beside(
    plain: Engine,
    other: Engine,
    groups: Sequence[Group],
    sampling: Sampling,
    *,
    progress: Progress | None = None,
    apart: bool = False,
) -> Beside:
    """Let two engines that were started decode every group, one after the other, in an order that
    alternates.

    Args:
        groups: all of one size.
        sampling: of the first prompt of a group; each further prompt of it has the next seed.
        apart: take turns by halves of the groups, for engines that cannot run at once.
    Raises:
        DraftwellError: what the engines raise; groups of several sizes.
    """
    if len({len(group) for group in groups}) != 1:
        raise DraftwellError(
            "groups that are compared have one size: split the prompts into equal ones",
            code="unequal_groups",
        )
    in_turn = decode_by_halves if apart else decode_in_turn
    one, two = in_turn(plain, other, groups, sampling, progress)
    return Beside(
        at_once=len(groups[0]),
        plain=side_of(one),
        other=side_of(two),
        prompts=places_of(groups),
        apart=apart,
    )


def joined(groups: Sequence[Group], first: Beside, rest: Beside) -> Beside:
    """What was measured in two parts, the one after the other, of `groups`."""
    return Beside(
        at_once=first.at_once,
        plain=first.plain.followed_by(rest.plain),
        other=first.other.followed_by(rest.other),
        prompts=places_of(groups),
    )


def warm_up(engine: Engine, group: Group, sampling: Sampling) -> None:
    """Let an engine decode a little, unmeasured."""
    engine.decode(group, replace(sampling, max_tokens=min(sampling.max_tokens, WARMUP_TOKENS)))


def decode_in_turn(
    plain: Engine,
    other: Engine,
    groups: Sequence[Group],
    sampling: Sampling,
    progress: Progress | None,
) -> tuple[list[Decoded], list[Decoded]]:
    """Both decode a group before the next one comes."""
    for engine in (plain, other):
        warm_up(engine, groups[0], sampling)
    turns = {
        engine.label: lambda group, engine=engine: engine.decode(groups[group], sampling)
        for engine in (plain, other)
    }
    one, two = take_turns(turns, len(groups), progress=progress).values()
    return [decoded for [decoded] in one], [decoded for [decoded] in two]


def decode_by_halves(
    plain: Engine,
    other: Engine,
    groups: Sequence[Group],
    sampling: Sampling,
    progress: Progress | None,
) -> tuple[list[Decoded], list[Decoded]]:
    """The first half by plain decoding, all by the other one, and the second half by plain
    decoding: what changes steadily over the time hits both alike, and each starts once or twice."""
    half = middle_of(groups)
    parts = [(plain, groups[:half]), (other, groups[:half])]
    parts += [(other, groups[half:]), (plain, groups[half:])]
    found: list[list[Decoded]] = []
    for place, (engine, part) in enumerate(parts):
        if place != 2:  # where the other one goes on
            warm_up(engine, groups[0], sampling)
        found.append([])
        for group in part:
            found[-1].append(engine.decode(group, sampling))
            if progress:
                done = sum(map(len, found))
                progress(done, 2 * len(groups), engine.label)
    first, two, more, last = found
    return first + last, two + more


def middle_of(groups: Sequence[Any]) -> int:
    """How many groups the first half has."""
    return (len(groups) + 1) // 2


def places_of(groups: Sequence[Group]) -> list[list[int]]:
    """Of each prompt its place among the distinct ones, in the order in which they come first.

    >>> places_of([[[5], [6]], [[7], [5]]])
    [[0, 1], [2, 0]]
    """
    places: dict[tuple[int, ...], int] = {}
    return [[places.setdefault(tuple(ids), len(places)) for ids in group] for group in groups]


def side_of(decoded: Sequence[Decoded]) -> Side:
    """The groups of one engine."""
    return Side(
        seconds=[one.seconds for one in decoded],
        tokens=[one.tokens for one in decoded],
        acceptance=Acceptance.total(answer.acceptance for one in decoded for answer in one.answers),
        each_seconds=[[answer.seconds for answer in one.answers] for one in decoded],
        first_token_seconds=[
            [answer.first_token_seconds for answer in one.answers] for one in decoded
        ],
        each_drafts=[
            [(answer.acceptance.rounds, answer.acceptance.accepted) for answer in one.answers]
            for one in decoded
        ],
        outputs=[[answer.tokens for answer in one.answers] for one in decoded],
    )


def decode_together(
    engine: OwnEngine, strategy: Strategy, group: Group, sampling: Sampling
) -> Decoded:
    """Decode prompts that are sent at once, their drafts limited as a server limits them."""
    started = time.perf_counter()
    limit = draft_limit(strategy, sampling, len(group))
    jobs = [
        engine.submit(ids, replace(sampling, seed=sampling.seed + place), strategy, limit)
        for place, ids in enumerate(group)
    ]
    seconds = [0.0] * len(jobs)
    try:
        while running := [job for job in jobs if not job.finished]:
            limit_drafts(engine, [(job.session, strategy) for job in running])
            engine.step()
            for place, job in enumerate(jobs):
                if job.error:
                    raise job.error
                if job.finished and not seconds[place]:
                    seconds[place] = time.perf_counter() - started
    finally:
        for job in jobs:
            engine.cancel(job)
        engine.close()
    answers = [
        Answer(
            tokens=job.output,
            seconds=taken,
            first_token_seconds=job.session.stats.first_token_seconds,
        )
        for job, taken in zip(jobs, seconds, strict=True)
    ]
    return Decoded(seconds=time.perf_counter() - started, answers=answers)
