"""Rounds of the published loops as they look where drafts end with the budget. The loops themselves
overshoot it; ours do not."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.published.decoding import Decoded, Round

Cut = Callable[[Decoded, int, int], list[Round]]
"""(what a loop returned, budget, gamma or cap) → the rounds that make the first `budget` tokens."""


def cut_sd(decoded: Decoded, budget: int, gamma: int) -> list[Round]:
    """A draft leaves room for the token that is sampled after it."""
    rounds, room = [], budget
    for _, judged, accepted in decoded.rounds:
        if room <= 0:
            break
        length = min(gamma, room - 1)
        rounds.append(Round(length, min(judged, length), min(accepted, length)))
        room -= rounds[-1].accepted + 1
    return rounds


def cut_pearl(decoded: Decoded, budget: int, gamma: int) -> list[Round]:
    """Unverified tokens and those drafted meanwhile have room together; nothing is sampled where
    all are kept."""
    rounds, room, tested = [], budget, 1
    for _, judged, accepted in decoded.rounds:
        if room <= 0:
            break
        asked = min(tested, room)
        rounds.append(
            Round(
                min(gamma, room - min(tested - 1, room)), min(judged, asked), min(accepted, asked)
            )
        )
        room -= rounds[-1].accepted + (accepted < asked)
        tested = gamma if accepted == tested else 1
    return rounds


def cut_sprinter(decoded: Decoded, budget: int, _: int) -> list[Round]:
    """Trusted tokens that fill the budget are the last, and the target is not asked."""
    rounds, room = [], budget
    for drafted, _, accepted in decoded.rounds:
        if room <= 0:
            break
        if drafted > room:
            rounds.append(Round(room, room, room))
            break
        rounds.append(Round(drafted, drafted, accepted))
        room -= accepted + 1
    return rounds
