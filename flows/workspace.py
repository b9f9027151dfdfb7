"""Where a pair's traces and artifacts are on this machine, and how strategies get theirs.

Everything of a pair and dtype is under `$DRAFTWELL_HOME/pairs/<pair>/<dtype>/`: `traces/`, `artifacts/<kind>/`,
`reports/`. An artifact is looked for in three places: a folder that the user names, the workspace, and what the pair
ships with. A hardware profile of another machine class is measured again; those of a padded target, and of a draft on
another device than the target's, always, and they are never kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from registry.pairs import fetch, find_pair
from serving.artifacts.kinds import find_kind
from serving.artifacts.pair_files import PairFiles, draftwell_home
from serving.errors import DraftwellError

if TYPE_CHECKING:
    from serving.artifacts.base import Artifact
    from serving.runtime.pair import LoadedPair
    from serving.runtime.strategies import Strategy, StrategyResources

Say = Callable[[str], None]


class Workspace:
    """One pair in one dtype on this machine.

    Args:
        name: name or alias of the pair, or the path of a pair's YAML file.
        dtype: None takes the pair's own.
        say: called with a line before each step that takes long.
    """

    def __init__(self, name: str, dtype: str | None = None, say: Say = lambda line: None):
        self.name, self.spec = name, find_pair(name)
        self.dtype = dtype or self.spec.dtype
        self.say = say
        self.root = draftwell_home() / "pairs" / self.spec.name / self.dtype
        self.traces, self.artifacts, self.reports = (self.root / n for n in ("traces", "artifacts", "reports"))
        self._files: PairFiles | None = None

    @property
    def shipped(self) -> Path:
        """Artifacts that come with the pair's catalogue entry."""
        return self.spec.folder / self.spec.name.replace("-", "_") / "artifacts" / self.dtype

    def files(self) -> PairFiles:
        """The pair's model folders, fetched and converted if need be."""
        if self._files is None:
            self._files = fetch(self.spec, progress=self.say)
        return self._files

    def in_dtype(self, dtype: str) -> Workspace:
        """The same pair's workspace in another dtype."""
        return Workspace(self.name, dtype, self.say)

    def aside(self, folder: Path) -> Workspace:
        """The same pair with its traces, artifacts and reports in a folder of their own: for what may not take this one's place yet."""
        other = Workspace(self.name, self.dtype, self.say)
        other.root, other._files = folder, self._files
        other.traces, other.artifacts, other.reports = (folder / n for n in ("traces", "artifacts", "reports"))
        return other

    def load(self, *, slots: int = 1, device: str = "cpu", draft_device: str | None = None, max_context: int | None = None,
             pad_target: float | None = None, strategies: Iterable[str] = (), keep_modules: bool = False) -> LoadedPair:
        """The pair's models, ready to run; `draft_device`, `pad_target` and `keep_modules` as in `load_pair`.

        Args:
            strategies: names of those that will run, empty if any may: some prefer the draft in ONNX Runtime, which is then
                loaded too, and only few need a qualifier.
        """
        from serving.runtime.strategies import find_strategy

        wanted = [find_strategy(name) for name in strategies]
        onnx_draft = any(strategy.prefers_onnx for strategy in wanted)
        qualifier = not wanted or any("qualifier" in strategy.roles for strategy in wanted)
        files = self.files()
        from transformers.utils import logging

        from serving.device import lacks_bfloat16
        from serving.runtime.pair import LoadSettings, load_pair

        logging.disable_progress_bar()
        padding = "" if pad_target is None else f", the target padded to {pad_target:g} parameters"
        slow = self.dtype == "bfloat16" and device == "cpu" and lacks_bfloat16()
        advice = " (this CPU has no instructions for it: float32 is faster here)" if slow else ""
        self.say(f"loading {self.spec.name} in {self.dtype}{padding}{advice}")
        dtype: Any = self.dtype
        return load_pair(files, LoadSettings(dtype=dtype, device=device, slots=slots, max_context=max_context, chat=self.spec.chat,
                         pad_target=pad_target, onnx_draft=onnx_draft, draft_device=draft_device, keep_modules=keep_modules,
                         qualifier=qualifier))

    def resources(
        self, pair: LoadedPair, names: Iterable[str], *, folder: Path | None = None, deterministic: bool = False
    ) -> StrategyResources:
        """The artifacts that the named strategies need; what is not there is left to the strategy to ask for.

        Args:
            folder: a folder of artifact folders that goes before the workspace's; a foreign artifact there is an error.
        """
        from serving.runtime.strategies import StrategyResources, find_strategy

        if folder is not None and not folder.is_dir():
            raise DraftwellError(f"no artifacts folder {folder}: check --artifacts", code="no_artifacts_folder")
        kinds = {kind: None for name in names for kind in find_strategy(name).artifacts}
        found = {kind: self._find(pair, kind, folder) for kind in kinds}
        if "hardware_profile" in found:
            found["hardware_profile"] = self._profile_for(pair, found["hardware_profile"])
        artifacts = {kind: artifact for kind, artifact in found.items() if artifact is not None}
        return StrategyResources(artifacts, pair.special_tokens, deterministic)

    def strategies(self, pair: LoadedPair, wanted: Iterable[tuple[str, Mapping[str, Any]]], **options: Any) -> list[Strategy]:
        """Strategies by name and parameters, with their artifacts."""
        from serving.runtime.strategies import build_strategy

        wanted = list(wanted)
        resources = self.resources(pair, [name for name, _ in wanted], **options)
        return [build_strategy(name, dict(parameters), resources) for name, parameters in wanted]

    def save(self, artifact: Artifact) -> Path:
        """Put an artifact into the workspace and return its folder."""
        folder = self.artifacts / artifact.kind
        artifact.save(folder)
        return folder

    def _find(self, pair: LoadedPair, kind: str, folder: Path | None) -> Artifact | None:
        cls = find_kind(kind).load_class()
        for place in (folder, self.artifacts, self.shipped):
            if place is None or not (place / kind / "artifact.json").is_file():
                continue
            if place == self.shipped:
                return _if_fitting(cls, place / kind, pair.fingerprint)
            return cls.load(place / kind, fingerprint=pair.fingerprint)
        return None

    def _profile_for(self, pair: LoadedPair, found: Any) -> Any:
        from components.report.machine import draft_device_of
        from serving.device import device_class

        here = device_class(pair.device)
        # Forwards of these take another time than those that any profile on disk was measured on.
        special = {"padded_to": pair.padded_to, "draft_device": draft_device_of(pair)}
        unlike = {name: value for name, value in special.items() if value is not None}
        complete = found is not None and (found.t_draft_onnx is not None or "draft_onnx" not in pair.models)
        if not unlike and complete and found.provenance.device_class == here:
            return found
        if "draft" not in pair.models:
            return None
        from components.calibrate.hardware_profile import measure_profile
        from components.report.provenance import provenance

        words = [*(["with the padded target"] if pair.padded_to is not None else []),
                 *([f"with the draft on {special['draft_device']}"] if special["draft_device"] is not None else [])]
        self.say(f"measuring a hardware profile for {here} " + (", ".join(words) or "(once, about 10 s)"))
        made = measure_profile(pair, provenance(pair, device_class=here, parameters=unlike or None))
        if not unlike:
            self.save(made)
        return made


def _if_fitting(cls: Any, folder: Path, fingerprint: str) -> Any:
    """A shipped artifact, or None where it was made for other weights (a user's own file in the pair's place)."""
    artifact = cls.load(folder)
    return artifact if artifact.provenance.fingerprint == fingerprint else None


def parse_settings(pairs: Iterable[str]) -> dict[str, str]:
    """`key=value` strings as a dict; anything else is an error."""
    settings = {}
    for item in pairs:
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise DraftwellError(f"--set {item!r} is not key=value, for example --set num_speculative_tokens=4", code="bad_setting")
        settings[key.strip()] = value.strip()
    return settings
