"""A shadow: the draft reads along with a request whose strategy has none, so that what it is served
can be watched (docs/drift.md).

Its forward passes are commands of the request like any others: they join the batches of requests
that draft, and no two threads ever enter a model at once. It drafts nothing and changes no text; of
the request's statistics only the time on the wall shows it. A shadow that fails only stops the
recording.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from draftwell.serving.errors import DraftwellError
from draftwell.serving.recording.recorder import PositionRecorder
from draftwell.serving.runtime.commands import SHADOW, Forward, Overlap, Step
from draftwell.serving.runtime.engine.engine import Job
from draftwell.serving.runtime.logits import Span
from draftwell.serving.runtime.model import Model
from draftwell.serving.runtime.session.lane import Lane
from draftwell.serving.runtime.session.stats import Stats

MOST_UNREAD = 8
"""Final tokens before the draft reads on. Fewer cost more forward passes; more hold more of the
target's logits, and are lost where a stop string ends the text."""


def read_along(job: Job, draft: Model, recorder: PositionRecorder) -> None:
    """Let a draft read what becomes final, for a recorder; call it before the engine's next step.

    Args:
        job: has just been submitted; its strategy uses no draft.
        draft: of the same vocabulary, with room for prompt and output; without a free slot nothing
            is recorded.
    """
    session = job.session
    try:
        slot = draft.open()
    except DraftwellError as error:
        recorder.give_up(error)
        return
    lane = Lane(SHADOW, draft, slot, session.sampling, Stats(), session.text.prompt_length)
    session.lanes[SHADOW] = lane  # closed with the others
    job.task.wrap(lambda steps, waiting: shadowed(steps, waiting, lane, session.text.ids, recorder))


def shadowed(
    steps: Step[None], waiting: Forward, lane: Lane, text: list[int], recorder: PositionRecorder
) -> Step[None]:
    """A request's own steps, which wait for a forward pass, with those of its shadow between
    them."""
    try:
        command: Any = waiting
        while True:
            result = yield command
            try:
                command = steps.send(result)
            except StopIteration:
                break
            passes = isinstance(command, Forward | Overlap)  # else a token is being drawn
            if passes and len(text) - lane.length >= MOST_UNREAD:  # the prompt, at first
                yield from read_unseen(lane, text, recorder)
        yield from read_unseen(lane, text, recorder)
    finally:
        steps.close()


def read_unseen(
    lane: Lane, text: list[int], recorder: PositionRecorder
) -> Generator[Forward, Span | Exception, None]:
    """Read what the draft has not seen of a text, and report to the recorder what it says after
    every token of the output."""
    unseen = tuple(text[lane.length :])
    if not unseen or recorder.stopped:
        return
    keep = min(len(unseen), len(text) - lane.prompt_length + 1)
    found = yield Forward(SHADOW, lane.slot, unseen, keep, lane.length == 0)
    if isinstance(found, Exception):
        recorder.give_up(found)
        return
    lane.length += len(unseen)
    recorder.saw("draft", list(text[: lane.length]), found, 1)
