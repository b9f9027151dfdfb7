"""Searching by replay: Optuna proposes configurations of lossless strategies, a trace says how fast each would be."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.replay import Texts, replay
from components.search_space import Space, defaults, grid, space_of, suggest
from serving.runtime.artifacts.hardware_profile import HardwareProfile
from serving.runtime.models.trace_model import RolloutExhausted
from serving.runtime.strategies import Kit, find_strategy
from serving.runtime.types import DraftwellError

Log = Callable[[str, float, int], None]
Progress = Callable[[int, int, str], None]
"""Called with (done, total, a few words)."""

TRIAL = "trial"
"""Attribute of Optuna's trial that holds ours."""


@dataclass(frozen=True)
class Trial:
    """A replayed configuration.

    Args:
        exact: False where a draft ran on behind the trace's rollouts, so that the prediction is an estimate.
    """

    strategy: str
    parameters: dict[str, Any]
    predicted_seconds_per_token: float
    exact: bool


@dataclass(frozen=True)
class Search:
    """Replays over one trace, guided by Optuna, a study for each strategy."""

    texts: Texts
    kit: Kit
    profile: HardwareProfile
    max_tokens: int
    overlap: bool
    seed: int
    file: Path | None
    digest: str

    def run(self, names: Sequence[str], trials: int, log: Log | None, progress: Progress | None) -> list[Trial]:
        """At most `trials` replays, shared among the strategies; what a small space leaves over goes to the others."""
        spaces = sorted(((name, space_of(name, self.texts.rollout)) for name in names), key=lambda item: len(grid(item[1])))
        done: list[Trial] = []
        for i, (name, space) in enumerate(spaces):
            share = max(1, (trials - len(done)) // (len(spaces) - i))
            for trial in self.search(name, space, share):
                done.append(trial)
                if log:
                    log(f"predicted_seconds_per_token/{name}", trial.predicted_seconds_per_token, len(done))
                if progress:
                    progress(len(done), trials, name)
        return done

    def search(self, name: str, space: Space, trials: int) -> list[Trial]:
        """The whole grid where the trials suffice for it, else what a seeded sampler proposes behind the defaults."""
        try:
            import optuna
        except ImportError as error:
            raise DraftwellError("tuning needs the package optuna: pip install 'draftwell[pipeline]'") from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(storage=f"sqlite:///{self.file}" if self.file else None, load_if_exists=True,
                                    study_name=self.study_name(name, space), direction="minimize",
                                    sampler=optuna.samplers.TPESampler(seed=self.seed))
        everything = grid(space)
        if not study.trials:
            for parameters in everything if len(everything) <= trials else [defaults(name, space)]:
                study.enqueue_trial(parameters)
        known = [Trial(**old.user_attrs[TRIAL]) for old in study.get_trials(states=[optuna.trial.TrialState.COMPLETE])]
        found = {key(trial.parameters): trial for trial in known}
        untried = [parameters for parameters in everything if key(parameters) not in found]
        random.Random(self.seed).shuffle(untried)
        while len(found) < min(trials, len(everything)):
            asked = study.ask()
            parameters = suggest(asked, space)
            if key(parameters) in found:  # samplers repeat themselves in small spaces: try something new next
                untried = [other for other in untried if key(other) not in found]
                study.enqueue_trial(untried[0])
            else:
                found[key(parameters)] = self.predict(name, parameters)
            trial = found[key(parameters)]
            asked.set_user_attr(TRIAL, vars(trial))
            study.tell(asked, trial.predicted_seconds_per_token)
        return list(found.values())

    def predict(self, name: str, parameters: dict[str, Any]) -> Trial:
        """One replay; where the trace's rollouts end too early, an estimate."""
        for extend in (False, True):
            try:
                result = replay(self.texts, name, parameters, self.kit, self.profile, max_tokens=self.max_tokens,
                                overlap=self.overlap, extend=extend)
                break
            except RolloutExhausted:
                continue
        return Trial(name, parameters, result.predicted_seconds_per_token, result.exact)

    def study_name(self, name: str, space: Space) -> str:
        """A study is continued only if everything that its values depend on is the same."""
        tables = {kind: vars(artifact) for kind, artifact in sorted(self.kit.artifacts.items())
                  if kind in find_strategy(name).artifacts}
        body = json.dumps([str(space), self.digest, self.max_tokens, self.overlap, self.profile.t_draft, self.profile.t_rest,
                           self.profile.t_verify, self.profile.split, self.kit.deterministic, str(tables)])
        return f"{name}-{hashlib.sha256(body.encode()).hexdigest()[:16]}"


def key(parameters: Mapping[str, Any]) -> str:
    return json.dumps(dict(parameters), sort_keys=True)


def shortlist(trials: Sequence[Trial], count: int) -> list[Trial]:
    """The best of every strategy (serial and parallel are two), fastest first; then the next best of any."""
    ranked = sorted(trials, key=lambda trial: trial.predicted_seconds_per_token)
    best: dict[tuple[str, Any], Trial] = {}
    for trial in ranked:
        best.setdefault((trial.strategy, trial.parameters.get("parallel")), trial)
    rest = [trial for trial in ranked if trial not in best.values()]
    return [*best.values(), *rest][:count]
