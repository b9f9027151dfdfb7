"""What served traffic is compared with, and where it is kept beyond the workspace's next
collection.

A champion's calibration traces are found by the digest that its artifacts name: among the
workspace's own, those of recalibrations, or those that an earlier check kept as hard links. They
hold no texts like those that a lossy strategy serves, so what such a release would serve on the
same prompts is collected when it is published.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftwell.components.collect.collect import collect_traces
from draftwell.components.collect.plan import PLAN, forget, is_complete, read_plan
from draftwell.components.collect.settings import CollectionSettings
from draftwell.components.drift.prompts import prompts_of_trace
from draftwell.flows.context import StepContext
from draftwell.flows.steps.champion import artifacts_of, serving_release
from draftwell.flows.workspace import Workspace
from draftwell.registry.releases import ReleaseVersion
from draftwell.registry.store import Store
from draftwell.serving.artifacts.base import Artifact
from draftwell.serving.artifacts.decoding_config import DecodingConfig
from draftwell.serving.artifacts.kinds import KINDS, WATCHED
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import json_digest, whole_folder
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.recording.trace_schema import LOSSY, TraceError
from draftwell.serving.runtime.strategies import (
    StrategyResources,
    build_strategy,
    find_strategy,
)
from draftwell.serving.temperature import SERVED_TEMPERATURE

RECALIBRATIONS = "recalibrations"
SLOTS = 4
"""Texts of a lossy strategy that are written at the same time: as many as every pair is loaded for
that a release is published with."""


@dataclass(frozen=True)
class Served:
    """What traffic is served with.

    Args:
        name: of the release, or what to call the workspace without one.
        fingerprint: of the pair that it was made for.
        artifacts: kind → artifact.
        release: the one that serves, None without one.
    """

    name: str
    fingerprint: str
    artifacts: dict[str, Artifact] = field(default_factory=dict)
    release: ReleaseVersion | None = None

    @property
    def trace_digest(self) -> str | None:
        """Digest of the traces it was calibrated on."""
        made = [
            self.artifacts[kind].provenance.trace_digest
            for kind in (*WATCHED, "decoding_config")
            if kind in self.artifacts
        ]
        return next((digest for digest in made if digest), None)

    @property
    def lossy(self) -> DecodingConfig | None:
        """Its config where its strategy is lossy: a server records what that writes as texts of a
        kind of their own (`trace.LOSSY`)."""

        config: Any = self.artifacts.get("decoding_config")
        return (
            config if config is not None and not find_strategy(config.strategy).lossless else None
        )


def served(space: Workspace, device: str, out: Path) -> Served:
    """What `current` under `out` serves, else the champion, with its artifacts; or what is
    calibrated in the workspace where there is neither yet."""
    if (release := serving_release(space, device, out)) is not None:
        return of_release(release)
    folders = {
        kind: space.artifacts / kind for kind in WATCHED if (space.artifacts / kind).is_dir()
    }
    found = {kind: KINDS[kind].load_class().load(folder) for kind, folder in folders.items()}
    if not found:
        raise DraftwellError(
            f"pair {space.spec.name} has neither a champion on {device} nor calibrated "
            f"artifacts in {space.dtype}: run "
            f"`draftwell tune --device {device}`, or collect, train and calibrate first",
            code="nothing_calibrated",
        )
    return Served(
        f"the workspace of {space.spec.name} (no champion yet)",
        next(iter(found.values())).provenance.fingerprint,
        found,
    )


def of_release(release: ReleaseVersion) -> Served:
    """What a release pins, from the registry, without what was deleted since."""
    found = artifacts_of(Store(), release, release.fingerprint, partly=True)
    return Served(release.name, release.fingerprint, found, release)


def find_reference(space: Workspace, champion: Served, named: Path | None) -> TraceSet:
    """The traces that served traffic is compared with: the named ones; else what a lossy champion's
    own strategy wrote, if that was collected; else those that the champion was calibrated on."""
    if named is not None:
        return TraceSet(named, fingerprint=champion.fingerprint)
    if champion.lossy is not None and is_usable(folder := served_reference(space, champion)):
        return TraceSet(folder, fingerprint=champion.fingerprint)
    return calibration_traces(space, champion)


def calibration_traces(space: Workspace, champion: Served) -> TraceSet:
    """The traces that the champion was calibrated on."""
    digest = champion.trace_digest
    if digest is None:
        raise DraftwellError(
            f"{champion.name} does not name the traces it was calibrated on: name them with "
            f"--set reference=…, or calibrate again",
            code="no_reference",
        )
    own = (space.traces_at(0), space.traces_at(SERVED_TEMPERATURE))
    for folder in (
        kept_reference(space, digest),
        *own,
        *sorted((space.root / RECALIBRATIONS).glob("*/traces")),
    ):
        traces = TraceSet(folder, fingerprint=champion.fingerprint)
        try:
            if traces.shards and traces.digest() == digest:
                return traces
        except TraceError:
            continue  # of another dtype, or broken: not the one to find
    raise DraftwellError(
        f"the traces that {champion.name} was calibrated on (digest {digest[:12]}) are not "
        f"in {space.root}: name them "
        "with --set reference=…, or recalibrate",
        code="no_reference",
    )


def kept_reference(space: Workspace, digest: str) -> Path:
    """Where a reference is kept beyond the workspace's next collection."""
    return space.root / "drift" / "references" / digest[:16]


def keep_reference(space: Workspace, traces: TraceSet, digest: str) -> None:
    """Keep a reference by hard links, which take no room; where there are none the traces are
    copied. The folder appears complete."""
    folder = kept_reference(space, digest)
    if folder.is_dir():
        return
    try:
        with whole_folder(folder) as place:
            # the plan has the hashes of the prompts
            for file in (*traces.shards, *traces.folder.glob(PLAN)):
                try:
                    os.link(file, place / file.name)
                except OSError:
                    shutil.copyfile(file, place / file.name)
    except OSError as error:
        space.say(
            f"the reference could not be kept ({error.strerror}): the next collection "
            "would replace it"
        )


def served_reference(space: Workspace, champion: Served) -> Path:
    """The folder of what a lossy champion's strategy wrote on the prompts that it was calibrated
    on. Its name is a digest of all inputs, so that another release with the same config, artifacts
    and traces finds it too."""
    config = champion.lossy
    assert config is not None
    kinds = [kind for kind in find_strategy(config.strategy).reads() if kind in champion.artifacts]
    made_of = [
        champion.fingerprint,
        champion.trace_digest,
        config.strategy,
        config.parameters,
        {kind: champion.artifacts[kind].digest for kind in kinds},
    ]
    name = json_digest(made_of)[:16]
    return space.root / "drift" / "references" / f"served-{name}"


def is_usable(folder: Path) -> bool:
    """Whether a folder holds a finished collection that can be read."""
    if read_plan(folder) is None or not is_complete(folder):
        return False
    try:
        return bool(TraceSet(folder).digest())
    except TraceError:
        return False


def keep_served(step: StepContext, release: ReleaseVersion, config: DecodingConfig) -> None:
    """Collect what a release would serve where its config is lossy: once, and in the pair's own
    workspace, whichever the step works in.

    A collection that was cut short is resumed. One that fails stops no release: monitoring then
    says that the reference is missing.
    """
    if find_strategy(config.strategy).lossless:
        return
    own = Workspace(
        step.workspace.name, step.workspace.dtype, step.workspace.say, step.workspace.device
    )
    try:
        collect_served(step, own, of_release(release))
    except (DraftwellError, OSError) as error:
        own.say(
            f"what {config.strategy} serves is not watched until it is published again: {error}"
        )


def collect_served(step: StepContext, space: Workspace, champion: Served) -> None:
    """Collect what a lossy release would serve on the prompts that it was calibrated on, and keep
    the traces with these.

    Raises:
        DraftwellError: these traces are gone, or another collection is writing to the folder.
    """
    config, pair = champion.lossy, step.pair
    assert config is not None
    traces = calibration_traces(space, champion)
    keep_reference(space, traces, traces.digest())
    folder = served_reference(space, champion)
    if is_usable(folder):
        return
    # a damaged file, which no further run would repair
    if is_complete(folder) and read_plan(folder) is not None:
        forget(folder)
    space.say(f"collecting what {config.strategy} serves, for monitoring")
    resources = StrategyResources(champion.artifacts, pair.special_tokens)
    strategy = build_strategy(config.strategy, dict(config.parameters), resources)
    header = traces.header
    settings = CollectionSettings(
        max_tokens=header.max_tokens,
        temperature=header.temperature,
        top_p=header.top_p,
        turns=0,
        rollout=1,
        prefix_kinds=(LOSSY,),
        batch=SLOTS,
    )
    collect_traces(
        pair,
        prompts_of_trace(traces),
        folder,
        settings,
        strategy=strategy,
        fresh=True,
        progress=step.bar,
    )
