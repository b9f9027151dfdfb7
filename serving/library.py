"""What `draftwell.load` gives: a bundle that answers in this process, as its server would.

Loading, checks, scheduling and text are the server's own (`server/`), without HTTP: `generate`
sends a ticket to the same scheduler. It needs neither the server's packages nor the pipeline's.
"""

from __future__ import annotations

import json
import secrets
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

from draftwell.serving.bundle.card import CARD_JSON
from draftwell.serving.bundle.manifest import read_bundle_manifest
from draftwell.serving.errors import DraftwellError, InvalidRequest
from draftwell.serving.runtime.engine.prompt_budget import PromptBudget
from draftwell.serving.runtime.requests import FinishReason
from draftwell.serving.server.model.loading import from_bundle
from draftwell.serving.server.model.served_model import ServedModel
from draftwell.serving.server.scheduling.detokenize import TextStream
from draftwell.serving.server.scheduling.scheduler import Scheduler
from draftwell.serving.server.scheduling.ticket import (
    Cancelled,
    Delta,
    End,
    Event,
    Failure,
    SchedulerClosed,
    Ticket,
)
from draftwell.serving.server.settings import ServerSettings

Messages = Sequence[Mapping[str, Any]]
"""A conversation: objects with `role` and `content`, as in OpenAI's API."""
TEXTS = ("text", "input_text", "output_text")
"""Types of a content's parts that are text."""
MOST_WAITING = 1_000_000
"""Requests that wait for a slot: the threads that ask are this program's own, and none is sent
away."""


@dataclass(frozen=True)
class Answer:
    """One complete answer."""

    text: str
    tokens: tuple[int, ...]
    """Ids of all generated tokens; an end token is the last one."""
    finish_reason: FinishReason
    """stop: the model ended, or a stop string came; length: `max_tokens` were generated."""
    acceptance: float | None
    """Share of the judged draft tokens that the target kept, 0 to 1; None: none was judged."""
    seconds: float
    """From the call to the last token."""
    strategy: str
    """That decoded it."""


class LoadedBundle:
    """A bundle whose models are in memory. Any thread may ask it; requests beyond its slots wait.

    Close it, or use it in a `with`, to free its models and its thread. `name` is the pair's,
    `release` the version that the bundle was built from, `strategy` what decodes greedy requests,
    `max_context` the most tokens of prompt and answer together, and `card` the tuning's card.

    Args:
        served: the loaded models with their tuned strategies.
        path: the bundle's folder.
        chat: a prompt that is a string is a user's message; False: plain text to go on from.
    """

    def __init__(self, served: ServedModel, path: Path, *, chat: bool = True):
        self.name, self.release, self.path = served.name, served.version, path
        self.strategy, self.max_context = served.strategy.name, served.max_context
        written = served.card.get(CARD_JSON)
        self.card: dict[str, Any] | None = None if written is None else json.loads(written)
        """Of the tuning that the bundle comes from, as plain JSON; `Card.model_validate` reads
        it."""
        scheduler = Scheduler(
            served.pair.engine(budget=PromptBudget(), governor=served.governor),
            served.strategy,
            served.slots,
            threads=served.threads,
            capacity=MOST_WAITING,
            prompt_sharing=served.prompt_sharing,
        )
        scheduler.start()
        self._chat = chat
        self._open: tuple[ServedModel, Scheduler] | None = (served, scheduler)
        # one that nobody refers to any more lets its thread go, which holds the models
        self._let_go = weakref.finalize(self, scheduler.stop_taking)

    def generate(
        self,
        prompt: str | Messages,
        *,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        top_p: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
    ) -> Answer:
        """Answer a prompt; at temperature 0 with the text that the bundle's server answers.

        Args:
            prompt: a user's message, or a conversation. The model's chat template frames it; a
                string is plain text where the pair is not for chat.
            max_tokens: at most, from 1; None: as many as the context leaves room for.
            temperature: 0 is greedy.
            top_p: share of the likeliest tokens that is drawn from, in (0, 1]; None: the model's
                own default.
            seed: the same seed gives the same answer; None: another one each time.
            stop: strings that end the answer and are no part of it.
        Raises:
            DraftwellError: the prompt is empty or too long, a value is out of bounds, the chat
                template refuses the messages, or the bundle is closed.
        """
        began, text, ids = time.perf_counter(), "", list[int]()
        ticket, events = self._request(prompt, max_tokens, temperature, top_p, seed, stop)
        for event in self._events(ticket, events):
            if isinstance(event, End):
                break
            text += event.text
            ids += [token.id for token in event.tokens]
        assert isinstance(event, End)
        assert ticket.strategy is not None
        return Answer(
            text=text,
            tokens=tuple(ids),
            finish_reason=event.finish_reason,
            acceptance=event.stats.acceptance_rate,
            seconds=time.perf_counter() - began,
            strategy=ticket.strategy.name,
        )

    def stream(
        self,
        prompt: str | Messages,
        *,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        top_p: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
    ) -> Iterator[str]:
        """The text that `generate` gives, in pieces, each as soon as it is final. Leaving the loop
        ends the request.

        Arguments and errors are those of `generate`; an error comes with the first piece.
        """
        ticket, events = self._request(prompt, max_tokens, temperature, top_p, seed, stop)
        for event in self._events(ticket, events):
            if isinstance(event, Delta) and event.text:
                yield event.text

    def close(self) -> None:
        """End the requests that run, and free the models; harmless where it is closed already."""
        if self._open is None:
            return
        _, scheduler = self._open
        self._open = None
        self._let_go.detach()
        scheduler.abort()
        scheduler.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _request(
        self,
        prompt: str | Messages,
        max_tokens: int | None,
        temperature: float,
        top_p: float | None,
        seed: int | None,
        stop: str | Sequence[str],
    ) -> tuple[Ticket, SimpleQueue[Event]]:
        """A request, not submitted yet, and where its events will come."""
        served, _ = self._opened()
        for name, value in (("temperature", temperature), ("top_p", top_p), ("seed", seed)):
            if value is not None and not isinstance(value, Integral if name == "seed" else Real):
                raise InvalidRequest(f"{name} is a number, not {value!r}")
        if seed is not None and seed < 0:
            raise InvalidRequest(f"seed is at least 0, not {seed}")
        ids = self._encoded(served, prompt)
        events: SimpleQueue[Event] = SimpleQueue()
        room = served.max_context - len(ids)
        defaults = {**served.sampling_defaults, "temperature": temperature}
        sampling = served.pair.sampling(
            **(defaults if top_p is None else {**defaults, "top_p": top_p}),
            max_tokens=max(1, room) if max_tokens is None else max_tokens,
            seed=secrets.randbits(63) if seed is None else seed,
            repeatable=seed is not None,
        )
        strings = stop_strings(stop)
        ticket = Ticket(
            ids,
            sampling,
            TextStream(served.decode, strings, ids, name=served.token_name),
            events.put,
            strategy=served.strategies.get(temperature=temperature),
        )
        return ticket, events

    def _encoded(self, served: ServedModel, prompt: str | Messages) -> list[int]:
        """The prompt's tokens."""
        if isinstance(prompt, str):
            if not prompt.strip():
                raise InvalidRequest("the prompt is empty: ask something", code="empty_prompt")
            if not self._chat:
                return served.encode(prompt)
            prompt = [{"role": "user", "content": prompt}]
        messages = [plain_message(message) for message in prompt]
        if not messages:
            raise InvalidRequest("there are no messages: give at least one", code="empty_prompt")
        return served.encode_chat(messages)

    def _events(self, ticket: Ticket, events: SimpleQueue[Event]) -> Iterator[Delta | End]:
        """What a request is answered with, up to its end; it is cancelled where nobody reads on."""
        _, scheduler = self._opened()
        try:
            scheduler.submit(ticket)
            while True:
                event = events.get()
                if isinstance(event, Failure):
                    raise event.error
                if isinstance(event, Cancelled):
                    raise _closed(self.path)
                yield event
                if isinstance(event, End):
                    return
        except SchedulerClosed as error:
            raise _closed(self.path) from error
        finally:
            ticket.cancel()

    def _opened(self) -> tuple[ServedModel, Scheduler]:
        if self._open is None:
            raise _closed(self.path)
        return self._open


def plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with its content as one text, which is what chat templates take.

    Raises:
        InvalidRequest: it has no role, or a content that is no text (`bad_messages`).

    >>> plain_message({"role": "user", "content": [{"type": "text", "text": "Hello"}]})
    {'role': 'user', 'content': 'Hello'}
    """
    given = dict(message) if isinstance(message, Mapping) else {}
    parts = given.get("content")
    if parts is None and given.get("role") in ("assistant", "tool"):
        parts = ""  # of an assistant that called a tool
    if isinstance(parts, list | tuple):
        found = [
            part.get("text")
            for part in parts
            if isinstance(part, Mapping) and part.get("type") in TEXTS
        ]
        texts = [text for text in found if isinstance(text, str)]
        parts = "".join(texts) if len(texts) == len(parts) else None
    if not isinstance(given.get("role"), str) or not isinstance(parts, str):
        seen = f"one has {sorted(given)}" if given else f"one is {message!r}"
        raise InvalidRequest(
            f"a message needs a role and a content of text, and {seen}: write "
            '{"role": "user", "content": "…"}',
            code="bad_messages",
        )
    return {**given, "content": parts}


def stop_strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    """The strings that end an answer."""
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, list | tuple) or not all(isinstance(one, str) for one in strings):
        raise InvalidRequest(f"stop is a text or a list of texts, not {stop!r}")
    if not all(strings):
        raise InvalidRequest("stop holds an empty string: leave it out", code="empty_stop")
    return tuple(strings)


def _closed(path: Path) -> DraftwellError:
    return DraftwellError(f"the bundle {path} is closed: load it again", code="bundle_closed")


def load(
    bundle: str | Path,
    *,
    slots: int = 1,
    threads: int | None = None,
    max_context: int | None = None,
    signature_key: str | Path | None = None,
) -> LoadedBundle:
    """Load a bundle, checked as its server checks it: every file by its digest, models and
    artifacts by the pair's fingerprint, and the signature where a key is named.

    Args:
        bundle: its folder or the link `current` to it, or a pair's name, whose bundle is
            `dist/<name>/current` here.
        slots: requests that are decoded at once, from 1.
        threads: compute threads; None: one for each usable core, and fewer while other processes
            use them.
        max_context: tokens of prompt and answer together, at most; None: the models' limit, at most
            4096.
        signature_key: public key (a file, or an address that cosign knows) that the bundle must be
            signed for; None: signatures are not checked.
    Raises:
        DraftwellError: there is no bundle, it is damaged, not signed, or not for this machine.
    """
    folder = Path(bundle).expanduser()
    deployed = Path("dist") / folder / "current"
    if not folder.exists() and deployed.is_dir():
        folder = deployed
    folder = folder.resolve()
    settings = ServerSettings.from_options(
        bundle=folder,
        slots=slots,
        threads=threads,
        max_context=max_context,
        signature_key=None if signature_key is None else str(signature_key),
    )
    served = from_bundle(settings)
    return LoadedBundle(served, folder, chat=read_bundle_manifest(folder).chat)
