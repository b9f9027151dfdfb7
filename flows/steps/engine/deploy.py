"""Deployment for another engine: from what its gate judged to a bundle that `current` points to.

The release's gate record is the authority, as for bundles of our own. Another version of the
engine, device, number format or other models than were measured are refused, and so is a draft or
head that was made again since.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any

from draftwell.components.drift.schema import NOT_ENOUGH
from draftwell.components.engines.environments import REPORTS, installed_packages, peers_root
from draftwell.components.engines.port import Acceptance
from draftwell.components.engines.vllm import NAME
from draftwell.components.engines.vllm_methods import NEEDS, OFF, ONE_LENGTH
from draftwell.components.tune.engines.candidates import NEEDS_PACKAGE
from draftwell.components.tune.engines.choice import EngineChoice
from draftwell.flows.steps.engine.monitor import check_engine
from draftwell.flows.steps.engine.recalibrate import note_made
from draftwell.flows.steps.engine.release import (
    EngineRelease,
    find_engine_release,
    measured_at_once,
    refuse_elsewhere,
)
from draftwell.flows.steps.engine.serve import serve_and_ask
from draftwell.flows.steps.engine.served import OPTIONS, Deployment
from draftwell.flows.steps.engine.space import EngineSpace, deployment_of
from draftwell.flows.steps.monitor import load_limits
from draftwell.flows.workspace import in_turn
from draftwell.registry.bundles.requirements import engine_lock
from draftwell.registry.bundles.vllm.build import (
    activate_vllm_bundle,
    build_vllm_bundle,
    bundles_of,
    keep_own_files,
)
from draftwell.registry.bundles.vllm.render import MANIFEST
from draftwell.registry.bundles.vllm.settings import (
    BUNDLED,
    COMMIT,
    EngineGate,
    gated_serving,
)
from draftwell.registry.bundles.wheel import plugin_wheel
from draftwell.registry.pairs.records import model_records
from draftwell.registry.promotion import deployment_objection, promote, withdrawal
from draftwell.registry.release_card import kept_card
from draftwell.registry.releases import find_release, is_champion
from draftwell.registry.store import Store
from draftwell.serving.errors import DraftwellError
from draftwell.serving.number_format import dtype_of

if TYPE_CHECKING:
    from draftwell.components.prompts.prompt import Prompt
    from draftwell.flows.settings import PipelineSettings
    from draftwell.registry.bundles.vllm.settings import VllmServing

SERVE_SECONDS = 90.0
"""That what is deployed is asked for before it serves: so long that its counts, a line every few
seconds, are enough to be compared with those of the tuning."""


@dataclass(frozen=True)
class Placed:
    """Where vLLM finds the models.

    Args:
        model, revision: the target, and its commit where it stays on the hub.
        draft: place of the draft or head in the bundle; None where nothing is needed.
        folders: place in the bundle → folder that is copied there.
    """

    model: str
    revision: str | None = None
    draft: str | None = None
    folders: dict[str, Path] = field(default_factory=dict)


@in_turn("draftwell deploy")
def deploy_as(
    settings: PipelineSettings, space: EngineSpace, number: int, prompts: Sequence[Prompt]
) -> dict[str, Any]:
    """Build the bundle of a release that passed with the flows' settings, try its server, and only
    then make it the champion and move `current`.

    The bundle decodes as many requests at once as were measured; of plain decoding, as many as were
    named. What it follows is served for no fewer, and a person's options of that stay.

    Returns:
        the `bundle` (None where a person promotes), what its trial `served`, and how drafts fared
        `since_tuning`.
    """
    say, kept = space.workspace.say, deployment_of(settings, space)
    released = find_engine_release(space, number, kept.temperature)
    store, release = Store(), released.release
    manual = (settings.promote or space.workspace.spec.promote) == "manual"
    if manual and not is_champion(store, release):
        say(f"    {release.name} waits to be promoted by a person, as `promote: manual` says")
        return {"bundle": None}
    choice, most = released.choice, max(settings.levels)
    at_once = most if choice.method == OFF else measured_at_once(choice)
    if at_once < most:
        say(
            f"    measured for {at_once} at once: there was no time to measure more; "
            "name more minutes and run it again"
        )
    bundle = deploy_on_engine(
        space,
        released,
        settings.out,
        options={**kept.options, "max_num_seqs": str(served_at_once(choice, at_once, kept))},
        with_weights=kept.with_weights,
        activate=False,
    )
    served = bundle_settings(bundle)
    say(f"    {bundle}, which decodes up to {served['max_num_seqs']} requests at once")
    if beyond := unmeasured_loads(choice, served):
        say(f"    {beyond}")
    tried = try_bundle(settings, space, bundle, prompts, at_once)
    if not is_champion(store, release):  # not before it has answered
        promote(store, release.pair, release.device, release.version)
        say(f"    {release.name} is the champion")
    note_made(space, bundle)
    activate_vllm_bundle(bundle)
    return {
        "bundle": str(bundle),
        "served": tried,
        "since_tuning": since_tuning(settings, space, kept.temperature),
    }


def served_at_once(choice: EngineChoice, at_once: int, kept: Deployment) -> int:
    """Requests that a bundle decodes at once: as many as the served one did, unless the choice
    drafts as much at loads that were not measured."""
    return at_once if choice.method in ONE_LENGTH else max(at_once, kept.at_once)


def try_bundle(
    settings: PipelineSettings,
    space: EngineSpace,
    bundle: Path,
    prompts: Sequence[Prompt],
    clients: int,
) -> dict[str, float]:
    """Requests to what was built; what is counted of them stays apart from what users' requests
    leave for monitoring."""
    spool = trial_spool(space)
    rmtree(spool, ignore_errors=True)
    ids, _ = space.encoded(prompts, settings.max_tokens)
    return serve_and_ask(
        bundle,
        space.workspace.spec.name,
        ids,
        max_tokens=settings.max_tokens,
        seconds=SERVE_SECONDS,
        clients=clients,
        spool=spool,
    )


def trial_spool(space: EngineSpace) -> Path:
    """Folder of the counts of a trial's requests."""
    return space.folder / "trial-spool"


def since_tuning(
    settings: PipelineSettings, space: EngineSpace, temperature: float
) -> dict[str, str]:
    """Whether drafts of the trial fared as they did when they were tuned: `verdict` and `why`."""
    if temperature:  # says nothing about sampled requests
        why = f"it is tuned for temperature {temperature:g}, and the trial's requests were greedy"
        return {"verdict": NOT_ENOUGH, "why": why}
    try:
        found = check_engine(
            space, spool=trial_spool(space), out=settings.out, limits=load_limits()
        )
    except DraftwellError as error:
        if error.code != "spool_empty":
            raise
        return {"verdict": NOT_ENOUGH, "why": str(error)}
    return {"verdict": found.verdict, "why": found.why}


def bundle_settings(bundle: Path) -> dict[str, Any]:
    """The settings that a bundle was made of."""
    return dict(json.loads((bundle / MANIFEST).read_text(encoding="utf-8"))["settings"])


def deploy_on_engine(
    space: EngineSpace,
    released: EngineRelease,
    out: Path,
    *,
    ungated: str | None = None,
    with_weights: bool = False,
    options: Mapping[str, str] | None = None,
    activate: bool = True,
) -> Path:
    """The folder of a bundle of a release that passed its gate, with the user's own files of the
    one before; `current` points at it.

    Args:
        ungated: reason to deploy it although no gate passed, or on something else than it was tuned
            for; recorded in the bundle, and said by its README.
        with_weights: put the target into the bundle although it is a commit on the hub.
        options: of `OPTIONS`, as a person writes them.
        activate: whether `current` moves.
    Raises:
        DraftwellError: `not_deployable` (no gate passed it, or it was rolled back),
            `tuned_elsewhere`, `missing_file`, `bad_setting` (unknown) or `bad_value`.
    """
    chosen = checked_options(options or {}, released.choice)
    record = judged(space, released, ungated)
    pair, device = space.workspace.spec.name, space.workspace.device.partition(":")[0]
    placed, wheel = places(space, released.choice, with_weights), plugin_wheel()

    def settings(number: int) -> VllmServing:
        return gated_serving(
            record,
            device=device,
            fingerprint=space.fingerprint,
            draft=placed.draft,
            ungated_reason=None if record["passed"] else ungated,
            pair=pair,
            release=number,
            model=placed.model,
            revision=placed.revision,
            dtype=dtype_of(space.workspace.dtype),
            plugins=(wheel.name,),
            tuned=tuned_counts(released),
            needs=needed_packages(record),
            **chosen,
        )

    lock = engine_lock(installed_packages(NAME), peers_root() / NAME / REPORTS)
    bundle = build_vllm_bundle(
        out,
        pair,
        device,
        settings,
        models=placed.folders,
        files={**lock, wheel.name: wheel.data, **kept_card(Store(), released.release)},
        activate=False,
    )
    take_own_files(space, bundles_of(out, pair), bundle)
    if activate:
        activate_vllm_bundle(bundle)
    return bundle


def needed_packages(record: Mapping[str, Any]) -> tuple[str, ...]:
    """What the judged method needs installed beside vLLM."""
    package = NEEDS_PACKAGE.get(str((record["settings"] or {}).get("method")))
    return () if package is None else (package,)


def take_own_files(space: EngineSpace, bundles: Path, bundle: Path) -> None:
    """Copy a user's own files of the served bundle into another one, and say which."""
    served = (bundles / "current").resolve()
    if served.is_dir() and served != bundle.resolve() and (names := keep_own_files(served, bundle)):
        space.workspace.say(f"    kept of {served.name}: {', '.join(names)}")


def checked_options(options: Mapping[str, str], choice: EngineChoice) -> dict[str, Any]:
    """Options of a deployment; one that there is none of is refused (`bad_setting`). A choice that
    drafts as much at all loads is served at measured ones, unless another number is named."""
    if unknown := sorted(set(options) - set(OPTIONS)):
        raise DraftwellError(
            f"--set {unknown[0]}: choose from {', '.join(OPTIONS)}", code="bad_setting"
        )
    known = {"max_num_seqs": measured_at_once(choice)} if choice.method in ONE_LENGTH else {}
    return {**known, **options}


def tuned_counts(released: EngineRelease) -> dict[str, Any]:
    """How drafts of what was chosen fared when it was measured one request at a time, as fields of
    `Tuned`: of each prompt (drafts whose first token was kept, drafts), because there each is
    measured once."""
    choice = released.choice
    label = choice.chosen.with_k(choice.k).label
    figures = choice.scheduled or [one for one in choice.confirmed if one.label == label]
    alone = [figure.acceptance for figure in figures if figure.at_once == 1]
    kept, drafts = Acceptance.total(alone).first
    return {
        "temperature": released.config.contents.temperature,
        "drafts": drafts,
        "first_kept": kept,
        "by_prompt": [pair for one in alone for pair in one.each],
    }


def judged(space: EngineSpace, released: EngineRelease, ungated: str | None) -> dict[str, Any]:
    """What the gate judged, for `gated_serving`; with a reason also what it did not pass, as far as
    it is here."""
    before = released.release
    # as it is now: its gate may have been since it was looked up
    release = find_release(Store(), before.pair, before.device, before.version)
    why = deployment_objection(Store(), release) or withdrawal(Store(), release)
    if why and not ungated:
        raise DraftwellError(
            f"{release.name} is not deployed, {why}: run `draftwell gate --engine {NAME} --pair "
            f"{space.workspace.name}`, or say why not with --set ungated=REASON",
            code="not_deployable",
        )
    try:
        refuse_elsewhere(space, released.config)
    except DraftwellError as error:
        if not ungated:
            raise
        why = str(error)
    return {
        **{name: one for name, one in space.here.items() if name in EngineGate.model_fields},
        "threads": released.config.contents.threads,
        "settings": released.choice.chosen.speculative_config(space.files),
        "at_once": measured_at_once(released.choice),
        "passed": not why,
        "release": release.name,
    }


def places(space: EngineSpace, choice: EngineChoice, with_weights: bool) -> Placed:
    """Where vLLM finds what was judged: a target on the hub stays there, by its commit; all else is
    copied into the bundle.

    Raises:
        DraftwellError: the draft or head is missing (`no_draft_to_export`, `no_head_to_export`).
    """

    known = model_records(space.workspace.spec, space.workspace.files())["target"]
    model, revision, folders = f"{BUNDLED}target", None, {f"{BUNDLED}target": space.files.target}
    if (
        known.source.startswith("hub:")
        and re.fullmatch(COMMIT, known.revision or "")
        and not with_weights
    ):
        model, revision, folders = known.source.removeprefix("hub:"), known.revision, {}
    role = NEEDS.get(choice.method)
    if role is None:
        return Placed(model, revision, None, folders)
    choice.chosen.speculative_config(space.files)  # refuses a missing one
    folder: Path = getattr(space.files, role)
    return Placed(model, revision, f"{BUNDLED}{role}", {**folders, f"{BUNDLED}{role}": folder})


def remarks(choice: EngineChoice, bundle: Path) -> list[str]:
    """Lines on what a bundle serves: requests at once, loads that were not measured, and containers
    that it does not describe."""
    settings = bundle_settings(bundle)
    found = [
        f"it decodes up to {settings['max_num_seqs']} requests at once, further ones wait: "
        "another number with --set max_num_seqs="
        f"{2 * settings['max_num_seqs']}; lengths for several loads with `draftwell step choose "
        f"--engine {NAME} --set levels=1,8`",
        unmeasured_loads(choice, settings),
        missing_containers(settings),
    ]
    return [line for line in found if line]


def missing_containers(settings: Mapping[str, Any]) -> str | None:
    """A line where a bundle has no container files because vLLM's image lacks what its settings
    need; None where that is not so."""
    if not settings["needs"] or settings["image"]:
        return None
    needs = ", ".join(settings["needs"])
    return (
        f"no Dockerfile, compose file or chart: {settings['speculative']['method']} needs "
        f"{needs}, which vLLM's image has not; name an "
        "image that has both with --set image=NAME, or leave the method out (tune with --set "
        "methods=…)"
    )


def unmeasured_loads(choice: EngineChoice, settings: Mapping[str, Any]) -> str | None:
    """A line where a bundle serves more requests at once than were measured, and a drafter runs
    there (`NEEDS`); else None."""
    top, most = measured_at_once(choice), settings["max_num_seqs"]
    if choice.method not in NEEDS or top >= most:
        return None
    return (
        f"{choice.chosen.label} was measured with up to {top} at once and is served with "
        f"up to {most}; beyond {top} nothing is drafted, but {NAME} still runs a pass of the "
        f"drafter in each round: tune with --set levels=… up to {most}, or deploy with --set "
        f"max_num_seqs={top}"
    )
