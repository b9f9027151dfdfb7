"""What was chosen for another engine, as an artifact of the registry and a release of it.

A release `release.<pair>.<device>-<engine>` pins one `engine_config`, with the head and the draft
that it names; one for sampled requests ends in `-sampled`. Candidate, challenger and champion,
verdicts, promotion and rollback are those of every release.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwell.components.engines.vllm_methods import CASCADE, NEEDS, OFF
from draftwell.components.export.schedules import sglang_adaptive, tensorrt_llm_schedule
from draftwell.components.prompts.overlap import hashes_of
from draftwell.components.report.provenance import provenance
from draftwell.components.tune.engines.choice import EngineChoice
from draftwell.flows.steps.engine.space import EngineSpace
from draftwell.flows.steps.picked import publish_once, take
from draftwell.flows.workspace import in_turn
from draftwell.registry.bundles.wheel import plugin_version
from draftwell.registry.composing import marked_versions
from draftwell.registry.pairs.records import model_records
from draftwell.registry.releases import ReleaseVersion, create_release, find_release
from draftwell.registry.store import Store
from draftwell.serving.artifacts.base import digest_of
from draftwell.serving.artifacts.engine_config import EngineConfig, EngineConfigFile
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import json_digest
from draftwell.serving.number_format import dtype_of
from draftwell.serving.temperature import class_of

if TYPE_CHECKING:
    from draftwell.components.prompts.prompt import Prompt
    from draftwell.components.tune.engines.ngram_replay import Text

ARTIFACTS = {"head": "eagle3_head", "draft": "distilled_draft"}
"""What a method reads → kind of the artifact that it is made of."""


@dataclass(frozen=True)
class EngineRelease:
    """A release for another engine, and the config that it pins."""

    release: ReleaseVersion
    config: EngineConfig

    @cached_property
    def choice(self) -> EngineChoice:
        """What was chosen."""
        return choice_of(self.config)


def choice_of(config: EngineConfig) -> EngineChoice:
    """What a config says was chosen."""
    return EngineChoice.model_validate_json(json.dumps(config.contents.choice))


def measured_at_once(choice: EngineChoice) -> int:
    """Requests at once that a choice was measured with, at most."""
    return max((level.at_once for level in choice.levels), default=1)


def save_choice(
    space: EngineSpace,
    choice: EngineChoice,
    *,
    temperature: float,
    subject: str,
    prompts: Sequence[Prompt],
    texts: Sequence[Text] | None,
) -> None:
    """Put a choice into the workspace, as the artifact that `publish_on_engine` registers.

    Args:
        subject: digest of what was measured.
        prompts: that it was chosen on.
        texts: that it was chosen with; None without any.
    """
    known = ("engine", "version", "distribution", "dtype", "threads")
    contents = EngineConfigFile(
        **{name: space.here[name] for name in known},
        plugin=plugin_version() if choice.method == CASCADE else None,
        temperature=temperature,
        label=choice.chosen.label,
        settings=portable_settings(space, choice),
        exports=exports(choice),
        subject=subject,
        choice=choice.model_dump(mode="json"),
    )
    parents = {} if texts is None else {"texts": json_digest(texts)}
    if (source := artifact_behind(space, choice)) is not None:
        parents[source[0]] = digest_of(source[1])
    made = provenance(
        space.pair,
        device_class=space.here["device_class"],
        parents=parents,
        training_prompts=hashes_of(prompts),
        parameters={name: space.here[name] for name in ("engine", "version", "threads")}
        | {"temperature": temperature, "strategy": choice.chosen.label},
        metrics=figures_of(choice),
    )
    space.workspace.begin()
    EngineConfig(contents, made).save(space.config_folder(temperature))


def exports(choice: EngineChoice) -> dict[str, Any]:
    """The choice as settings of further engines; one that cannot express it is missing."""
    found: dict[str, Any] = {}
    if choice.levels and choice.method == "eagle3":
        found["sglang_adaptive"] = sglang_adaptive(
            [(level.at_once, level.open) for level in choice.levels]
        )
    if choice.levels and choice.method not in (OFF, CASCADE):
        found["tensorrt_llm"] = tensorrt_llm_schedule(
            [(level.at_once, level.k) for level in choice.levels]
        )
    return found


def figures_of(choice: EngineChoice) -> dict[str, float]:
    """What MLflow compares choices by: of a single request where the choice was confirmed; nothing
    of plain decoding."""
    label = choice.alone.label
    for figure in choice.confirmed:
        if figure.label == label and figure.at_once == 1:
            return {
                "speedup": figure.ratio,
                "speedup_low": figure.low,
                "tokens_per_second": figure.tokens_per_second,
            }
    return {}


def portable_settings(space: EngineSpace, choice: EngineChoice) -> dict[str, Any] | None:
    """The engine's settings, with a draft or head by the name of its folder, which ends with a
    digest."""
    settings = choice.chosen.speculative_config(space.files)
    if settings is not None and choice.method in NEEDS:
        settings["model"] = Path(settings["model"]).name
    return settings


def artifact_behind(space: EngineSpace, choice: EngineChoice) -> tuple[str, Path] | None:
    """Kind and folder of the artifact that the chosen method reads; None where it reads none, or a
    draft that is no artifact."""
    role = NEEDS.get(choice.method)
    folder = (
        space.head_folder()
        if role == "head"
        else space.workspace.files().draft
        if role == "draft"
        else None
    )
    if role is None or folder is None or not (folder / "artifact.json").is_file():
        return None
    return ARTIFACTS[role], folder


@in_turn("draftwell release create")
def publish_on_engine(space: EngineSpace, temperature: float = 0.0) -> EngineRelease:
    """Register the workspace's choice, or the one that a person marked in MLflow in its place, and
    pin it in a release, which becomes `candidate`.

    Raises:
        DraftwellError: nothing is tuned (`not_tuned`), or what is does not fit (as
            `refuse_elsewhere` says).
    """
    workspace, store, folder = space.workspace, Store(), space.config_folder(temperature)
    device = workspace.device.partition(":")[0]
    marked = marked_versions(store, workspace.spec.name, device, ("engine_config",))
    for version in marked.values():
        if class_of(float(version.tags.get("temperature", 0))) == class_of(temperature):
            take(workspace, store, version, folder)
    if (config := space.config(temperature)) is None:
        raise DraftwellError(
            f"nothing is tuned for {space.name}: run `draftwell step choose --engine "
            f"{space.option} "
            f"--pair {workspace.spec.name}` first",
            code="not_tuned",
        )
    refuse_elsewhere(space, config)
    choice, temperature = choice_of(config), config.contents.temperature
    folders = {"engine_config": folder}
    if (source := artifact_behind(space, choice)) is not None:
        folders[source[0]] = source[1]
    pins = {kind: publish_once(workspace, store, kind, at).version for kind, at in folders.items()}
    release = create_release(
        store,
        workspace.spec.name,
        space.released_as(temperature),
        pins,
        model_records(workspace.spec, workspace.files()),
        {"reason": choice.reason},
        settings={"strategy": choice.chosen.label, "temperature": temperature},
    )
    return EngineRelease(release, config)


def find_engine_release(
    space: EngineSpace, version_or_alias: int | str, temperature: float = 0.0
) -> EngineRelease:
    """A release for the engine, by number or alias, with its config from the registry.

    Raises:
        DraftwellError: there is none (`not_registered`).
    """
    store = Store()
    device = space.released_as(temperature)
    release = find_release(store, space.workspace.spec.name, device, version_or_alias)
    pinned = store.resolve("engine_config", release.pair, release.pins["engine_config"])
    with tempfile.TemporaryDirectory() as place:
        folder = store.download(pinned, Path(place) / "engine_config")
        return EngineRelease(release, EngineConfig.load(folder))


def candidates(space: EngineSpace) -> list[EngineRelease]:
    """What is to be judged: the candidate for greedy requests, and the one for sampled ones.

    Raises:
        DraftwellError: there is neither (`no_candidate`).
    """
    store, pair = Store(), space.workspace.spec.name
    found = [
        find_engine_release(space, number, temperature)
        for temperature in (0.0, 1.0)
        if (
            number := store.get_aliases("release", f"{pair}.{space.released_as(temperature)}").get(
                "candidate"
            )
        )
        is not None
    ]
    if not found:
        raise DraftwellError(
            f"no release was judged: release.{pair}.{space.released_as(0.0)} has no candidate, "
            f"`draftwell step choose --engine {space.option} --pair {space.workspace.name}` "
            f"makes one",
            code="no_candidate",
        )
    return found


def refuse_elsewhere(space: EngineSpace, config: EngineConfig) -> None:
    """Refuse a config that was measured on another engine, version, device, number format or models
    than are here.

    Raises:
        DraftwellError: a field differs (`tuned_elsewhere`).
    """
    made, contents = config.provenance, config.contents
    there = {
        **dict(contents),
        "dtype": dtype_of(contents.dtype),
        "device_class": made.device_class,
        "fingerprint": made.fingerprint,
        "threads": space.threads,
    }
    here = {**space.here, "settings": portable_settings(space, choice_of(config))}
    if contents.plugin is not None:
        here["plugin"] = plugin_version()
    for name, value in here.items():
        if there[name] != value:
            what = name.replace("_", " ")
            raise DraftwellError(
                f"{contents.label} was tuned for {contents.engine} with {what} {there[name]!r}, "
                f"and here it is {value!r}: run `draftwell step choose --engine {space.option} "
                f"--pair "
                f"{space.workspace.name}` here",
                code="tuned_elsewhere",
            )
