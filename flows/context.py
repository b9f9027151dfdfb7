"""What all steps work with: the pair's workspace, its loaded models, and a progress bar."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from draftwell.components.collect.plan import is_complete, prompt_hashes
from draftwell.components.prompts.overlap import TrainingPrompts
from draftwell.flows.workspace import Workspace
from draftwell.serving.artifacts.base import MANIFEST, Provenance, digest_of, read_manifest
from draftwell.serving.artifacts.checkpoint import CONFIG, GENERATION, read_object
from draftwell.serving.artifacts.kinds import find_kind
from draftwell.serving.artifacts.pair_files import fingerprint
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import write_json
from draftwell.serving.recording.trace import TraceSet

if TYPE_CHECKING:
    from draftwell.components.prompts.prompt import Prompt
    from draftwell.serving.artifacts.base import Artifact
    from draftwell.serving.runtime.pair import LoadedPair

Bar = Callable[..., None]
MADE_OF_NO_PROMPTS = ("hardware_profile",)
"""Kinds of artifacts that learn nothing from prompts."""


@dataclass(frozen=True)
class StepContext:
    """What all steps work with."""

    workspace: Workspace
    pair: LoadedPair
    bar: Bar | None = None

    def report(self, name: str, value: Any, *, per_device: bool = False) -> Path:
        """Write a JSON report into the workspace; `per_device`: among those of this device."""
        self.workspace.begin()
        return write_json(
            (self.workspace.device_reports if per_device else self.workspace.reports)
            / f"{name}.json",
            value,
        )

    def stamp(self, kind: str) -> None:
        """Note in an artifact's pictures, freshly drawn, which one they are of."""
        from draftwell.components.report.drawing import note_artifact

        for picture in pictures_of(self.workspace, kind):
            if picture.suffix == ".png":
                note_artifact(picture, digest_of(self.workspace.folder(kind)))

    def parents(self, *kinds: str) -> dict[str, str]:
        """kind → digest of artifacts in the workspace that something is made from."""
        folders = {kind: self.workspace.folder(kind) for kind in kinds}
        return {kind: digest_of(folder) for kind, folder in folders.items() if folder.is_dir()}


def encoder_of(space: Workspace) -> LoadedPair:
    """The pair without its models: it encodes prompts as the pair will, and knows stop tokens."""
    from transformers import GenerationConfig

    from draftwell.serving.runtime.model_files import load_tokenizer
    from draftwell.serving.runtime.pair import LoadedPair

    target = space.files().target
    if (target / GENERATION).is_file():
        config = GenerationConfig.from_pretrained(target)
    else:
        config = GenerationConfig.from_model_config(read_object(target / CONFIG))
    dtype: Any = space.dtype
    modules: dict[Any, Any] = {"target": SimpleNamespace(generation_config=config)}
    return LoadedPair(
        space.spec.name,
        dtype,
        "cpu",
        {},
        modules,
        load_tokenizer(target),
        fingerprint(space.files(), space.dtype),
        space.spec.chat,
    )


def open_trace(step: StepContext, folder: Path | None = None, temperature: float = 0.0) -> TraceSet:
    """The trace set to learn from; without a folder the workspace's for a temperature."""

    traces = TraceSet(
        folder or step.workspace.traces_at(temperature), fingerprint=step.pair.fingerprint
    )
    if not traces.shards:
        sampled = f" --set temperature={temperature:g}" if temperature else ""
        raise DraftwellError(
            (
                f"no traces in {traces.folder}: run `draftwell step collect --pair "
                f"{step.workspace.spec.name}{sampled}` first"
            ),
            code="no_traces",
        )
    if not is_complete(traces.folder):
        raise DraftwellError(
            f"the collection in {traces.folder} is unfinished: run the same `draftwell "
            "step collect` again, it resumes "
            "where it stopped",
            code="collection_unfinished",
        )
    return traces


def training_prompts(
    space: Workspace,
    traces: Path | None = None,
    kinds: Iterable[str] = (),
    pair: LoadedPair | None = None,
) -> TrainingPrompts:
    """The prompts that a workspace's traces, artifacts and distilled draft were made from, so that
    nothing is measured on them.

    Args:
        traces: trace folder; None takes the workspace's.
        kinds: of the artifacts, in the workspace or shipped with the pair, whichever strategies
            would get.
        pair: as in `prompts_behind`.
    """

    found, recorded, lacking = (
        TraceSet(traces or space.traces),
        dict[str, Iterable[str] | None](),
        dict[str, Sequence[str]](),
    )
    if found.shards:
        recorded["traces"], lacking["traces"] = prompts_behind(found, pair)
    folders = {
        kind: next(
            (
                place / kind
                for place in (space.artifacts, space.shipped)
                if (place / kind / MANIFEST).is_file()
            ),
            None,
        )
        for kind in kinds
        if kind not in MADE_OF_NO_PROMPTS
    }
    made = made_from_prompts({**folders, "distilled_draft": distilled_draft(space)})
    recorded |= {kind: one.training_prompts for kind, one in made.items()}
    return TrainingPrompts.of(
        recorded, lacking | {kind: one.unknown_prompts for kind, one in made.items()}
    )


def distilled_draft(space: Workspace) -> Path | None:
    """Folder of the pair's draft where that is distilled; nothing is fetched for this question."""
    source = space.spec.draft
    return (
        None
        if source is None or source.artifact is None
        else space.spec.folder / Path(source.artifact).expanduser()
    )


def made_from_prompts(folders: Mapping[str, Path | None]) -> dict[str, Provenance]:
    """kind → where the artifact of a folder comes from, of those that are there."""
    present = {
        kind: folder
        for kind, folder in folders.items()
        if folder is not None and (folder / MANIFEST).is_file()
    }
    return {
        kind: Provenance.model_validate(read_manifest(folder)["provenance"])
        for kind, folder in present.items()
    }


def prompts_behind(
    traces: TraceSet, pair: LoadedPair | None = None
) -> tuple[list[str] | None, tuple[str, ...]]:
    """Hashes of the prompts of traces, for the provenance of what is made from them, and what of
    the traces has others.

    Args:
        pair: that the traces are of; it decodes the prompts of requests that a server recorded
            without a body.
    Returns:
        None in place of the hashes where no prompt is known.
    """

    from draftwell.components.drift.recorded_prompts import recorded_hashes

    hashes = prompt_hashes(traces)
    return recorded_hashes(traces, pair) if hashes is None else (sorted(set(hashes.values())), ())


def take_untouched(
    space: Workspace, used: TrainingPrompts, prompts: Sequence[Prompt], limit: int | None = None
) -> list[Prompt]:
    """At most `limit` prompts that nothing in `used` was made from; a person reads how many others
    were left out.

    Raises:
        DraftwellError: none is left (`no_untouched_prompts`).
    """
    left, lines = used.untouched(prompts, limit)
    for line in lines:
        space.say(line)
    return left


def artifact_prompts(
    artifacts: Mapping[str, Artifact], draft: Path | None = None
) -> TrainingPrompts:
    """The prompts that artifacts were made from.

    Args:
        artifacts: kind → artifact.
        draft: the draft model's folder; one that was distilled is an artifact, too.
    """

    made = {
        kind: artifact.provenance
        for kind, artifact in artifacts.items()
        if kind not in MADE_OF_NO_PROMPTS
    }
    made |= made_from_prompts({"distilled_draft": draft})
    return TrainingPrompts.of(
        {kind: one.training_prompts for kind, one in made.items()},
        {kind: one.unknown_prompts for kind, one in made.items()},
    )


def pictures_of(space: Workspace, kind: str) -> list[Path]:
    """The plots and pages in the workspace's reports that belong to an artifact."""
    of_kind = find_kind(kind)
    reports = space.device_reports if of_kind.per_device else space.reports
    return sorted(path for pattern in of_kind.pictures for path in reports.glob(pattern))


def now() -> str:
    """This moment, ISO 8601, UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
