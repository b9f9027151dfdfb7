"""What a tuner chooses among: the strategies that are possible here, and trials of those that no
replay can predict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from draftwell.components.prompts.prompt import Prompt, prompts_digest
from draftwell.components.tune.constraints import ConstraintChecker
from draftwell.components.tune.evaluator import Evaluate, QualityOf
from draftwell.components.tune.evidence import Trial
from draftwell.components.tune.search.search import Search
from draftwell.components.tune.search.space import MEASURED, REPLAYED
from draftwell.components.tune.settings import Constraints, TuneSettings
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
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
) -> tuple[list[str], dict[str, str]]:
    """Names to try, and why the others are left out. A name that the user gave and that is unfit is
    an error (`not_tunable`)."""
    names, left_out = [], {}
    for name in settings.strategies if settings.strategies is not None else [*REPLAYED, *MEASURED]:
        if name == PLAIN.name:
            continue  # always measured
        problem = reason_not_tunable(pair, resources, name, settings, quality)
        if problem is None:
            names.append(name)
        elif settings.strategies is not None:
            raise DraftwellError(
                f"strategy {name} cannot be tuned here: {problem}", code="not_tunable"
            )
        else:
            left_out[name] = problem
    return names, left_out


def reason_not_tunable(
    pair: LoadedPair,
    resources: StrategyResources,
    name: str,
    settings: TuneSettings,
    quality: QualityOf | None,
) -> str | None:
    """Why a strategy cannot be tuned, or None."""
    cls = find_strategy(name)
    if name not in REPLAYED and name not in MEASURED:
        return f"it has no search space, choose from {', '.join([*REPLAYED, *MEASURED])}"
    if not cls.lossless and settings.constraints.lossless_only:
        return "it is lossy, and only lossless strategies are allowed"
    return unfit(pair, resources, name, settings.temperature, quality)


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


@dataclass(frozen=True)
class Explorer:
    """Tries configurations that no replay can predict, on a few prompts."""

    pair: LoadedPair
    search: Search
    evaluate: Evaluate
    quality: QualityOf | None
    prompts: Sequence[Prompt]
    profile: HardwareProfile

    @property
    def few(self) -> Sequence[Prompt]:
        """The prompts that are explored on."""
        return self.prompts[:EXPLORE_PROMPTS]

    @property
    def subject(self) -> dict[str, Any]:
        """What explored values depend on besides the search."""
        return {
            "prompts": prompts_digest(self.few),
            "tokens": EXPLORE_TOKENS,
            "device_class": self.profile.provenance.device_class,
            "padded_to": self.pair.padded_to,
            "fingerprint": self.pair.fingerprint,
            "threads": torch.get_num_threads(),
        }

    def describe(self, name: str) -> dict[str, Any]:
        """The description of a strategy's study, replayed or explored."""
        return self.search.describe(name, None if name in REPLAYED else self.subject)

    def run(self, names: Sequence[str], count: int) -> list[Trial]:
        """The trials of all strategies, `count` of each."""
        return [
            trial
            for name in names
            for trial in self.search.explore(name, count, self.measure, self.subject)
        ]

    def measure(self, choice: StrategyChoice) -> Trial:
        """One choice as a trial."""
        few = self.few
        [result] = self.evaluate([choice], few, max_tokens=EXPLORE_TOKENS, fresh=True)
        divergence, least = 0.0, None
        if not find_strategy(choice.name).lossless:
            # the resume file answers from the second time on
            [plain] = self.evaluate([PLAIN], few, max_tokens=EXPLORE_TOKENS, fresh=True)
            checker = ConstraintChecker(Constraints(), self.quality, None, {})
            divergence, *_ = checker.losses(choice, few, result, plain)
            least = max(
                0.0,
                min(
                    checker.least(choice, few, result, plain)["quality_loss"],
                    least_share(divergence, sum(result.tokens)),
                ),
            )
        return Trial.of(
            choice,
            predicted_seconds_per_token=result.pace,
            exact=False,
            target_calls_per_token=result.calls_per_token,
            divergence=divergence,
            least_divergence=least,
            source="measured",
        )


def least_share(share: float, count: int, z: float = 1.96) -> float:
    """Lower end of Wilson's 95 % interval of a share of `count` tokens.

    Two prompts that happen to lose alike leave a bound over prompts no width; the tokens still say
    how little was seen.

    >>> round(least_share(6 / 47, 47), 3), round(least_share(0.0, 47), 3)
    (0.06, 0.0)
    """
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, (share + z * z / (2 * count) - spread) / (1 + z * z / count))
