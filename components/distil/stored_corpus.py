"""A corpus that stays on disk: ids are read at once, states when they are asked for.

With the states of several layers a corpus of millions of tokens takes tens of gigabytes, which
`corpus.read_corpus` would hold in memory. Shards are the same files.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from draftwell.components.distil.corpus import Conversation
from draftwell.serving.errors import DraftwellError


class StoredConversation(Conversation):
    """A conversation whose states are read from its shard at every use.

    Args:
        states: the shard's slice `hidden`, an object of safetensors that reads rows.
        start: first row.
    """

    def __init__(self, ids: Tensor, prompt: int, states: Any, start: int):
        self.ids, self.prompt, self._states, self._start = ids, prompt, states, start

    @property
    def hidden(self) -> Tensor:  # type: ignore[override]
        """`[total - 1, width]` as stored."""
        read: Tensor = self._states[self._start : self._start + len(self.ids) - 1]
        return read


def read_stored(shards: Iterable[Path]) -> list[Conversation]:
    """All conversations of these shards, in order; `hidden` stays on disk.

    Raises:
        DraftwellError: a shard is damaged.
    """
    return [conversation for path in shards for conversation in _shard(path)]


def _shard(path: Path) -> list[Conversation]:
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(path, "pt")
        ids, prompts, totals = (file.get_tensor(name) for name in ("ids", "prompt", "total"))
        states = file.get_slice("hidden")
        sound = [len(prompts), len(ids), states.get_shape()[0]] == [
            len(totals),
            int(totals.sum()),
            int((totals - 1).sum()),
        ]
    except (OSError, ValueError, KeyError, SafetensorError):
        sound = False
    if not sound:
        raise DraftwellError(
            f"{path} is damaged: delete it and run the same command again, which writes it again",
            code="damaged_shard",
        )
    found: list[Conversation] = []
    at = start = 0
    for prompt, total in zip(prompts.tolist(), totals.tolist(), strict=True):
        found.append(StoredConversation(ids[at : at + total].long(), prompt, states, start))
        at, start = at + total, start + total - 1
    return found
