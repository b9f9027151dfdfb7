"""Searching: Optuna proposes configurations, and for each of them three values are to be small.

Those of lossless strategies come from replay over a trace; what cannot be replayed is measured briefly. The values are seconds
per emitted token, target calls per emitted token, and divergence: the share of emitted tokens that are not the target's argmax
after the same prefix, relative to plain decoding, which at temperature 0 is the mean total variation between what was written and
what the target would have written there. It is 0 where a strategy is lossless: that is proved, not measured.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from components.replay.replay import replay_strategy
from components.replay.texts import Texts
from components.replay.trace_model import RolloutExhausted
from components.tune.evidence import Trial
from components.tune.search.space import MEASURED, Space, combinations, completed, plain, replayable, space_of, start, suggest
from components.tune.search.studies import Studies, import_optuna
from serving.artifacts.base import Artifact
from serving.artifacts.hardware_profile import HardwareProfile
from serving.files import json_digest, sha256_file
from serving.runtime.strategies import StrategyChoice, StrategyResources, find_strategy

Log = Callable[[str, float, int], None]
Progress = Callable[[int, int, str], None]
"""Called with (done, total, strategy)."""

TRIAL = "trial"
"""Attribute of Optuna's trial that holds ours."""


@dataclass(frozen=True)
class Search:
    """A search over one trace and one set of artifacts, with a study for each strategy.

    Args:
        max_tokens: tokens per text that are replayed.
        known: what workers have replayed already, so that it is not repeated.
    """

    texts: Texts
    resources: StrategyResources
    profile: HardwareProfile
    max_tokens: int
    overlap: bool
    studies: Studies
    trace_digest: str
    known: Mapping[StrategyChoice, Trial] = field(default_factory=dict)

    def run(self, names: Sequence[str], trials: int, log: Log | None, progress: Progress | None) -> list[Trial]:
        """At most `trials` replays, shared among the strategies."""
        done: list[Trial] = []
        for name, share in self.shares(names, trials).items():
            for trial in self.search(name, share, self.predict):
                done.append(trial)
                if log:
                    log(f"predicted_seconds_per_token/{name}", trial.predicted_seconds_per_token, len(done))
                if progress:
                    progress(len(done), trials, name)
        return done

    def shares(self, names: Sequence[str], trials: int) -> dict[str, int]:
        """Strategy → how many configurations it may try, small spaces first: what these leave over goes to the others."""
        sizes = {name: len(self.configs(name)) for name in names}
        shares: dict[str, int] = {}
        for name in sorted(names, key=sizes.__getitem__):
            shares[name] = max(1, trials // (len(names) - len(shares)))
            trials -= min(shares[name], sizes[name])
        return shares

    def unfinished(self, names: Sequence[str], trials: int) -> dict[str, int]:
        """Strategy → its share, for those whose study does not hold that many configurations yet; the largest first."""
        state = import_optuna().trial.TrialState
        left = {}
        for name, share in self.shares(names, trials).items():
            study = self.studies.open(name, self.describe(name))
            if len(study.get_trials(states=[state.COMPLETE])) < min(share, len(self.configs(name))):
                left[name] = share
        return dict(sorted(left.items(), key=lambda item: -item[1]))

    def space(self, name: str) -> Space:
        """The values that a strategy's parameters may have; replayed ones are bounded by the trace's rollouts."""
        return MEASURED[name] if name in MEASURED else space_of(name, self.texts.rollout, self.profile)

    def configs(self, name: str) -> list[StrategyChoice]:
        """Every configuration of a strategy that may be tried."""
        return combinations(name) if name in MEASURED else replayable(name, self.texts.rollout, self.profile)

    def search(self, name: str, trials: int, value: Callable[[StrategyChoice], Trial], *, first: Sequence[StrategyChoice] = (),
               subject: Mapping[str, Any] | None = None) -> list[Trial]:
        """The complete space where the trials suffice for it, else what a seeded sampler proposes after the first ones.

        Args:
            value: makes a trial of a choice.
            first: choices that are tried before the sampler is asked; none takes the defaults.
            subject: what values depend on besides what `describe` names.
        """
        state = import_optuna().trial.TrialState
        space = self.space(name)
        study = self.studies.open(name, self.describe(name, subject))
        allowed = dict.fromkeys([*self.configs(name), *first])
        if not study.trials:
            for choice in list(allowed) if len(allowed) <= trials else first or [start(name, space)]:
                study.enqueue_trial({parameter: choice.parameters[parameter] for parameter in space})
        known = [Trial(**old.user_attrs[TRIAL]) for old in study.get_trials(states=[state.COMPLETE])]
        found = {trial.choice: trial for trial in known if trial.choice in allowed}
        untried = [choice for choice in allowed if choice not in found]
        random.Random(self.studies.seed).shuffle(untried)
        while len(found) < min(trials, len(allowed)):
            asked = study.ask()
            choice = completed(name, suggest(asked, space))
            if choice in allowed and choice not in found:
                found[choice] = value(choice)
            else:  # samplers repeat themselves, and a strategy's own rules forbid some combinations: try something new next
                untried = [other for other in untried if other not in found]
                study.enqueue_trial({parameter: untried[0].parameters[parameter] for parameter in space})
            trial = found.get(choice)
            if trial is None:
                study.tell(asked, state=state.FAIL)
                continue
            asked.set_user_attr(TRIAL, trial.model_dump())
            study.tell(asked, trial.values)
        return list(found.values())

    def predict(self, choice: StrategyChoice) -> Trial:
        """One replay; where the trace's rollouts end too early, an estimate."""
        if (known := self.known.get(choice)) is not None:
            return known
        for extend in (False, True):
            try:
                result = replay_strategy(self.texts, choice.name, dict(choice.parameters), self.resources, self.profile,
                                         max_tokens=self.max_tokens, overlap=self.overlap, extend=extend)
                break
            except RolloutExhausted:
                continue
        return Trial.of(choice, predicted_seconds_per_token=result.predicted_seconds_per_token, exact=result.exact,
                        target_calls_per_token=result.stats.calls_per_token, divergence=0.0, source="replayed")

    def explore(self, name: str, count: int, measure: Callable[[StrategyChoice], Trial], first: Sequence[StrategyChoice],
                subject: Mapping[str, Any]) -> list[Trial]:
        """`count` configurations of a strategy that no replay can predict, each measured.

        Args:
            first: choices to begin with, all of which are measured; none takes the defaults.
            subject: what is measured on.
        """
        return self.search(name, max(count, len(first)), measure, first=first, subject=subject)

    def describe(self, name: str, subject: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """All that a trial's values depend on: a study is continued only if all of it is the same."""
        kinds = [kind for kind in find_strategy(name).artifacts if kind in self.resources.artifacts]
        artifacts = {kind: artifact_digest(self.resources.artifacts[kind]) for kind in kinds}
        return {"space": plain(self.space(name)), "trace": self.trace_digest, "budget": self.max_tokens, "overlap": self.overlap,
                "artifacts": artifacts | {"hardware_profile": artifact_digest(self.profile)},
                "deterministic": self.resources.deterministic, **(subject or {})}


def artifact_digest(artifact: Artifact) -> str:
    """Digest of an artifact's kind, schema and files, as `base.digest_of` makes it of a folder; the provenance is left out."""
    known = getattr(artifact, "digest", None)
    if known is not None:
        return str(known)
    with tempfile.TemporaryDirectory() as place:
        artifact.write_files(Path(place))
        files = {path.name: sha256_file(path) for path in sorted(Path(place).iterdir())}
    return json_digest([artifact.kind, artifact.schema_version, files])


def fastest_vanilla(search: Search, trials: Sequence[Trial]) -> Trial:
    """Vanilla SD at its fastest gamma by replay, which every cost ratio is relative to (docs/methods.md)."""
    tried = {trial.choice: trial for trial in trials}
    return min((tried.get(choice) or search.predict(choice) for choice in search.configs("vanilla_sd")),
               key=lambda trial: trial.predicted_seconds_per_token)


def shortlist(trials: Sequence[Trial], count: int) -> list[Trial]:
    """The best of every strategy (serial and parallel are two), fastest first; then the next best of any."""
    ranked = sorted(trials, key=lambda trial: trial.predicted_seconds_per_token)
    best: dict[tuple[str, Any], Trial] = {}  # by strategy, and by whether draft and target run at once
    for trial in ranked:
        best.setdefault((trial.strategy, trial.parameters.get("parallel")), trial)
    rest = [trial for trial in ranked if trial not in best.values()]
    return [*best.values(), *rest][:count]
