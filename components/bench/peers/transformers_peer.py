"""The peer `transformers`, in this process: `generate` plainly, with the pair's draft as assistant
(constant draft length, no early exit), and with prompt lookup. The modules are the pair's own: for
each call they attend with SDPA again, and afterwards over our slots.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig
from transformers.utils import logging

from draftwell.components.bench.peers.group import PeerGroup
from draftwell.components.bench.runner import Generation
from draftwell.serving.runtime.models.transformers_model import ATTENTION
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.session.stats import Stats

LOOKUP_TOKENS, LOOKUP_NGRAM = 10, 3


def transformers_peers(pair: LoadedPair, gamma: int) -> PeerGroup:
    """Plain, assisted (where the pair has a draft) and prompt-lookup generation."""
    target = pair.modules["target"]
    attention = (
        "sdpa"
        if over_our_slots(target)
        else f"{target.config._attn_implementation}, the model's own"
    )
    notes = [f"attention: {attention}; cache: transformers' default"]
    group = PeerGroup([TransformersPeer(pair, "autoregressive")], notes, transformers.__version__)
    draft = pair.modules.get("draft")
    if draft is not None and draft.config.vocab_size != target.config.vocab_size:
        group.notes.append(
            f"no assisted: transformers refuses a draft of {draft.config.vocab_size} ids beside a "
            f"target of {target.config.vocab_size}"
        )
    elif draft is not None:
        settings = draft.generation_config
        settings.num_assistant_tokens = gamma
        settings.num_assistant_tokens_schedule = "constant"
        settings.assistant_confidence_threshold = 0.0
        group.contenders.append(TransformersPeer(pair, "assisted", assistant=draft))
        group.notes.append(f"assisted: {gamma} draft tokens a round, constant, no early exit")
        if pair.models["draft"].head_tokens is not None:
            group.notes.append(
                "assisted: transformers cannot restrict the draft's head to its frequent "
                "tokens, so the "
                "assistant computes the full head"
            )
    lookup = {"prompt_lookup_num_tokens": LOOKUP_TOKENS, "max_matching_ngram_size": LOOKUP_NGRAM}
    group.contenders.append(TransformersPeer(pair, "prompt_lookup", settings=lookup))
    group.notes.append(
        f"prompt_lookup: up to {LOOKUP_TOKENS} tokens, n-grams of at most {LOOKUP_NGRAM}"
    )
    return group


class TransformersPeer:
    """`generate` of transformers on the pair's target.

    Args:
        assistant: the module that drafts.
        settings: further fields of the generation config.
    """

    def __init__(
        self,
        pair: LoadedPair,
        name: str,
        *,
        assistant: Any = None,
        settings: dict[str, Any] | None = None,
    ):
        self.pair, self.label = pair, f"transformers/{name}"
        self.assistant, self.settings = assistant, settings or {}

    def reset(self) -> None:
        """Nothing is remembered between requests."""

    def config(self, sampling: Sampling) -> Any:
        """Our sampling parameters as transformers' generation config."""
        stops = sorted(sampling.stop_token_ids)
        drawn = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}
        return GenerationConfig(
            max_new_tokens=sampling.max_tokens,
            eos_token_id=stops or None,
            repetition_penalty=1.0,
            pad_token_id=stops[0] if stops else 0,
            do_sample=not sampling.greedy,
            **({} if sampling.greedy else drawn),
            **self.settings,
        )

    def generate(self, ids: Sequence[int], sampling: Sampling) -> Generation:
        target = self.pair.modules["target"]
        prompt = torch.tensor([list(ids)], device=target.device)
        config, clock = self.config(sampling), FirstTokenClock()
        helpers = {} if self.assistant is None else {"assistant_model": self.assistant}
        with own_attention(target, *helpers.values()), quiet(), torch.random.fork_rng():
            torch.manual_seed(sampling.seed)
            started = time.perf_counter()
            output = target.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=config,
                streamer=clock,
                **helpers,
            )
            tokens = output[0, len(ids) :].tolist()
            seconds = time.perf_counter() - started
        first = clock.first - started
        return Generation(
            tokens, Stats(emitted=len(tokens), wall_seconds=seconds, first_token_seconds=first)
        )


class FirstTokenClock:
    """A streamer of transformers that only notes when the first new token came."""

    def __init__(self) -> None:
        self.calls, self.first = 0, 0.0

    def put(self, value: Tensor) -> None:
        self.calls += 1
        if self.calls == 2:  # the first call hands over the prompt
            self.first = time.perf_counter()

    def end(self) -> None:
        """The text is complete."""


def over_our_slots(module: Any) -> bool:
    """Whether a module's attention has been replaced by ours; models with attention code of their
    own keep it."""
    return bool(module.config._attn_implementation == ATTENTION)


@contextmanager
def own_attention(*modules: Any) -> Iterator[None]:
    """Let modules attend as transformers does by default on this machine, and afterwards as before;
    some always do."""
    modules = tuple(module for module in modules if over_our_slots(module))
    before = [module.config._attn_implementation for module in modules]
    try:
        for module in modules:
            module.set_attn_implementation("sdpa")
        yield
    finally:
        for module, implementation in zip(modules, before, strict=True):
            module.set_attn_implementation(implementation)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep back transformers' advice about arguments that it passes to itself."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
