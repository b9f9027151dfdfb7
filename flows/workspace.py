"""Where a pair's traces and artifacts are on this machine, and how strategies get theirs.

Everything of a pair and dtype is under `$DRAFTWELL_HOME/pairs/<pair>/<dtype>/`: `traces/` (greedy
texts), `traces_sampled/`, `artifacts/<kind>/`, `reports/`, and what is valid on one device only
under `<device>/`: `artifacts/hardware_profile/`, `artifacts/decoding_config/`, `tuning/`, and the
reports of tuning, gate and monitoring. An artifact is looked for in three places: a folder that the
user names, the workspace, and what the pair ships with. Reading changes nothing here: what is
missing is made by the commands that its strategies name.

`workspace.json` says which format (`draftwell.serving.format`) all of it has.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from draftwell.registry.pairs import fetch, find_pair
from draftwell.registry.pairs.fitting import check_fits
from draftwell.serving.artifacts.base import MANIFEST, read_manifest
from draftwell.serving.artifacts.compiled_libraries import wanted_mode
from draftwell.serving.artifacts.kinds import KINDS, OURS, device_of, find_kind
from draftwell.serving.artifacts.pair_files import PairFiles, draftwell_home, fingerprint
from draftwell.serving.device import (
    default_device,
    device_type,
    keep_freed_memory,
    lacks_bfloat16,
)
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import file_lock, put_back, set_aside, write_json
from draftwell.serving.format import FORMAT, check_format
from draftwell.serving.number_format import dtype_of
from draftwell.serving.temperature import class_of

if TYPE_CHECKING:
    from draftwell.serving.artifacts.base import Artifact
    from draftwell.serving.artifacts.hardware_profile import HardwareProfile
    from draftwell.serving.runtime.pair import LoadedPair
    from draftwell.serving.runtime.strategies import Strategy, StrategyChoice, StrategyResources

Say = Callable[[str], None]
MARK = "workspace.json"
"""File of a workspace that says which format all of it has."""
PROFILE = "hardware_profile"
TURN = ".turn"
"""File of a workspace whose lock is held by whoever changes it; says who that is."""
P = ParamSpec("P")
R = TypeVar("R")


class Workspace:
    """One pair in one dtype on this machine.

    Args:
        name: name or alias of the pair, or the path of a pair's YAML file.
        dtype: the number format (`draftwell.serving.number_format`); None takes the pair's own.
        device: cpu or cuda, of what is valid on one device only; None takes
            `draftwell.serving.device.default_device`.
        say: called with a line before each step that takes long.
    """

    def __init__(
        self,
        name: str,
        dtype: str | None = None,
        say: Say = lambda line: None,
        device: str | None = None,
    ):
        self.name, self.spec = name, find_pair(name)
        self._device = device
        self.dtype = dtype or self.spec.number_format
        self.say = say
        self.root = draftwell_home() / "pairs" / self.spec.name / self.dtype
        self.traces, self.artifacts, self.reports = (
            self.root / n for n in ("traces", "artifacts", "reports")
        )
        self._files: PairFiles | None = None
        self._told = False
        self._check_format()

    @property
    def on_command_lines(self) -> str:
        """The pair as a command takes it, without the folders above a file of this machine."""
        is_file = self.name.endswith((".yaml", ".yml"))
        return shlex.quote(Path(self.name).name if is_file else self.name)

    def _check_format(self) -> None:
        """Refuse a workspace that another version of Draftwell has made."""
        try:
            written = json.loads((self.root / MARK).read_text())["format"]
        except (OSError, ValueError, LookupError, TypeError):
            kept = ("traces*/shard-*", f"artifacts/*/{MANIFEST}", f"*/artifacts/*/{MANIFEST}")
            if not any(path for pattern in kept for path in self.root.glob(pattern)):
                return
            written = None
        check_format(
            written,
            f"the workspace {self.root}",
            "`make reset`, or remove it, then collect and tune again",
        )

    def begin(self) -> None:
        """Note the format of a workspace that something is about to be written to."""
        if not (self.root / MARK).is_file():
            write_json(self.root / MARK, {"format": FORMAT})

    @contextmanager
    def turn(self, what: str, *, wait: bool = False) -> Iterator[None]:
        """Let no other process change the workspace meanwhile, and put back what a killed one has
        left set aside. This process may begin it again: steps call each other, on several threads.

        Args:
            what: who holds it, for the message of others, such as "draftwell step choose".
            wait: for another holder, with a line that says so.
        Raises:
            DraftwellError: another process holds it (`workspace_in_use`).
        """
        held = HELD.setdefault(self.root, _Held())
        file = self.root / TURN
        while not self._take_turn(held, what):
            holder = file.read_text() or "another command"
            if not wait:
                raise DraftwellError(
                    f"{holder} is changing {self.root}: wait for it, or set another DRAFTWELL_HOME",
                    code="workspace_in_use",
                )
            self.say(f"waiting for {holder}, which is changing {self.root}")
            with file_lock(file):  # without the guard: other threads are refused meanwhile
                pass
        try:
            yield
        finally:
            with held.guard:
                held.times -= 1
                if held.times == 0:
                    held.lock.close()

    def _take_turn(self, held: _Held, what: str) -> bool:
        """Begin this process's turn, or begin it again; False where another process has it."""
        file = self.root / TURN
        with held.guard, ExitStack() as lock:
            if held.times == 0:
                if not lock.enter_context(file_lock(file, wait=False)):
                    return False
                host, began = socket.gethostname(), f"{datetime.now():%H:%M}"
                file.write_text(f"{what} (process {os.getpid()} on {host} since {began})")
                for artifacts in (self.artifacts, *self.root.glob("*/artifacts")):
                    put_back(artifacts)
                held.lock = lock.pop_all()
            held.times += 1
        return True

    def traces_at(self, temperature: float) -> Path:
        """Folder of the traces of a temperature: greedy ones and sampled ones do not replace each
        other."""
        return (
            self.traces
            if class_of(temperature) == "greedy"
            else self.traces.with_name(f"{self.traces.name}_sampled")
        )

    @property
    def shipped(self) -> Path:
        """Artifacts that come with the pair's catalogue entry."""
        return self.spec.folder / self.spec.name.replace("-", "_") / "artifacts" / self.dtype

    def shipped_folder(self, kind: str) -> Path | None:
        """Folder of an artifact that comes with the pair's catalogue entry and was made for its
        weights; None where there is none."""

        folder = self.shipped / kind
        if not (folder / MANIFEST).is_file():
            return None
        if read_manifest(folder)["provenance"]["fingerprint"] == fingerprint(
            self.files(), self.dtype
        ):
            return folder
        self._say_left_out()
        return None

    def _say_left_out(self) -> None:
        """Once: that artifacts which come with the pair are not for its files."""
        if not self._told:
            self._told = True
            self.say(
                f"the artifacts that come with {self.spec.name} are left out: they were "
                "made for other weights, or for the "
                "tokenizer.json of another version of transformers; install what "
                "constraints.txt names and remove "
                f"{self.files().target}, or make your own with `draftwell step calibrate` and "
                "`draftwell step train`"
            )

    @property
    def device(self) -> str:
        """cpu or cuda."""
        if self._device is None:
            self._device = default_device()
        return self._device

    @property
    def device_root(self) -> Path:
        """What is valid on this device only."""
        return self.root / self.device

    @property
    def device_reports(self) -> Path:
        """Reports of tuning, gate and monitoring."""
        return self.device_root / "reports"

    def folder(self, kind: str, device: str | None = None) -> Path:
        """Where the workspace keeps an artifact, whether it is there or not.

        Args:
            device: another one than the workspace's, for kinds that are `per_device`.
        """
        if not find_kind(kind).per_device:
            return self.artifacts / kind
        return self.root / (device or self.device) / "artifacts" / kind

    def kept(self) -> dict[str, Path]:
        """kind → folder of the artifacts in the workspace; what a killed run left half written
        begins with a dot."""
        shared = {p.name: p for p in sorted(self.artifacts.glob("[!.]*")) if p.is_dir()}
        per_device = {kind: self.folder(kind) for kind in KINDS if find_kind(kind).per_device}
        return {
            kind: folder for kind, folder in {**shared, **per_device}.items() if folder.is_dir()
        }

    def to_release(self, device: str) -> dict[str, Path]:
        """kind → folder of all that a release for a device pins.

        Raises:
            DraftwellError: nothing was tuned for it (`nothing_to_release`).
        """
        shared = {
            kind: folder
            for kind, folder in self.kept().items()
            if kind not in KINDS or (kind in OURS and not KINDS[kind].per_device)
        }
        own = {kind: self.folder(kind, device) for kind in OURS if KINDS[kind].per_device}
        folders = shared | {kind: folder for kind, folder in own.items() if folder.is_dir()}
        if "decoding_config" not in folders:
            raise DraftwellError(
                f"nothing to release: run `draftwell step choose --pair {self.spec.name} --device "
                f"{device}` first",
                code="nothing_to_release",
            )
        if (head := self.shipped_folder("eagle3_head")) is not None:
            folders.setdefault("eagle3_head", head)
        draft = self.files().draft
        if draft is not None and (draft / MANIFEST).is_file():
            folders["distilled_draft"] = draft
        return folders

    def files(self) -> PairFiles:
        """The pair's model folders, fetched and converted if need be."""
        if self._files is None:
            self._files = fetch(self.spec, progress=self.say)
        return self._files

    def in_dtype(self, dtype: str) -> Workspace:
        """The same pair's workspace in another dtype."""
        return Workspace(self.name, dtype, self.say, self._device)

    def aside(self, folder: Path) -> Workspace:
        """The same pair with its traces, artifacts and reports in a folder of their own: for what
        may not take this one's place yet."""
        other = Workspace(self.name, self.dtype, self.say, self._device)
        other.root, other._files = folder, self._files
        other.traces, other.artifacts, other.reports = (
            folder / n for n in ("traces", "artifacts", "reports")
        )
        return other

    def load(
        self,
        *,
        slots: int = 1,
        device: str = "cpu",
        draft_device: str | None = None,
        max_context: int | None = None,
        pad_target: float | None = None,
        strategies: Iterable[StrategyChoice] = (),
        keep_modules: bool = False,
        compile: str | None = None,
    ) -> LoadedPair:
        """The pair's models, ready to run; `draft_device`, `pad_target`, `keep_modules` and
        `compile` as in `load_pair`.

        Args:
            strategies: those that will run, empty if any may: some prefer the draft in ONNX
                Runtime, which is then loaded too, and only few need a qualifier.
        Raises:
            DraftwellError: the models are larger than the device's memory; nothing was downloaded.
        """
        from draftwell.serving.runtime.strategies import find_strategy

        wanted = [(find_strategy(choice.name), choice.parameters) for choice in strategies]
        onnx_draft = any(strategy.prefers_onnx for strategy, _ in wanted)
        qualifier = not wanted or any(
            "qualifier" in (*strategy.roles, parameters.get("drafter"))
            for strategy, parameters in wanted
        )
        check_fits(self.spec, device_type(device), self.dtype)
        files = self.files()
        from transformers.utils import logging

        from draftwell.serving.runtime.pair import LoadSettings, load_pair

        logging.disable_progress_bar()
        self._say_loading(device, pad_target)
        keep_freed_memory()
        return load_pair(
            files,
            LoadSettings.model_validate(
                {
                    "dtype": self.dtype,
                    "device": device,
                    "slots": slots,
                    "max_context": max_context,
                    "pad_target": pad_target,
                    "compile": compile or wanted_mode(),
                }
            ),
            chat=self.spec.chat,
            qualifier=qualifier,
            onnx_draft=onnx_draft,
            draft_device=draft_device,
            keep_modules=keep_modules,
        )

    def _say_loading(self, device: str, pad_target: float | None) -> None:
        """What is loaded, and where that will be slow."""

        padding = "" if pad_target is None else f", the target padded to {pad_target:g} parameters"
        slow = dtype_of(self.dtype) == "bfloat16" and device == "cpu" and lacks_bfloat16()
        advice = (
            " (this CPU has no instructions for it: unless its layers are compiled, float32 is "
            "faster)"
            if slow
            else ""
        )
        self.say(f"loading {self.spec.name} in {self.dtype}{padding}{advice}")

    def resources(
        self,
        pair: LoadedPair,
        names: Iterable[str],
        *,
        folder: Path | None = None,
        profile: HardwareProfile | None = None,
    ) -> StrategyResources:
        """The artifacts that the named strategies read; what is not there is left to the strategy
        to ask for, and so is a hardware profile of another machine.

        Args:
            folder: a folder of artifact folders that goes before the workspace's; a foreign
                artifact there is an error.
            profile: takes the place of the hardware profile
                (`draftwell.flows.steps.profile.find_or_measure_profile`).
        """
        from draftwell.components.calibrate.hardware_profile import fits_here
        from draftwell.serving.runtime.strategies import StrategyResources, find_strategy

        kinds = {kind: None for name in names for kind in find_strategy(name).reads()}
        found = {kind: self.found(pair, kind, folder) for kind in kinds}
        if PROFILE in found:
            known = found[PROFILE]
            fits = known is not None and fits_here(known, pair, found.get("eagle3_head"))
            found[PROFILE] = profile or (known if fits else None)
        artifacts = {kind: artifact for kind, artifact in found.items() if artifact is not None}
        return StrategyResources(artifacts, pair.special_tokens)

    def strategies(
        self, pair: LoadedPair, wanted: Iterable[tuple[str, Mapping[str, Any]]], **options: Any
    ) -> list[Strategy]:
        """Strategies by name and parameters, with their artifacts."""
        from draftwell.serving.runtime.strategies import build_strategy

        wanted = list(wanted)
        resources = self.resources(pair, [name for name, _ in wanted], **options)
        return [build_strategy(name, dict(parameters), resources) for name, parameters in wanted]

    def save(self, artifact: Artifact) -> Path:
        """Put an artifact into the workspace and return its folder: that of the device it was made
        on, where it is valid there only."""
        folder = self.folder(
            artifact.kind, device_of(artifact.kind, artifact.provenance.device_class)
        )
        self.begin()
        artifact.save(folder)
        return folder

    def found(self, pair: LoadedPair, kind: str, folder: Path | None = None) -> Artifact | None:
        """An artifact of a named folder, else of the workspace, else the one that the pair ships
        with; None where there is none.

        Args:
            folder: as in `resources`.
        Raises:
            DraftwellError: the folder is not there, or an artifact cannot be used.
        """

        if folder is not None and not folder.is_dir():
            raise DraftwellError(
                f"no artifacts folder {folder}: check artifacts=", code="no_artifacts_folder"
            )
        cls, shipped = find_kind(kind).load_class(), self.shipped / kind
        for place in (
            folder / kind if folder else None,
            self.folder(kind, device_type(pair.device)),
            shipped,
        ):
            if place is not None and not place.exists() and (old := set_aside(place)).is_dir():
                raise DraftwellError(
                    f"the {kind} was being replaced when a command was killed: rename {old} to "
                    f"{place.name}, or run the command again",
                    code="replacement_cut_off",
                )
            if place is None or not (place / MANIFEST).is_file():
                continue
            if place == shipped:
                if (fitting := _if_fitting(cls, place, pair.fingerprint)) is None:
                    self._say_left_out()
                return fitting
            return cls.load(place, fingerprint=pair.fingerprint)
        return None


class _Held:
    """A workspace's turn, as far as this process has it."""

    def __init__(self) -> None:
        self.guard, self.times, self.lock = threading.Lock(), 0, ExitStack()


HELD: dict[Path, _Held] = {}
"""Root of a workspace → this process's turn of it."""


def in_turn(what: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Run a step in the `turn` of the workspace that one of its arguments is or has."""

    def decorate(step: Callable[P, R]) -> Callable[P, R]:
        @wraps(step)
        def taken(*given: P.args, **more: P.kwargs) -> R:
            owners = (getattr(one, "workspace", one) for one in (*given, *more.values()))
            space = next(one for one in owners if isinstance(one, Workspace))
            with space.turn(what):
                return step(*given, **more)

        return taken

    return decorate


def _if_fitting(cls: Any, folder: Path, fingerprint: str) -> Any:
    """A shipped artifact, or None where it was made for other weights (a user's own file in the
    pair's place)."""
    artifact = cls.load(folder)
    return artifact if artifact.provenance.fingerprint == fingerprint else None


def parse_settings(pairs: Iterable[str]) -> dict[str, str]:
    """`key=value` strings as a dict; anything else is an error."""
    settings = {}
    for item in pairs:
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise DraftwellError(
                f"{item!r} is not key=value, for example num_speculative_tokens=4",
                code="bad_setting",
            )
        settings[key.strip()] = value.strip()
    return settings
