"""Choosing how another engine speculates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from draftwell.components.bench.engines.measure import measurements_of
from draftwell.components.engines.vllm_methods import OFF, ONE_LENGTH
from draftwell.components.export.schedules import read_schedule
from draftwell.components.report.tables import plural
from draftwell.components.tune.engines.budget import Budget
from draftwell.components.tune.engines.candidates import left_out
from draftwell.components.tune.engines.imported import Imported, check_imported
from draftwell.components.tune.engines.lab import Lab
from draftwell.components.tune.engines.regret import grid_regret
from draftwell.components.tune.engines.settings import DEFAULTS, EngineTuneSettings
from draftwell.components.tune.engines.tune import EXPLORED, tune_engine
from draftwell.flows.context import take_untouched, training_prompts
from draftwell.flows.progress import tell_best
from draftwell.flows.steps.engine.collect import collected_texts
from draftwell.flows.steps.engine.release import choice_of, measured_at_once, save_choice
from draftwell.flows.steps.engine.space import EngineSpace, deployment_of
from draftwell.flows.steps.picked import take_marked
from draftwell.flows.workspace import in_turn
from draftwell.serving.errors import DraftwellError

if TYPE_CHECKING:
    from draftwell.components.bench.engines.figures import Figure
    from draftwell.components.prompts.prompt import Prompt
    from draftwell.components.tune.engines.choice import EngineChoice
    from draftwell.components.tune.engines.ngram_replay import Text
    from draftwell.flows.settings import PipelineSettings

LEAST_SECONDS = 60.0
"""Below which a tuning is not begun."""


@in_turn("draftwell step choose")
def tune_on_engine(
    space: EngineSpace,
    prompts: Sequence[Prompt],
    settings: EngineTuneSettings,
    *,
    limit: int | None = None,
    fresh: bool = False,
    texts: Sequence[Text] | None = None,
    budget: Budget | None = None,
    served: int = 0,
) -> EngineChoice:
    """Choose how the engine speculates; the choice is put into the workspace, as an artifact.

    Head and draft that a person marked in MLflow are taken into the workspace first; prompts that
    they were made from are left out.

    Args:
        limit: prompts, at most; None takes all.
        texts: greedy texts of the target that were collected, which decide which n-grams are looked
            up.
        budget: of time; None takes as long as it takes.
        served: requests at once that are served whatever is measured: nothing is drafted beyond
            those that were.
    """
    imported = imported_from(settings)
    say, device = space.workspace.say, space.workspace.device.partition(":")[0]
    take_marked(space.workspace, device, ("eagle3_head", "distilled_draft"))
    space.forget_files()
    if settings.methods != DEFAULTS.methods:
        refuse_if_nothing_is_left(space, settings)
    used = training_prompts(space.workspace, kinds=("eagle3_head",))
    prompts = take_untouched(space.workspace, used, prompts, limit)
    lab = lab_of(space, prompts, settings, fresh=fresh)
    lab.budget, lab.tell = budget or lab.budget, tell_if_fastest()
    if lab.store.read:
        say(
            f"{lab.store.read} measurements of an earlier run are reused: --set fresh=true "
            f"measures again"
        )
    choice = bounded(tune_engine(lab, settings, space.lacks, texts, imported), served)
    save_choice(
        space,
        choice,
        temperature=settings.temperature,
        subject=lab.store.subject,
        prompts=prompts,
        texts=texts,
    )
    return choice


def tell_if_fastest() -> Callable[[Figure], None]:
    """Tells a way to speculate that is faster, one request at a time, than all that were told
    before."""
    fastest = 0.0

    def tell(figure: Figure) -> None:
        nonlocal fastest
        if figure.at_once == 1 and figure.ratio > fastest:
            fastest = figure.ratio
            tell_best(
                f"{figure.label}: {fastest:.2f} times as fast as plain decoding on "
                f"{plural(figure.prompts, 'prompt')}"
            )

    return tell


@in_turn("draftwell step choose")
def tune_as(
    settings: PipelineSettings, space: EngineSpace, prompts: Sequence[Prompt], seconds: float
) -> dict[str, Any]:
    """Tune with the flows' settings in so many seconds; returns the choice, why, and what was
    measured.

    Raises:
        DraftwellError: there is no time left to tune (`no_time`), or as `tune_on_engine`.
    """
    if seconds < LEAST_SECONDS:
        raise DraftwellError(
            "collecting and training left no time to tune: name more than "
            f"{settings.minutes:g} minutes; what was collected is kept",
            code="no_time",
        )
    kept = deployment_of(settings, space)
    choice = tune_on_engine(
        space,
        prompts,
        engine_settings(settings, kept.temperature),
        fresh=settings.fresh,
        texts=collected_texts(space),
        budget=Budget(seconds),
        served=kept.at_once,
    )
    for name, why in choice.left_out.items():
        space.workspace.say(f"    left out: {name}, {why}")
    return {
        "strategy": choice.chosen.label,
        "parameters": {},
        "reason": choice.reason,
        "sampled": None,
        "measured": choice.model_dump(mode="json"),
    }


def grid_as(
    settings: PipelineSettings, space: EngineSpace, prompts: Sequence[Prompt]
) -> dict[str, Any]:
    """The regret of the choice, by all settings measured again on all prompts that it was tuned
    on."""
    temperature = deployment_of(settings, space).temperature
    wanted, config = engine_settings(settings, temperature), space.config(temperature)
    assert config is not None
    lab = lab_of(space, prompts, wanted, fresh=False)
    return grid_regret(lab, wanted, choice_of(config), collected_texts(space))


def imported_from(settings: EngineTuneSettings) -> Imported | None:
    """The schedule of another engine or tool that was named, for the loads that are measured; None
    where none was.

    Raises:
        DraftwellError: as `read_schedule`; it does not say of which method it is, and several are
            tuned (`bad_import`).
    """
    if settings.schedule is None:
        return None
    file, read = settings.schedule, read_schedule(settings.schedule)
    method = read.method or (settings.methods[0] if len(settings.methods) == 1 else None)
    if method is None:
        raise DraftwellError(
            f"{file} does not say how its tokens are drafted: name that alone with --set methods=…",
            code="bad_import",
        )
    lengths = tuple((load, read.at(load)) for load in settings.levels)
    found = Imported(f"{file.name} ({read.engine})", method, lengths)
    check_imported(settings, found)  # a mistake is refused before an engine is started
    return found


def engine_settings(settings: PipelineSettings, temperature: float = 0.0) -> EngineTuneSettings:
    """The part of the flows' settings that tuning goes by."""
    return EngineTuneSettings(
        methods=settings.methods or DEFAULTS.methods,
        levels=settings.levels,
        max_tokens=settings.max_tokens,
        temperature=temperature,
    )


def bounded(choice: EngineChoice, served: int) -> EngineChoice:
    """The choice; where more requests are served at once than it was measured with, one with
    lengths by load, so that the bundle drafts nothing beyond them. Methods of one length draft
    there, and `deploy` says so."""
    top = measured_at_once(choice)
    if choice.schedule or choice.method in (OFF, *ONE_LENGTH) or served <= top:
        return choice
    return choice.model_copy(update={"schedule": ((1, top, choice.k),)})


def refuse_if_nothing_is_left(space: EngineSpace, settings: EngineTuneSettings) -> None:
    """Refuse a tuning in which none of the methods that a person named can be tried: plain decoding
    would be no answer to that.

    Raises:
        DraftwellError: the line says why for each (`no_method_left`).
    """
    out = left_out(settings, space.files, space.lacks)
    if all(name in out for name in settings.methods if name != OFF):
        reasons = "; ".join(f"{name}, {why}" for name, why in out.items())
        raise DraftwellError(
            (
                f"none of the methods that were named can be tried ({reasons or 'off alone'}): "
                "name others with --set methods=…"
            ),
            code="no_method_left",
        )


def lab_of(
    space: EngineSpace, prompts: Sequence[Prompt], settings: EngineTuneSettings, *, fresh: bool
) -> Lab:
    """What a tuning measures with, and where it keeps that."""
    sampling = space.pair.sampling(max_tokens=settings.max_tokens, temperature=settings.temperature)
    lab = space.lab(prompts, sampling, max(settings.levels))
    subject = space.subject(
        lab.prompts,
        sampling,
        slots=lab.slots,
        context=lab.context,
        explore=EXPLORED,
        groups=lab.groups,
    )
    lab.store = measurements_of(subject, space.measurements(settings.temperature), fresh=fresh)
    return lab
