"""Tuning: which strategy, with which parameters, for this pair, this machine and these prompts.

Replay over a trace predicts many configurations without a model, and those that no replay can
predict are tried briefly. The best of both are measured by successive halving together with plain
decoding and the champion. A configuration is chosen only if it keeps to the constraints and is
surely faster than plain decoding in a measurement of its own, made after it was selected: its times
had no part in that, some of its prompts had (`successive_halving`). The gate judges it on prompts
that had none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from draftwell.components.collect.decoding import encode_all
from draftwell.components.collect.trace_checks import check_temperature
from draftwell.components.prompts.prompt import Prompt, prompts_digest
from draftwell.components.replay.head_scores import score_rollouts
from draftwell.components.replay.sampled import texts_of
from draftwell.components.replay.texts import Texts
from draftwell.components.report.machine import describe_machine
from draftwell.components.tune.candidates import (
    EXPLORE_TOKENS,
    Explorer,
    choose_strategies,
    unfit_champion,
)
from draftwell.components.tune.constraints import ConstraintChecker, VanillaBaseline
from draftwell.components.tune.decision import Contender, choosable, why_chosen, why_plain
from draftwell.components.tune.evaluator import Evaluate, QualityOf
from draftwell.components.tune.evidence import Metrics, Trial, TuningEvidence
from draftwell.components.tune.findings import artifacts_of, findings_of, rollouts_of
from draftwell.components.tune.resume import ResumableEvaluator
from draftwell.components.tune.search.search import (
    Progress,
    Search,
    Spread,
    fastest_vanilla,
    shortlist,
)
from draftwell.components.tune.search.space import MEASURED, REPLAYED, nearest_default
from draftwell.components.tune.search.trial_log import TrialLog
from draftwell.components.tune.settings import TuneSettings
from draftwell.components.tune.successive_halving import (
    HalvingResult,
    successive_halving,
)
from draftwell.serving.artifacts.acceptance_head import AcceptanceHead
from draftwell.serving.artifacts.base import ArtifactError
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.errors import DraftwellError
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import (
    PLAIN,
    StrategyChoice,
    StrategyResources,
    find_strategy,
)

SPECDEC_PP = "specdec_pp"
ALWAYS_CONFIRMED = "hybrid"
"""It needs no thresholds and weighs every draft, so two prompts of a rung are no reason to leave it
out."""


@dataclass(frozen=True)
class TuneInputs:
    """What is tuned, and on what.

    Args:
        trace: of this pair, at the temperature of the settings.
        prompts: what is measured on; others than the trace's show what the choice is worth on new
            ones.
        resources: artifacts; a strategy that lacks one is left out, and the evidence reports it.
        profile: of this pair as it is loaded.
        champion: what is served now; measured throughout, and chosen if it is still the best.
    """

    pair: LoadedPair
    trace: TraceSet
    prompts: Sequence[Prompt]
    resources: StrategyResources
    profile: HardwareProfile
    champion: StrategyChoice | None = None


@dataclass(frozen=True)
class TuneFiles:
    """Where an interrupted tuning can resume from; None keeps nothing.

    Args:
        study: file of trials (`search.trial_log`).
        named: the user chose that file, so a search of another kind in it is refused.
        rungs: JSON file of what was measured; whoever keeps the result removes it.
    """

    study: Path | None = None
    named: bool = False
    rungs: Path | None = None


@dataclass(frozen=True)
class TuneHooks:
    """Who helps, and who is kept informed.

    Args:
        spread: has replays made by workers, except SpecDec++'s, whose rollouts the draft that is
            loaded here scores (`without_scores`). Measurements are always made here, one at a time,
            because they are timings.
        progress: called with (replays done, all, strategy).
    """

    spread: Spread | None = None
    progress: Progress | None = None


@dataclass(frozen=True)
class _Candidates:
    """What the search found: trials by replay and by first measurements, and two references."""

    search: Search
    few: Sequence[Prompt]
    replayed: list[Trial]
    explored: list[Trial]
    plain: Trial
    vanilla: Trial | None

    @property
    def tried(self) -> list[Trial]:
        return [*self.replayed, *self.explored]

    @property
    def references(self) -> list[Trial]:
        """Trials that are evidence only."""
        return [self.plain, *([self.vanilla] if self.vanilla else [])]


def tune_strategy(
    inputs: TuneInputs,
    settings: TuneSettings,
    evaluate: Evaluate,
    quality: QualityOf | None = None,
    files: TuneFiles | None = None,
    hooks: TuneHooks | None = None,
) -> TuningEvidence:
    """Choose a strategy and its parameters.

    Args:
        evaluate: measures (`evaluator.Evaluator`).
        quality: judges outputs (`evaluator.QualityReader`); needed for lossy strategies.
    Returns:
        the choice, the reason, and all that it rests on.
    Raises:
        ContextTooLong: a prompt is too long for a model that may read it; nothing has been replayed
            or measured then.
        DraftwellError: no prompts, an empty trace or one of another pair, an unknown or unfit
            strategy, a study of another search, a measurement that is not a number.
    """
    files, hooks = files or TuneFiles(), hooks or TuneHooks()
    inputs = check_inputs(inputs, settings)
    names, left_out = choose_strategies(inputs.pair, inputs.resources, settings, quality)
    if why := unfit_champion(
        inputs.pair, inputs.resources, inputs.champion, quality, settings.temperature
    ):
        left_out["champion"], inputs = why, replace(inputs, champion=None)
    check_contexts(inputs, names, settings.max_tokens)
    evaluate = ResumableEvaluator(evaluate, files.rungs, resume_subject(inputs, settings))
    found = find_candidates(inputs, settings, names, evaluate, quality, files, hooks)
    checker = checker_for(found, settings, evaluate, quality)
    allowed = [
        trial
        for trial in found.tried
        if settings.constraints.objection(trial_metrics(trial, checker, found.few)) is None
    ]
    best = [
        *shortlist([t for t in allowed if t.source == "replayed"], settings.measure_top),
        *shortlist([t for t in allowed if t.source == "measured"], (settings.measure_top + 1) // 2),
    ]
    halved = successive_halving(
        evaluate,
        [trial.choice for trial in best],
        inputs.prompts,
        champion=inputs.champion,
        default=default_among(allowed),
        seed=settings.seed,
        violates=checker.violation,
    )
    confirmed = with_constraints(halved, checker, inputs.prompts)
    choice, reason = decide(confirmed, halved.tail, len(found.tried), len(allowed))
    return TuningEvidence(
        **findings_of(found.tried, halved, confirmed, found.references),
        **circumstances_of(inputs, settings, found.search),
        choice=choice,
        reason=reason,
        left_out=left_out,
        rollouts=rollouts_of(found.search, names, found.replayed),
    )


def decide(
    figures: Sequence[Metrics], tail: float, tried: int, allowed: int
) -> tuple[StrategyChoice, str]:
    """The choice and why, in a sentence.

    Args:
        figures: of the confirmation; the first is plain decoding's.
        tail: of their intervals.
        tried, allowed: how many configurations were predicted or explored, and how many of these
            keep to the constraints.
    """
    contenders = [
        Contender(
            one.choice, str(one.choice), one.speedup, one.speedup_low, one.prompts, one.objection
        )
        for one in figures[1:]
    ]
    if ranked := choosable(contenders):
        return ranked[0].setting, why_chosen(ranked[0], str(PLAIN), tail)
    if tried and not allowed and not contenders:
        return PLAIN, f"{PLAIN}, because none of {tried} configurations keeps to the constraints"
    return PLAIN, why_plain(contenders, str(PLAIN))


def default_among(allowed: Sequence[Trial]) -> StrategyChoice | None:
    """The strategy that is always confirmed, as near to its defaults as it was tried; None where it
    was not tried, or may not be chosen."""
    tried = [trial.choice for trial in allowed if trial.choice.name == ALWAYS_CONFIRMED]
    return nearest_default(ALWAYS_CONFIRMED, tried) if tried else None


def check_inputs(inputs: TuneInputs, settings: TuneSettings) -> TuneInputs:
    """The inputs with the trace bound to the pair; what could not be tuned is refused.

    Raises:
        DraftwellError: no prompts (`no_prompts`), lossy strategies without a limit of their loss
            (`no_quality_limit`), a cost limit without a draft model (`no_draft_model`), a trace or
            a hardware profile of another pair.
    """
    if not inputs.prompts:
        raise DraftwellError(
            "there are no prompts to measure on: name a file that has some", code="no_prompts"
        )
    limits = settings.constraints
    if not limits.lossless_only and limits.max_quality_loss is None:
        raise DraftwellError(
            (
                "lossy strategies need a limit of what they may lose: set max_quality_loss in "
                "Constraints, such as 0.1"
            ),
            code="no_quality_limit",
        )
    if limits.max_cost_ratio is not None and "draft" not in inputs.pair.models:
        raise DraftwellError(
            (
                "a cost ratio is relative to vanilla SD, which needs a draft model: leave "
                "--max-cost-ratio out"
            ),
            code="no_draft_model",
        )
    bound = TraceSet(inputs.trace.folder, fingerprint=inputs.pair.fingerprint)
    check_temperature(bound, settings.temperature)
    owner, fingerprint = inputs.profile.provenance, inputs.pair.fingerprint
    if owner.fingerprint and owner.fingerprint != fingerprint:
        raise ArtifactError(
            f"the hardware profile belongs to pair {owner.pair} with fingerprint "
            f"{owner.fingerprint[:12]}, not "
            f"{fingerprint[:12]}: calibrate this pair (draftwell calibrate)",
            code="foreign_profile",
        )
    return replace(inputs, trace=bound)


def check_contexts(inputs: TuneInputs, names: Sequence[str], max_tokens: int) -> None:
    """Refuse a prompt that is too long for a model of any strategy that may be measured, before
    anything is."""
    wanted = [PLAIN.name, *names, *([inputs.champion.name] if inputs.champion is not None else [])]
    encode_all(
        inputs.pair,
        inputs.prompts,
        max_tokens,
        {role for name in wanted for role in find_strategy(name).roles},
    )


def resume_subject(inputs: TuneInputs, settings: TuneSettings) -> dict[str, Any]:
    """What measurements depend on besides choices and prompts: a resume file of anything else is
    not used."""
    pair = inputs.pair
    return {
        "fingerprint": pair.fingerprint,
        "device_class": inputs.profile.provenance.device_class,
        "artifacts": artifacts_of(inputs.resources),
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "padded_to": pair.padded_to,
        "threads": torch.get_num_threads(),
    }


def find_candidates(
    inputs: TuneInputs,
    settings: TuneSettings,
    names: Sequence[str],
    evaluate: Evaluate,
    quality: QualityOf | None,
    files: TuneFiles,
    hooks: TuneHooks,
) -> _Candidates:
    """Search the strategies' spaces: by replay where a trace predicts them, else by short
    measurements."""
    texts = texts_for(inputs.pair, inputs.trace, inputs.resources, names)
    log = TrialLog(files.study, named=files.named)
    search = Search(
        texts,
        inputs.resources,
        inputs.profile,
        min(settings.max_tokens, texts.max_tokens),
        log,
        inputs.trace.digest(),
        settings.seed,
    )
    explorer = Explorer(
        inputs.pair,
        search,
        evaluate,
        quality,
        inputs.prompts,
        inputs.profile,
    )
    log.check({name: explorer.describe(name) for name in names})
    spread = without_scores(hooks.spread) if hooks.spread is not None else None
    replayed = search.run(
        [name for name in names if name in REPLAYED],
        settings.trials,
        spread=spread,
        progress=hooks.progress,
    )
    explored = explorer.run([name for name in names if name in MEASURED], settings.explore)
    vanilla = fastest_vanilla(search, replayed) if "draft" in inputs.pair.models else None
    return _Candidates(search, explorer.few, replayed, explored, search.predict(PLAIN), vanilla)


def without_scores(spread: Spread) -> Spread:
    """The same for all but SpecDec++, whose rollouts were scored by the draft that is loaded
    here."""

    def others(
        search: Search, choices: Sequence[StrategyChoice], found: Callable[[Trial], None]
    ) -> None:
        if rest := [choice for choice in choices if choice.name != SPECDEC_PP]:
            spread(search, rest, found)

    return others


def texts_for(
    pair: LoadedPair, trace: TraceSet, resources: StrategyResources, names: Sequence[str]
) -> Texts:
    """The trace's texts; with the acceptance head's predictions along their rollouts where
    SpecDec++ is to be replayed."""
    head: Any = resources.artifacts.get(AcceptanceHead.kind)
    return (
        texts_of(trace, lambda texts: score_rollouts(pair, texts, head))
        if SPECDEC_PP in names
        else texts_of(trace)
    )


def checker_for(
    found: _Candidates, settings: TuneSettings, evaluate: Evaluate, quality: QualityOf | None
) -> ConstraintChecker:
    """What compares configurations with the constraints."""
    limits, vanilla = settings.constraints, found.vanilla
    trials = [found.plain, *found.replayed]
    calls = {trial.choice: trial.target_calls_per_token for trial in trials}
    if vanilla is None:
        return ConstraintChecker(limits, quality, None, calls)
    baseline = VanillaBaseline(evaluate, vanilla.choice)
    return ConstraintChecker(limits, quality, vanilla.target_calls_per_token, calls, baseline)


def trial_metrics(
    trial: Trial, checker: ConstraintChecker, few: Sequence[Prompt]
) -> dict[str, Any]:
    """What constraints ask of a trial; ROUGE-L is asked of longer texts only. `few`: prompts that
    explored ones were measured on.

    So few tokens leave much open: what loses too much is dropped here only if it surely does, later
    rungs see more of it.
    """
    calls = trial.target_calls_per_token
    loss = trial.divergence if trial.least_divergence is None else trial.least_divergence
    return {
        "lossless": find_strategy(trial.strategy).lossless,
        "quality_loss": loss,
        "rouge_l_lost": None,
        "surprisal_shift": None,
        "cost_ratio": checker.cost_ratio(trial.choice, calls, few, EXPLORE_TOKENS),
    }


def with_constraints(
    halved: HalvingResult, checker: ConstraintChecker, prompts: Sequence[Prompt]
) -> list[Metrics]:
    """The confirmation's figures with quality, cost and the constraint that each breaks, if any."""
    plain = halved.confirmed[0][1]
    confirmed = []
    for figure, (choice, measured) in zip(halved.confirmation, halved.confirmed, strict=True):
        found = checker.metrics(choice, prompts, measured, plain)
        confirmed.append(
            figure.model_copy(update={**found, "objection": checker.constraints.objection(found)})
        )
    return confirmed


def circumstances_of(inputs: TuneInputs, settings: TuneSettings, search: Search) -> dict[str, Any]:
    """What the evidence's figures depend on."""
    pair = inputs.pair
    return {
        "champion": inputs.champion,
        "constraints": settings.constraints,
        "trace_digest": search.trace_digest,
        "artifacts": artifacts_of(inputs.resources),
        "fingerprint": pair.fingerprint,
        "padded_to": pair.padded_to,
        "device_class": inputs.profile.provenance.device_class,
        "machine": describe_machine(pair),
        "prompts": len(inputs.prompts),
        "prompts_digest": prompts_digest(inputs.prompts),
        "max_tokens": settings.max_tokens,
        "replayed_tokens": search.max_tokens,
        "temperature": settings.temperature,
        "seed": settings.seed,
    }
