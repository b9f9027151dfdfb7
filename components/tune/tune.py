"""Tuning: which strategy, with which parameters, for this pair, this machine and these prompts.

Replay over a trace predicts many configurations without a model, and those that no replay can
predict are tried briefly. The best of both are measured by successive halving together with plain
decoding and the champion. A configuration is chosen only if it keeps to the constraints and is
surely faster than plain decoding in a measurement of its own, made after it was selected: its times
had no part in that, some of its prompts had (`successive_halving`). The gate judges it on prompts
that had none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from draftwell.components.collect.decoding import encode_all
from draftwell.components.collect.trace_checks import check_temperature
from draftwell.components.prompts.prompt import Prompt, prompts_digest
from draftwell.components.replay.sampled import texts_of
from draftwell.components.report.intervals import TAIL
from draftwell.components.report.machine import describe_machine
from draftwell.components.results import Results
from draftwell.components.tune.candidates import choose_strategies, explore, unfit_champion
from draftwell.components.tune.constraints import ConstraintChecker
from draftwell.components.tune.decision import Contender, choosable, why_chosen, why_plain
from draftwell.components.tune.evaluator import Evaluate, QualityOf
from draftwell.components.tune.evidence import (
    EVIDENCE_VERSION,
    Confirmation,
    Trial,
    TuningEvidence,
)
from draftwell.components.tune.findings import artifacts_of, latest_figures, rollouts_of
from draftwell.components.tune.resume import ResumableEvaluator
from draftwell.components.tune.search.search import (
    Progress,
    Search,
    Spread,
    fastest_vanilla,
    shortlist,
    trials_in,
)
from draftwell.components.tune.search.space import REPLAYED, nearest_default
from draftwell.components.tune.settings import Constraints, TuneSettings
from draftwell.components.tune.successive_halving import successive_halving
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

MEASURED_WITH = (
    "fingerprint",
    "device_class",
    "artifacts",
    "max_tokens",
    "temperature",
    "padded_to",
)
"""Fields of the evidence that measurements depend on besides choices and prompts: those that were
made with others are not resumed from."""
ALWAYS_CONFIRMED = "hybrid"
"""It needs no thresholds and weighs every draft, so two prompts of a rung are no reason to leave it
out."""
EXPLORED, MEASURED = 5, 5
"""Configurations that are measured: so many that the best is among them, as far as replay and two
prompts tell; each more takes a whole measurement."""
SEED = 0
"""Of samples and of intervals: the same tuning gives the same choice, but for times."""


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
        strategies: names to choose among; None: all that are allowed and possible.
        explored: configurations of each strategy that no replay predicts; each is measured on a
            few prompts.
        measured: replayed configurations that are measured; of explored ones half as many,
            rounded up.
    """

    pair: LoadedPair
    trace: TraceSet
    prompts: Sequence[Prompt]
    resources: StrategyResources
    profile: HardwareProfile
    champion: StrategyChoice | None = None
    strategies: Sequence[str] | None = None
    explored: int = EXPLORED
    measured: int = MEASURED


def prepared(
    inputs: TuneInputs, settings: TuneSettings, quality: QualityOf | None
) -> tuple[TuneInputs, list[str], dict[str, str]]:
    """The inputs, checked and without a champion that is unfit here; the strategies to try, and
    those that are left out with the reason."""
    inputs = check_inputs(inputs, settings)
    pair, resources = inputs.pair, inputs.resources
    names, left_out = choose_strategies(pair, resources, settings, quality, inputs.strategies)
    if why := unfit_champion(pair, resources, inputs.champion, quality, settings.temperature):
        left_out["champion"], inputs = why, replace(inputs, champion=None)
    check_contexts(inputs, names, settings.max_tokens)
    return inputs, names, left_out


def tune_strategy(
    inputs: TuneInputs,
    settings: TuneSettings,
    evaluate: Evaluate,
    quality: QualityOf | None = None,
    *,
    study: Path | None = None,
    rungs: Path | None = None,
    spread: Spread | None = None,
    progress: Progress | None = None,
) -> TuningEvidence:
    """Choose a strategy and its parameters; `progress` gets (replays done, all, strategy).

    Args:
        evaluate: measures (`evaluator.Evaluator`).
        quality: judges outputs; needed for lossy strategies.
        study: file of replays, which later tunings use too.
        rungs: file of what was measured, from which a tuning resumes; the caller removes it.
        spread: has replays made by workers; measurements, which are timings, are made here.
    Returns:
        the choice, the reason, and all that it rests on.
    Raises:
        ContextTooLong: a prompt is too long for a model that may read it; nothing is measured then.
        DraftwellError: no prompts, an unfit trace or strategy, a study that is no file of trials.
    """
    inputs, names, left_out = prepared(inputs, settings, quality)
    about = circumstances_of(inputs, settings)
    bound = {name: about[name] for name in MEASURED_WITH} | {"threads": torch.get_num_threads()}
    evaluate = ResumableEvaluator(evaluate, rungs, bound)
    search = search_of(inputs, settings, trials_in(study))
    to_replay = [one for one in names if one in REPLAYED]
    to_explore = [one for one in names if one not in REPLAYED]
    replayed = search.run(to_replay, settings.trials, spread=spread, progress=progress)
    explored = explore(search, to_explore, inputs.explored, evaluate, quality, inputs.prompts)
    tried = [*replayed, *explored]
    vanilla = fastest_vanilla(search, replayed) if "draft" in inputs.pair.models else None
    references = [search.predict(PLAIN), *([vanilla] if vanilla else [])]
    calls = {trial.choice: trial.target_calls_per_token for trial in [*references, *replayed]}
    fastest = vanilla.choice if vanilla else None
    halved, confirmation = successive_halving(
        evaluate,
        candidates_of(replayed, explored, vanilla, settings.constraints, inputs.measured),
        inputs.prompts,
        ConstraintChecker(settings.constraints, quality, evaluate, fastest, calls),
        champion=inputs.champion,
        default=default_among(tried),
        seed=SEED,
    )
    choice, reason = decide(confirmation, len(tried))
    return TuningEvidence(
        **about,
        trials=tried,
        rungs=halved,
        confirmation=confirmation,
        measured=latest_figures(halved, confirmation, [*references, *tried]),
        choice=choice,
        reason=reason,
        left_out=left_out,
        rollouts=rollouts_of(search, names, replayed),
    )


def search_of(inputs: TuneInputs, settings: TuneSettings, trials: Results[Trial]) -> Search:
    """The search over the trace's texts."""
    texts = texts_of(inputs.trace)
    budget = min(settings.max_tokens, texts.max_tokens)
    digest = inputs.trace.digest()
    return Search(texts, inputs.resources, inputs.profile, budget, trials, digest, SEED)


def candidates_of(
    replayed: Sequence[Trial],
    explored: Sequence[Trial],
    vanilla: Trial | None,
    limits: Constraints,
    measured: int,
) -> list[StrategyChoice]:
    """What is measured at length: the best by replay that do not cost too much, and the best of
    those that were explored; `measured` as in `TuneInputs`."""
    if limits.max_cost_ratio is not None and vanilla is not None:
        most_calls = limits.max_cost_ratio * vanilla.target_calls_per_token
        replayed = [trial for trial in replayed if trial.target_calls_per_token <= most_calls]
    best = [
        *shortlist(replayed, measured),
        *shortlist(explored, (measured + 1) // 2, limits.max_quality_loss),
    ]
    return [trial.choice for trial in best]


def decide(confirmation: Confirmation, tried: int) -> tuple[StrategyChoice, str]:
    """The choice and why, in a sentence; `tried` is how many configurations there were."""
    contenders = [
        Contender(
            one.choice, str(one.choice), one.speedup, one.speedup_low, one.prompts, one.objection
        )
        for one in confirmation.figures[1:]
    ]
    if ranked := choosable(contenders):
        return ranked[0].setting, why_chosen(ranked[0], str(PLAIN), confirmation.tail or TAIL)
    if tried and not contenders:
        return PLAIN, f"{PLAIN}, because none of {tried} configurations keeps to the constraints"
    return PLAIN, why_plain(contenders, str(PLAIN))


def default_among(tried: Sequence[Trial]) -> StrategyChoice | None:
    """The strategy that is always confirmed, as near to its defaults as it was tried; None where it
    was not."""
    found = [trial.choice for trial in tried if trial.strategy == ALWAYS_CONFIRMED]
    return nearest_default(ALWAYS_CONFIRMED, found) if found else None


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
                "max_cost_ratio out"
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
            f"{fingerprint[:12]}: calibrate this pair (draftwell step calibrate)",
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


def circumstances_of(inputs: TuneInputs, settings: TuneSettings) -> dict[str, Any]:
    """What the evidence's figures depend on."""
    pair = inputs.pair
    return {
        "schema_version": EVIDENCE_VERSION,
        "champion": inputs.champion,
        "constraints": settings.constraints,
        "trace_digest": inputs.trace.digest(),
        "artifacts": artifacts_of(inputs.resources),
        "fingerprint": pair.fingerprint,
        "padded_to": pair.padded_to,
        "device_class": inputs.profile.provenance.device_class,
        "machine": describe_machine(pair),
        "prompts": len(inputs.prompts),
        "prompts_digest": prompts_digest(inputs.prompts),
        "max_tokens": settings.max_tokens,
        "replayed_tokens": min(settings.max_tokens, inputs.trace.header.max_tokens),
        "temperature": settings.temperature,
        "seed": SEED,
    }
