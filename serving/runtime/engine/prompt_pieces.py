"""Long prompts in pieces: while others are being answered, a step of the engine reads only so many tokens of prompts.

Otherwise all of them would wait for the whole prompt between two of their tokens. Pieces are an affair of the engine alone: a strategy
is sent the rows of its forward pass once the last of its tokens is read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from serving.runtime.commands import Forward
from serving.runtime.engine.task import Task

LEAST = 16
"""Tokens of the smallest piece that is worth a place in a batch."""


def next_piece(command: Forward, read: int, room: int | None) -> Forward:
    """What to run of a forward pass of which `read` tokens were run before.

    The rows that are wanted come from the last piece, so that one holds all of them.

    Args:
        room: tokens that may be run; None: all.

    >>> command = Forward("target", 0, (5, 6, 7, 8), keep=2)
    >>> next_piece(command, 1, 1).tokens, next_piece(command, 2, 1).tokens
    ((6,), (7, 8))
    """
    left = len(command.tokens) - read
    if room is None or left <= max(room, command.keep):
        return command if read == 0 else replace(command, tokens=command.tokens[read:])
    count = min(room, left - command.keep)
    return replace(command, tokens=command.tokens[read : read + count], keep=1, steps=1)


def share_room(tasks: Iterable[Task], room: int | None) -> list[Task]:
    """Set every task's next piece, and return those that have one now.

    Forward passes of at most `LEAST` tokens, or that keep the rows of all their tokens, as in decoding, always run; longer ones share
    `room` in their order.

    Args:
        room: tokens of prompts that the batch may read; None: all.
    """
    chosen = []
    for task in tasks:
        assert task.waiting is not None
        long = len(task.waiting.tokens) - task.read > max(LEAST, task.waiting.keep)  # not a long draft that is verified
        if long and room is not None and room < LEAST:
            continue
        task.piece = next_piece(task.waiting, task.read, room if long else None)
        if long and room is not None:
            room -= len(task.piece.tokens)
        chosen.append(task)
    return chosen
