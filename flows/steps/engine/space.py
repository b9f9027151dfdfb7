"""What another engine reads of a pair, and where its choice and its measurements are."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwell.components.bench.engines.measure import measurements_of
from draftwell.components.engines.environments import peers_root
from draftwell.components.engines.vllm import (
    NAME,
    VllmEngine,
    check_version,
    command,
    device_for,
    distribution,
    gpu_share,
    lacks,
)
from draftwell.components.engines.vllm_methods import Method, VllmFiles
from draftwell.components.export.checkpoint import save_draft, save_head
from draftwell.components.prompts.overlap import TrainingPrompts
from draftwell.components.prompts.prompt import ids_of
from draftwell.components.tune.engines.lab import GROUPS, Lab
from draftwell.flows.context import Bar, encoder_of, now, take_untouched, training_prompts
from draftwell.flows.progress import announce, counting
from draftwell.flows.steps.engine.served import Deployment, served_deployment
from draftwell.flows.workspace import Workspace
from draftwell.registry.bundles.wheel import PLUGIN, plugin_version
from draftwell.registry.releases import engine_device
from draftwell.serving.artifacts.base import ArtifactError
from draftwell.serving.artifacts.eagle3_head import Eagle3Head
from draftwell.serving.artifacts.engine_config import EngineConfig
from draftwell.serving.artifacts.pair_files import fingerprint
from draftwell.serving.device import (
    checked_device,
    device_class,
    set_threads,
    usable_cores,
)
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import json_digest
from draftwell.serving.number_format import dtype_of
from draftwell.serving.runtime.pair import LoadedPair

if TYPE_CHECKING:
    from draftwell.components.engines.port import Engine
    from draftwell.components.prompts.prompt import Prompt
    from draftwell.flows.settings import PipelineSettings
    from draftwell.serving.runtime.requests import Sampling

REPORT = "loop.json"
"""What came of the flow, in the engine's folder."""
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
    def name(self) -> str:
        """Of the engine, as releases have it."""
        return NAME

    @property
    def option(self) -> str:
        """The engine as `--engine` names it."""
        return NAME

    @property
    def folder(self) -> Path:
        """Where texts, measurements and reports of this engine are kept."""
        return self.workspace.device_root / NAME

    @property
    def models(self) -> Path:
        """Where drafts and heads are written as this engine reads them."""
        return peers_root() / "models"

    def lacks(self, package: str) -> bool:
        """Whether a distribution is missing in the engine's environment."""
        return lacks(package)

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
    def here(self) -> dict[str, Any]:
        """What is measured, and with what: figures of anything else say nothing of it."""
        return {
            "engine": NAME,
            "version": self.version,
            "distribution": distribution(),
            "device_class": device_class(self.workspace.device),
            "dtype": dtype_of(self.workspace.dtype),
            "threads": self.threads,
            "fingerprint": self.fingerprint,
        }

    @cached_property
    def fingerprint(self) -> str:
        """Of the models."""
        return fingerprint(self.workspace.files(), self.workspace.dtype)

    @cached_property
    def pair(self) -> LoadedPair:
        """The pair without its models: it encodes prompts and knows stop tokens."""
        return encoder_of(self.workspace)

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
        folder = self.models / f"{self.workspace.spec.name}-{role}-{digest[:12]}"
        if not folder.is_dir():
            self.workspace.say(f"writing the {role} for {self.name}")
            write(folder)
        return folder

    def shown(self, method: Method) -> str:
        """A way to speculate as people give it to the engine."""
        return json.dumps(method.speculative_config(self.files))

    def engine(self, label: str) -> Engine:
        """An engine, not yet started."""
        device = self.workspace.device.partition(":")[0]
        return VllmEngine(
            f"{NAME}/{label}",
            self.files.target,
            dtype=dtype_of(self.workspace.dtype),
            threads=self.threads,
            device=device,
            plugins=PLUGIN.parent,
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

    def lab(
        self, prompts: Sequence[Prompt], sampling: Sampling, slots: int, groups: int = GROUPS
    ) -> Lab:
        """What ways to speculate are measured with; nothing is kept."""
        ids, context = self.encoded(prompts, sampling.max_tokens)
        store = measurements_of({})
        return Lab(self.engine, self.files, ids, sampling, slots, context, groups, store, self.bar)

    def subject(
        self, ids: Sequence[Sequence[int]], sampling: Sampling, **more: Any
    ) -> dict[str, Any]:
        """What a measurement depends on."""
        return {
            **self.here,
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
        return engine_device(self.workspace.device.partition(":")[0], self.name, temperature)

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

    def forget_files(self) -> None:
        """Look for draft and head again: there may be others."""
        vars(self).pop("files", None)


def space_of(settings: PipelineSettings) -> EngineSpace:
    """The pair on the engine; a missing or wrong engine is refused before models are looked for.
    The answer to a drift computes with no more threads than what is served was measured with,
    unless a person names others.

    Raises:
        DraftwellError: the engine is not installed or not the one that is needed (as
            `EngineSpace.version` says), the device is not here, or the pair has a draft that other
            engines cannot read (`engine_option`).
    """
    command()
    device_for(settings.device)
    set_threads(settings.threads)
    workspace = Workspace(settings.pair, settings.dtype, announce, checked_device(settings.device))
    space = EngineSpace(workspace, settings.threads or usable_cores(), counting("done"))
    if (draft := workspace.spec.draft) is not None and draft.near_copy is not None:
        raise DraftwellError(
            f"the draft of {workspace.spec.name} is a copy of the target that our own engine makes "
            "in memory: name another pair for --engine vllm",
            code="engine_option",
        )
    if workspace.device != "cpu":
        announce("vLLM on a GPU was never run by this project: what it says there is unconfirmed")
    _ = space.version
    known = deployment_of(settings, space).threads
    if settings.threads is None and known is not None:
        return replace(space, threads=min(known, space.threads))
    return space


def deployment_of(settings: PipelineSettings, space: EngineSpace) -> Deployment:
    """What a person decided about what is served, which the answer to a drift keeps."""
    if settings.source != "drift":
        return Deployment()
    return served_deployment(settings.out, space.workspace.spec.name)


def about(space: EngineSpace) -> dict[str, Any]:
    """What a document is about."""
    return {**space.here, "pair": space.workspace.spec.name, "made": now()}


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
    used = TrainingPrompts({**made.by_name, f"the choice for {space.name}": tuned}, made.unknown)
    return take_untouched(space.workspace, used, prompts, limit)
