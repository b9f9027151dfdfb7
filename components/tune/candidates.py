"""What a tuner chooses among: the strategies that are possible here, and trials of those that no
replay can predict."""

from __future__ import annotations

from collections.abc import Sequence

from draftwell.components.prompts.prompt import Prompt
from draftwell.components.tune.constraints import losses
from draftwell.components.tune.evaluator import Evaluate, Measured, QualityOf
from draftwell.components.tune.evidence import Trial
from draftwell.components.tune.search.search import Search
from draftwell.components.tune.search.space import tunable
from draftwell.components.tune.settings import TuneSettings
from draftwell.serving.artifacts.kinds import other_temperature
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import (
    PLAIN,
    StrategyChoice,
    StrategyResources,
    build_strategy,
    find_strategy,
)

EXPLORE_PROMPTS, EXPLORE_TOKENS = 2, 24


def choose_strategies(
    pair: LoadedPair,
    resources: StrategyResources,
    settings: TuneSettings,
    quality: QualityOf | None,
    asked: Sequence[str] | None = None,
) -> tuple[list[str], dict[str, str]]:
    """Names to try, of those that are asked for or of all, and why the others are left out. A name
    that is asked for and unfit is an error (`not_tunable`)."""
    names, left_out = [], {}
    for name in tunable() if asked is None else asked:
        if name == PLAIN.name:
            continue  # always measured
        if not find_strategy(name).lossless and settings.constraints.lossless_only:
            problem: str | None = "it is lossy, and only lossless strategies are allowed"
        else:
            problem = unfit(pair, resources, name, settings.temperature, quality)
        if problem is None:
            names.append(name)
        elif asked is not None:
            raise DraftwellError(
                f"strategy {name} cannot be tuned here: {problem}", code="not_tunable"
            )
        else:
            left_out[name] = problem
    return names, left_out


def unfit(
    pair: LoadedPair,
    resources: StrategyResources,
    name: str,
    temperature: float,
    quality: QualityOf | None,
) -> str | None:
    """Why a strategy cannot be measured here, or None; constraints are no reason."""
    cls = find_strategy(name)
    if not cls.lossless and quality is None:
        return "it is lossy, and nothing measures its quality"
    if lacking := lacking_for(pair, resources, name):
        return f"it needs {lacking}, which is not available"
    read = (resources.artifacts[kind] for kind in cls.reads() if kind in resources.artifacts)
    return other_temperature(read, temperature)


def unfit_champion(
    pair: LoadedPair,
    resources: StrategyResources,
    champion: StrategyChoice | None,
    quality: QualityOf | None,
    temperature: float = 0.0,
) -> str | None:
    """Why the champion cannot be measured here, or None."""
    if champion is None:
        return None
    try:
        build_strategy(champion.name, dict(champion.parameters))
    except DraftwellError as error:
        return str(error)
    why = unfit(pair, resources, champion.name, temperature, quality)
    return None if why is None else f"{champion.name}: {why}"


def lacking_for(pair: LoadedPair, resources: StrategyResources, name: str) -> str | None:
    """The first model or artifact that a strategy needs and that is not here."""
    cls = find_strategy(name)
    roles = (role for role in cls.roles if role not in pair.models)
    kinds = (kind for kind in cls.artifacts if kind not in resources.artifacts)
    return next(iter([*roles, *kinds]), None)


def explore(
    search: Search,
    names: Sequence[str],
    count: int,
    evaluate: Evaluate,
    quality: QualityOf | None,
    prompts: Sequence[Prompt],
) -> list[Trial]:
    """Trials of configurations that no replay can predict: `count` of each strategy, each measured
    on the first few prompts."""
    few = prompts[:EXPLORE_PROMPTS]

    def measured(choice: StrategyChoice) -> Measured:
        [result] = evaluate([choice], few, max_tokens=EXPLORE_TOKENS, fresh=True)
        return result

    trials = []
    for choice in (choice for name in names for choice in search.choices(name, count)):
        result, divergence = measured(choice), 0.0
        if quality is not None and not find_strategy(choice.name).lossless:
            divergence = losses(quality, few, result, measured(PLAIN))["quality_loss"] or 0.0
        trials.append(
            Trial.of(
                choice,
                predicted_seconds_per_token=result.pace,
                exact=False,
                target_calls_per_token=result.calls_per_token,
                divergence=divergence,
                source="measured",
            )
        )
    return trials
