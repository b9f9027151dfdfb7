"""What another engine reads of a pair, and where its choice and its measurements are."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from draftwell.components.engines.environments import peers_root
from draftwell.components.engines.vllm import (
    NAME,
    VllmEngine,
    check_version,
    command,
    device_for,
    distribution,
    gpu_share,
)
from draftwell.components.engines.vllm_methods import VllmFiles
from draftwell.components.export.checkpoint import save_draft, save_head
from draftwell.components.prompts.overlap import TrainingPrompts
from draftwell.components.prompts.prompt import ids_of
from draftwell.components.tune.engines.choice import EngineChoice
from draftwell.flows.context import Bar, now, training_prompts
from draftwell.flows.workspace import Workspace
from draftwell.registry.bundles.vllm.plugin_wheel import PACKAGE, plugin_version
from draftwell.registry.releases import engine_device
from draftwell.serving.artifacts.base import ArtifactError
from draftwell.serving.artifacts.eagle3_head import Eagle3Head
from draftwell.serving.artifacts.engine_config import EngineConfig
from draftwell.serving.artifacts.pair_files import fingerprint
from draftwell.serving.device import checked_device, default_device, device_class, usable_cores
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import json_digest
from draftwell.serving.number_format import dtype_of
from draftwell.serving.runtime.model_files import load_tokenizer
from draftwell.serving.runtime.pair import LoadedPair

if TYPE_CHECKING:
    from draftwell.components.prompts.prompt import Prompt
    from draftwell.serving.runtime.requests import Sampling

ROOM = 64
"""Positions beyond prompt and answer: drafts reach over the end."""


@dataclass(frozen=True)
class EngineSpace:
    """A pair on an engine of its own environment.

    Args:
        threads: that the engine computes with.
    """

    workspace: Workspace
    threads: int
    bar: Bar | None = None

    @property
    def folder(self) -> Path:
        """Where texts, measurements and reports of this engine are kept."""
        return self.workspace.device_root / NAME

    @cached_property
    def version(self) -> str:
        """Of the installed engine.

        Raises:
            DraftwellError: it is not installed, or another version (`peer_not_installed`,
                `engine_version`).
        """
        command()
        return check_version() or "unknown"

    @cached_property
    def fingerprint(self) -> str:

        return fingerprint(self.workspace.files(), self.workspace.dtype)

    @cached_property
    def pair(self) -> LoadedPair:
        """The pair without its models: it encodes prompts and knows stop tokens."""
        from transformers import GenerationConfig

        space = self.workspace
        target = space.files().target
        config = (
            GenerationConfig.from_pretrained(target)
            if (target / "generation_config.json").is_file()
            else GenerationConfig()
        )
        dtype: Any = space.dtype
        modules: dict[Any, Any] = {"target": SimpleNamespace(generation_config=config)}
        return LoadedPair(
            space.spec.name,
            dtype,
            "cpu",
            {},
            modules,
            load_tokenizer(target),
            self.fingerprint,
            space.spec.chat,
        )

    @cached_property
    def files(self) -> VllmFiles:
        """Target, and draft and head with complete weights, written once where they borrow the
        target's."""
        files = self.workspace.files()
        return VllmFiles(files.target, draft=self._draft(files.draft), head=self._head())

    def _draft(self, folder: Path | None) -> Path | None:
        if folder is None or (folder / "config.json").is_file():
            return folder

        return self._written(
            "draft",
            self.fingerprint,
            lambda out: save_draft(
                self.workspace.files().target, folder, out, dtype_of(self.workspace.dtype)
            ),
        )

    def head_folder(self) -> Path | None:
        """Folder of the head, the workspace's own or the one that the pair ships with."""
        own = self.workspace.folder("eagle3_head")
        if (own / "artifact.json").is_file():
            return own
        return self.workspace.shipped_folder("eagle3_head")

    def _head(self) -> Path | None:

        if (folder := self.head_folder()) is None:
            return None
        head = Eagle3Head.load(folder, fingerprint=self.fingerprint)
        return self._written(
            "head",
            str(head.digest),
            lambda out: save_head(self.workspace.files().target, head, out),
        )

    def _written(self, role: str, digest: str, write: Callable[[Path], Any]) -> Path:
        folder = peers_root() / "models" / f"{self.workspace.spec.name}-{role}-{digest[:12]}"
        if not folder.is_dir():
            self.workspace.say(f"writing the {role} for {NAME}")
            folder.parent.mkdir(parents=True, exist_ok=True)
            write(folder)
        return folder

    def engine(self, label: str) -> VllmEngine:
        """An engine, not yet started."""
        device = self.workspace.device.partition(":")[0]
        return VllmEngine(
            f"{NAME}/{label}",
            self.files.target,
            dtype=dtype_of(self.workspace.dtype),
            threads=self.threads,
            device=device,
            plugins=PACKAGE.parent,
            gpu_share=gpu_share() if device == "cuda" else None,
        )

    def encoded(self, prompts: Sequence[Prompt], max_tokens: int) -> tuple[list[list[int]], int]:
        """Token ids of the prompts, and positions that the longest needs.

        Raises:
            DraftwellError: one is too long for the target (`context_too_long`).
        """

        ids = [ids_of(self.pair, prompt) for prompt in prompts]
        config = json.loads((self.files.target / "config.json").read_text())
        limit = int(config.get("max_position_embeddings") or 1 << 20)
        for prompt, one in zip(prompts, ids, strict=True):
            if len(one) + max_tokens > limit:
                raise DraftwellError(
                    f"prompt {prompt.id} has {len(one)} tokens, which with {max_tokens} "
                    f"more exceed the target's {limit}: "
                    "leave it out, or ask for fewer tokens",
                    code="context_too_long",
                )
        return ids, min(limit, max(map(len, ids)) + max_tokens + ROOM)

    def subject(
        self, ids: Sequence[Sequence[int]], sampling: Sampling, **more: Any
    ) -> dict[str, Any]:
        """What a measurement depends on."""

        return {
            "engine": NAME,
            "version": self.version,
            "device_class": device_class(self.workspace.device),
            "threads": self.threads,
            "fingerprint": self.fingerprint,
            "dtype": self.workspace.dtype,
            "prompts": json_digest(list(ids)),
            "head": str(self.files.head),
            "plugin": plugin_version(),
            "sampling": [sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.seed],
            **more,
        }

    def measurements(self, temperature: float) -> Path:
        """File by which a tuning that was killed resumes."""
        return self.folder / f"measurements{f'-t{temperature:g}' if temperature else ''}.jsonl"

    def released_as(self, temperature: float) -> str:
        """The device of the engine's releases for requests of this temperature."""
        return engine_device(self.workspace.device.partition(":")[0], NAME, temperature)

    def config_folder(self, temperature: float) -> Path:
        """Folder of the choice for the class of this temperature."""
        folder = self.workspace.folder("engine_config")
        return folder.with_name(f"{folder.name}_sampled") if temperature else folder

    def config(self, temperature: float = 0.0) -> EngineConfig | None:
        """What was tuned last for requests of this class; None where nothing was, or what is there
        cannot be read."""
        try:
            return EngineConfig.load(self.config_folder(temperature))
        except ArtifactError:
            return None

    def tuned_config(self, temperature: float = 0.0) -> EngineConfig:
        """What was tuned last for requests of this class.

        Raises:
            DraftwellError: nothing was (`not_tuned`).
        """
        if (config := self.config(temperature)) is not None:
            return config
        raise DraftwellError(
            f"nothing is tuned for {NAME}: run `draftwell tune --engine {NAME} --pair "
            f"{self.workspace.spec.name}` first",
            code="not_tuned",
        )

    def choice(self, temperature: float = 0.0) -> EngineChoice | None:
        """The choice of `config`."""
        config = self.config(temperature)
        return (
            None
            if config is None
            else EngineChoice.model_validate_json(json.dumps(config.contents.choice))
        )


def engine_space(
    pair: str,
    dtype: str | None,
    device: str | None,
    threads: int | None,
    say: Callable[[str], None],
) -> EngineSpace:
    """A pair on the engine; a missing or wrong engine is refused before models are looked for.

    Args:
        device: None takes the one that the engine is built for, or where it does not say the
            default one.
        threads: None takes all cores.
        say: is told what is not confirmed.
    Raises:
        DraftwellError: the engine is not installed or not the one that is needed (as
            `EngineSpace.version` says), the device is not here, or the pair has a draft that other
            engines cannot read (`engine_option`).
    """

    command()
    on = device_for(device)
    space = EngineSpace(
        Workspace(pair, dtype, say, default_device() if on is None else checked_device(on)),
        threads or usable_cores(),
    )
    if (draft := space.workspace.spec.draft) is not None and draft.near_copy is not None:
        raise DraftwellError(
            f"the draft of {space.workspace.spec.name} is a copy of the target that our "
            "own engine makes in memory: name "
            "another pair for --engine vllm",
            code="engine_option",
        )
    if space.workspace.device != "cpu":
        say("vLLM on a GPU was never run by this project: what it says there is unconfirmed")
    _ = space.version
    return space


def about(space: EngineSpace) -> dict[str, Any]:
    """What a document is about."""

    return {
        "engine": NAME,
        "version": space.version,
        "pair": space.workspace.spec.name,
        "fingerprint": space.fingerprint,
        "dtype": space.workspace.dtype,
        "device_class": device_class(space.workspace.device),
        "distribution": distribution(),
        "threads": space.threads,
        "made": now(),
    }


def untouched(
    space: EngineSpace, prompts: Sequence[Prompt], limit: int | None, config: EngineConfig
) -> list[Prompt]:
    """At most `limit` prompts that neither the draft, the head nor the config was made from; a
    person reads how many were left out.

    Raises:
        DraftwellError: none is left (`no_untouched_prompts`).
    """

    made = training_prompts(space.workspace, kinds=("eagle3_head",))
    tuned = frozenset(config.provenance.training_prompts or ())
    left, lines = TrainingPrompts(
        {**made.by_name, f"the choice for {NAME}": tuned}, made.unknown
    ).untouched(prompts, limit)
    for line in lines:
        space.workspace.say(line)
    return left
