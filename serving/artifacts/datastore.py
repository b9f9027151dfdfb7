"""Datastore: texts that the target wrote, with a suffix array, so that what followed any few tokens
is found by bisection.

REST (He 2023, 2311.08252, section 3.1) drafts from one; SuffixDecoding (Oliaro 2024, 2411.04975)
asks the same of its global tree. Places are sorted by the `WINDOW` tokens from them on, by prefix
doubling (Manber and Myers 1990), and not by whole suffixes: matches of up to `LONGEST` tokens need
no more. A million tokens are sorted in a few seconds and take 8 MB on disk, 12 MB in memory.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from draftwell.serving.artifacts.base import Artifact, ArtifactError, Provenance

FILE = "datastore.safetensors"
END = -1
"""In the stream after each text: no match and no continuation crosses it."""
LONGEST, SHORTEST = 16, 2
"""Tokens of a match."""
WINDOW = 32
"""Tokens that places are sorted by: more than a match and the token after it."""
MAX_TOKENS = 8_000_000
"""Largest datastore: more would be slow to sort and to load, and places would no longer be
small."""
MOST = 64
"""Occurrences whose continuations are looked at: of more, as many, evenly spread over what follows
them."""
TOKEN = 4
"""Bytes of a token."""


class Continuations(NamedTuple):
    """What followed the longest match.

    Args:
        length: tokens of the match; 0: there is none.
        tokens: a list for each occurrence, each of at least one token.
    """

    length: int
    tokens: list[list[int]]


class Datastore(Artifact):
    """Texts in one stream. It never changes, so threads may share it.

    Args:
        stream: `[n]` int32, token ids, and `END` after each text.
        order: `[tokens]` int32, the places of all tokens in the stream, sorted by the `WINDOW`
            tokens from there on.

    Raises:
        ArtifactError: the two do not fit together (`bad_artifact`).

    >>> store = Datastore.from_texts([[5, 6, 7], [1, 5, 6, 8]])
    >>> store.continuations([9, 5, 6], limit=2)
    Continuations(length=2, tokens=[[7], [8]])
    """

    kind = "datastore"

    def __init__(self, stream: np.ndarray, order: np.ndarray, provenance: Provenance):
        fits = (
            stream.ndim == order.ndim == 1
            and stream.dtype == order.dtype == np.int32
            and (not len(stream) or stream[-1] == END)
        )
        if not fits or len(order) != np.count_nonzero(stream != END) or (stream < END).any():
            raise ArtifactError(
                "the datastore's tokens and their order do not fit together: make it again"
            )
        if len(order) and (order.min() < 0 or order.max() >= len(stream)):
            raise ArtifactError(
                "the datastore's order names places that it does not have: make it again"
            )
        self.stream, self.order, self.provenance = stream, order, provenance
        # compares as the tokens do, and slices of it are cheap
        self._bytes = (stream.astype(np.int64) + 1).astype(">u4").tobytes()
        self._places = np.ascontiguousarray(order).data

    @classmethod
    def from_texts(
        cls, texts: Iterable[Sequence[int] | np.ndarray], provenance: Provenance | None = None
    ) -> Self:
        """A datastore of these texts; one without tokens is left out.

        Raises:
            ArtifactError: more than `MAX_TOKENS` tokens (`datastore_too_large`), or one that is no
                token id (`no_token_id`).
        """
        kept = [np.asarray(text, dtype=np.int64) for text in texts if len(text)]
        count = sum(map(len, kept))
        if count > MAX_TOKENS:
            raise ArtifactError(
                f"a datastore takes {MAX_TOKENS:,} tokens at most, not {count:,}: give fewer texts",
                code="datastore_too_large",
            )
        stream = np.full(count + len(kept), END, dtype=np.int64)
        if kept:
            stream[
                np.arange(count) + np.repeat(np.arange(len(kept)), [len(text) for text in kept])
            ] = np.concatenate(kept)
        if np.count_nonzero(stream < 0) != len(kept) or (
            len(stream) and stream.max() > np.iinfo(np.int32).max
        ):
            raise ArtifactError(
                "a text holds a number that is no token id: give ids from 0 on", code="no_token_id"
            )
        return cls(
            stream.astype(np.int32),
            sorted_places(stream),
            provenance or Provenance(pair="", fingerprint=""),
        )

    @classmethod
    def empty(cls, provenance: Provenance | None = None) -> Self:
        """One that matches nothing."""
        return cls.from_texts([], provenance)

    def __len__(self) -> int:
        """Tokens of all texts."""
        return len(self.order)

    def continuations(
        self,
        context: Sequence[int],
        limit: int,
        *,
        longest: int = LONGEST,
        shortest: int = SHORTEST,
        most: int = MOST,
    ) -> Continuations:
        """What followed the longest of the context's last n tokens that some text holds with a
        token after it.

        Args:
            limit: tokens of a continuation at most, at least 1.
            longest, shortest: bounds of n, 1 <= shortest, longest <= `LONGEST`.
            most: occurrences at most.
        """
        length, found = self._longest_match(context[-min(longest, LONGEST) :], shortest)
        if len(found) > most:
            found = [found[i * len(found) // most] for i in range(most)]
        return Continuations(length, [self._follow(self._places[i] + length, limit) for i in found])

    def _longest_match(self, tail: Sequence[int], shortest: int) -> tuple[int, Sequence[int]]:
        """Its length and its occurrences, as indices of `order`. Where n tokens occur fewer do too,
        so n is bisected as well."""
        wanted = (np.asarray(tail, dtype=np.int64) + 1).astype(">u4").tobytes()
        low, high, best = shortest, len(tail), (0, range(0))
        while low <= high:
            length = (low + high) // 2
            found = self._occurrences(wanted[len(wanted) - TOKEN * length :])
            if found:
                best, low = (length, found), length + 1
            else:
                high = length - 1
        return best

    def _occurrences(self, wanted: bytes) -> range:
        """Indices of `order` where these tokens are, with one after them in the same text (`END`
        sorts before all tokens)."""
        data, size = self._bytes, len(wanted)
        with_next = wanted + (1).to_bytes(TOKEN, "big")
        first = bisect_left(
            self._places,
            with_next,
            key=lambda place: data[TOKEN * place : TOKEN * place + size + TOKEN],
        )
        return range(
            first,
            bisect_right(
                self._places,
                wanted,
                lo=first,
                key=lambda place: data[TOKEN * place : TOKEN * place + size],
            ),
        )

    def _follow(self, place: int, limit: int) -> list[int]:
        tokens: list[int] = self.stream[place : place + limit].tolist()
        return tokens[: tokens.index(END)] if END in tokens else tokens

    def write_files(self, folder: Path) -> None:
        from safetensors.numpy import save_file

        save_file({"stream": self.stream, "order": self.order}, folder / FILE)

    @classmethod
    def read_files(cls, folder: Path, provenance: Provenance) -> Self:
        from safetensors.numpy import load_file

        tensors = load_file(folder / FILE)
        return cls(tensors["stream"], tensors["order"], provenance)


def sorted_places(stream: np.ndarray) -> np.ndarray:
    """The places of all tokens of a stream `[n]`, sorted by the `WINDOW` tokens from there on;
    equal ones by place. `[tokens]` int32."""
    rank = stream.astype(np.int64) + 2  # what is past the end has 0, before `END`
    step = 1
    while step < WINDOW and len(rank):
        after = np.zeros_like(rank)
        after[:-step] = rank[step:]
        rank = (
            np.unique(rank * (rank.max() + 1) + after, return_inverse=True)[1].astype(np.int64) + 1
        )
        step *= 2
    order = np.argsort(rank, kind="stable")
    places: np.ndarray = order[stream[order] != END].astype(np.int32)
    return places
