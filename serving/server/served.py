"""What a server serves: a loaded pair, the strategy that decodes with it, and how many requests run at once."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from serving.runtime.artifacts.base import Artifact
from serving.runtime.artifacts.decoding_config import DecodingConfig
from serving.runtime.artifacts.hardware_profile import HardwareProfile
from serving.runtime.pair import LoadedPair
from serving.runtime.strategies import Kit, Strategy, build_strategy, find_strategy
from serving.runtime.types import DraftwellError

log = logging.getLogger(__name__)


@dataclass
class ServedModel:
    """A model as clients see it.

    Args:
        name: what clients write as `model`.
        slots: requests that run at once; the pair must have been loaded with as many.
        threads: compute threads; None leaves torch's own choice.
        created: Unix seconds, shown by `/v1/models`.
    """

    name: str
    pair: LoadedPair
    strategy: Strategy
    slots: int = 1
    threads: int | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self._encoding = threading.Lock()  # a tokenizer's settings may change while it encodes
        self.max_context = min(m.max_context for m in self.strategy.choose_models(self.pair.models).values())
        self.vocab_size = self.pair.models["target"].vocab_size
        self.stop_tokens = self.pair.stop_tokens

    def encode(self, prompt: str) -> list[int]:
        """Ids of plain text; any thread may call it."""
        with self._encoding:
            return self.pair.encode(prompt)

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Ids of a conversation, ready for the assistant's turn; any thread may call it.

        Raises:
            DraftwellError: the chat template refuses the conversation (roles out of order, say).
        """
        with self._encoding:
            return self.pair.encode_chat(messages)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of generated ids, without special tokens and without what ended the text."""
        return self.pair.decode([i for i in ids if i not in self.stop_tokens])


def from_bundle(path: Path, *, slots: int = 8, dtype: str | None = None, threads: int | None = None,
                max_context: int | None = None, deterministic: bool = False) -> ServedModel:
    """Load what a bundle holds. Online state starts from its artifacts and lives in memory.

    Args:
        path: the bundle's folder.
        dtype: None takes the bundle's; another one is refused, because artifacts are bound to it.
        max_context: positions per request; None takes the models' own limit, at most 4096.
        deterministic: copy online state for every request, so that an answer never depends on earlier requests.
    Raises:
        DraftwellError: the bundle is damaged or foreign, its models are missing, or it was tuned for another device.
    """
    from serving.runtime.bundle import open_bundle
    from serving.runtime.pair import load_pair
    from serving.runtime.pair_files import models_root

    bundle = open_bundle(path)
    manifest = bundle.manifest
    if dtype not in (None, manifest.dtype):
        raise DraftwellError(f"the bundle {path} was tuned in {manifest.dtype}, not {dtype}: leave --dtype out, or deploy a release "
                             f"of the pair in {dtype}")
    check_device(manifest.device)
    artifacts = bundle.artifacts()
    config = artifacts.get(DecodingConfig.kind)
    if not isinstance(config, DecodingConfig):
        raise DraftwellError(f"the bundle {path} holds no decoding config: tune the pair and deploy again")
    check_device_class(config, artifacts, manifest.device)
    if threads:
        set_threads(threads)
    files = bundle.files(models_root())
    pair = load_pair(files, dtype=manifest.dtype, device=manifest.device,  # type: ignore[arg-type]
                     slots=slots, max_context=max_context, onnx_draft=find_strategy(config.strategy).prefers_onnx)
    needed = {kind: artifacts[kind] for kind in find_strategy(config.strategy).artifacts if kind in artifacts}
    warm_up(pair, build_strategy(config.strategy, config.parameters, Kit(needed, pair.special_tokens, deterministic=True)))
    strategy = build_strategy(config.strategy, config.parameters, Kit(needed, pair.special_tokens, deterministic))
    return ServedModel(manifest.pair, pair, strategy, slots, threads)


def warm_up(pair: LoadedPair, strategy: Strategy) -> None:
    """Decode a few tokens: a missing artifact or broken weights show before the first client comes, not after."""
    prompt = pair.encode_prompt("Hello")
    pair.engine().generate(prompt, pair.sampling(max_tokens=8), strategy)


def check_device(device: str) -> None:
    """Refuse a bundle for a device that is not here."""
    import torch

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise DraftwellError(f"the bundle was made for {device}, and no CUDA device is here: deploy with DEVICE=cpu")


def check_device_class(config: DecodingConfig, artifacts: Mapping[str, Artifact], device: str) -> None:
    """Refuse a profile of another machine where the strategy paces itself by it; say so where only the tuning is foreign."""
    from serving.runtime.device import device_class

    here = device_class(device)
    profile = artifacts.get(HardwareProfile.kind)
    measured = profile.provenance.device_class if profile else None
    if HardwareProfile.kind in find_strategy(config.strategy).artifacts and measured not in (None, here):
        raise DraftwellError(f"the bundle's hardware profile was measured on {measured}, this machine is {here}: run "
                             "`draftwell calibrate` and `draftwell tune` here and deploy again")
    tuned = config.provenance.device_class
    if tuned not in (None, here):
        log.warning("the decoding config was tuned on %s, this machine is %s: another choice may be faster here", tuned, here)


def set_threads(threads: int) -> None:
    """Compute threads of this process."""
    import torch

    torch.set_num_threads(threads)
