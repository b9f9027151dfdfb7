"""Prompts that begin alike are read once: what another slot of the same owner holds is copied
instead of being read again.

The answers to one prompt, for example, come together: the first reads the prompt, the others wait
and copy it, so that each of them reads only the prompt's last token. Like pieces of prompts
(prompt_pieces.py) this is an affair of the engine alone: a strategy is sent the rows of its forward
pass, whoever read its first tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from draftwell.serving.runtime.engine.task import Task
from draftwell.serving.runtime.model import Model
from draftwell.serving.runtime.models.slots import Slots
from draftwell.serving.runtime.session.lane import Lane
from draftwell.serving.runtime.session.session import Session

log = logging.getLogger(__name__)

LEAST_COPIED = 8
"""Tokens from which on a copy is worth the trouble."""


class Request(Protocol):
    """What is asked of a job here."""

    session: Session
    task: Task


def lane_of(job: Request, task: Task) -> Lane:
    """The lane that a task's forward pass reads into."""
    assert task.waiting is not None
    return job.session.lanes[task.waiting.model]


def begins(task: Task) -> bool:
    """Whether a task waits for its request's first forward pass on a model."""
    return task.waiting is not None and task.waiting.prefill and task.waiting.parents is None


def waits_for_another(job: Request, task: Task, jobs: Sequence[Request]) -> bool:
    """Whether a request of the same owner is about to read the same prompt on the same model, or
    has begun to, and more of it can be copied then than now.

    Once the first has read the prompt nobody waits any more, so that all others copy it and read
    its last token in one step.

    Args:
        jobs: all that run, in their order of arrival: of several that have not begun the first does
            not wait.
    """
    if not begins(task) or task.read or task.flying:
        return False
    lane, earlier = lane_of(job, task), True
    most = min(lane.prompt_length, most_copied(lane, task))
    if lane.text.owner is None or most - lane.length < LEAST_COPIED:
        return False
    then = 0  # how much of it there will be
    for other in jobs:
        if other is job:
            earlier = False
            continue
        if other.session.owner != job.session.owner or not same_prompt(job, other):
            continue
        for leaf in other.task.leaves():
            if begins(leaf) and (earlier or leaf.read or leaf.flying):
                theirs = lane_of(other, leaf)
                if theirs.model is lane.model and theirs.text.owner == lane.text.owner:
                    assert leaf.waiting is not None
                    then = max(then, theirs.length + len(leaf.waiting.tokens))
        if then >= most:
            break
    then = min(then, most)
    return then - lane.length >= LEAST_COPIED and then - longest_held(lane, task)[1] >= LEAST_COPIED


def same_prompt(job: Request, other: Request) -> bool:
    """Whether two requests have the same prompt; every two that wait are compared in every step, so
    the prompts are not read for it."""
    one, two = job.session.text, other.session.text
    return one.prompt_length == two.prompt_length and one.prompt_digest == two.prompt_digest


def most_copied(lane: Lane, task: Task) -> int:
    """Tokens that a task's lane may hold before its forward pass: all but those whose rows are
    wanted."""
    assert task.waiting is not None
    return lane.length + len(task.waiting.tokens) - task.waiting.keep


def longest_held(lane: Lane, task: Task) -> tuple[int, int]:
    """The slot of the same owner that holds most of what a task's forward pass leaves in its lane,
    and how many tokens these are."""
    assert task.waiting is not None
    slots: Slots = lane.model.slots
    return slots.texts.longest(
        lane.text.owner, [*lane.text.tokens[: lane.length], *task.waiting.tokens]
    )


def copy_prompt(job: Request, task: Task) -> None:
    """Copy what another slot holds of the beginning of a task's forward pass, which then counts as
    run."""
    if not begins(task) or task.read:
        return
    lane = lane_of(job, task)
    if lane.text.owner is None:
        return
    model: Model = lane.model
    held = lane.length
    source, common = longest_held(lane, task)
    common = min(common, most_copied(lane, task))
    if common - held < LEAST_COPIED:
        return
    try:
        model.fork(source, lane.slot, common, held)
    except Exception as error:  # if the device has failed, the next forward pass says so
        model.rollback(lane.slot, held)  # what was copied lies after the slot's end
        log.warning("a prompt could not be copied and is read again", exc_info=error)
        return
    task.read = common - held
    if lane.role == "target":
        lane.stats.cached_tokens += task.read
        lane.stats.target_tokens -= task.read
