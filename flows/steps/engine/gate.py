"""Judging a release for another engine, beside the engine's plain decoding."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwell.components.bench.engines.figures import figure_of
from draftwell.components.engines.vllm_methods import OFF
from draftwell.components.gate.engine_checks import differences, judge_engine, judge_regression
from draftwell.components.gate.verdict_report import verdict_markdown
from draftwell.components.tune.engines.lab import Lab, MethodFails
from draftwell.flows.steps.champion import champion_number
from draftwell.flows.steps.engine.release import (
    EngineRelease,
    find_engine_release,
    refuse_elsewhere,
)
from draftwell.flows.steps.engine.space import EngineSpace, deployment_of, untouched
from draftwell.flows.steps.gate_parts.record import judged_digest, record_of, record_stays
from draftwell.flows.workspace import in_turn
from draftwell.registry.gates import load_gates
from draftwell.registry.promotion import outdated
from draftwell.registry.releases import objection, record_gate, reports_folder, standing_record
from draftwell.registry.store import Store
from draftwell.serving.bundle.verdict import GateVerdict, Skipped, settled
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import write_json

if TYPE_CHECKING:
    from draftwell.components.bench.engines.figures import Figure
    from draftwell.components.prompts.prompt import Prompt
    from draftwell.flows.settings import PipelineSettings
    from draftwell.registry.gates import GateRecord
    from draftwell.registry.releases import ReleaseVersion


FIGURES = "figures.json"
"""Among a gate's reports."""
UNMEASURED = ("tuned_elsewhere", "no_head_to_export", "no_draft_to_export")
"""Errors of a champion that cannot be measured on this machine."""


def gate_as(
    settings: PipelineSettings, space: EngineSpace, number: int, prompts: Sequence[Prompt]
) -> dict[str, Any]:
    """Judge a release with the flows' settings, unless it passed on these prompts already.

    Returns:
        whether it `passed`, `checks`, the `figures` that speed was judged by, and the `champion`
        that it was judged beside.
    """
    released = find_engine_release(space, number, deployment_of(settings, space).temperature)
    release, rows = released.release, untouched(space, prompts, None, released.config)
    record = None if settings.fresh else standing_record(release)
    champion = champion_number(space.workspace, release.device)
    found: dict[str, Any] = {"report": None, "champion": champion}
    if (
        record is not None
        and record.judged == judged_digest(rows, settings.max_tokens)
        and objection(release, record) is None
        and outdated(Store(), release, record) is None
        and (kept := kept_figures(release, record)) is not None
    ):
        space.workspace.say("    passed in an earlier run")
        return {**found, "passed": True, "checks": [], "figures": kept}
    verdict, figures = gate_on_engine(space, released, rows, settings.max_tokens)
    return {
        **found,
        "passed": verdict.passed,
        "checks": [vars(check) for check in verdict.checks],
        "figures": [figure.model_dump(mode="json") for figure in figures],
    }


@in_turn("draftwell gate")
def gate_on_engine(
    space: EngineSpace,
    released: EngineRelease,
    prompts: Sequence[Prompt],
    max_tokens: int,
    *,
    keep: bool = True,
    file: str | None = None,
) -> tuple[GateVerdict, list[Figure]]:
    """Judge a release beside the engine's plain decoding, at the temperature that it was tuned for;
    outputs are compared at 0.

    Args:
        keep: whether the verdict is recorded with the release (`record_stays`).
        file: name of the prompts' file, where a person chose one for this gate.
    Returns:
        the verdict, and the figures that speed was judged by, one for each load.
    Raises:
        DraftwellError: it was tuned on something else than is here (`tuned_elsewhere`).
    """
    refuse_elsewhere(space, released.config)
    verdict, figures = judge(space, released, prompts, max_tokens)
    release = released.release
    champion = champion_number(space.workspace, release.device)
    if keep and not record_stays(space.workspace, release, verdict):
        judged = judged_digest(prompts, max_tokens)
        keep_verdict(
            record_of(release, verdict, champion, judged=judged, prompts=file), verdict, figures
        )
    return verdict, figures


def judge(
    space: EngineSpace,
    released: EngineRelease,
    prompts: Sequence[Prompt],
    max_tokens: int,
) -> tuple[GateVerdict, list[Figure]]:
    """The verdict and its figures; nothing is kept."""

    choice, temperature = released.choice, released.config.contents.temperature
    levels = tuple(level.at_once for level in choice.levels) or (1,)
    sampling = space.pair.sampling(max_tokens=max_tokens, temperature=temperature)
    lab = space.lab(prompts, sampling, max(levels))
    with lab.open():
        figures = lab.measure(choice.chosen, "gate", levels) if choice.method != OFF else []
        unlike = [
            one
            for figure in ([] if temperature else figures)
            for one in differences(
                lab.found(choice.chosen, "gate", figure.at_once),
                lab.groups_at(figure.at_once),
                lab.plain(),
                space.workspace.dtype,
                sampling,
            )
        ]
        regression = beside_champion(space, released, lab, levels)
    settings = choice.chosen.speculative_config(space.files)
    compared = None if temperature else unlike
    thresholds = load_gates()
    verdict = (
        judge_engine(figures, compared, thresholds, settings, idle_loads(released)) + regression
    )
    return settled(verdict, thresholds, space.name), figures


def beside_champion(
    space: EngineSpace, released: EngineRelease, lab: Lab, levels: Sequence[int]
) -> GateVerdict:
    """How a release compares with what the champion decodes with, at the levels of the release."""
    release, choice = released.release, released.choice.chosen
    number = champion_number(space.workspace, release.device)
    if number is None or number == release.version:
        why = "there is no other champion"
        return GateVerdict.of([Skipped("regression", why, applies=False)])
    champion = find_engine_release(space, number, released.config.contents.temperature)
    rival, name = champion.choice.chosen, f"{champion.release.name}, the champion,"
    try:
        refuse_elsewhere(space, champion.config)
        if rival == choice:
            why = f"{name} decodes in the same way"
            return GateVerdict.of([Skipped("regression", why, applies=False)])
        found = [
            figure_of(choice.label, lab.between(rival, choice, "gate", level))
            for level in levels
            if level not in idle_loads(released) & idle_loads(champion)  # the same engine twice
        ]
    except DraftwellError as error:
        if error.code not in UNMEASURED and not isinstance(error, MethodFails):
            raise
        return GateVerdict.of([Skipped("regression", f"{name} cannot be measured here: {error}")])
    return judge_regression(found, load_gates())


def idle_loads(released: EngineRelease) -> frozenset[int]:
    """Requests at once at which a choice drafts nothing."""
    return frozenset(level.at_once for level in released.choice.levels if level.k == 0)


def kept_figures(release: ReleaseVersion, record: GateRecord) -> list[dict[str, Any]] | None:
    """The figures of an earlier gate; None where they are gone."""
    kept = Store().read_file(release.published, f"{reports_folder(record)}/{FIGURES}")
    return None if kept is None else json.loads(kept)


def keep_verdict(record: GateRecord, verdict: GateVerdict, figures: Sequence[Figure]) -> None:
    """Keep a record with its release, with the figures as a file."""
    with tempfile.TemporaryDirectory() as place:
        file = write_json(
            Path(place) / FIGURES, [figure.model_dump(mode="json") for figure in figures]
        )
        record_gate(Store(), record, words=verdict_markdown(verdict), files=[file])
