"""Deployment for another engine: from what its gate judged to a bundle that `current` points to.

The gate's record in the workspace is the authority, as a release's gate record is for bundles of
our own: another engine, version, device, number format or other models than it names are refused,
and so is a draft or head that was made again since.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwell.components.engines.environments import REPORTS, installed_packages, peers_root
from draftwell.components.engines.port import Acceptance
from draftwell.components.engines.vllm import NAME
from draftwell.components.engines.vllm_methods import NEEDS
from draftwell.components.tune.engines.candidates import NEEDS_PACKAGE
from draftwell.flows.steps.engine.space import RECORD, EngineSpace, about, tuned_choice
from draftwell.serving.errors import DraftwellError
from draftwell.serving.number_format import dtype_of

if TYPE_CHECKING:
    from draftwell.components.bench.engines.figures import Figure
    from draftwell.components.gate.engine_checks import EngineGateRecord
    from draftwell.registry.bundles.vllm.settings import VllmServing

OPTIONS = (
    "image",
    "served_name",
    "max_model_len",
    "max_num_seqs",
    "memory",
    "cache",
    "gpus",
    "cpus",
    "replicas",
    "port",
)
"""Fields of `VllmServing` that a person may set; all others follow from what was judged."""
JUDGED = ("engine", "version", "distribution", "device_class", "dtype", "fingerprint")
"""Fields of the gate's record that have to be those of here and now."""


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


def deploy_on_engine(
    space: EngineSpace,
    out: Path,
    *,
    temperature: float = 0.0,
    ungated: str | None = None,
    with_weights: bool = False,
    options: Mapping[str, str] | None = None,
    activate: bool = True,
) -> Path:
    """Build a bundle of what the engine's gate judged, and point `current` at it.

    Args:
        out: folder of all bundles.
        temperature: of the requests that it was tuned and judged for.
        ungated: reason to deploy what was tuned although no gate passed; recorded in the bundle,
            and said by its README.
        with_weights: put the target into the bundle although it is a commit on the hub.
        options: of `OPTIONS`, as a person writes them.
        activate: whether `current` moves.
    Returns:
        the bundle's folder.
    Raises:
        DraftwellError: nothing was judged (`not_gated`), the gate did not pass (`gate_not_passed`),
            or judged something else than what is here (`gated_elsewhere`); files are missing
            (`missing_file`); an unknown option (`bad_setting`) or a bad value (`bad_value`).
    """
    from draftwell.registry.bundles.vllm.build import build_vllm_bundle
    from draftwell.registry.bundles.vllm.plugin_wheel import plugin_wheel
    from draftwell.registry.bundles.vllm.readme import ENGINE_LOCK
    from draftwell.registry.bundles.vllm.requirements import engine_lock
    from draftwell.registry.bundles.vllm.settings import gated_serving

    chosen = dict(options or {})
    if unknown := sorted(set(chosen) - set(OPTIONS)):
        raise DraftwellError(
            f"--set {unknown[0]}: choose from {', '.join(OPTIONS)}", code="bad_setting"
        )
    record = judged(space, temperature, ungated)
    pair, device = space.workspace.spec.name, space.workspace.device.partition(":")[0]
    placed, wheel, tuned = (
        places(space, record, with_weights),
        plugin_wheel(),
        tuned_counts(space, temperature),
    )
    package = NEEDS_PACKAGE.get(str((record.settings or {}).get("method")))

    def settings(number: int) -> VllmServing:
        return gated_serving(
            record.model_dump(mode="json"),
            device=device,
            fingerprint=space.fingerprint,
            draft=placed.draft,
            ungated_reason=None if record.passed else ungated,
            pair=pair,
            release=number,
            model=placed.model,
            revision=placed.revision,
            dtype=dtype_of(space.workspace.dtype),
            plugins=(wheel.name,),
            tuned=tuned,
            needs=() if package is None else (package,),
            **chosen,
        )

    lock = engine_lock(installed_packages(NAME), peers_root() / NAME / REPORTS)
    return build_vllm_bundle(
        out,
        pair,
        device,
        settings,
        models=placed.folders,
        files={ENGINE_LOCK: lock.encode(), wheel.name: wheel.data},
        activate=activate,
    )


def tuned_counts(space: EngineSpace, temperature: float) -> dict[str, Any] | None:
    """How drafts of what was chosen fared when it was measured, as fields of `Tuned`; None where no
    choice is there.

    Counted is every load where lengths follow the load. A choice of an earlier version has no
    counts of each prompt.
    """
    choice = space.choice(temperature)
    if choice is None:
        return None
    figures = choice.scheduled or [
        one for one in choice.confirmed if one.label == choice.chosen.with_k(choice.k).label
    ]
    kept, drafts = Acceptance.total(figure.acceptance for figure in figures).first
    return {
        "temperature": temperature,
        "drafts": drafts,
        "first_kept": kept,
        "by_prompt": counts_by_prompt(figures),
    }


def counts_by_prompt(figures: Sequence[Figure]) -> list[tuple[int, int]]:
    """(drafts whose first token was kept, drafts) of each prompt, over all figures; empty where a
    figure does not list its answers.

    One request at a time every prompt is measured once; more at once take the same prompts in the
    order of `groups_of`.
    """
    from draftwell.components.bench.engines.measure import groups_of

    prompts = next((figure.groups for figure in figures if figure.at_once == 1), 0)
    if not prompts or any(
        len(figure.acceptance.each) != figure.groups * figure.at_once for figure in figures
    ):
        return []
    found = [(0, 0)] * prompts
    for figure in figures:
        order = [
            place
            for group in groups_of(
                [[place] for place in range(prompts)], figure.at_once, figure.groups
            )
            for (place,) in group
        ]
        for place, (kept, drafts) in zip(order, figure.acceptance.each, strict=True):
            found[place] = found[place][0] + kept, found[place][1] + drafts
    return found


def judged(space: EngineSpace, temperature: float, ungated: str | None) -> EngineGateRecord:
    """The gate's record, which allows what is here; with a reason, what was tuned, as a record that
    did not pass."""
    from draftwell.components.gate.engine_checks import EngineGateRecord
    from draftwell.registry.bundles.vllm.plugin_wheel import plugin_version

    known = about(space)
    here = {name: known[name] for name in JUDGED}
    try:
        record = read_record(space, temperature)
        if record is None:
            raise DraftwellError(
                f"the gate has not judged {space.workspace.spec.name} on {NAME}: "
                f"{gate_command(space)}, or say why not "
                "with --ungated REASON",
                code="not_gated",
            )
        record.check(
            **here,
            temperature=temperature,
            **({"plugin": plugin_version()} if record.plugin is not None else {}),
        )
        return record
    except DraftwellError:
        if ungated is None:
            raise
    choice = tuned_choice(space, temperature)
    return EngineGateRecord(
        **here,
        made=known["made"],
        temperature=temperature,
        passed=False,
        checks=[],
        threads=space.tuned(temperature).get("threads"),
        settings=choice.chosen.speculative_config(space.files),
    )


def read_record(space: EngineSpace, temperature: float) -> EngineGateRecord | None:
    """The gate's record for requests of this temperature; None where there is none.

    Raises:
        DraftwellError: it cannot be read (`bad_gate_record`).
    """
    from pydantic import ValidationError

    from draftwell.components.gate.engine_checks import EngineGateRecord

    file = space.file_of(RECORD, temperature)
    try:
        return EngineGateRecord.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise DraftwellError(
            f"{file} is no gate record: {gate_command(space)}", code="bad_gate_record"
        ) from error


def gate_command(space: EngineSpace) -> str:
    """What to run where a record is missing."""
    return f"run `draftwell gate --engine {NAME} --pair {space.workspace.name}`"


def places(space: EngineSpace, record: EngineGateRecord, with_weights: bool) -> Placed:
    """Where vLLM finds what was judged: a target on the hub stays there, by its commit; all else is
    copied into the bundle.

    Raises:
        DraftwellError: the draft or head is missing (`missing_file`), or another one than was
            judged (`gated_elsewhere`).
    """
    from draftwell.registry.bundles.vllm.settings import BUNDLED, COMMIT
    from draftwell.registry.pairs.records import model_records

    known = model_records(space.workspace.spec, space.workspace.files())["target"]
    model, revision, folders = f"{BUNDLED}target", None, {f"{BUNDLED}target": space.files.target}
    if (
        known.source.startswith("hub:")
        and re.fullmatch(COMMIT, known.revision or "")
        and not with_weights
    ):
        model, revision, folders = known.source.removeprefix("hub:"), known.revision, {}
    config = record.settings or {}
    role = NEEDS.get(str(config.get("method")))
    if role is None:
        return Placed(model, revision, None, folders)
    folder: Path | None = getattr(space.files, role)
    if folder is None:
        raise DraftwellError(
            (
                f"the gate judged {config['method']} with a {role}, and this pair has none "
                f"here: {gate_command(space)}"
            ),
            code="missing_file",
        )
    if folder.name != Path(str(config.get("model"))).name:  # names end with a digest
        raise DraftwellError(
            f"the {role} was made again since the gate judged "
            f"{Path(str(config.get('model'))).name}, and is {folder.name} "
            f"now: {gate_command(space)}",
            code="gated_elsewhere",
        )
    return Placed(model, revision, f"{BUNDLED}{role}", {**folders, f"{BUNDLED}{role}": folder})


def remarks(space: EngineSpace, bundle: Path, temperature: float) -> list[str]:
    """Lines on what a bundle serves: requests at once, loads that were not measured, and containers
    that it does not describe."""
    settings = json.loads((bundle / "manifest.json").read_text())["settings"]
    found = [
        f"it decodes up to {settings['max_num_seqs']} requests at once, further ones wait: "
        "another number with --set max_num_seqs="
        f"{2 * settings['max_num_seqs']}; lengths for several loads with `draftwell tune "
        f"--engine {NAME} --levels 1,8`",
        unmeasured_loads(space, settings, temperature),
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
        "image that has both with --set image=NAME, or leave the method out (tune with --methods)"
    )


def unmeasured_loads(
    space: EngineSpace, settings: Mapping[str, Any], temperature: float
) -> str | None:
    """A line where a bundle serves more requests at once than were measured, and something is
    drafted or a drafter runs there; else None.

    With lengths by load nothing is drafted there, which costs nothing but with methods that read a
    draft or a head (`NEEDS`).
    """
    from draftwell.registry.bundles.vllm.settings import SCHEDULE

    choice = space.choice(temperature)
    by_load = SCHEDULE in (settings["speculative"] or {})
    if choice is None or not settings["speculative"] or (by_load and choice.method not in NEEDS):
        return None
    top = max((level.at_once for level in choice.levels), default=1)
    if top >= settings["max_num_seqs"]:
        return None
    beyond = (
        (
            f"; beyond {top} nothing is drafted, but {NAME} still runs a pass of the drafter "
            "in each round"
        )
        if by_load
        else ""
    )
    most = settings["max_num_seqs"]
    return (
        f"{choice.chosen.label} was measured with up to {top} at once and is served with "
        f"up to {most}{beyond}: tune with --levels up "
        f"to {most}, or deploy with --set max_num_seqs={top}"
    )
