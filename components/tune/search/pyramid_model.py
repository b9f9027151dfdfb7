"""PyramidSD's throughput model, which orders configurations before any is measured (PyramidSD,
section 3.3).

A stage whose judge reads l proposed tokens and adds one makes β·(l + 1) tokens a round, β = tokens
per round / (l + 1), so V = β(l + 1) / (l/V_proposer + 1/V_judge). In PyramidSD the proposer of the
target's stage is itself such a stage.

The paper leaves β to measurement. Here it comes from the models' agreement on a few texts of the
target, with acceptance taken as independent of the place in a round, a(tau) = share of positions
with Div <= tau: a round then makes (1 − a^(l+1))/(1 − a) tokens. And V_judge is that of a forward
pass over l + 1 tokens, not over one token as in the paper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from draftwell.components.calibrate.hardware_profile import filler, timed
from draftwell.components.prompts.prompt import Prompt, ids_of
from draftwell.components.tune.evidence import Trial
from draftwell.components.tune.search.space import combinations
from draftwell.serving.artifacts.forward_costs import seconds_at
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.runtime.acceptance.divergence import divergence
from draftwell.serving.runtime.commands import Forward, Role
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import StrategyChoice, build_strategy, find_strategy
from draftwell.serving.runtime.strategies.lossy.pyramid import Pyramid
from draftwell.serving.runtime.types import Rows

SIZES = (1, 2, 4, 8, 16, 32)


def stage_throughput(beta: float, length: int, proposer: float, judge: float) -> float:
    """Tokens per second of one stage.

    Args:
        beta: tokens per round / (length + 1), in (0, 1].
        length: l, proposed tokens a round.
        proposer, judge: tokens per second of the one, forward passes per second of the other.

    >>> round(stage_throughput(0.8, 4, 100.0, 10.0), 2)
    28.57
    """
    return beta * (length + 1) / (length / proposer + 1 / judge)


def pyramid_throughput(
    beta_qualifier: float,
    beta_target: float,
    num_draft: int,
    num_ready: int,
    draft: float,
    qualifier: float,
    target: float,
) -> float:
    """Tokens per second of PyramidSD: the target's stage with the qualifier's stage for its
    proposer.

    Args:
        num_draft, num_ready: l_D and l_Q.
        draft, qualifier, target: V_D in tokens, V_Q and V_T in forward passes per second.

    >>> round(pyramid_throughput(0.8, 0.7, 4, 9, 100.0, 50.0, 10.0), 2)
    29.79
    """
    return stage_throughput(
        beta_target,
        num_ready,
        stage_throughput(beta_qualifier, num_draft, draft, qualifier),
        target,
    )


def beta_of(acceptance: float, length: int) -> float:
    """β of a stage whose tokens are each kept with probability `acceptance`, independently.

    >>> beta_of(0.5, 2), beta_of(1.0, 7)
    (0.5833333333333334, 1.0)
    """
    return sum(acceptance**i for i in range(length + 1)) / (length + 1)


@dataclass(frozen=True)
class ModelAgreement:
    """How far three models agree, at every position of the target's own greedy texts.

    Args:
        target: Div(target, qualifier) of every position.
        qualifier: Div(qualifier, draft) of every position.
        matches: share of positions at which draft and qualifier have the same argmax.
    """

    target: list[float]
    qualifier: list[float]
    matches: float

    @staticmethod
    def share(divergences: Sequence[float], tau: float) -> float:
        """a(tau): share of positions that a threshold keeps."""
        return sum(value <= tau for value in divergences) / len(divergences)


def measure_agreement(
    pair: LoadedPair, prompts: Sequence[Prompt], *, name: str = "js", max_tokens: int = 32
) -> ModelAgreement:
    """One greedy text of the target for each prompt, read by all three models.

    Args:
        name: the divergence.
    """
    to_target: list[float] = []
    to_qualifier: list[float] = []
    matches = 0
    for prompt in prompts:
        ids = ids_of(pair, prompt)
        job = pair.engine().generate(
            ids, pair.sampling(max_tokens=max_tokens), build_strategy("autoregressive")
        )
        target, qualifier, draft = (
            last_rows(pair, role, [*ids, *job.output], len(job.output))
            for role in ("target", "qualifier", "draft")
        )
        for i, token in enumerate(job.output):
            to_target.append(divergence(name, target.raw(i), qualifier.raw(i), token))  # type: ignore[arg-type]
            to_qualifier.append(divergence(name, qualifier.raw(i), draft.raw(i), token))  # type: ignore[arg-type]
            matches += qualifier.top[i] == draft.top[i]
    return ModelAgreement(to_target, to_qualifier, matches / len(to_target))


def last_rows(pair: LoadedPair, role: Role, ids: Sequence[int], count: int) -> Rows:
    """A model's rows for the last `count` of `ids`."""
    model = pair.models[role]
    slot = model.open()
    try:
        [output] = model.forward([Forward(role, slot, tuple(ids[:-1]), keep=count, prefill=True)])
        return output.rows(pair.sampling())
    finally:
        model.close(slot)


def time_qualifier(pair: LoadedPair, *, repeats: int = 5, context: int = 64) -> dict[int, float]:
    """Tokens → median seconds of the qualifier's forward pass over as many tokens."""
    model = pair.models["qualifier"]
    sizes = [k for k in SIZES if k == 1 or k + context <= model.max_context]
    slot = model.open()
    try:
        model.forward([Forward("qualifier", slot, filler(pair, context), prefill=True)])
        return {
            k: median([timed(pair, "qualifier", slot, k, context) for _ in range(repeats + 1)][1:])
            for k in sizes
        }
    finally:
        model.close(slot)


def estimate(
    choice: StrategyChoice,
    agreement: ModelAgreement,
    profile: HardwareProfile,
    qualifier: Mapping[int, float],
) -> Trial:
    """What the model predicts for one configuration, decoded greedily; an estimate, so `exact` is
    False.

    Args:
        qualifier: of `time_qualifier`.
    """
    parameters = choice.parameters
    ready, drafted = int(parameters["num_speculative_tokens"]), int(parameters["num_draft_tokens"])
    inner = (
        agreement.share(agreement.qualifier, parameters["tau_qualifier"])
        if "tau_qualifier" in parameters
        else agreement.matches
    )
    outer = agreement.share(agreement.target, parameters["tau_target"])
    speed = pyramid_throughput(
        beta_of(inner, drafted),
        beta_of(outer, ready),
        drafted,
        ready,
        1 / profile.draft_seconds,
        1 / seconds_at(qualifier, drafted + 1),
        1 / profile.verify_seconds(ready + 1),
    )
    return Trial.of(choice, predicted_seconds_per_token=1 / speed, exact=False, source="estimated")


def shortlist_pyramid(
    strategy: str,
    agreement: ModelAgreement,
    profile: HardwareProfile,
    qualifier: Mapping[int, float],
) -> list[Trial]:
    """For each tau_T the lengths (and tau_Q) with the best prediction, fastest first.

    One for each threshold, because the model knows speed only: the loosest would always win, and
    quality might refuse it.
    """
    trials = [estimate(choice, agreement, profile, qualifier) for choice in combinations(strategy)]
    best: dict[float, Trial] = {}
    for trial in sorted(trials, key=lambda trial: trial.predicted_seconds_per_token):
        best.setdefault(trial.parameters["tau_target"], trial)
    return list(best.values())


def predict_pyramids(
    pair: LoadedPair, names: Sequence[str], prompts: Sequence[Prompt], profile: HardwareProfile
) -> list[Trial]:
    """The shortlist of every pyramid strategy among `names`; nothing is measured where there is
    none."""
    pyramids = [name for name in names if issubclass(find_strategy(name), Pyramid)]
    if not pyramids:
        return []
    agreement, qualifier = measure_agreement(pair, prompts[:4]), time_qualifier(pair)
    return [
        trial
        for name in pyramids
        for trial in shortlist_pyramid(name, agreement, profile, qualifier)
    ]
