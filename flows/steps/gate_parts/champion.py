"""The champion that a candidate is compared with: found, loaded, and ready to decode what it
serves."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from draftwell.components.bench.runner import StrategyContender
from draftwell.components.gate.footprint import room_for_another
from draftwell.components.prompts.overlap import TrainingPrompts
from draftwell.flows.context import StepContext, artifact_prompts
from draftwell.flows.steps.champion import artifacts_of, champion_of
from draftwell.registry.releases import (
    FORGOTTEN,
    ReleaseVersion,
    standing_record,
    suppress_gone,
)
from draftwell.registry.store import Store
from draftwell.serving.artifacts.base import Artifact
from draftwell.serving.artifacts.compiled_libraries import wanted_mode
from draftwell.serving.artifacts.decoding_config import DecodingConfig
from draftwell.serving.artifacts.pair_files import fingerprint
from draftwell.serving.bundle.verdict import GateVerdict, Skipped
from draftwell.serving.runtime.pair import LoadedPair, LoadSettings, load_pair
from draftwell.serving.runtime.strategies import STRATEGIES, StrategyResources, served_choice


@dataclass(frozen=True)
class ChampionComparison:
    """The champion that a candidate is compared with, if there is one.

    Args:
        release: None where there is none other than the candidate.
        contenders: the champion with its own artifacts, or nobody.
        comparable: its artifacts, where they are for the very models of the candidate.
        unmeasured: why a champion is not measured, or None.
        prompts: what it was made from; of nothing where it is not measured.
    """

    release: ReleaseVersion | None = None
    contenders: tuple[StrategyContender, ...] = ()
    comparable: dict[str, Artifact] = field(default_factory=dict)
    unmeasured: str | None = None
    prompts: TrainingPrompts = field(default_factory=TrainingPrompts)

    @property
    def config(self) -> DecodingConfig | None:
        """What it serves, if it is measured."""
        found: Any = next(
            (one.resources.artifacts.get("decoding_config") for one in self.contenders), None
        )
        return found

    def skipped(self) -> GateVerdict:
        """Why nothing was compared with it; empty where it was measured."""
        if self.contenders:
            return GateVerdict(())
        why = self.unmeasured or "there is no other champion"
        stands = self.release is not None and FORGOTTEN not in self.release.published.tags
        return GateVerdict.of([Skipped("regression", why, applies=stands)])

    def at(self, temperature: float) -> ChampionComparison:
        """The same champion with what it serves at a temperature."""

        contenders = []
        for one in self.contenders:
            config: Any = one.resources.artifacts["decoding_config"]
            choice = served_choice(config, temperature)
            contenders.append(StrategyContender(one.pair, one.resources, choice, one.label))
        return replace(self, contenders=tuple(contenders))


def find_rival(step: StepContext, store: Store, release: ReleaseVersion) -> ChampionComparison:
    """The pair's champion, ready to decode."""

    champion = champion_of(step.workspace, release.device)
    if champion is None or champion.version == release.version:
        return ChampionComparison()
    with suppress_gone():
        return opened_rival(step, store, champion)
    why = "was withdrawn" if FORGOTTEN in champion.published.tags else "pins what is gone"
    return ChampionComparison(
        champion, unmeasured=f"{champion.name}, the champion, {why}: not measured"
    )


def opened_rival(step: StepContext, store: Store, champion: ReleaseVersion) -> ChampionComparison:
    """A champion, ready to decode.

    Raises:
        DraftwellError: it pins what is gone (`GONE`).
    """
    with tempfile.TemporaryDirectory() as place:
        draft = draft_of(step, store, champion, Path(place))
        pair = pair_with(step, champion, draft)
        if pair is None:
            return ChampionComparison(
                champion,
                unmeasured=f"{champion.name}, the champion, has other weights or another dtype "
                "than the models here, or there is no memory for both: not measured",
            )
        theirs = artifacts_of(store, champion, champion.fingerprint)
        made_of = artifact_prompts(theirs, draft)
    config: Any = theirs["decoding_config"]
    record = standing_record(champion)
    if record is not None and record.serves_greedy_choice(
        champion.version, champion.pins, champion.published.digest
    ):
        theirs["decoding_config"] = config = config.with_greedy_for_sampled()
    contender = StrategyContender(
        pair, StrategyResources(theirs, pair.special_tokens), served_choice(config, 0.0), "champion"
    )
    return ChampionComparison(
        champion, (contender,), theirs if pair is step.pair else {}, prompts=made_of
    )


def draft_of(step: StepContext, store: Store, champion: ReleaseVersion, place: Path) -> Path | None:
    """Folder of the draft that a champion runs on: the workspace's own where the models are the
    same, else a distilled one that it pins."""
    if champion.fingerprint == step.pair.fingerprint:
        return step.workspace.files().draft
    version = champion.pins.get("distilled_draft")
    if version is None:
        return None
    draft = store.resolve("distilled_draft", champion.pair, version)
    return store.download(draft, place / "draft")


def pair_with(step: StepContext, champion: ReleaseVersion, draft: Path | None) -> LoadedPair | None:
    """The models that a champion runs on: those that are loaded, or the same target with the
    distilled draft that it pins.

    Args:
        draft: of `draft_of`.
    Returns:
        None where they are not available here: another target or dtype, a draft that is not in the
            registry, or no memory for both.
    """

    pair, space = step.pair, step.workspace
    if champion.fingerprint == pair.fingerprint:
        return pair
    if draft is None or not pair.device.startswith("cpu") or not room_for_another(space.files()):
        return None
    files = replace(space.files(), draft=draft)
    if fingerprint(files, pair.dtype) != champion.fingerprint:
        return None
    onnx = any(strategy.prefers_onnx for strategy in STRATEGIES.values())
    settings = LoadSettings.model_validate({"dtype": pair.dtype, "compile": wanted_mode()})
    return load_pair(files, settings, chat=space.spec.chat, onnx_draft=onnx)
