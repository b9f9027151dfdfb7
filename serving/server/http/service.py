"""From a validated request to its tickets: prompts to tokens, checks of length and budget, one
choice for each answer."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from fastapi import Request
from fastapi.responses import Response

from draftwell.serving.errors import DraftwellError, InvalidRequest
from draftwell.serving.recording.prompt_ratings import RatedPrompt
from draftwell.serving.runtime.grammar.masks import Grammar
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.session.session import UNLIMITED
from draftwell.serving.runtime.strategies import Strategy, build_strategy, describe
from draftwell.serving.server.http.conversation import AnswerChoice, Conversation, Deadline
from draftwell.serving.server.http.errors import APIError, queue_full, shutting_down, without_paths
from draftwell.serving.server.http.prompts import ENCODERS, Prompt, Prompts, on_thread
from draftwell.serving.server.http.rendering import (
    PING_SECONDS,
    Answer,
    ChatAnswer,
    CompletionAnswer,
    EventStream,
)
from draftwell.serving.server.http.requests import (
    MOST_CHOICES,
    ChatRequest,
    CompletionRequest,
    Format,
    Generation,
    text_of,
)
from draftwell.serving.server.http.responses_api import ResponseAnswer, ResponsesRequest
from draftwell.serving.server.http.security import client_of, tenant_of
from draftwell.serving.server.model.served_model import Owner, ServedModel
from draftwell.serving.server.model.strategy_pool import EVERYBODY, PLAIN
from draftwell.serving.server.scheduling.admission import QueueFull
from draftwell.serving.server.scheduling.detokenize import TextStream
from draftwell.serving.server.scheduling.scheduler import Scheduler
from draftwell.serving.server.scheduling.ticket import SchedulerClosed
from draftwell.serving.temperature import SERVED_TEMPERATURE

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions; a chat may fill the context."""


COMPILERS = ThreadPoolExecutor(4, thread_name_prefix="grammar")
"""Threads of their own: grammars that take seconds to compile must not keep prompts from being
encoded."""

MOST_LISTED = 200_000
"""Entries of one request's lists: log-probs of tokens and of alternatives to them, and origins of
tokens."""
LISTED_BYTES = 600
"""Memory of such an entry until the request is answered."""


class Service:
    """Answers requests for one served model."""

    def __init__(self, served: ServedModel, scheduler: Scheduler):
        self.served, self.scheduler = served, scheduler
        self.fingerprint = system_fingerprint(served)
        self.prompts = Prompts(served)
        self._prepared: Counter[str] = Counter()
        """Client → tickets that are being prepared: their prompts are encoded."""
        self._turns: WeakValueDictionary[Owner, asyncio.Lock] = WeakValueDictionary()
        """Whose grammar is compiled: one of each owner's at a time."""

    async def chat(
        self, body: ChatRequest, request: Request, kind: type[ChatAnswer] = ChatAnswer
    ) -> Response:
        """Answer `/v1/chat/completions`, or `/v1/messages` by its own kind of answer."""

        async def prompts() -> list[Prompt]:
            return [await self.chat_prompt(body)]

        return await self._answer(kind, body, request, prompts)

    async def chat_prompt(self, body: ChatRequest, least: int = 0) -> Prompt:
        """The prompt of a conversation; `least` as in `Prompts.chat`."""
        messages = [message.plain() for message in body.messages]
        return await self.prompts.chat(messages, body.template_options, least=least)

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        """Answer `/v1/completions`."""

        async def prompts() -> list[Prompt]:
            echo = bool(body.echo)
            return [await self.prompts.completion(prompt, echo) for prompt in body.prompts]

        return await self._answer(
            CompletionAnswer, body, request, prompts, len(body.prompts), DEFAULT_COMPLETION_TOKENS
        )

    async def respond(self, body: ResponsesRequest, request: Request) -> Response:
        """Answer `/v1/responses`."""

        async def prompts() -> list[Prompt]:
            return [await self.prompts.chat(body.messages, body.template_options, field="input")]

        return await self._answer(ResponseAnswer, body, request, prompts)

    async def _answer(
        self,
        kind: type[Answer],
        body: Generation,
        request: Request,
        encode: Callable[[], Awaitable[list[Prompt]]],
        prompts: int = 1,
        default_tokens: int | None = None,
    ) -> Response:
        """The answer to one or several prompts.

        Args:
            encode: makes the prompts.
            default_tokens: to generate; None: as many as the context leaves room for.
        """
        self.check_model(body.model)
        body = body.with_defaults(self.served.sampling_defaults)
        deadline = self._accept(body, request, prompts)
        with self._preparing(client_of(request), prompts * (body.n or 1)):
            async with deadline.enforced():
                encoded = await encode()
                given = await self._given(body, request)
                choices = self._choices(body, request, encoded, default_tokens, given)
            conversation = Conversation(
                self.scheduler,
                request,
                choices,
                deadline=deadline,
                client=client_of(request),
                owner=owner_of(body, request),
                served=self.served,
            )
            conversation.submit()
        answer = kind(self.served, self.fingerprint, conversation, body)
        if not body.stream:
            return await answer.whole()
        try:
            # an error until then gets its own HTTP status
            first = await conversation.next(PING_SECONDS)
        except BaseException:
            conversation.close()
            raise
        return EventStream(answer, first)

    @contextmanager
    def _preparing(self, client: str, count: int) -> Iterator[None]:
        """So many tickets of a client are being prepared, which counts as waiting."""
        self._prepared[client] += count
        try:
            yield
        finally:
            self._prepared[client] -= count
            if not self._prepared[client]:
                del self._prepared[client]

    def _accept(self, body: Generation, request: Request, prompts: int = 1) -> Deadline:
        """When the request has to be answered, from now on.

        Raises:
            APIError: it asks for too many answers (400), which no wait would change; the queue has
                no room for it (429), which is not worth any work; or the server is shutting down.
        """
        count = body.n or 1
        if not 1 <= prompts * count <= MOST_CHOICES:
            raise APIError(
                400,
                f"{prompts} prompts with {count} answers each: ask for 1 to {MOST_CHOICES} "
                "answers in all",
                param="prompt" if prompts != 1 else "n",
            )
        try:
            client = client_of(request)
            self.scheduler.check_room(client, prompts * count, self._prepared[client])
        except QueueFull as error:
            raise queue_full(str(error), error.retry_after_seconds) from error
        except SchedulerClosed as error:
            raise shutting_down() from error
        return Deadline.of(body.timeout, request.app.state.request_timeout)

    def check_model(self, name: str | None) -> None:
        """Refuse a request for another model; None: it names none."""
        if name not in (None, self.served.name):
            raise APIError(
                404,
                f"the model '{name}' does not exist: this server has '{self.served.name}'",
                param="model",
                code="model_not_found",
            )

    async def _given(self, body: Generation, request: Request) -> dict[str, Any]:
        """Settings of the sampling that take time to make: the prediction, and the grammar of the
        format that is asked for."""
        drafts, asked = body.decoding.enabled is not False, body.format
        given: dict[str, Any] = {"draft_forced": drafts, "grammar": None, "prediction": ()}
        if asked is not None:
            given["grammar"] = await self._grammar(asked, owner_of(body, request))
        if body.prediction is not None and drafts:
            given["prediction"] = await self.prompts.prediction(text_of(body.prediction.content))
        return given

    async def _grammar(self, asked: Format, owner: Owner) -> Grammar:
        try:
            definition = await on_thread(ENCODERS, asked.define, self.served.is_token)
            if (known := self.served.known_grammar(definition, owner)) is not None:
                return known
            return await self._compiled(definition, owner)
        except InvalidRequest as error:
            for part in asked.parts:  # if one of them is refused alone, the message names its field
                await self._grammar(part, owner)
            raise APIError(400, without_paths(error), param=asked.field, code=error.code) from error
        # a missing package, or a tokenizer that cannot be read: nothing that a client could fix
        except DraftwellError as error:
            raise APIError(501, without_paths(error), param=asked.field, code=error.code) from error

    async def _compiled(self, definition: str, owner: Owner) -> Grammar:
        """A grammar, of which a client has one compiled at a time, also where it has given up
        the one before."""
        turn, loop = self._turns.setdefault(owner, asyncio.Lock()), asyncio.get_running_loop()
        await turn.acquire()
        compiling = COMPILERS.submit(self.served.grammar, definition, owner)
        compiling.add_done_callback(lambda _: loop.call_soon_threadsafe(turn.release))
        return await asyncio.wrap_future(compiling)

    def _choices(
        self,
        body: Generation,
        request: Request,
        prompts: Sequence[Prompt],
        default_tokens: int | None,
        given: Mapping[str, Any],
    ) -> list[AnswerChoice]:
        """`n` choices for every prompt, in order. A prompt's answers do not depend on the other
        prompts.

        Args:
            given: as `_given` returns it.
        """
        count, ends = body.n or 1, given["grammar"] is not None
        rated = 0 if body.alternatives is None else 1 + body.alternatives  # entries for each token
        traced = int(body.decoding.trace is True)
        strategy = self._strategy(body, request)
        seed = secrets.randbits(63) if body.seed is None else body.seed
        hidden = frozenset(body.stop_token_ids or ())
        decode = partial(self.served.decode, stops=hidden) if hidden else self.served.decode
        choices: list[AnswerChoice] = []
        for prompt in prompts:
            budget = self._budget(body, prompt, default_tokens)
            if rated + traced and body.token_limit is None:  # nobody asked for so many
                listed = MOST_LISTED // (len(prompts) * count) - (
                    rated * len(prompt.ids) if prompt.echoed else 0
                )
                budget = max(1, min(budget, listed // (rated + traced)))
            for number in range(count):
                own_seed = derived_seed(seed, number)
                sampling = replace(self._sampling(body, budget, own_seed, ends=ends), **given)
                text = TextStream(
                    decode,
                    body.stops(),
                    prompt.ids,
                    sampling.min_tokens,
                    self.served.token_name,
                )
                choice = AnswerChoice(len(choices), prompt.ids, sampling, text, strategy)
                choice.before, choice.body = prompt.echoed, prompt.body
                choice.shows = body.token_limit != 0
                if body.rates_prompt:
                    choice.strategy = RatedPrompt()
                choices.append(choice)
        if listed := _check_listed(choices, rated, traced):
            request.state.charge(LISTED_BYTES * listed)
        return choices

    def _strategy(self, body: Generation, request: Request) -> Strategy:
        """The strategy that the request names, else the tuned one."""
        asked, tenant, pool = body.decoding, tenant_of(request), self.served.strategies
        name = PLAIN if asked.enabled is False else asked.strategy
        try:
            strategy = pool.get(name, tenant, body.used_temperature)
        except DraftwellError as error:
            if name is None:
                raise  # the tuned strategy is not available: not the client's error
            raise APIError(
                400, without_paths(error), param="speculation.strategy", code="strategy_not_found"
            ) from error
        if asked.parameters:
            allowed = request.app.state.allow_parameters
            return with_parameters(strategy, asked.parameters, allowed=allowed)
        return strategy

    def _budget(self, body: Generation, prompt: Prompt, default_tokens: int | None) -> int:
        """Tokens to generate; default: the room that the context leaves."""
        room = self.served.max_context - len(prompt.ids)
        if not prompt.ids:
            raise APIError(400, "the prompt is empty: send at least one token", param=prompt.field)
        asked = body.token_limit
        # 0 runs as 1, which is not shown
        budget = min(room, default_tokens or room) if asked is None else max(1, asked)
        if budget > room or room < 1:
            wanted = f"{len(prompt.ids)} in the {prompt.field}" + (
                f", {body.token_limit} to generate" if body.token_limit else ""
            )
            raise self.prompts.too_long(wanted, prompt.field)
        return budget

    def _sampling(
        self, body: Generation, budget: int, seed: int, *, ends: bool = False
    ) -> Sampling:
        """How a choice's tokens are drawn.

        Args:
            ends: the model's end-of-text tokens end the answer in any case: a grammar has nothing
                after its end.
        """
        settings = body.sampling_settings()
        for param, tokens in (
            ("logit_bias", settings["logit_bias"]),
            ("stop_token_ids", body.stop_token_ids or ()),
        ):
            wrong = next((token for token in tokens if token >= self.served.vocab_size), None)
            if wrong is not None:
                raise APIError(
                    400,
                    f"token {wrong} is not in the vocabulary: the largest id is "
                    f"{self.served.vocab_size - 1}",
                    param=param,
                )
        if settings["min_tokens"] > budget:
            raise APIError(
                400,
                f"min_tokens must be at most the tokens to generate, which are {budget} here",
                param="min_tokens",
            )
        stops = frozenset(body.stop_token_ids or ()) | (
            frozenset() if body.ignore_eos and not ends else self.served.stop_tokens
        )
        return self.served.pair.sampling(
            max_tokens=budget, seed=seed, stop_token_ids=stops, **settings
        )

    def offer(self, request: Request) -> dict[str, Any]:
        """Model, longest context, and every strategy with its parameters: their bounds, and the
        values that it runs with at temperature 0.

        `exact`: a lossless strategy's greedy answers are plain decoding's to the bit. `tuned` names
        the strategies that requests get which name none, by class of temperature; `default` is that
        of greedy ones. `card`: `/card` says how they were tuned.
        """
        served, tenant = self.served, tenant_of(request)
        return {
            "model": served.name,
            "default": served.strategy.name,
            "tuned": served.tuned,
            "max_context": served.max_context,
            "exact": served.pair.exact,
            "allow_parameters": request.app.state.allow_parameters,
            "card": bool(served.card),
            "strategies": [
                described(served.strategies.get(name, tenant)) for name in served.strategies.names()
            ],
        }


def owner_of(body: Generation, request: Request) -> Owner:
    """Whose prompts and grammars a request finds read and compiled."""
    return tenant_of(request) or EVERYBODY, body.cache_salt or ""


def derived_seed(seed: int, number: int) -> int:
    """Seed of a prompt's answer number `number`; the first has the request's own.

    >>> (
    ...     derived_seed(7, 0),
    ...     derived_seed(7, 1) == derived_seed(7, 1),
    ...     derived_seed(7, 1) == derived_seed(7, 2),
    ... )
    (7, True, False)
    """
    if number == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest()) >> 1


def system_fingerprint(served: ServedModel) -> str:
    """Changes with the weights, the tuned strategies and their settings: with the same one, a seed
    gives the same answer."""
    strategies = [served.strategy, served.strategies.get(temperature=SERVED_TEMPERATURE)]
    defaults = [served.sampling_defaults] if served.sampling_defaults else []
    made_of = json.dumps(
        [
            served.name,
            served.pair.fingerprint,
            *defaults,
            *([one.name, one.config.model_dump(mode="json")] for one in strategies),
        ]
    )
    return f"fp_{hashlib.sha256(made_of.encode()).hexdigest()[:12]}"


def with_parameters(
    strategy: Strategy, parameters: Mapping[str, Any], *, allowed: bool
) -> Strategy:
    """A strategy with some of its parameters changed, over the same artifacts and online state.

    Raises:
        APIError: 403 if the server does not allow it, 400 for an unknown parameter or a value out
            of bounds.
    """

    def refused(status: int, message: str, code: str) -> APIError:
        return APIError(status, message, param="speculation.parameters", code=code)

    if not allowed:
        raise refused(
            403,
            "this server does not let requests change parameters: leave them out, or start "
            "it with --allow-parameters",
            "parameters_not_allowed",
        )
    for name in strategy.bench_only:
        if name in parameters:
            message = f"{name} is for benches, whose state nobody keeps: leave it out"
            raise refused(400, message, "invalid_parameters")
    try:
        changed = build_strategy(
            strategy.name, {**strategy.config.model_dump(), **parameters}, strategy.resources
        )
    except DraftwellError as error:
        raise refused(400, str(error), "invalid_parameters") from error
    if table := strategy.draft_length_by_batch:
        # alone it drafts as its parameters say, beside others as was measured
        changed.draft_length_by_batch = {**table, 1: UNLIMITED}
    return changed


def described(strategy: Strategy) -> dict[str, Any]:
    """A strategy as plain JSON; an infinite value (no bound) is null."""
    facts = describe(type(strategy))
    for name, parameter in facts["parameters"].items():
        value = getattr(strategy.config, name)
        parameter["value"] = (
            None if isinstance(value, float) and not math.isfinite(value) else value
        )
    return {key: facts[key] for key in ("name", "lossless", "paper", "parameters")}


def _check_listed(choices: Sequence[AnswerChoice], rated: int, traced: int) -> int:
    """How many tokens answers list at most; too many are refused.

    Args:
        rated, traced: entries for each token, of log-probs and of a trace.
    """
    listed = sum(
        (rated + traced) * choice.sampling.max_tokens
        + (rated * len(choice.prompt) if choice.before else 0)
        for choice in choices
    )
    if listed > MOST_LISTED:
        raise APIError(
            400,
            f"{len(choices)} answers with {'log-probs' if rated else 'a trace'} would "
            f"list up to {listed} tokens: ask for at most {MOST_LISTED} in all, by fewer answers, "
            "tokens or alternatives",
            param="logprobs" if rated else "speculation.trace",
        )
    return listed
