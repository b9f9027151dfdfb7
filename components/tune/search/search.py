"""Searching: Optuna proposes configurations, and for each of them three values are to be small.

Those of lossless strategies come from replay over a trace; what cannot be replayed is measured briefly. The values are seconds
per emitted token, target calls per emitted token, and divergence: the share of emitted tokens that are not the target's argmax
behind the same prefix, over the same share of plain decoding, which at temperature 0 is the mean total variation between what was
written and what the target would have written there. It is 0 where a strategy is lossless: that is proved, not measured.
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
from components.tune.search.space import MEASURED, Space, combinations, completed, key, plain, replayable, space_of, start, suggest
from components.tune.search.studies import Studies, digest_of_json, import_optuna
from serving.artifacts.base import Artifact
from serving.artifacts.hardware_profile import HardwareProfile
from serving.files import sha256_file
from serving.runtime.strategies import StrategyResources, find_strategy

Log = Callable[[str, float, int], None]
Progress = Callable[[int, int, str], None]
"""Called with (done, total, a few words)."""

TRIAL = "trial"
"""Attribute of Optuna's trial that holds ours."""


@dataclass(frozen=True)
class Trial:
    """A configuration and its three values.

    Args:
        predicted_seconds_per_token: by replay, by an estimate, or by a first short measurement: see `source`.
        exact: False where a draft ran on behind the trace's rollouts, so that a prediction is an estimate.
        target_calls_per_token: None of an estimate.
        divergence: as in the module's first lines, 0..1; None of an estimate.
        source: replayed, measured or estimated.
    """

    strategy: str
    parameters: dict[str, Any]
    predicted_seconds_per_token: float
    exact: bool
    target_calls_per_token: float | None = None
    divergence: float | None = None
    source: str = "estimated"

    @property
    def values(self) -> tuple[float, float, float]:
        """The objectives, in the order of `studies.OBJECTIVES`."""
        assert self.target_calls_per_token is not None
        assert self.divergence is not None
        return self.predicted_seconds_per_token, self.target_calls_per_token, self.divergence


@dataclass(frozen=True)
class Search:
    """A search over one trace and resources, with a study for each strategy.

    Args:
        known: (strategy, `key` of its parameters) → what others have replayed already, so that it is not done again.
    """

    texts: Texts
    resources: StrategyResources
    profile: HardwareProfile
    max_tokens: int
    overlap: bool
    studies: Studies
    trace_digest: str
    known: Mapping[tuple[str, str], Trial] = field(default_factory=dict)

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
        """Strategy → how many configs it may try, small spaces first: what these leave over goes to the others."""
        sizes = {name: len(self.configs(name)) for name in names}
        shares: dict[str, int] = {}
        for name in sorted(names, key=sizes.__getitem__):
            shares[name] = max(1, trials // (len(names) - len(shares)))
            trials -= min(shares[name], sizes[name])
        return shares

    def unfinished(self, names: Sequence[str], trials: int) -> dict[str, int]:
        """Strategy → its share, for those whose study does not hold that many configs yet; the longest first."""
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

    def configs(self, name: str) -> list[dict[str, Any]]:
        """Every config of a strategy that may be tried."""
        return combinations(name) if name in MEASURED else replayable(name, self.texts.rollout, self.profile)

    def search(self, name: str, trials: int, value: Callable[[str, dict[str, Any]], Trial], *, first: Sequence[dict[str, Any]] = (),
               subject: Mapping[str, Any] | None = None) -> list[Trial]:
        """The whole space where the trials suffice for it, else what a seeded sampler proposes behind the first ones.

        Args:
            value: makes a trial of a strategy and its parameters.
            first: configs that are tried before the sampler is asked; none takes the defaults.
            subject: what values depend on besides what `describe` names.
        """
        state = import_optuna().trial.TrialState
        space = self.space(name)
        study = self.studies.open(name, self.describe(name, subject))
        allowed = {key(parameters): parameters for parameters in [*self.configs(name), *first]}
        if not study.trials:
            for parameters in list(allowed.values()) if len(allowed) <= trials else first or [start(name, space)]:
                study.enqueue_trial({parameter: parameters[parameter] for parameter in space})
        known = [Trial(**old.user_attrs[TRIAL]) for old in study.get_trials(states=[state.COMPLETE])]
        found = {key(trial.parameters): trial for trial in known if key(trial.parameters) in allowed}
        untried = [parameters for parameters in allowed.values() if key(parameters) not in found]
        random.Random(self.studies.seed).shuffle(untried)
        while len(found) < min(trials, len(allowed)):
            asked = study.ask()
            parameters = completed(name, suggest(asked, space))
            if key(parameters) in allowed and key(parameters) not in found:
                found[key(parameters)] = value(name, parameters)
            else:  # samplers repeat themselves, and a strategy's own rules forbid some combinations: try something new next
                untried = [other for other in untried if key(other) not in found]
                study.enqueue_trial({parameter: untried[0][parameter] for parameter in space})
            trial = found.get(key(parameters))
            if trial is None:
                study.tell(asked, state=state.FAIL)
                continue
            asked.set_user_attr(TRIAL, vars(trial))
            study.tell(asked, trial.values)
        return list(found.values())

    def predict(self, name: str, parameters: dict[str, Any]) -> Trial:
        """One replay; where the trace's rollouts end too early, an estimate."""
        if (known := self.known.get((name, key(parameters)))) is not None:
            return known
        for extend in (False, True):
            try:
                result = replay_strategy(self.texts, name, parameters, self.resources, self.profile, max_tokens=self.max_tokens,
                                overlap=self.overlap, extend=extend)
                break
            except RolloutExhausted:
                continue
        return Trial(name, parameters, result.predicted_seconds_per_token, result.exact, result.stats.calls_per_token, 0.0, "replayed")

    def explore(self, name: str, count: int, measure: Callable[[str, dict[str, Any]], Trial], first: Sequence[dict[str, Any]],
                subject: Mapping[str, Any]) -> list[Trial]:
        """`count` configs of a strategy that no replay can predict, each measured.

        Args:
            first: configs to begin with, all of which are measured; none takes the defaults.
            subject: what is measured on.
        """
        return self.search(name, max(count, len(first)), measure, first=first, subject=subject)

    def describe(self, name: str, subject: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """All that a trial's values depend on: a study is continued only if every word is the same."""
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
    return digest_of_json([artifact.kind, artifact.schema_version, files])


def fastest_vanilla(search: Search, trials: Sequence[Trial]) -> Trial:
    """Vanilla SD at its fastest gamma by replay, the measure of every cost ratio (METHODS, "Measures")."""
    tried = {key(trial.parameters): trial for trial in trials if trial.strategy == "vanilla_sd"}
    return min((tried.get(key(parameters)) or search.predict("vanilla_sd", parameters) for parameters in search.configs("vanilla_sd")),
               key=lambda trial: trial.predicted_seconds_per_token)


def shortlist(trials: Sequence[Trial], count: int) -> list[Trial]:
    """The best of every strategy (serial and parallel are two), fastest first; then the next best of any."""
    ranked = sorted(trials, key=lambda trial: trial.predicted_seconds_per_token)
    best: dict[tuple[str, Any], Trial] = {}
    for trial in ranked:
        best.setdefault((trial.strategy, trial.parameters.get("parallel")), trial)
    rest = [trial for trial in ranked if trial not in best.values()]
    return [*best.values(), *rest][:count]
