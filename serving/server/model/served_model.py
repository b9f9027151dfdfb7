"""What a server serves: a loaded pair, the strategy that decodes with it, and how many requests run at once."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from serving.artifacts.base import Artifact
from serving.artifacts.decoding_config import DecodingConfig
from serving.artifacts.hardware_profile import HardwareProfile
from serving.errors import DraftwellError
from serving.runtime.pair import LoadedPair
from serving.runtime.strategies import Strategy, StrategyResources, build_strategy, find_strategy
from serving.server.model.snapshots import SnapshotOrigin
from serving.server.model.strategy_pool import PLAIN, Mode, StrategyPool
from serving.server.scheduling.costs import BatchCosts, completed, from_profile, measure

if TYPE_CHECKING:
    from serving.artifacts.pair_files import PairFiles
    from serving.bundle.bundle import Manifest

log = logging.getLogger(__name__)


class StrategySource(Protocol):
    """The strategies that a server offers."""

    def names(self) -> tuple[str, ...]:
        """What `get` takes."""

    def get(self, name: str | None = None, tenant: str | None = None) -> Strategy:
        """A strategy by name, None for the tuned one, with the state that the tenant's requests may use.

        Raises:
            DraftwellError: it is not offered; the message names those that are.
        """


class TunedOrPlain:
    """The tuned strategy and plain decoding, the same for all tenants."""

    def __init__(self, tuned: Strategy):
        self._strategies = {tuned.name: tuned}
        self._strategies.setdefault(PLAIN, build_strategy(PLAIN))
        self._tuned = tuned

    def names(self) -> tuple[str, ...]:
        return tuple(self._strategies)

    def get(self, name: str | None = None, tenant: str | None = None) -> Strategy:
        if name is None:
            return self._tuned
        if name not in self._strategies:
            raise DraftwellError(f"this server has no strategy {name!r}: choose one of {', '.join(self.names())}")
        return self._strategies[name]


@dataclass
class ServedModel:
    """A model as clients see it.

    Args:
        name: what clients write as `model`.
        slots: requests that run at once; the pair must have been loaded with as many.
        threads: compute threads; None leaves torch's own choice.
        created: Unix seconds, shown by `/v1/models`.
        strategies: what requests may choose from; None: `strategy` and plain decoding.
        version: of the bundle, for people.
        costs: seconds of forwards, by which drafts shorten under load; None leaves them alone.
        origin: the bundle; None without one.
        artifacts: the bundle's.
    """

    name: str
    pair: LoadedPair
    strategy: Strategy
    slots: int = 1
    threads: int | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    strategies: StrategySource = None  # type: ignore[assignment]  # __post_init__ fills it
    version: str | None = None
    costs: BatchCosts | None = None
    origin: SnapshotOrigin | None = None
    artifacts: Mapping[str, Artifact] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.strategies = self.strategies or TunedOrPlain(self.strategy)
        self._encoding = threading.Lock()  # a tokenizer's settings may change while it encodes
        self.max_context = min(m.max_context for m in self.strategy.choose_models(self.pair.models).values())
        self.vocab_size = self.pair.models["target"].vocab_size
        self.stop_tokens = self.pair.stop_tokens

    def share_tokenizer(self, other: ServedModel) -> None:
        """Take turns with another model that has the same tokenizer."""
        self._encoding = other._encoding

    @property
    def label(self) -> str:
        """Name and version, for logs."""
        return f"{self.name} {self.version}" if self.version else self.name

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

    def token_text(self, token: int) -> str:
        """One token as it is within a text, with its space, special ones spelt out; "\ufffd" stands for a part of a character."""
        alone = str(self.pair.tokenizer.decode([token]))
        lead, known = self._lead
        if lead is None or token in self._special:
            return alone
        text = str(self.pair.tokenizer.decode([lead, token]))
        return text[len(known):] if text.startswith(known) else alone

    @cached_property
    def _special(self) -> frozenset[int]:
        return self.pair.special_tokens

    @cached_property
    def _lead(self) -> tuple[int | None, str]:
        """A token to spell others behind, and its text: decoders of SentencePiece tokenizers drop the space that a text begins with."""
        ids = [i for i in self.encode("a") if i not in self._special]
        return (ids[-1], str(self.pair.tokenizer.decode(ids[-1:]))) if ids else (None, "")


def from_bundle(path: Path, *, slots: int = 8, dtype: str | None = None, threads: int | None = None,
                max_context: int | None = None, deterministic: bool = False, beside: ServedModel | None = None,
                state: Mode = "shared", offered: Collection[str] | None = None) -> ServedModel:
    """Load what a bundle holds. Online state starts from its artifacts and lives in memory.

    Args:
        path: the bundle's folder.
        dtype: None takes the bundle's; another one is refused, because artifacts are bound to it.
        max_context: positions per request; None takes the models' own limit, at most 4096.
        deterministic: copy online state for every request, so that an answer never depends on earlier requests.
        beside: what serves meanwhile, loaded with the same settings; its pair is shared where the bundle is for the same models. The
            caller then sees to it that the new strategy works: those models are busy.
        state: whose requests share what is learnt (`StrategyPool`); `deterministic` is `off`.
        offered: strategies that requests may name (`StrategyPool`).
    Raises:
        DraftwellError: the bundle is damaged or foreign, its models are missing, it was tuned for a device that is not here, or for
            another than what serves, or the home lies inside it.
    """
    from serving.artifacts.pair_files import draftwell_home, models_root
    from serving.bundle.bundle import open_bundle, refuse_inside
    from serving.runtime.pair import LoadSettings, load_pair

    refuse_inside(path, {"DRAFTWELL_HOME": draftwell_home()})  # a draft's graph is kept there
    bundle = open_bundle(path)
    manifest = bundle.manifest
    if dtype not in (None, manifest.dtype):
        raise DraftwellError(f"the bundle {path} was tuned in {manifest.dtype}, not {dtype}: leave --dtype out, or deploy a release "
                             f"of the pair in {dtype}")
    check_same_device(manifest.device, beside)
    check_device(manifest.device)
    files = bundle.files(models_root())  # foreign weights are refused before anything loads
    artifacts = bundle.artifacts()
    config = artifacts.get(DecodingConfig.kind)
    if not isinstance(config, DecodingConfig):
        raise DraftwellError(f"the bundle {path} holds no decoding config: tune the pair and deploy again")
    check_device_class(config, artifacts, manifest.device)
    if threads:
        set_threads(threads)
    needed = {kind: artifacts[kind] for kind in find_strategy(config.strategy).artifacts if kind in artifacts}
    profile = artifacts.get(HardwareProfile.kind)
    if beside is not None and can_share(beside.pair, manifest, files, config.strategy):
        pair = beside.pair
    else:
        pair = load_pair(files, LoadSettings(dtype=manifest.dtype, device=manifest.device,
                         slots=slots, max_context=max_context, onnx_draft=find_strategy(config.strategy).prefers_onnx))
        warm_up(
            pair, build_strategy(config.strategy, config.parameters, StrategyResources(needed, pair.special_tokens, deterministic=True))
        )
    paced = profile_costs(profile, manifest.device) if isinstance(profile, HardwareProfile) else None
    costs = costs_of(pair, slots, paced, beside)
    usable = {kind: artifact for kind, artifact in artifacts.items() if kind != HardwareProfile.kind or paced is not None}
    pool = StrategyPool(pair, usable, config, pair.special_tokens, "off" if deterministic else state, offered=offered)
    served = ServedModel(manifest.pair, pair, pool.get(), slots, threads, version=str(manifest.release_version), costs=costs,
                         strategies=pool, origin=SnapshotOrigin.of(manifest), artifacts=artifacts)
    if beside is not None and beside.pair is pair:
        served.share_tokenizer(beside)
    return served


def can_share(pair: LoadedPair, manifest: Manifest, files: PairFiles, strategy: str) -> bool:
    """Whether a loaded pair is the one that a bundle was made for, chat template and stop tokens included, with every model that the
    bundle's strategy uses."""
    from serving.artifacts.pair_files import settings_digest

    lacks_onnx = find_strategy(strategy).prefers_onnx and "draft_onnx" not in pair.models
    same = (pair.fingerprint, pair.device) == (manifest.fingerprint, manifest.device) and pair.settings == settings_digest(files)
    return same and not lacks_onnx


def profile_costs(profile: HardwareProfile, device: str) -> BatchCosts | None:
    """Costs by a bundle's profile; None where it was measured on another machine."""
    from serving.device import device_class

    return from_profile(profile) if profile.provenance.device_class in (None, device_class(device)) else None


def costs_of(pair: LoadedPair, slots: int, known: BatchCosts | None, beside: ServedModel | None) -> BatchCosts | None:
    """What batches cost: timed, where the machine is idle, and completed by what the bundle's profile knows. None: nothing is known, and
    with one slot nothing need be."""
    if beside is not None and beside.pair is pair:  # timed when these models were loaded
        timed = beside.costs
    elif slots == 1 or (beside is not None and known is not None):  # beside a server that decodes, times are worse than a profile's
        timed = None
    else:
        timed = measure(pair.models, slots, batched=batches(pair))
    if known is None:
        return timed
    return replace(completed(timed, known) if timed else known, batched=batches(pair))


def batches(pair: LoadedPair) -> bool:
    """Whether a forward over many requests costs as its tokens do, and not as so many forwards."""
    from serving.runtime.models.unbatched_model import UnbatchedModel

    return not isinstance(pair.models["target"], UnbatchedModel)


def warm_up(pair: LoadedPair, strategy: Strategy) -> None:
    """Decode a few tokens: a missing artifact or broken weights show before the first client comes, not after."""
    prompt = pair.encode_prompt("Hello")
    pair.engine().generate(prompt, pair.sampling(max_tokens=8), strategy)


def check_same_device(device: str, beside: ServedModel | None) -> None:
    """Refuse to go over to another device: one link `current` serves bundles for both, and a server should not move unasked."""
    if beside is not None and beside.pair.device != device:
        raise DraftwellError(f"the bundle was made for {device}, and this server computes on {beside.pair.device}: deploy into one folder "
                             "per device (draftwell deploy --out), or start the server again to change devices")


def check_device(device: str) -> None:
    """Refuse a bundle for a device that is not here."""
    import torch

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise DraftwellError(f"the bundle was made for {device}, and no CUDA device is here: deploy with DEVICE=cpu")


def check_device_class(config: DecodingConfig, artifacts: Mapping[str, Artifact], device: str) -> None:
    """Refuse a profile of another machine where the strategy paces itself by it; say so where only the tuning is foreign."""
    from serving.device import device_class

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
