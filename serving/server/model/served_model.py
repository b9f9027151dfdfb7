"""What a server serves: a loaded pair, the strategies that decode with it, and how many requests
run at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from draftwell.serving.artifacts.base import Artifact
from draftwell.serving.runtime.engine.thread_governor import ThreadGovernor
from draftwell.serving.runtime.grammar.guidance import GuidanceGrammar, GuidanceTokenizer
from draftwell.serving.runtime.grammar.masks import Grammar
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import Strategy
from draftwell.serving.server.model.snapshots import SnapshotOrigin
from draftwell.serving.server.model.strategy_pool import EVERYBODY, StrategyPool
from draftwell.serving.server.scheduling.detokenize import HALF, is_whole
from draftwell.serving.server.settings import PromptSharing
from draftwell.serving.temperature import SERVED_TEMPERATURE, TemperatureClass

USABLE: dict[str, Callable[[float], bool]] = {
    "temperature": lambda value: 0 <= value <= 2,
    "top_p": lambda value: 0 < value <= 1,
    "top_k": lambda value: 0 <= value <= 10**6,
    "min_p": lambda value: 0 <= value <= 1,
    "repetition_penalty": lambda value: 0.01 <= value <= 10,
}
"""Which values of a model's generation config are used as defaults."""

GRAMMARS_KEPT = 64
Owner = tuple[str, str]
"""A tenant, and the `cache_salt` of its request: whether a grammar is there shows in the time that
a request takes, so nobody finds those of others."""
NOBODY: Owner = (EVERYBODY, "")
"""The owner of what is asked for without a key or a salt."""


@dataclass
class ServedModel:
    """A model as clients see it.

    Args:
        name: what clients write as `model`.
        strategy: what was tuned for greedy requests; `strategies` has that for sampled ones.
        slots: requests that run at once; the pair must have been loaded with as many.
        threads: compute threads; None: PyTorch's choice, and what the governor makes of it.
        governor: adapts the threads while requests are decoded; None: they never change.
        created: Unix seconds, shown by `/v1/models`.
        strategies: what requests may choose from.
        version: of the bundle, for display.
        origin: identity of the bundle; None without one.
        artifacts: the bundle's.
        model_defaults: requests get the sampling defaults of the model's generation config.
        prompt_sharing: as in `Scheduler`.
        card: name → content of the files of the bundle's card; empty without one.
    """

    name: str
    pair: LoadedPair
    strategy: Strategy
    slots: int = 1
    threads: int | None = None
    governor: ThreadGovernor | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    strategies: StrategyPool = field(kw_only=True)
    version: str | None = None
    origin: SnapshotOrigin | None = None
    artifacts: Mapping[str, Artifact] = field(default_factory=dict)
    model_defaults: bool = True
    prompt_sharing: PromptSharing = "tenant"
    card: Mapping[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._spelt: dict[int, str] = {}  # at most the vocabulary
        self._keeping = threading.Lock()
        self._grammars: dict[tuple[Owner, str], GuidanceGrammar] = {}  # the last asked for last
        tuned = [self.strategy, self.strategies.get(temperature=SERVED_TEMPERATURE)]
        self.tuned: dict[TemperatureClass, str] = {
            "greedy": tuned[0].name,
            "sampled": tuned[1].name,
        }
        for one in tuned:
            # a model that is missing is found before the first request
            one.choose_models(self.pair.models)
        self.max_context = self.pair.models["target"].max_context
        self.vocab_size = self.pair.models["target"].vocab_size
        self.stop_tokens = self.pair.stop_tokens
        defaults = self.pair.sampling_defaults if self.model_defaults else {}
        self.sampling_defaults = {
            name: value for name, value in defaults.items() if USABLE[name](value)
        }
        """What requests get that name nothing else: of the model's generation config, as far as a
        request could ask for it."""

    @property
    def label(self) -> str:
        """Name and version, for logs."""
        return f"{self.name} {self.version}" if self.version else self.name

    def encode(self, prompt: str, **options: Any) -> list[int]:
        """Ids of plain text; any thread may call it. Options as in `LoadedPair.encode`."""
        return self.pair.encode(prompt, **options)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Ids of a conversation, ready for the assistant's answer; any thread may call it. Options
        and errors as in `LoadedPair.encode_chat`."""
        return self.pair.encode_chat(messages, **options)

    def decode(self, ids: Sequence[int], stops: frozenset[int] = frozenset()) -> str:
        """Text of generated ids, without special tokens, the model's stop tokens and `stops`."""
        return self.pair.decode([i for i in ids if i not in self.stop_tokens and i not in stops])

    def grammar(self, definition: str, owner: Owner = NOBODY) -> Grammar:
        """A grammar of this model's tokens, compiled; any thread may call it. Those asked for last
        are kept.

        Args:
            definition: as `runtime.grammar.guidance` makes it.
            owner: whose requests find it compiled.
        Raises:
            DraftwellError: it is no grammar, or the model's tokenizer cannot be read for it.
        """
        if (known := self.known_grammar(definition, owner)) is not None:
            return known
        grammar = GuidanceGrammar(self._guidance, definition)
        with self._keeping:
            self._grammars[owner, definition] = grammar
            if len(self._grammars) > GRAMMARS_KEPT:
                self._grammars.pop(next(iter(self._grammars)))
        return grammar

    def known_grammar(self, definition: str, owner: Owner = NOBODY) -> Grammar | None:
        """A grammar that was compiled before for the same owner and is kept, else None; does not
        wait for one that is being compiled."""
        with self._keeping:
            found = self._grammars.pop((owner, definition), None)
            if found is not None:
                self._grammars[owner, definition] = found
            return found

    def is_token(self, text: str) -> bool:
        """Whether a text is a token that was added to the vocabulary, and is written as text when
        it is decoded."""
        added = self.pair.tokenizer.added_tokens_encoder
        return (
            text in added
            and added[text] < self.vocab_size
            and not self.pair.tokenizer.added_tokens_decoder[added[text]].special
        )

    @cached_property
    def _guidance(self) -> GuidanceTokenizer:
        return GuidanceTokenizer(self.pair.tokenizer, self.vocab_size, self.stop_tokens)

    def token_text(self, token: int) -> str:
        """One token as it appears within a text, with its space; special tokens by name, "\ufffd"
        for a part of a character. Each is spelt once."""
        if token not in self._spelt:
            self._spelt[token] = self._spell(token)
        return self._spelt[token]

    def token_name(self, token: int) -> str:
        """One token as the vocabulary has it."""
        return str(self.pair.tokenizer.convert_ids_to_tokens(token))

    def token_bytes(self, token: int) -> list[int] | None:
        """Bytes of `token_text`; None for a part of a character, whose bytes the decoder does not
        give."""
        text = self.token_text(token)
        part = HALF in text and not is_whole(text, self.token_name(token))
        return None if part else list(text.encode())

    def _spell(self, token: int) -> str:
        alone = str(self.pair.tokenizer.decode([token]))
        lead, known = self._lead
        if lead is None or token in self._special:
            return alone
        text = str(self.pair.tokenizer.decode([lead, token]))
        return text[len(known) :] if text.startswith(known) else alone

    @cached_property
    def _special(self) -> frozenset[int]:
        return self.pair.special_tokens

    @cached_property
    def _lead(self) -> tuple[int | None, str]:
        """A token to put before others when decoding them, and its text: SentencePiece decoders
        drop a text's leading space."""
        ids = [i for i in self.encode("a") if i not in self._special]
        return (ids[-1], str(self.pair.tokenizer.decode(ids[-1:]))) if ids else (None, "")
