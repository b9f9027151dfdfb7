"""Searching: every configuration of the replayed strategies is replayed, the others are tried on a
few prompts.

Of each configuration three values are known: seconds per emitted token, target calls per
emitted token, and divergence: the share of emitted tokens that are not the target's argmax after
the same prefix, relative to plain decoding, which at temperature 0 is the mean total variation
between what was written and what the target would have written there. It is 0 where a strategy is
lossless: that is proved, not measured.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftwell.components.replay.replay import replay_strategy
from draftwell.components.replay.texts import Texts
from draftwell.components.results import Results
from draftwell.components.tune.evidence import Trial
from draftwell.components.tune.halving import best_of_each
from draftwell.components.tune.search.space import (
    PUBLISHED,
    REPLAYED,
    combinations,
    nearest_default,
    replayable,
)
from draftwell.serving.artifacts.base import Artifact
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import json_digest, sha256_file
from draftwell.serving.runtime.strategies import StrategyChoice, StrategyResources, find_strategy

Progress = Callable[[int, int, str], None]
REPLAY = 2
"""Raised where a strategy drafts otherwise with the same settings: trials of before are no answer
then."""
"""Called with (done, total, strategy)."""


@dataclass(frozen=True)
class Search:
    """A search over one trace and one set of artifacts.

    Args:
        max_tokens: tokens per text that are replayed.
        trials: what was replayed before, and where it is kept.
        seed: of the order in which a space that is not tried whole is tried.
    """

    texts: Texts
    resources: StrategyResources
    profile: HardwareProfile
    max_tokens: int
    trials: Results[Trial]
    trace_digest: str
    seed: int = 0

    def run(
        self,
        names: Sequence[str],
        limit: int | None,
        *,
        spread: Spread | None = None,
        progress: Progress | None = None,
    ) -> list[Trial]:
        """Replays of these strategies' configurations: all of them, or at most `limit`. What is on
        disk is not replayed again.

        Args:
            spread: has replays made by workers; what they leave is replayed here.
        """
        subjects = {name: self.subject(name) for name in names}
        keys = {
            choice: json_digest([subjects[name], choice.to_json()])
            for name, count in self.counts(names, limit).items()
            for choice in self.choices(name, count)
        }
        missing = [choice for choice, key in keys.items() if key not in self.trials]

        def keep(trial: Trial) -> None:
            self.trials.put(keys[trial.choice], trial)
            if progress:
                done = sum(key in self.trials for key in keys.values())
                progress(done, len(keys), trial.strategy)

        if spread is not None and missing:
            spread(self, missing, keep)
        for choice in missing:
            if keys[choice] not in self.trials:
                keep(self.predict(choice))
        return [self.trials[key] for key in keys.values()]

    def counts(self, names: Sequence[str], limit: int | None) -> dict[str, int]:
        """Strategy → how many configurations it may try. With a limit small spaces come first: what
        they leave over goes to the others, and each strategy has at least one."""
        sizes = {name: len(self.configs(name)) for name in names}
        if limit is None:
            return sizes
        shares: dict[str, int] = {}
        for name in sorted(names, key=sizes.__getitem__):
            shares[name] = min(sizes[name], max(1, limit // (len(names) - len(shares))))
            limit -= shares[name]
        return shares

    def configs(self, name: str) -> list[StrategyChoice]:
        """Every configuration of a strategy that may be tried; replayed ones are bounded by the
        trace's rollouts."""
        return (
            replayable(name, self.texts.rollout, self.profile)
            if name in REPLAYED
            else combinations(name)
        )

    def choices(self, name: str, count: int) -> list[StrategyChoice]:
        """The complete space where `count` suffices for it, else what is nearest to the strategy's
        defaults, and others that cover every parameter's values evenly."""
        allowed = self.configs(name)
        if len(allowed) <= count:
            return allowed
        first = [nearest_default(name, allowed), *published(name, allowed)]
        return evenly(first, allowed, self.seed)[:count]

    def predict(self, choice: StrategyChoice) -> Trial:
        """One replay; where the trace's rollouts end too early, an estimate."""
        result = replay_strategy(
            self.texts,
            choice.name,
            dict(choice.parameters),
            self.resources,
            self.profile,
            max_tokens=self.max_tokens,
            extend=True,
        )
        return Trial.of(
            choice,
            predicted_seconds_per_token=result.predicted_seconds_per_token,
            exact=result.exact,
            target_calls_per_token=result.stats.calls_per_token,
            divergence=0.0,
            source="replayed",
        )

    def subject(self, name: str) -> dict[str, Any]:
        """All that a strategy's trials depend on besides the choice."""
        kinds = [kind for kind in find_strategy(name).reads() if kind in self.resources.artifacts]
        artifacts = {kind: artifact_digest(self.resources.artifacts[kind]) for kind in kinds}
        return {
            "trace": self.trace_digest,
            "replay": REPLAY,
            "budget": self.max_tokens,
            "artifacts": artifacts | {"hardware_profile": artifact_digest(self.profile)},
            "deterministic": self.resources.deterministic,
        }


def trials_in(file: Path | None) -> Results[Trial]:
    """The trials of earlier searches, where this one keeps its own.

    A trial's key says all that it depends on, so one file holds those of many searches.

    Args:
        file: None keeps them in memory.
    Raises:
        DraftwellError: the file holds something else (`not_a_study`).
    """
    refusal = DraftwellError(
        f"{file} is no file of trials that this version reads: name another with --set study=…, or "
        "move it away",
        code="not_a_study",
    )
    return Results(file, "trials", Trial, refusal=refusal)


Spread = Callable[[Search, Sequence[StrategyChoice], Callable[[Trial], None]], None]
"""Has configurations replayed elsewhere and hands over each trial; what it leaves out is replayed
here."""


def published(name: str, allowed: Sequence[StrategyChoice]) -> list[StrategyChoice]:
    """The choices with settings that the paper found the fastest, each with the others as
    near to the defaults as there are."""
    found = []
    for settings in PUBLISHED.get(name, ()):
        same = [one for one in allowed if settings.items() <= one.parameters.items()]
        found += [nearest_default(name, same)] if same else []
    return found


def evenly(
    first: Sequence[StrategyChoice], allowed: Sequence[StrategyChoice], seed: int
) -> list[StrategyChoice]:
    """The first choices, then the others, so that any number of them has every parameter's values
    about equally often.

    Each next one shares the fewest values with those before it; ties are broken at random.

    >>> from draftwell.serving.runtime.strategies import StrategyChoice
    >>> points = [
    ...     StrategyChoice("csd", {"min_count": count, "tau": tau})
    ...     for count in (1, 2)
    ...     for tau in (0.1, 0.2)
    ... ]
    >>> [str(choice) for choice in evenly(points[:1], points, 0)][:2]
    ['csd(min_count=1, tau=0.1)', 'csd(min_count=2, tau=0.2)']
    """
    rest = [choice for choice in allowed if choice not in first]
    random.Random(seed).shuffle(rest)
    used: Counter[tuple[str, Any]] = Counter(
        pair for choice in first for pair in choice.parameters.items()
    )
    ordered = list(dict.fromkeys(first))
    while rest:
        best = min(rest, key=lambda choice: sum(used[pair] for pair in choice.parameters.items()))
        rest.remove(best)
        ordered.append(best)
        used.update(best.parameters.items())
    return ordered


def artifact_digest(artifact: Artifact) -> str:
    """Digest of an artifact's kind, schema and files, as `base.digest_of` makes it of a folder; the
    provenance is left out."""
    known = getattr(artifact, "digest", None)
    if known is not None:
        return str(known)
    with tempfile.TemporaryDirectory() as place:
        artifact.write_files(Path(place))
        files = {path.name: sha256_file(path) for path in sorted(Path(place).iterdir())}
    return json_digest([artifact.kind, artifact.schema_version, files])


def fastest_vanilla(search: Search, trials: Sequence[Trial]) -> Trial:
    """Vanilla SD at its fastest gamma by replay, which every cost ratio is relative to
    (docs/methods.md)."""
    tried = {trial.choice: trial for trial in trials}
    return min(
        (tried.get(choice) or search.predict(choice) for choice in search.configs("vanilla_sd")),
        key=lambda trial: trial.predicted_seconds_per_token,
    )


def shortlist(
    trials: Sequence[Trial], count: int, max_divergence: float | None = None
) -> list[Trial]:
    """The best of every strategy (serial and parallel are two), fastest first; then the next best
    of any.

    Args:
        max_divergence: those that diverged more come after the others: a short measurement is too
            little to leave them out.
    """
    limit = 1.0 if max_divergence is None else max_divergence
    ranked = sorted(
        trials, key=lambda trial: (trial.divergence > limit, trial.predicted_seconds_per_token)
    )
    return best_of_each(ranked, lambda one: (one.strategy, one.parameters.get("parallel")), count)
