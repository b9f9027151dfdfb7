"""A grammar as a table of states: what may come depends on a state, and each token leads to
another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from draftwell.serving.runtime.grammar.masks import Matcher


class FiniteGrammar:
    """A finite automaton over tokens.

    Args:
        states: of each state token → next state; the first is the beginning. The next state of a
            token that ends the text is not used.
    """

    def __init__(self, states: Sequence[Mapping[int, int]], vocab_size: int):
        self.states, self.vocab_size = states, vocab_size

    def matcher(self) -> Matcher:
        return FiniteMatcher(self)


class FiniteMatcher:
    """Follows one output."""

    def __init__(self, grammar: FiniteGrammar):
        self.grammar = grammar
        self._path = [0]

    def allowed(self) -> NDArray[np.bool_]:
        mask = np.zeros(self.grammar.vocab_size, dtype=np.bool_)
        mask[[*self.grammar.states[self._path[-1]]]] = True
        return mask

    def accept(self, token: int) -> bool:
        following = self.grammar.states[self._path[-1]].get(token, -1)
        if following < 0:
            return False
        self._path.append(following)
        return True

    def rollback(self, count: int) -> None:
        if count:
            del self._path[-count:]

    def forced(self) -> list[int]:
        found, state = list[int](), self._path[-1]
        while len(self.grammar.states[state]) == 1 and len(found) < len(self.grammar.states):
            token, state = next(iter(self.grammar.states[state].items()))
            if state < 0:
                break
            found.append(token)
        return found
