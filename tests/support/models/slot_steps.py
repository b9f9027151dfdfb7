"""Random operations on a model's slots, each compared with a plain forward pass over the text that
the slot holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from draftwell.serving.errors import ContextTooLong, DraftwellError
from draftwell.serving.runtime.commands import Forward
from tests.support.models.tiny import VOCAB

COUNT, CONTEXT = 3, 16

TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6)

WHICH = st.integers(0, 5)

ACTIONS = {
    "open": st.tuples(st.just("open")),
    "close": st.tuples(st.just("close"), WHICH),
    "feed": st.tuples(
        st.just("feed"),
        st.lists(st.tuples(WHICH, TOKENS, st.integers(1, 6)), min_size=1, max_size=3),
    ),
    "back": st.tuples(st.just("back"), WHICH, st.integers(0, 8)),
    "fork": st.tuples(st.just("fork"), WHICH, WHICH, st.integers(0, 8)),
}

STEPS = st.lists(
    st.sampled_from(["feed"] * 6 + ["back", "back", "fork", "fork", "open", "close"]).flatmap(
        ACTIONS.__getitem__
    ),
    min_size=6,
    max_size=20,
).map(lambda steps: [("open",), ("open",), *steps])


def run_step(
    model: Any,
    plain: Any,
    held: dict[int, list[int]],
    branches: set[int],
    action: str,
    arguments: list[Any],
) -> None:
    slots = sorted(held)
    if action == "open":
        if len(held) - len(branches) == COUNT:
            with pytest.raises(DraftwellError, match="in use"):
                model.open()
        else:
            held[model.open()] = []
    elif not slots:
        return
    elif action == "close":
        slot = slots[arguments[0] % len(slots)]
        model.close(slot)
        branches.discard(slot)
        del held[slot]
    elif action == "back":
        slot = slots[arguments[0] % len(slots)]
        if arguments[1] > len(held[slot]):
            with pytest.raises(ValueError, match="roll"):
                model.rollback(slot, arguments[1])
        else:
            model.rollback(slot, arguments[1])
            del held[slot][arguments[1] :]
    elif action == "fork":
        fork(model, held, branches, slots[arguments[0] % len(slots)], *arguments[1:])
    else:
        feed(
            model,
            plain,
            held,
            {slots[which % len(slots)]: (tokens, keep) for which, tokens, keep in arguments[0]},
        )


def fork(
    model: Any, held: dict[int, list[int]], branches: set[int], source: int, which: int, length: int
) -> None:
    """Into a branch that is open, or into a new one."""
    if which < len(branches):
        into = sorted(branches)[which]
    else:
        into = model.open_branch()
        branches.add(into)
        held[into] = []
    if source == into or length > len(held[source]):
        with pytest.raises(ValueError, match="fork"):
            model.fork(source, into, length)
    else:
        shared = min(length, common(held[source], held[into]))
        model.fork(source, into, length, shared)  # of what both hold already nothing is copied
        held[into] = held[source][:length]


def common(one: list[int], other: list[int]) -> int:
    """Length of the common start."""
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


def feed(
    model: Any, plain: Any, held: dict[int, list[int]], rows: dict[int, tuple[list[int], int]]
) -> None:
    """One ragged batch; one that does not fit changes nothing."""
    commands = [
        Forward("target", slot, tuple(tokens), min(keep, len(tokens)))
        for slot, (tokens, keep) in rows.items()
    ]
    if any(len(held[slot]) + len(tokens) > CONTEXT for slot, (tokens, _) in rows.items()):
        with pytest.raises(ContextTooLong):
            model.forward(commands)
        return
    outputs = model.forward(commands)
    for command, output in zip(commands, outputs, strict=True):
        held[command.slot] += command.tokens
        with torch.no_grad():
            expected = plain(torch.tensor([held[command.slot]])).logits[0, -command.keep :]
        assert torch.allclose(output.logits, expected, atol=1e-4)
