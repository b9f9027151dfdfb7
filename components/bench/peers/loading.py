"""Starting the peers of a bench, each variant in a process of its own, and ending them with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from draftwell.components.bench.interleaved import leaving_out
from draftwell.components.bench.peers import check_peers
from draftwell.components.bench.peers.group import PeerGroup, ProcessPeer
from draftwell.components.bench.peers.model_files import gguf_of, head_folder, model_folder
from draftwell.components.bench.peers.transformers_peer import transformers_peers
from draftwell.components.engines.environments import DRIVERS, interpreter, peers_root
from draftwell.components.engines.port import EngineSettings
from draftwell.components.engines.process import EngineProcess
from draftwell.components.engines.vllm import VllmEngine
from draftwell.components.engines.vllm_methods import Method, VllmFiles
from draftwell.serving.artifacts.base import Artifact
from draftwell.serving.artifacts.eagle3_head import Eagle3Head
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.pair import LoadedPair

LOOKUP = {"lookup_tokens": 5, "lookup_ngram": 3}
"""Tokens that vLLM's n-gram speculation and llama.cpp's prompt lookup draft, and their longest
n-gram."""
ROOM = 64
"""Positions beyond prompt and answer: drafts reach over the end."""


@contextmanager
def open_peers(
    pair: LoadedPair,
    names: Sequence[str],
    *,
    gamma: int = 5,
    context: int = 2048,
    temperature: float = 0.0,
    head: Artifact | None = None,
    left_out: dict[str, str] | None = None,
) -> Iterator[dict[str, PeerGroup]]:
    """The peers with these names, ready to decode; their processes end with the block.

    Args:
        gamma: draft length with the pair's draft, and with its head.
        context: tokens of the longest prompt with its answer.
        temperature: that of the bench.
        head: the pair's EAGLE-3 head, where it has one, for peers that load it.
        left_out: takes label → reason of those that do not start; None lets their errors through.
    Raises:
        DraftwellError: what `check_peers` and `EngineProcess` raise.
    """
    check_peers(
        names, device=pair.device, temperature=temperature, padded=pair.padded_to is not None
    )
    if names and any(
        parameter.numel() == 0
        for module in pair.modules.values()
        for parameter in module.parameters()
    ):
        raise DraftwellError(
            (
                "the pair's transformers modules gave up their weights: load it with "
                "keep_modules=True to measure peers"
            ),
            code="modules_without_weights",
        )
    limit = (
        int(pair.modules["target"].config.get_text_config().max_position_embeddings) if names else 0
    )
    positions = min(context + ROOM, limit)
    with ExitStack() as stack:
        groups = {}
        for name in names:
            with leaving_out(name, left_out):
                groups[name] = (
                    process_peers(
                        name, pair, variants_of(name, pair, gamma, head), positions, stack, left_out
                    )
                    if name in DRIVERS
                    else transformers_peers(pair, gamma)
                )
        yield groups


def variants_of(
    name: str, pair: LoadedPair, gamma: int, head: Artifact | None = None
) -> dict[str, dict[str, Any] | None]:
    """Variant of a peer → how it speculates, by the engine's own keys; None: plain decoding."""
    if name == "llama.cpp":
        return {"autoregressive": None, "prompt_lookup": dict(LOOKUP)}
    methods = {"ngram": Method("ngram", LOOKUP["lookup_tokens"], LOOKUP["lookup_ngram"])}
    if "draft" in pair.modules:
        methods["draft_model"] = Method("draft_model", gamma)
    if isinstance(head, Eagle3Head):
        methods["eagle3"] = Method("eagle3", gamma)
    files = VllmFiles(
        model_folder(pair, "target"),
        draft=model_folder(pair, "draft") if "draft_model" in methods else None,
        head=head_folder(pair, head) if isinstance(head, Eagle3Head) else None,
    )
    return {
        "autoregressive": None,
        **{variant: method.speculative_config(files) for variant, method in methods.items()},
    }


def process_peers(
    name: str,
    pair: LoadedPair,
    variants: dict[str, dict[str, Any] | None],
    context: int,
    stack: ExitStack,
    left_out: dict[str, str] | None = None,
) -> PeerGroup:
    """One engine for each variant, started one after the other; each is stopped when it is
    ready."""
    group = PeerGroup()
    for variant, speculation in variants.items():
        engine = engine_of(name, variant, pair)
        stack.callback(engine.stop)
        with leaving_out(engine.label, left_out):
            about = engine.start(EngineSettings(speculation=speculation, context=context))
            group.contenders.append(ProcessPeer(engine))
            notes = (*about.notes, *note_on(name, variant, speculation))
            group.notes += [note for note in notes if note not in group.notes]
            group.version = about.version
    return group


def engine_of(name: str, variant: str, pair: LoadedPair) -> EngineProcess:
    """A peer's engine, not yet started."""
    label, threads = f"{name}/{variant}", torch.get_num_threads()
    if name == "vllm":
        return VllmEngine(label, model_folder(pair, "target"), dtype=pair.dtype, threads=threads)
    return EngineProcess(
        label,
        [str(interpreter(name)), str(DRIVERS[name])],
        peers_root() / "logs" / f"{name}-{variant}.log",
        threads=threads,
        fixed={"model": str(gguf_of(pair)), "dtype": pair.dtype},
    )


def note_on(name: str, variant: str, speculation: dict[str, Any] | None) -> list[str]:
    """How a variant of vLLM speculates; llama.cpp's driver says it itself."""
    if name != "vllm" or speculation is None:
        return []
    shown = ", ".join(
        f"{key} {value}" for key, value in speculation.items() if key not in ("method", "model")
    )
    return [f"vllm {variant}: {shown}"]
