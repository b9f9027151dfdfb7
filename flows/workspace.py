"""Where a pair's traces and artifacts are on this machine, and how strategies get theirs.

Everything of a pair and dtype is under `$DRAFTWELL_HOME/pairs/<pair>/<dtype>/`: `traces/` (greedy
texts), `traces_sampled/`, `artifacts/<kind>/`, `reports/`, and what is valid on one device only
under `<device>/`: `artifacts/hardware_profile/`, `artifacts/decoding_config/`, `tuning/`, and the
reports of tuning, gate and monitoring. An artifact is looked for in three places: a folder that the
user names, the workspace, and what the pair ships with. A hardware profile of another machine class
is measured again; those of a padded target, and of a draft on another device than the target's,
always, and they are never kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwell.registry.pairs import fetch, find_pair
from draftwell.serving.artifacts.base import ArtifactError, read_manifest
from draftwell.serving.artifacts.compiled_libraries import wanted_mode
from draftwell.serving.artifacts.kinds import KINDS, device_of, find_kind
from draftwell.serving.artifacts.pair_files import PairFiles, draftwell_home
from draftwell.serving.errors import DraftwellError
from draftwell.serving.number_format import dtype_of
from draftwell.serving.temperature import class_of

if TYPE_CHECKING:
    from draftwell.serving.artifacts.base import Artifact
    from draftwell.serving.runtime.pair import LoadedPair
    from draftwell.serving.runtime.strategies import Strategy, StrategyChoice, StrategyResources

Say = Callable[[str], None]


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
        from draftwell.serving.artifacts.pair_files import fingerprint

        folder = self.shipped / kind
        if not (folder / "artifact.json").is_file():
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
                f"{self.files().target}, or make your own with `draftwell calibrate` and "
                "`draftwell train`"
            )

    @property
    def device(self) -> str:
        """cpu or cuda."""
        if self._device is None:
            from draftwell.serving.device import default_device  # imports torch

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
        self._move_by_device(kind)
        return self.root / (device or self.device) / "artifacts" / kind

    def kept(self) -> dict[str, Path]:
        """kind → folder of the artifacts in the workspace; what a killed run left half written
        begins with a dot."""
        shared = {p.name: p for p in sorted(self.artifacts.glob("[!.]*")) if p.is_dir()}
        per_device = {kind: self.folder(kind) for kind in KINDS if find_kind(kind).per_device}
        return {
            kind: folder for kind, folder in {**shared, **per_device}.items() if folder.is_dir()
        }

    def _move_by_device(self, kind: str) -> None:
        """Move what earlier versions kept for whichever device came last to where its device's is
        now; never over another one."""
        old = self.artifacts / kind
        if not old.is_dir():
            return
        try:
            made = read_manifest(old)["provenance"].get("device_class")
        except ArtifactError:
            return  # broken, or of another version: left to whoever looks there
        place = self.root / (device_of(kind, made) or "cpu")
        new = place / "artifacts" / kind
        if new.exists():
            return
        reports = [
            *find_kind(kind).pictures,
            *(["tuning.json"] if kind == "decoding_config" else []),
        ]
        files = [file for pattern in reports for file in self.reports.glob(pattern)]
        # the artifact last: its move ends it all
        moves = [*((file, place / "reports" / file.name) for file in files), (old, new)]
        for source, target in moves:
            target.parent.mkdir(parents=True, exist_ok=True)
            source.rename(target)
        self.say(
            f"moved {kind}, made on {place.name}, to {new}: workspaces keep one for each device now"
        )

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
        compiled: bool = True,
    ) -> LoadedPair:
        """The pair's models, ready to run; `draft_device`, `pad_target` and `keep_modules` as in
        `load_pair`.

        Args:
            compiled: False: without compiled layers, whether they are there or not.
            strategies: those that will run, empty if any may: some prefer the draft in ONNX
                Runtime, which is then loaded too, and only few need a qualifier.
        Raises:
            DraftwellError: the models are larger than the device's memory; nothing was downloaded.
        """
        from draftwell.registry.pairs.fitting import check_fits
        from draftwell.serving.device import device_type
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

        from draftwell.serving.device import lacks_bfloat16
        from draftwell.serving.runtime.pair import LoadSettings, load_pair

        logging.disable_progress_bar()
        padding = "" if pad_target is None else f", the target padded to {pad_target:g} parameters"
        slow = dtype_of(self.dtype) == "bfloat16" and device == "cpu" and lacks_bfloat16()
        advice = (
            (
                " (this CPU has no instructions for it: unless its layers are compiled, "
                "float32 is faster)"
            )
            if slow
            else ""
        )
        self.say(f"loading {self.spec.name} in {self.dtype}{padding}{advice}")
        return load_pair(
            files,
            LoadSettings.model_validate(
                {
                    "dtype": self.dtype,
                    "device": device,
                    "slots": slots,
                    "max_context": max_context,
                    "chat": self.spec.chat,
                    "pad_target": pad_target,
                    "onnx_draft": onnx_draft,
                    "draft_device": draft_device,
                    "keep_modules": keep_modules,
                    "qualifier": qualifier,
                    "compile": wanted_mode("try") if compiled else "off",
                }
            ),
        )

    def resources(
        self,
        pair: LoadedPair,
        names: Iterable[str],
        *,
        folder: Path | None = None,
        deterministic: bool = False,
    ) -> StrategyResources:
        """The artifacts that the named strategies read; what is not there is left to the strategy
        to ask for.

        Args:
            folder: a folder of artifact folders that goes before the workspace's; a foreign
                artifact there is an error.
        """
        from draftwell.serving.runtime.strategies import StrategyResources, find_strategy

        if folder is not None and not folder.is_dir():
            raise DraftwellError(
                f"no artifacts folder {folder}: check --artifacts", code="no_artifacts_folder"
            )
        kinds = {kind: None for name in names for kind in find_strategy(name).reads()}
        found = {kind: self._find(pair, kind, folder) for kind in kinds}
        if "hardware_profile" in found:
            found["hardware_profile"] = self._profile_for(
                pair, found["hardware_profile"], found.get("eagle3_head")
            )
        artifacts = {kind: artifact for kind, artifact in found.items() if artifact is not None}
        return StrategyResources(artifacts, pair.special_tokens, deterministic)

    def found(self, pair: LoadedPair, kind: str) -> Artifact | None:
        """An artifact of the workspace, else the one that the pair ships with; None where there is
        neither."""
        return self._find(pair, kind, None)

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
        artifact.save(folder)
        return folder

    def _find(self, pair: LoadedPair, kind: str, folder: Path | None) -> Artifact | None:
        from draftwell.serving.device import device_type

        cls, shipped = find_kind(kind).load_class(), self.shipped / kind
        for place in (
            folder / kind if folder else None,
            self.folder(kind, device_type(pair.device)),
            shipped,
        ):
            if place is None or not (place / "artifact.json").is_file():
                continue
            if place == shipped:
                if (fitting := _if_fitting(cls, place, pair.fingerprint)) is None:
                    self._say_left_out()
                return fitting
            return cls.load(place, fingerprint=pair.fingerprint)
        return None

    def _profile_for(self, pair: LoadedPair, found: Any, head: Any = None) -> Any:
        from draftwell.components.report.machine import draft_device_of
        from draftwell.serving.runtime.machine_class import machine_class

        here = machine_class(pair)  # a profile of other layers is measured again, too
        # Forwards of these take another time than those that any profile on disk was measured on.
        special = {"padded_to": pair.padded_to, "draft_device": draft_device_of(pair)}
        unlike = {name: value for name, value in special.items() if value is not None}
        complete = found is not None and all(
            (
                found.t_draft is not None or "draft" not in pair.models,
                found.t_draft_onnx is not None or "draft_onnx" not in pair.models,
                found.t_head is not None or head is None,
            )
        )
        if not unlike and complete and found.provenance.device_class == here:
            return found
        from draftwell.components.calibrate.hardware_profile import measure_profile
        from draftwell.components.report.provenance import provenance

        words = [
            *(["with the padded target"] if pair.padded_to is not None else []),
            *(
                [f"with the draft on {special['draft_device']}"]
                if special["draft_device"] is not None
                else []
            ),
        ]
        self.say(
            f"measuring a hardware profile for {here} " + (", ".join(words) or "(once, about 10 s)")
        )
        made = measure_profile(
            pair, provenance(pair, device_class=here, parameters=unlike or None), head=head
        )
        if not unlike:
            self.save(made)
        return made


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
                f"--set {item!r} is not key=value, for example --set num_speculative_tokens=4",
                code="bad_setting",
            )
        settings[key.strip()] = value.strip()
    return settings
