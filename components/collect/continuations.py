"""The texts that a trace is made of: what target, draft or both write after a prompt.

SPRINTER (section 3.2) trains on four kinds of prefix: (a) original text, (b) with draft text, (c)
with target text, (d) with text by both, which is what its loop sees when it runs. Its pairs
continue plain text. Under a chat template (a) would be the inside of the user's message, where
nobody ever drafts, so it is left out there: the other three kinds are answers, as they are served.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from draftwell.components.collect.decoding import Request, decode_all, room
from draftwell.components.collect.settings import CollectionSettings
from draftwell.components.prompts.prompt import Message, Prompt, ids_of
from draftwell.serving.errors import DraftwellError
from draftwell.serving.recording.trace_schema import LOSSY
from draftwell.serving.runtime.acceptance.exact import Exact
from draftwell.serving.runtime.commands import Role, Step
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.model import Model
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.schedules.sequential import sequential
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.strategies import (
    Strategy,
    StrategyConfig,
    StrategyResources,
    build_strategy,
)

TRUST = 0.75
"""Chance that a mixed text keeps a draft token unverified: runs of four on average, about
SPRINTER's own."""
LONGEST_RUN = 20

Continued = tuple[list[int], list[int]]
"""A prompt's tokens, and those written after them."""


@dataclass(frozen=True)
class WrittenText:
    """A prompt's turn with a continuation.

    Args:
        prompt_tokens: all tokens before the continuation, at least one.
        tokens: the continuation, at least one token, up to and with a stop token.
        cut_tokens: left out of the prompt, which was too long.
    """

    prompt: Prompt
    turn: int
    kind: str
    sampling: Sampling
    prompt_tokens: list[int]
    tokens: list[int]
    cut_tokens: int = 0


class Interleaved(Strategy):
    """SPRINTER's loop with a coin in the place of its verifier: text by draft and target in
    turn."""

    name = "interleaved"
    lossless = False
    paper = "SPRINTER, section 3.2 (d)"

    class Config(StrategyConfig):
        """No parameters."""

    def run(self, session: Session) -> Step[None]:
        # its own stream: no uniform is used twice
        coin = np.random.default_rng([session.sampling.seed, 11])
        yield from sequential(
            session, lambda row, after, token: coin.random() < TRUST, Exact(), LONGEST_RUN, False
        )


def room_for_prompts(
    pair: LoadedPair, max_tokens: int, rollout: int, strategy: Strategy | None = None
) -> int:
    """Longest prompt, in tokens, that fits every model's context together with a continuation and
    the rollout after its end.

    Args:
        strategy: that writes texts; its models count too.
    Raises:
        DraftwellError: no prompt fits.
    """
    roles = {"target", "draft", *(strategy.roles if strategy else ())}
    context = min(model.max_context for role, model in pair.models.items() if role in roles)
    room = context - max_tokens - rollout
    if room < 1:
        raise DraftwellError(
            f"max_tokens {max_tokens} and rollout {rollout} leave no room for a prompt in "
            "a context of "
            f"{context}: lower one of them",
            code="no_room",
        )
    return room


def turns_of(prompt: Prompt, turns: int) -> int:
    """How many turns of a prompt get a text; `turns` 0 means all."""
    return min(turns, len(prompt.turns)) if turns else len(prompt.turns)


def write_texts(
    pair: LoadedPair,
    prompts: Sequence[tuple[Prompt, Sampling]],
    settings: CollectionSettings,
    room: int,
    *,
    strategy: Strategy | None = None,
) -> list[WrittenText]:
    """Texts of every kind for every prompt, by prompt, turn and kind.

    Between the turns of a conversation stand the recorded answers, where there are any, else the
    target's.

    Args:
        prompts: with the sampling parameters of each.
        settings: of these the kinds, the turns, and the requests at once.
        room: longest prompt in tokens; longer ones are cut (`cut_messages`).
        strategy: writes the texts of kind `lossy`.
    """
    kinds, texts = settings.prefix_kinds, list[WrittenText]()
    histories = {prompt.id: [*prompt.messages] for prompt, _ in prompts}
    turns = {prompt.id: turns_of(prompt, settings.turns) for prompt, _ in prompts}
    for turn in range(max(turns.values())):
        # no turn draws what another one drew
        active = [
            (prompt, replace(sampling, seed=sampling.seed + (turn << 32)))
            for prompt, sampling in prompts
            if turns[prompt.id] > turn
        ]
        for prompt, _ in active:
            histories[prompt.id].append({"role": "user", "content": prompt.turns[turn]})
        cut = [asked(pair, prompt, turn, histories[prompt.id], room) for prompt, _ in active]
        requests = [(ids, sampling) for (ids, _), (_, sampling) in zip(cut, active, strict=True)]
        unanswered = any(
            turns[prompt.id] > turn + 1 and len(prompt.answers) <= turn for prompt, _ in active
        )
        by_kind: dict[str, list[Continued]] = {}
        for kind in dict.fromkeys([*kinds, *(["target"] if unanswered else [])]):
            by_kind[kind] = (
                bare_texts(pair, [prompt for prompt, _ in active], requests)
                if kind == "bare"
                else continue_all(pair, kind, requests, settings.batch, strategy)
            )
        for i, (prompt, sampling) in enumerate(active):
            texts += [
                WrittenText(prompt, turn, kind, sampling, *by_kind[kind][i], cut[i][1])
                for kind in kinds
            ]
            if turns[prompt.id] > turn + 1:
                recorded = prompt.answers[turn : turn + 1]
                answer = recorded[0] if recorded else pair.decode(by_kind["target"][i][1])
                histories[prompt.id].append({"role": "assistant", "content": answer})
    order = {prompt.id: i for i, (prompt, _) in enumerate(prompts)}
    written_texts = [text for text in texts if text.tokens]
    return sorted(written_texts, key=lambda text: (order[text.prompt.id], text.turn))


def asked(
    pair: LoadedPair, prompt: Prompt, turn: int, history: Sequence[Message], room: int
) -> tuple[list[int], int]:
    """The tokens before a turn's answer, at most `room`, and how many were left out."""
    if prompt.tokens:
        return keep_end(pair, list(prompt.tokens[turn]), room)
    return (
        keep_end(pair, ids_of(pair, prompt), room)
        if prompt.raw
        else cut_messages(pair, [*history, *prompt.after], room, prompt.tools)
    )


def continue_all(
    pair: LoadedPair,
    kind: str,
    requests: Sequence[Request],
    batch: int,
    lossy: Strategy | None,
) -> list[Continued]:
    """The continuation of each request by target, draft or both; texts of kind `lossy` as a server
    writes them, but no request learns from another."""
    strategy: Strategy = build_strategy("autoregressive")
    if kind == "mixed":
        strategy = Interleaved(Interleaved.Config(), StrategyResources())
    elif kind == LOSSY:
        assert lossy is not None  # checked by `work.check_inputs`
        strategy = type(lossy)(lossy.config, replace(lossy.resources, deterministic=True))
    models: dict[Role, Model] = {"target": pair.models["draft"]} if kind == "draft" else pair.models
    engine = Engine(models)
    outputs = decode_all(engine, requests, [strategy] * len(requests), room(engine, batch))
    return [(list(ids), output) for (ids, _), output in zip(requests, outputs, strict=True)]


def bare_texts(
    pair: LoadedPair, prompts: Sequence[Prompt], requests: Sequence[Request]
) -> list[Continued]:
    """Texts of kind bare: prompts that are cut in two; nothing where a chat template frames them,
    because nobody drafts inside a user's message."""
    around = {raw: template_around(pair, raw=raw) for raw in {prompt.raw for prompt in prompts}}
    return [
        bare(list(ids), sampling.max_tokens, *around[prompt.raw])
        if prompt.raw or not pair.in_chat_template
        else (list(ids), [])
        for prompt, (ids, sampling) in zip(prompts, requests, strict=True)
    ]


def bare(ids: list[int], max_tokens: int, head: int, tail: int) -> tuple[list[int], list[int]]:
    """A plain text as its own continuation: its end, without the tokens that the tokenizer puts
    around every text."""
    own = ids[: len(ids) - tail]
    cut = min(len(own), max(1, head, len(own) - max_tokens))
    return own[:cut], own[cut:]


def template_around(pair: LoadedPair, *, raw: bool = False) -> tuple[int, int]:
    """Number of tokens that the chat template puts before a first message and after a last one; for
    raw text, those of the tokenizer."""
    one, other = ((pair.encode if raw else pair.encode_prompt)(text) for text in ("a", "b"))
    return shared_beginning(one, other), shared_beginning(one[::-1], other[::-1])


def message_of(pair: LoadedPair, ids: Sequence[int], around: tuple[int, int]) -> str | None:
    """The one message that the tokens of a prompt were made of; None where they are of something
    else, such as a conversation.

    Args:
        around: of `template_around`.
    """
    head, tail = around
    text = pair.decode(list(ids[head : len(ids) - tail]))
    return text if text.strip() and pair.encode_prompt(text) == list(ids) else None


def shared_beginning(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    differing = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differing, min(len(one), len(other)))


def starts_of_turns(messages: Sequence[Message]) -> list[int]:
    """Places at which turns begin: of users' messages, and of the first one that is no system
    message; of the last one where there is neither."""
    others = [place for place, one in enumerate(messages) if one["role"] != "system"]
    users = [place for place in others if messages[place]["role"] == "user"]
    return sorted({*others[:1], *users}) or [len(messages) - 1]


def cut_messages(
    pair: LoadedPair,
    messages: Sequence[Message],
    room: int,
    tools: Sequence[Mapping[str, Any]] = (),
) -> tuple[list[int], int]:
    """Ids of a conversation in at most `room` tokens, and how many tokens were left out.

    The chat template stays complete, as a model expects it: first the turns before the last one are
    removed, the oldest first, except a system message, then the beginnings of the longest messages
    of the last turn, which a user's message begins. Plain text keeps its end, after a special token
    at its start.
    """
    ids = pair.encode_messages(messages, tools)
    total = len(ids)
    if total <= room:
        return ids, 0
    if pair.in_chat_template:
        kept = list(messages)
        while len(ids) > room and (turns := starts_of_turns(kept))[:-1]:
            kept = [
                one
                for place, one in enumerate(kept)
                if one["role"] == "system" or place >= turns[1]
            ]
            ids = pair.encode_messages(kept, tools)
        last = starts_of_turns(kept)[-1]
        written = [place for place in range(last, len(kept)) if kept[place].get("content")]
        for place in sorted(written, key=lambda place: len(kept[place]["content"]), reverse=True):
            content = pair.encode(kept[place]["content"])
            left = len(content)
            while len(ids) > room and (left := max(0, left - (len(ids) - room))) > 0:
                # half a character
                text = pair.decode(content[-left:]).lstrip("\N{REPLACEMENT CHARACTER}")
                kept[place] = {**kept[place], "content": text}
                ids = pair.encode_messages(kept, tools)
            if len(ids) <= room:
                return ids, total - len(ids)
    ids, _ = keep_end(pair, ids, room)
    return ids, total - room


def keep_end(pair: LoadedPair, ids: list[int], room: int) -> tuple[list[int], int]:
    """The last tokens of a text, at most `room` with a special token at its start, and how many
    were left out."""
    if len(ids) <= room:
        return ids, 0
    start = ids[:1] if ids[0] in pair.special_tokens and room > 1 else []
    return [*start, *ids[len(start) - room :]], len(ids) - room
