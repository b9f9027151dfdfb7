"""A pair on an engine that a launcher starts at an address."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from draftwell.components.engines.launch_template import option_words
from draftwell.components.engines.launched import LaunchedEngine
from draftwell.components.engines.launcher import Launcher
from draftwell.components.engines.port import LAUNCHED, EngineSettings
from draftwell.components.engines.vllm_methods import OFF, Method, VllmFiles
from draftwell.components.export.launch_options import launch_options
from draftwell.components.tune.engines.lab import GROUPS
from draftwell.flows.steps.engine.space import EngineSpace
from draftwell.flows.steps.remote.space import FOLDER, check_tokens, folder_name
from draftwell.flows.workspace import Workspace
from draftwell.serving.device import cuda_available, device_class
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import json_digest
from draftwell.serving.number_format import dtype_of

if TYPE_CHECKING:
    from draftwell.components.engines.port import About, Engine
    from draftwell.components.engines.remote.address import EngineAddress
    from draftwell.components.prompts.prompt import Prompt
    from draftwell.components.tune.engines.lab import Lab
    from draftwell.serving.runtime.requests import Sampling

LOCAL = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class LaunchedSpace(EngineSpace):
    """A pair on an engine that a launcher starts. Which engine it is, it says itself: it is started
    without speculation when it is asked for first, and runs on for the measurements.

    Args:
        threads: 0, because those of the engine are its own.
        launcher: the caller leaves it as a context, which ends what runs.
        draft, head: as the engine reads them: folders of its machine, or names on the hub; None:
            the pair's own, written where this machine's engines read them.
    """

    launcher: Launcher = field(kw_only=True)
    draft: str | None = field(default=None, kw_only=True)
    head: str | None = field(default=None, kw_only=True)

    @cached_property
    def said(self) -> tuple[str, About]:
        """The engine's name, and what it says of itself.

        Raises:
            DraftwellError: no launcher can tell it how to speculate (`engine_option`), it serves
                another model than the pair's target (`vocabulary_mismatch`), or as
                `LaunchedEngine`.
        """
        engine = LaunchedEngine(f"engine/{OFF}", self.launcher, lambda speculation: {})
        about = engine.start(EngineSettings())
        running = self.launcher.start(engine.label, {})  # it may rest
        name = engine.remote.dialect.name
        for remark in check_tokens(self.pair, engine.remote):
            self.workspace.say(remark)
        engine.disconnect()
        self.launcher.rest(running)
        if name not in LAUNCHED:
            raise DraftwellError(
                f"{self.option} answers as {name}, and a launcher can tell only "
                f"{', '.join(LAUNCHED)} how to speculate",
                code="engine_option",
            )
        return name, about

    @property
    def name(self) -> str:
        return self.said[0]

    @property
    def option(self) -> str:
        return self.launcher.addresses[0].url

    @cached_property
    def version(self) -> str:
        return self.said[1].version.removeprefix(f"{self.name} ")

    @cached_property
    def here(self) -> dict[str, Any]:
        return {
            "engine": self.name,
            "version": self.version,
            "distribution": None,
            "device_class": self.device_class,
            "dtype": dtype_of(self.workspace.dtype),
            "threads": self.threads,
            "fingerprint": self.fingerprint,
        }

    @property
    def device_class(self) -> str:
        """This machine's where the engine answers on it; else the device alone."""
        device = self.workspace.device
        here = is_local(self.option) and (device == "cpu" or cuda_available())
        return device_class(device) if here else f"{device.partition(':')[0]}-elsewhere"

    @property
    def folder(self) -> Path:
        return place_of(self.workspace, self.launcher.addresses[0])

    @property
    def models(self) -> Path:
        return self.folder.parent / "models"

    def lacks(self, package: str) -> bool:
        """Nobody can look: a method that lacks one fails at its start."""
        return False

    @cached_property
    def files(self) -> VllmFiles:
        """The target, which the command names itself, and draft and head."""
        files = self.workspace.files()
        own = self.own_models
        return VllmFiles(
            files.target,
            draft=Path(self.draft) if self.draft else self._draft(files.draft) if own else None,
            head=Path(self.head) if self.head else self._head() if own else None,
        )

    @property
    def own_models(self) -> bool:
        """Whether the engine can read what this machine writes: llama.cpp reads other files."""
        return self.name != "llama.cpp"

    def methods(self, named: Sequence[str] | None) -> tuple[str, ...]:
        """Those to choose among: what was named, else what the engine has.

        Raises:
            DraftwellError: the engine has no such method (`bad_method`).
        """
        known = LAUNCHED[self.name]
        for name in named or ():
            if name not in known and self.name != "vllm":
                raise DraftwellError(
                    f"{self.name} has no method {name} here: choose from {', '.join(known)}",
                    code="bad_method",
                )
        return tuple(named or known)

    def check_levels(self, levels: Sequence[int]) -> None:
        """Refuse draft lengths by load where the engine has none (`engine_option`)."""
        if len(levels) > 1 and self.name != "vllm":
            raise DraftwellError(
                f"{self.name} has one draft length for all loads: leave levels out",
                code="engine_option",
            )

    def options_of(self, speculation: Mapping[str, Any] | None) -> dict[str, Any]:
        """A way to speculate as the engine's options."""
        return launch_options(self.name, speculation) if speculation else {}

    def shown(self, method: Method) -> str:
        options = self.options_of(method.speculative_config(self.files))
        return f"options for {self.name}: {shlex.join(option_words(options)) or 'none'}"

    def engine(self, label: str) -> Engine:
        return LaunchedEngine(f"engine/{label}", self.launcher, self.options_of)

    def lab(
        self, prompts: Sequence[Prompt], sampling: Sampling, slots: int, groups: int = GROUPS
    ) -> Lab:
        lab = super().lab(prompts, sampling, slots, groups)
        lab.apart = self.launcher.alternates
        return lab

    def subject(
        self, ids: Sequence[Sequence[int]], sampling: Sampling, **more: Any
    ) -> dict[str, Any]:
        """As for other engines, and the command, by its digest: it may hold what others must not
        read."""
        command = json_digest(self.launcher.command.text)
        draft = str(self.files.draft)
        return super().subject(ids, sampling, command=command, draft=draft, **more)


def place_of(workspace: Workspace, address: EngineAddress) -> Path:
    """Where logs, measurements and reports of engines at an address are kept."""
    return workspace.device_root / FOLDER / folder_name(address)


def is_local(url: str) -> bool:
    """Whether an address is this machine's own."""
    return urlsplit(url).hostname in LOCAL
