"""What another engine reads of a pair, and where its choices, records and measurements are."""

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
    distribution,
    gpu_share,
)
from draftwell.components.engines.vllm_methods import VllmFiles
from draftwell.flows.context import Bar, now, training_prompts
from draftwell.flows.workspace import Workspace
from draftwell.registry.bundles.vllm.plugin_wheel import PACKAGE, plugin_version
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import json_digest
from draftwell.serving.number_format import dtype_of

if TYPE_CHECKING:
    from draftwell.components.prompts.prompt import Prompt
    from draftwell.components.tune.engines.choice import EngineChoice
    from draftwell.serving.runtime.pair import LoadedPair
    from draftwell.serving.runtime.requests import Sampling

ROOM = 64
"""Positions beyond prompt and answer: drafts reach over the end."""
CHOICE, RECORD, MEASUREMENTS = "tuned", "gate", "measurements"
"""Names of files, without what `EngineSpace.file_of` adds."""


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
        """Where choices, records and measurements of this engine are kept."""
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
        from draftwell.serving.artifacts.pair_files import fingerprint

        return fingerprint(self.workspace.files(), self.workspace.dtype)

    @cached_property
    def pair(self) -> LoadedPair:
        """The pair without its models: it encodes prompts and knows stop tokens."""
        from transformers import GenerationConfig

        from draftwell.serving.runtime.model_files import load_tokenizer
        from draftwell.serving.runtime.pair import LoadedPair

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
        from draftwell.components.export.checkpoint import save_draft

        return self._written(
            "draft",
            self.fingerprint,
            lambda out: save_draft(
                self.workspace.files().target, folder, out, dtype_of(self.workspace.dtype)
            ),
        )

    def _head(self) -> Path | None:
        from draftwell.components.export.checkpoint import save_head
        from draftwell.serving.artifacts.eagle3_head import Eagle3Head

        own = self.workspace.folder("eagle3_head")
        folder = (
            own
            if (own / "artifact.json").is_file()
            else self.workspace.shipped_folder("eagle3_head")
        )
        if folder is None:
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
        from draftwell.components.prompts.prompt import ids_of

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
        from draftwell.serving.device import device_class

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

    def file_of(self, what: str, temperature: float) -> Path:
        """`tuned.json` of greedy requests, `tuned-t0.7.json` of those that are sampled at .7."""
        return self.folder / (f"{what}-t{temperature:g}.json" if temperature else f"{what}.json")

    def tuned(self, temperature: float = 0.0) -> dict[str, Any]:
        """The document of the last tuning for requests of this temperature; empty where there is
        none."""
        try:
            found = json.loads(self.file_of(CHOICE, temperature).read_text())
            return found if isinstance(found, dict) else {}
        except (OSError, ValueError):
            return {}

    def temperatures(self) -> list[float]:
        """Of all choices that are there, ascending."""
        found = [
            0.0,
            *(
                float(number)
                for path in self.folder.glob(f"{CHOICE}-t*.json")
                if (number := path.stem.removeprefix(f"{CHOICE}-t")).replace(".", "", 1).isdecimal()
            ),
        ]
        return sorted(one for one in found if self.tuned(one))

    def choice(self, temperature: float = 0.0) -> EngineChoice | None:
        """What was tuned last for requests of this temperature; None where nothing was, or what is
        there is not readable."""
        from pydantic import ValidationError

        from draftwell.components.tune.engines.choice import EngineChoice

        try:
            return EngineChoice.model_validate_json(json.dumps(self.tuned(temperature)["choice"]))
        except (KeyError, ValidationError):
            return None


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
    from draftwell.components.engines.vllm import device_for
    from draftwell.serving.device import checked_device, default_device, usable_cores

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
    from draftwell.serving.device import device_class

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


def tuned_choice(space: EngineSpace, temperature: float = 0.0) -> EngineChoice:
    """What was tuned for these models and requests of this temperature.

    Raises:
        DraftwellError: nothing was (`not_tuned`), or for other models (`other_models`).
    """
    choice = space.choice(temperature)
    if choice is None:
        raise DraftwellError(
            (
                f"nothing is tuned for {NAME}: run `draftwell tune --engine {NAME} --pair "
                f"{space.workspace.spec.name}` first"
            ),
            code="not_tuned",
        )
    if space.tuned(temperature).get("fingerprint") != space.fingerprint:
        raise DraftwellError(
            f"the choice for {NAME} was made for other models: tune again", code="other_models"
        )
    return choice


def untouched(
    space: EngineSpace, prompts: Sequence[Prompt], limit: int | None, temperature: float = 0.0
) -> list[Prompt]:
    """At most `limit` prompts that neither the draft, the head nor the choice was made from; a
    person reads how many were left out.

    Raises:
        DraftwellError: none is left (`no_untouched_prompts`).
    """
    from draftwell.components.prompts.overlap import TrainingPrompts

    made = training_prompts(space.workspace, kinds=("eagle3_head",))
    tuned = frozenset(space.tuned(temperature).get("prompt_hashes", ()))
    left, lines = TrainingPrompts(
        {**made.by_name, f"the choice for {NAME}": tuned}, made.unknown
    ).untouched(prompts, limit)
    for line in lines:
        space.workspace.say(line)
    return left
