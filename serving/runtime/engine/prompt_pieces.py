"""Long prompts in pieces: a step of the engine reads only so many tokens of prompts, fewer while
requests are being answered.

Otherwise those would wait for the whole prompt between two of their tokens, and others that come
meanwhile for their first one. Pieces are an affair of the engine alone: a strategy is sent the rows
of its forward pass once the last of its tokens is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from draftwell.serving.runtime.commands import Forward
from draftwell.serving.runtime.engine.piece_sizes import SMALLEST
from draftwell.serving.runtime.engine.task import Task

LEAST = 16
"""Tokens up to which a forward pass is not cut: early in a text one of sixteen takes less than two
of eight (2.2 to 2.7 and 1.7 to 2.1 times one token's). The price: the last tokens of a long prompt
are read whatever the budget, and late in a prompt of thousands sixteen take longer than they may
(beside seven rows after 3,400 tokens 75 ms, eight 48), once a prompt. Measured in docs/log.md."""
LONGEST = 1024
"""Tokens of the longest piece where there is a limit at all; longer ones are read no faster, and
hold up a request that comes meanwhile."""
MOST_ROWS = 128
"""Rows of prompts that are rated, in one step: each is as wide as the vocabulary, and a step's are
in memory together."""


def next_piece(command: Forward, read: int, room: int | None) -> Forward:
    """What to run of a forward pass of which `read` tokens were run before.

    The rows that are wanted come from the last piece, so that one holds all of them, but where a
    prompt is rated: there each piece has its own. A tree is never cut.

    Args:
        room: tokens that may be run; None: all.

    >>> command = Forward("target", 0, (5, 6, 7, 8), keep=2)
    >>> next_piece(command, 1, 1).tokens, next_piece(command, 2, 1).tokens
    ((6,), (7, 8))
    >>> rated = next_piece(Forward("target", 0, (5, 6, 7, 8), keep=4, rates=True), 1, 2)
    >>> rated.tokens, rated.keep
    ((6, 7), 2)
    """
    left = len(command.tokens) - read
    if command.rates:
        count = left if room is None else min(room, left)
        return replace(part(command, read, read + count), keep=count)
    if room is None or left <= max(room, command.keep) or command.parents is not None:
        return command if read == 0 else part(command, read, len(command.tokens))
    count = min(room, left - command.keep)
    return replace(part(command, read, read + count), keep=1, steps=1)


def part(command: Forward, start: int, end: int) -> Forward:
    """The same with a part of its tokens."""
    features = None if command.features is None else command.features[start:end]
    return replace(command, tokens=command.tokens[start:end], features=features)


def reads_prompt(task: Task) -> bool:
    """Whether what is left of a task's forward pass is long: more than `LEAST` tokens, and no long
    draft that is verified.

    A prompt that is rated always is: it is read in short parts, whose ends together would be half
    of it.
    """
    assert task.waiting is not None
    return task.waiting.rates or tokens_left(task) > max(LEAST, task.waiting.keep)


def tokens_left(task: Task) -> int:
    """Tokens of a task's forward pass that are still to be run."""
    assert task.waiting is not None
    return len(task.waiting.tokens) - task.read


def share_room(
    tasks: Iterable[Task],
    room: int | None,
    turn: int = 0,
    weigh: Callable[[Task], float] | None = None,
) -> list[Task]:
    """Set every task's next piece, and return those that have one now.

    Forward passes of at most `LEAST` tokens, or that keep the rows of all their tokens, as in
    decoding, always run; longer ones, and those of prompts that are rated, share `room`
    (`split_room`). The latter also share `MOST_ROWS`, and take turns at it.

    Args:
        tasks: in their order of arrival.
        room: tokens of prompts that the batch may read; None: all.
        turn: how many steps have read prompts before.
        weigh: how much of the room the next token of a prompt takes, 1 or more; None: all are
            `alike`.
    """
    tasks = list(tasks)
    long = [task for task in tasks if reads_prompt(task)]
    given: dict[Task, int | None] = dict.fromkeys(long)
    if room is not None:
        given.update(
            zip(
                long,
                split_room(
                    [tokens_left(task) for task in long],
                    room,
                    turn,
                    list(map(weigh or alike, long)),
                ),
                strict=True,
            )
        )
    given |= share_rows(
        [task for task in tasks if task.waiting is not None and task.waiting.rates], given, turn
    )
    chosen = []
    for task in tasks:
        assert task.waiting is not None
        share = given.get(task)
        if share == 0:
            continue
        task.piece = next_piece(task.waiting, task.read, share)
        chosen.append(task)
    return chosen


def alike(_: Task) -> float:
    """Every token takes as much of the room as every other."""
    return 1.0


def share_rows(
    rated: Sequence[Task], given: Mapping[Task, int | None], turn: int
) -> dict[Task, int]:
    """How many tokens to read of prompts that are rated, so that a step has at most `MOST_ROWS`
    rows of them.

    Args:
        given: what each may read at most, None: all of it, as where it has no entry.
        turn: as in `share_room`.
    """
    shares: dict[Task, int] = {}
    first, left = turn % max(1, len(rated)), MOST_ROWS
    for task in (*rated[first:], *rated[:first]):
        most = given.get(task)
        share = min(left, tokens_left(task) if most is None else most)
        shares[task] = share if share >= min(SMALLEST, tokens_left(task)) else 0
        left -= shares[task]
    return shares


def room_of_oldest(room: int, turn: int, oldest_weight: float, shortest_weight: float) -> float:
    """The oldest prompt's part of the room beside a shorter one: half, or, where the room is too
    small for two pieces, all of it every second step."""
    if room >= SMALLEST * (oldest_weight + shortest_weight):
        return min(room / 2, room - SMALLEST * shortest_weight)
    return 0 if turn % 2 else room


def split_room(
    left: Sequence[int], room: int, turn: int = 0, weights: Sequence[float] = ()
) -> list[int]:
    """How many tokens of each prompt to read.

    The shortest come first, so that nobody waits behind a long prompt; the oldest gets half the
    room meanwhile, so that it never stops. No piece is smaller than `SMALLEST`, unless it is the
    last, or longer than `LONGEST`; where the room is too small for two, the oldest and the shortest
    take turns.

    Args:
        left: tokens that are left of each prompt, the oldest first.
        turn: how many steps have read prompts before.
        weights: how much of the room a token of each takes, 1 or more; () for 1 each.

    >>> split_room([4000, 30, 20], 100), split_room([4000, 300, 200], 64), split_room([4000], 64)
    ([50, 30, 20], [32, 0, 32], [64])
    >>> (
    ...     split_room([4000, 300], 8, turn=1),
    ...     split_room([4000, 300], 8, turn=2),
    ...     split_room([4000, 300], 4096),
    ... )
    ([0, 8], [8, 0], [1024, 300])
    >>> (
    ...     split_room([900], 60, weights=[3.0]),
    ...     split_room([900], 9, weights=[3.0]),
    ...     split_room([900, 30], 100, weights=[3.0, 1.0]),
    ... )
    ([20], [8], [23, 30])
    >>> split_room([900, 300], 60, weights=[1.0, 5.0])  # the shortest has a piece, too
    [20, 8]
    """
    left, weights = [min(LONGEST, one) for one in left], weights or [1.0] * len(left)
    given = [0] * len(left)
    if not left or room < SMALLEST:
        return given
    shortest = sorted(range(1, len(left)), key=left.__getitem__)
    first: float = room
    if shortest:
        first = room_of_oldest(room, turn, weights[0], weights[shortest[0]])
    free = float(room)

    def give(i: int, least: int, most: float) -> None:
        """As many further tokens of a prompt as `most` of the room is for, but `least`."""
        nonlocal free
        more = min(left[i] - given[i], max(least, int(most / weights[i])))
        given[i], free = given[i] + more, free - more * weights[i]

    if first:
        give(0, SMALLEST, first)
    for i in shortest:
        if int(free / weights[i]) < min(SMALLEST, left[i]) and any(given):
            break
        give(i, SMALLEST, free)
    if given[0] or free >= SMALLEST * weights[0]:
        give(0, 0, free)
    return given
