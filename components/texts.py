"""The texts that a trace is made of: what target, draft or both write behind a prompt.

SPRINTER (section 3.2) trains on four kinds of prefix: (a) original text, (b) with draft text, (c) with target text,
(d) with text by both, which is what its loop meets when it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from components.decoding import decode_all, room
from components.prompts import Prompt
from serving.runtime.acceptance.exact import Exact
from serving.runtime.engine import Engine
from serving.runtime.pair import LoadedPair
from serving.runtime.schedules.sequential import sequential
from serving.runtime.session import Session
from serving.runtime.strategies import Kit, Strategy, StrategyConfig, build_strategy
from serving.runtime.types import DraftwellError, Model, Role, Sampling, Step

TRUST = 0.75
"""Chance that a mixed text keeps a draft token unseen: runs of four on average, about SPRINTER's own."""
LONGEST_RUN = 20


@dataclass(frozen=True)
class WrittenText:
    """A prompt's turn with a continuation.

    Args:
        prompt_tokens: what stands before the continuation, at least one token.
        tokens: the continuation, at least one token, up to and with a stop token.
    """

    prompt: Prompt
    turn: int
    kind: str
    sampling: Sampling
    prompt_tokens: list[int]
    tokens: list[int]


class Interleaved(Strategy):
    """SPRINTER's loop with a coin in the place of its verifier: text by draft and target in turn."""

    name = "interleaved"
    lossless = False
    paper = "SPRINTER, section 3.2 (d)"

    class Config(StrategyConfig):
        """No parameters."""

    def run(self, session: Session) -> Step[None]:
        coin = np.random.default_rng([session.sampling.seed, 11])  # its own stream: no uniform is used twice
        yield from sequential(session, lambda row, after, token: coin.random() < TRUST, Exact(), LONGEST_RUN, False)


def room_for_prompts(pair: LoadedPair, max_tokens: int, rollout: int) -> int:
    """Tokens of a prompt that fit every model's context beside a continuation and the rollout behind its end."""
    context = min(model.max_context for role, model in pair.models.items() if role in ("target", "draft"))
    room = context - max_tokens - rollout
    if room < 1:
        raise DraftwellError(f"max_tokens {max_tokens} and rollout {rollout} leave no room for a prompt in a context of "
                             f"{context}: lower one of them")
    return room


def write_texts(pair: LoadedPair, prompts: Sequence[tuple[Prompt, Sampling]], kinds: Sequence[str], *, room: int,
                batch: int, turns: int = 1) -> list[WrittenText]:
    """Texts of every kind for every prompt, by prompt, turn and kind.

    Args:
        prompts: with the sampling parameters of each.
        room: prompts longer than this keep their last `room` tokens.
        batch: requests at once, as far as the pair has slots.
        turns: turns of a conversation that get a text; the answers in between are the target's.
    """
    texts: list[WrittenText] = []
    history: dict[str, list[dict[str, str]]] = {prompt.id: list(prompt.messages) for prompt, _ in prompts}
    for turn in range(turns):
        active = [(prompt, sampling) for prompt, sampling in prompts if len(prompt.turns) > turn]
        for prompt, _ in active:
            history[prompt.id].append({"role": "user", "content": prompt.turns[turn]})
        requests = [(pair.encode_messages(history[prompt.id])[-room:], sampling) for prompt, sampling in active]
        wanted = dict.fromkeys([*kinds, *(["target"] if turn + 1 < turns else [])])
        written = {kind: _write(pair, kind, requests, batch) for kind in wanted}
        for i, (prompt, sampling) in enumerate(active):
            texts += [WrittenText(prompt, turn, kind, sampling, *written[kind][i]) for kind in kinds]
            if "target" in written:
                history[prompt.id].append({"role": "assistant", "content": pair.decode(written["target"][i][1])})
    order = {prompt.id: i for i, (prompt, _) in enumerate(prompts)}
    return sorted((text for text in texts if text.tokens), key=lambda text: (order[text.prompt.id], text.turn))


def _write(pair: LoadedPair, kind: str, requests: list[tuple[list[int], Sampling]],
           batch: int) -> list[tuple[list[int], list[int]]]:
    """(prompt tokens, continuation) of each request; a bare text's continuation is the end of its own prompt."""
    if kind == "bare":
        cuts = [max(1, len(ids) - sampling.max_tokens) for ids, sampling in requests]
        return [(ids[:cut], ids[cut:]) for (ids, _), cut in zip(requests, cuts, strict=True)]
    strategy = Interleaved(Interleaved.Config(), Kit()) if kind == "mixed" else build_strategy("autoregressive")
    models: dict[Role, Model] = {"target": pair.models["draft"]} if kind == "draft" else pair.models
    engine = Engine(models)
    outputs = decode_all(engine, requests, [strategy] * len(requests), room(engine, batch))
    return [(ids, output) for (ids, _), output in zip(requests, outputs, strict=True)]


def sampling_of(base: Sampling, index: int) -> Sampling:
    """Parameters of the prompt with this number: a seed of its own, so that no draw depends on the other prompts."""
    return replace(base, seed=base.seed + index)
