"""The last requests that were answered, for a new bundle to answer before it serves."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.server.model.served_model import ServedModel
from draftwell.serving.server.scheduling.observer import Observer
from draftwell.serving.server.scheduling.ticket import End, Event, Ticket

KEPT = 8
LONGEST_PROMPT = 1024
"""Tokens: longer ones would hold up the clients of a switch."""
MOST_TOKENS = 16
DRAWN_BY = ("temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty")
"""What a mirrored request's tokens are drawn by; token ids may mean others in the new bundle."""


@dataclass(frozen=True)
class MirroredRequest:
    """A request as a client sent it: `messages` or `prompt`, and how its tokens are drawn."""

    body: Mapping[str, Any]
    sampling: Mapping[str, Any]

    @property
    def temperature(self) -> float:
        return float(self.sampling["temperature"])

    def for_model(self, served: ServedModel) -> tuple[list[int], Sampling]:
        """Its prompt and sampling for another model.

        Raises:
            DraftwellError: the model's chat template refuses it.
        """
        if "messages" in self.body:
            prompt = served.encode_chat(self.body["messages"])
        else:
            prompt = served.encode(self.body["prompt"])
        return prompt, served.pair.sampling(max_tokens=MOST_TOKENS, **self.sampling)


class Mirror(Observer):
    """Keeps the last requests that were answered, in memory only. None of a client that names a
    `cache_salt`, and none longer than `LONGEST_PROMPT`."""

    def __init__(self) -> None:
        self._kept: deque[MirroredRequest] = deque(maxlen=KEPT)

    def finished(self, ticket: Ticket, event: Event) -> None:
        """Keep a request that was answered."""
        salted = isinstance(ticket.owner, tuple) and ticket.owner[-1]
        if ticket.own or salted or ticket.body is None or not isinstance(event, End):
            return
        if len(ticket.prompt) <= LONGEST_PROMPT:
            drawn = {name: getattr(ticket.sampling, name) for name in DRAWN_BY}
            self._kept.append(MirroredRequest(ticket.body, drawn))

    def requests(self) -> Sequence[MirroredRequest]:
        """The last ones, the oldest first; from any thread."""
        return list(self._kept)
