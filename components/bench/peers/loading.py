"""Starting the peers of a bench, each variant in a process of its own, and ending them with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from components.bench.peers.environments import DRIVERS, check_peers, interpreter, peers_root
from components.bench.peers.group import PeerGroup, ProcessPeer
from components.bench.peers.model_files import gguf_of, head_folder, model_folder
from components.bench.peers.process import PeerProcess
from components.bench.peers.transformers_peer import transformers_peers
from serving.artifacts.base import Artifact
from serving.artifacts.eagle3_head import Eagle3Head
from serving.errors import DraftwellError
from serving.runtime.pair import LoadedPair

LOOKUP = {"lookup_tokens": 5, "lookup_ngram": 3}
"""Tokens that vLLM's n-gram speculation and llama.cpp's prompt lookup draft, and their longest n-gram."""
ROOM = 64
"""Positions beyond prompt and answer: drafts reach over the end."""


@contextmanager
def open_peers(pair: LoadedPair, names: Sequence[str], *, gamma: int = 5, context: int = 2048, temperature: float = 0.0,
               head: Artifact | None = None) -> Iterator[dict[str, PeerGroup]]:
    """The peers with these names, ready to decode; their processes end with the block.

    Args:
        gamma: draft length with the pair's draft, and with its head.
        context: tokens of the longest prompt with its answer.
        temperature: that of the bench.
        head: the pair's EAGLE-3 head, where it has one, for peers that load it.
    Raises:
        DraftwellError: what `check_peers` and `PeerProcess` raise.
    """
    check_peers(names, device=pair.device, temperature=temperature, padded=pair.padded_to is not None)
    if names and any(parameter.numel() == 0 for module in pair.modules.values() for parameter in module.parameters()):
        raise DraftwellError("the pair's transformers modules gave up their weights: load it with keep_modules=True to measure peers",
                             code="modules_without_weights")
    limit = int(pair.modules["target"].config.get_text_config().max_position_embeddings) if names else 0
    settings = {"dtype": pair.dtype, "context": min(context + ROOM, limit), "num_speculative_tokens": gamma, **LOOKUP}
    with ExitStack() as stack:
        yield {name: transformers_peers(pair, gamma) if name not in DRIVERS else
               process_peers(name, variants_of(name, pair, head), settings, stack) for name in names}


def variants_of(name: str, pair: LoadedPair, head: Artifact | None = None) -> dict[str, dict[str, Any]]:
    """Variant of a peer → what its driver reads."""
    if name == "llama.cpp":
        model = {"model": str(gguf_of(pair))}
        return {"autoregressive": model, "prompt_lookup": model}
    model = {"model": str(model_folder(pair, "target"))}
    drafting = {"draft_model": {**model, "draft": str(model_folder(pair, "draft"))}} if "draft" in pair.modules else {}
    with_head = {"eagle3": {**model, "head": str(head_folder(pair, head))}} if isinstance(head, Eagle3Head) else {}
    return {"autoregressive": model, "ngram": model, **drafting, **with_head}


def process_peers(name: str, variants: dict[str, dict[str, Any]], settings: dict[str, Any], stack: ExitStack) -> PeerGroup:
    """One process for each variant, started one after the other; each is stopped when it is ready."""
    group = PeerGroup()
    for variant, files in variants.items():
        log = peers_root() / "logs" / f"{name}-{variant}.log"
        process = PeerProcess(f"{name}/{variant}", [str(interpreter(name)), str(DRIVERS[name])], log, threads=torch.get_num_threads())
        stack.callback(process.close)
        about = process.start({**settings, **files, "variant": variant})
        group.contenders.append(ProcessPeer(process))
        group.notes += [note for note in about.notes if note not in group.notes]
        group.version = about.version
    return group
