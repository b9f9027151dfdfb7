"""Publishing: every artifact of the workspace into the registry, pinned in a new release; or a
release of versions that a person picked."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwell.components.gate.temperatures import objections
from draftwell.flows.context import StepContext, pictures_of
from draftwell.flows.loading import open_pair
from draftwell.flows.steps.eagle3 import curves_of
from draftwell.flows.steps.picked import take_marked
from draftwell.flows.steps.reference_traces import keep_served
from draftwell.flows.workspace import Workspace, in_turn
from draftwell.registry.cards.model_card import choice_settings
from draftwell.registry.composing import compose
from draftwell.registry.pairs import model_records
from draftwell.registry.releases import create_release
from draftwell.registry.store import Store
from draftwell.serving.artifacts.decoding_config import DecodingConfig
from draftwell.serving.artifacts.kinds import find_kind
from draftwell.serving.device import checked_device
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.strategies import find_strategy

if TYPE_CHECKING:
    from draftwell.registry.composing import Composition
    from draftwell.registry.releases import ReleaseVersion


@dataclass(frozen=True)
class PickedRelease:
    """A release of picked versions, where each came from, and what a person should know of it."""

    release: ReleaseVersion
    composition: Composition
    notes: tuple[str, ...]


@in_turn("draftwell release create")
def run_publish(
    step: StepContext, evidence: Mapping[str, Any], *, device: str | None = None
) -> ReleaseVersion:
    """Publish every artifact of the workspace, and what a person marked in MLflow in its place, and
    pin them in a new release, which becomes `candidate`. What a lossy one would serve is collected,
    for its traffic to be compared with (`reference_traces.keep_served`).

    Args:
        evidence: kept with the release as JSON; MLflow compares the numbers at its top.
        device: that of the release; None takes the workspace's.
    Raises:
        DraftwellError: no tuned config for the device, or one that was made on another.
    """

    space, store = step.workspace, Store()
    files = space.files()
    device = device or space.device
    take_marked(space, device)
    folders = space.to_release(device)
    config = DecodingConfig.load(folders["decoding_config"])
    check_temperatures(config, folders)
    heads = [kind for kind in ("eagle3_head",) if kind in folders]
    metrics = {kind: curves_of(space, folders[kind]) for kind in heads}
    pins = {
        kind: store.publish(
            folder, pair=space.spec.name, metrics=metrics.get(kind), plots=pictures_of(space, kind)
        ).version
        for kind, folder in folders.items()
    }
    release = create_release(
        store,
        space.spec.name,
        device,
        pins,
        model_records(space.spec, files),
        dict(evidence),
        settings=shown_settings(config),
    )
    keep_served(step, release, config)
    return release


def check_temperatures(config: DecodingConfig, folders: Mapping[str, Path]) -> None:
    """Refuse a release in which a choice reads an artifact that was made for the other class of
    temperatures.

    Raises:
        DraftwellError: there is one (`artifact_of_another_temperature`).
    """

    tied = {kind: folder for kind, folder in folders.items() if find_kind(kind).tied_to_temperature}
    artifacts = {kind: find_kind(kind).load_class().load(folder) for kind, folder in tied.items()}
    if wrong := objections(config, artifacts):
        raise DraftwellError(
            f"{'; '.join(wrong)}: make it again from traces of that temperature, or tune again",
            code="artifact_of_another_temperature",
        )


def shown_settings(config: DecodingConfig) -> dict[str, Any]:
    """What MLflow shows as a release's parameters next to its versions."""

    settings = choice_settings(config.strategy, config.parameters)
    if config.sampled is not None:
        found = choice_settings(config.sampled.strategy, config.sampled.parameters)
        settings |= {
            f"sampled.{key}": value
            for key, value in {"temperature": config.sampled.temperature, **found}.items()
        }
    return settings


@in_turn("draftwell release create")
def publish_picked(space: Workspace, device: str, pins: Mapping[str, str]) -> PickedRelease:
    """Make a release of picked versions, which becomes `candidate`; every other kind is the
    champion's, or the newest that fits.

    Nothing is trained or measured, and models are loaded only to collect what a lossy choice would
    serve (`keep_served`).

    Args:
        pins: kind → number or alias of a version.
    Raises:
        DraftwellError: see `draftwell.registry.composing.compose` and `check_temperatures`; nothing
            was registered.
    """

    store, name = Store(), space.spec.name
    chosen = compose(store, name, device, pins)
    read = [
        kind
        for kind in chosen.versions
        if kind == "decoding_config" or find_kind(kind).tied_to_temperature
    ]
    with tempfile.TemporaryDirectory() as place:
        folders = {kind: store.download(chosen.versions[kind], Path(place) / kind) for kind in read}
        config = DecodingConfig.load(folders["decoding_config"])
        check_temperatures(config, folders)
    known = (
        chosen.champion.contents.models.items()
        if chosen.champion
        else model_records(space.spec, space.files()).items()
    )
    models = {str(role): record for role, record in known}
    evidence = {
        "picked": {kind: chosen.versions[kind].version for kind in chosen.picked},
        "others_from": chosen.champion.name if chosen.champion else "the newest versions",
    }
    versions = {kind: version.version for kind, version in chosen.versions.items()}
    release = create_release(
        store, name, device, versions, models, evidence, settings=shown_settings(config)
    )
    if not find_strategy(config.strategy).lossless:
        try:
            step = open_pair(space.name, space.dtype, device=checked_device(device), say=space.say)
        # such as a release for a device that is not here; it is registered all the same
        except DraftwellError as error:
            space.say(
                f"what {config.strategy} serves is not watched until it is published again: {error}"
            )
        else:
            keep_served(step, release, config)
    return PickedRelease(release, chosen, tuple(notes_on(chosen, config)))


def notes_on(chosen: Composition, config: DecodingConfig) -> Iterator[str]:
    """What a person should know of a composition before the gate measures it."""

    names = list(
        dict.fromkeys([config.strategy, *([config.sampled.strategy] if config.sampled else [])])
    )
    tuned_with = chosen.versions["decoding_config"].parents
    for kind in chosen.picked:
        version, readers = (
            chosen.versions[kind],
            [name for name in names if kind in find_strategy(name).reads()],
        )
        if kind == "decoding_config":
            continue
        if not readers:
            verb = "does" if len(names) == 1 else "do"
            yield (
                f"{' and '.join(names)}, which this release serves, {verb} not read {kind}: "
                f"version {version.version} changes no answer"
            )
        elif kind in tuned_with and tuned_with[kind] != version.digest:
            yield (
                f"the parameters of {' and '.join(readers)} were tuned with another {kind} "
                f"than version {version.version}: "
                "the gate measures them together"
            )
