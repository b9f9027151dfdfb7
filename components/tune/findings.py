"""What a tuning found, as parts of its evidence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from draftwell.components.tune.evidence import Confirmation, Metrics, Rollouts, Rung, Trial
from draftwell.components.tune.search.search import Search, artifact_digest
from draftwell.components.tune.search.space import combinations
from draftwell.serving.runtime.strategies import StrategyResources


def latest_figures(
    rungs: Sequence[Rung], confirmation: Confirmation, trials: Iterable[Trial]
) -> list[Metrics]:
    """The last metrics of every configuration that was measured, plain decoding's first, with what
    its trial predicted: a short measurement predicts nothing, and the loss of more text than the
    trial's goes before the trial's."""
    tried = {trial.choice: trial for trial in trials}
    confirmed = {figure.choice for figure in confirmation.figures}
    figures = [figure for rung in rungs for figure in rung.figures] + confirmation.figures
    found = []
    for choice, figure in {figure.choice: figure for figure in figures}.items():
        trial, seconds, divergence = tried.get(choice), None, figure.quality_loss
        if trial is not None:
            seconds = trial.predicted_seconds_per_token if trial.source == "replayed" else None
            divergence = trial.divergence if divergence is None else divergence
        update = {
            "confirmed": choice in confirmed,
            "predicted_seconds_per_token": seconds,
            "divergence": divergence,
        }
        found.append(figure.model_copy(update=update))
    return found


def rollouts_of(search: Search, names: Sequence[str], replayed: Sequence[Trial]) -> Rollouts:
    """What the length of a trace's rollouts meant for a search."""
    beyond = {name: len(combinations(name)) - len(search.configs(name)) for name in names}
    return Rollouts(
        length=search.texts.rollout,
        beyond={name: count for name, count in beyond.items() if count},
        inexact=sum(not trial.exact for trial in replayed),
        replayed=len(replayed),
    )


def artifacts_of(resources: StrategyResources) -> dict[str, str]:
    """kind → digest of every artifact."""
    return {
        kind: artifact_digest(artifact) for kind, artifact in sorted(resources.artifacts.items())
    }
