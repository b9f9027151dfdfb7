"""An engine at an address, with the pair that its prompts are encoded for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from draftwell.components.engines.port import About, EngineSettings
from draftwell.components.engines.remote.address import EngineAddress
from draftwell.components.engines.remote.dialect import Dialect
from draftwell.components.engines.remote.remote import RemoteEngine
from draftwell.components.prompts.prompt import ids_of
from draftwell.flows.context import Bar, encoder_of
from draftwell.flows.workspace import Workspace
from draftwell.serving.artifacts.checkpoint import CONFIG, read_object
from draftwell.serving.errors import DraftwellError, VocabularyMismatch
from draftwell.serving.files import json_digest

if TYPE_CHECKING:
    from draftwell.components.prompts.prompt import Prompt
    from draftwell.serving.runtime.pair import LoadedPair
    from draftwell.serving.runtime.requests import Sampling

FOLDER = "at_addresses"
"""In the device's folder of the workspace: a folder for each address."""
PROBE = "The 12,345th café — naïve façade?\n\tdef f(x): return x**2  # 東京 🙂"
"""A text that tokenizers of different models split differently."""


@dataclass(frozen=True)
class RemoteSpace:
    """A pair, and an engine at an address that serves its target.

    Args:
        engine: was started; it speculates as its server was started to.
        about: what it says of itself.
        plain: the same model without speculation, started too: at an address of its own, or by
            requests that switch it off; None: there is none.
        remarks: what a reader of its figures should know, a line each.
    """

    workspace: Workspace
    engine: RemoteEngine
    about: About
    plain: RemoteEngine | None = None
    remarks: list[str] = field(default_factory=list)
    bar: Bar | None = None

    @property
    def address(self) -> EngineAddress:
        """Where it is."""
        return self.engine.address

    @property
    def dialect(self) -> Dialect:
        """What it speaks."""
        return self.engine.dialect

    @property
    def folder(self) -> Path:
        """Where texts, measurements and states of this address are kept."""
        return self.workspace.device_root / FOLDER / folder_name(self.address)

    @cached_property
    def pair(self) -> LoadedPair:
        """The pair without its models: it encodes prompts and knows stop tokens."""
        return encoder_of(self.workspace)

    def encoded(self, prompts: Sequence[Prompt], max_tokens: int) -> list[list[int]]:
        """Token ids of the prompts.

        Raises:
            DraftwellError: one is too long for the target (`context_too_long`); what the engine
                has no room for it refuses itself.
        """
        config = read_object(self.workspace.files().target / CONFIG)
        limit = int(config.get("max_position_embeddings") or 1 << 20)
        found = [ids_of(self.pair, prompt) for prompt in prompts]
        for prompt, ids in zip(prompts, found, strict=True):
            if len(ids) + max_tokens > limit:
                raise DraftwellError(
                    f"prompt {prompt.id} has {len(ids)} tokens, which with {max_tokens} more "
                    f"exceed the target's {limit}: leave it out, or ask for fewer tokens",
                    code="context_too_long",
                )
        return found

    def subject(
        self, ids: Sequence[Sequence[int]], sampling: Sampling, **more: Any
    ) -> dict[str, Any]:
        """What a measurement or a text depends on; nothing secret is in it."""
        return {
            **self.described(),
            "prompts": json_digest(list(ids)),
            "sampling": [sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.seed],
            **more,
        }

    def described(self) -> dict[str, Any]:
        """The engine, for documents."""
        return {
            "engine": self.dialect.name,
            "address": self.address.url,
            "model": self.address.model,
            "version": self.about.version,
            "pair": self.workspace.spec.name,
        }


@contextmanager
def open_remote(
    workspace: Workspace,
    address: EngineAddress,
    plain: EngineAddress | None = None,
    *,
    bar: Bar | None = None,
) -> Iterator[RemoteSpace]:
    """Ask an engine what it is, and whether it serves the pair's target; connections are closed
    afterwards, and it runs on.

    Args:
        plain: where the same model is served without speculation; None takes the engine itself
            where requests can switch speculation off.
    Raises:
        DraftwellError: what `RemoteEngine.start` raises; other tokens than the pair's
            (`vocabulary_mismatch`).
    """
    with ExitStack() as stack:
        engine, about = started(RemoteEngine("engine", address), stack)
        other = None
        if plain is not None:
            other, said = started(RemoteEngine("plain", plain), stack)
        elif engine.dialect.switches_off:
            other, said = started(RemoteEngine("plain", address, speculate=False), stack)
        space = RemoteSpace(workspace, engine, about, other, list(about.notes), bar)
        space.remarks.extend(check_tokens(space.pair, engine))
        if other is not None and plain is not None:
            check_tokens(space.pair, other)
            if said.version != about.version:
                space.remarks.append(f"plain decoding is {said.version}, not {about.version}")
        yield space


def started(engine: RemoteEngine, stack: ExitStack) -> tuple[RemoteEngine, About]:
    """An engine that was asked what it is, and is left with the stack."""
    stack.callback(engine.stop)
    return engine, engine.start(EngineSettings())


def check_tokens(pair: LoadedPair, engine: RemoteEngine) -> list[str]:
    """Compare how the pair and the served model split a text; a line where the engine does not say.

    Raises:
        DraftwellError: they split it differently (`vocabulary_mismatch`).
    """
    theirs = engine.dialect.tokens_of(engine.client, PROBE)
    if theirs is None:
        return [
            f"{engine.address.url} does not say how it splits texts into tokens: whether it serves "
            f"the target of {pair.name} was not checked"
        ]
    if theirs != pair.tokenizer.encode(PROBE, add_special_tokens=False):
        raise VocabularyMismatch(
            f"the model at {engine.address.url} splits a text into other tokens than the target of "
            f"{pair.name}: name its pair with --pair, or another model with --set engine_model=…"
        )
    return []


def folder_name(address: EngineAddress) -> str:
    """A folder's name for an address and a model: readable, and different for different ones.

    >>> folder_name(EngineAddress("http://127.0.0.1:8000"))
    '127.0.0.1-8000-1db13367'
    """
    digest = hashlib.sha256(f"{address.url} {address.model or ''}".encode()).hexdigest()[:8]
    place = urlsplit(address.url).netloc
    return "".join(c if c.isalnum() or c in "._" else "-" for c in place) + f"-{digest}"


def document(space: RemoteSpace, **more: Mapping[str, Any] | Any) -> dict[str, Any]:
    """What a JSON file of an engine's figures begins with."""
    return {**space.described(), "remarks": list(space.remarks), **more}
