"""Starting the peers of a bench, each variant in a process of its own, and ending them with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from draftwell.components.bench.interleaved import leaving_out
from draftwell.components.bench.peers import check_peers
from draftwell.components.bench.peers.group import PeerGroup, ProcessPeer
from draftwell.components.bench.peers.model_files import (
    gguf_of,
    head_folder,
    head_gguf,
    model_folder,
    onnx_folder,
    openvino_folder,
)
from draftwell.components.bench.peers.transformers_peer import transformers_peers
from draftwell.components.engines.environments import DRIVERS, interpreter, peers_root
from draftwell.components.engines.port import EngineSettings
from draftwell.components.engines.process import EngineProcess
from draftwell.components.engines.vllm import VllmEngine
from draftwell.components.engines.vllm_methods import Method, VllmFiles
from draftwell.serving.artifacts.base import Artifact
from draftwell.serving.artifacts.eagle3_head import Eagle3Head
from draftwell.serving.errors import DraftwellError
from draftwell.serving.number_format import Weights
from draftwell.serving.runtime.pair import LoadedPair

LOOKUP = {"lookup_tokens": 5, "lookup_ngram": 3}
"""Tokens that vLLM's n-gram speculation and llama.cpp's prompt lookup draft, and their longest
n-gram."""
ROUNDING = ("llama.cpp", "xllamacpp", "openvino", "onnxruntime")
"""Peers that round weights to 8 or 4 bits."""
ROOM = 64
"""Positions beyond prompt and answer: drafts reach over the end."""


def check_modules(pair: LoadedPair) -> None:
    """Refuse a pair whose modules hold no weights that peers could read."""
    if any(
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


@contextmanager
def open_peers(
    pair: LoadedPair,
    names: Sequence[str],
    *,
    gamma: int = 5,
    context: int = 2048,
    slots: int = 1,
    weights: Weights | None = None,
    head: Artifact | None = None,
    left_out: dict[str, str] | None = None,
) -> Iterator[dict[str, PeerGroup]]:
    """The peers with these names, ready to decode; their processes end with the block.

    Args:
        gamma: draft length with the pair's draft, and with its head.
        context: tokens of the longest prompt with its answer.
        slots: requests at once.
        weights: let the peers round the target's weights; those that cannot are left out.
        head: the pair's EAGLE-3 head, where it has one, for peers that load it.
        left_out: takes label → reason of those that do not start; None lets their errors through.
    Raises:
        DraftwellError: what `check_peers` and `EngineProcess` raise.
    """
    check_peers(names, device=pair.device, padded=pair.padded_to is not None)
    if names:
        check_modules(pair)
    limit = (
        int(pair.modules["target"].config.get_text_config().max_position_embeddings) if names else 0
    )
    positions = min(context + ROOM, limit)
    with ExitStack() as stack:
        groups = {}
        for name in names:
            with leaving_out(name, left_out):
                check_weights(name, weights)
                if name not in DRIVERS:
                    groups[name] = transformers_peers(pair, gamma)
                    continue
                fixed = fixed_of(name, pair, weights)
                group = groups[name] = PeerGroup()
                for variant, speculation in variants_of(name, pair, gamma, head).items():
                    engine = engine_of(name, variant, pair, fixed)
                    stack.callback(engine.stop)
                    with leaving_out(engine.label, left_out):
                        settings = EngineSettings(
                            speculation=speculation() if callable(speculation) else speculation,
                            slots=slots,
                            context=positions,
                        )
                        start_peer(group, engine, name, variant, settings)
        yield groups


def check_weights(name: str, weights: Weights | None) -> None:
    """Refuse a peer that has whole weights only.

    Raises:
        DraftwellError: it has (`peer_weights`).
    """
    if weights is not None and name not in ROUNDING:
        raise DraftwellError(
            f"{name} is measured with whole weights only, not {weights}: leave it out of peers",
            code="peer_weights",
        )


Speculation = dict[str, Any] | Callable[[], dict[str, Any]] | None
"""How an engine speculates, by its own keys, or what makes the files for that; None: plain."""


def variants_of(
    name: str, pair: LoadedPair, gamma: int, head: Artifact | None = None
) -> dict[str, Speculation]:
    """Variant of a peer → how it speculates."""
    if name == "onnxruntime":
        return {"autoregressive": None}
    if name == "llama.cpp":
        return {"autoregressive": None, "prompt_lookup": dict(LOOKUP)}
    if name == "vllm":
        return vllm_variants(pair, gamma, head)
    looked_up = {"tokens": LOOKUP["lookup_tokens"], "ngram": LOOKUP["lookup_ngram"]}
    found: dict[str, Speculation] = {"autoregressive": None, "prompt_lookup": looked_up}
    if "draft" in pair.modules:
        found["draft_model"] = lambda: drafting(name, pair, gamma, None)
    if isinstance(head, Eagle3Head):
        found["eagle3"] = lambda: drafting(name, pair, gamma, head)
    return found


def drafting(name: str, pair: LoadedPair, gamma: int, head: Eagle3Head | None) -> dict[str, Any]:
    """Drafts of OpenVINO's or xllamacpp's by a head, or by the pair's draft without one."""
    if name == "xllamacpp":
        file = gguf_of(pair, "draft", vocabulary=True) if head is None else head_gguf(pair, head)
        return {"tokens": gamma, "draft": str(file), "eagle3": head is not None}
    folder = model_folder(pair, "draft") if head is None else head_folder(pair, head)
    return {"tokens": gamma, "draft": str(openvino_folder(folder, folder.name))}


def vllm_variants(pair: LoadedPair, gamma: int, head: Artifact | None) -> dict[str, Speculation]:
    """vLLM's speculative configs."""
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


def start_peer(
    group: PeerGroup, engine: EngineProcess, name: str, variant: str, settings: EngineSettings
) -> None:
    """Start a variant, which is stopped when it is ready, and add it to its group."""
    about = engine.start(settings)
    group.contenders.append(ProcessPeer(engine))
    notes = (*about.notes, *note_on(name, variant, settings.speculation))
    group.notes += [note for note in notes if note not in group.notes]
    group.version = about.version


def fixed_of(name: str, pair: LoadedPair, weights: Weights | None) -> dict[str, Any]:
    """Settings of a driver that are the same at every start; its model's files are made here."""
    if name == "vllm":
        return {}
    target = model_folder(pair, "target")
    made = f"{pair.name}-target-{pair.fingerprint[:12]}"
    model = {
        "openvino": lambda: openvino_folder(target, made, weights),
        "onnxruntime": lambda: onnx_folder(target, made, weights),
        "xllamacpp": lambda: gguf_of(pair, weights=weights, vocabulary=True),
    }.get(name, lambda: gguf_of(pair, weights=weights))
    return {"model": str(model()), "dtype": pair.dtype, "weights": weights}


def engine_of(name: str, variant: str, pair: LoadedPair, fixed: dict[str, Any]) -> EngineProcess:
    """A peer's engine, not yet started."""
    label, threads = f"{name}/{variant}", torch.get_num_threads()
    if name == "vllm":
        return VllmEngine(label, model_folder(pair, "target"), dtype=pair.dtype, threads=threads)
    return EngineProcess(
        label,
        [str(interpreter(name)), str(DRIVERS[name])],
        peers_root() / "logs" / f"{name}-{variant}.log",
        threads=threads,
        fixed=fixed,
    )


def note_on(name: str, variant: str, speculation: dict[str, Any] | None) -> list[str]:
    """How a variant of vLLM speculates; drivers of others say what matters themselves."""
    if name != "vllm" or speculation is None:
        return []
    shown = ", ".join(
        f"{key} {value}" for key, value in speculation.items() if key not in ("method", "model")
    )
    return [f"vllm {variant}: {shown}"]
