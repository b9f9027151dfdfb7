"""Whether a release's artifacts fit the temperatures that its choices are for, and checks of what
serves sampled requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from draftwell.components.bench.schema import BenchEntry
from draftwell.components.gate.bench_checks import surprisal_shift
from draftwell.components.gate.evidence import surely, within
from draftwell.serving.artifacts.base import Artifact
from draftwell.serving.artifacts.decoding_config import DecodingConfig
from draftwell.serving.artifacts.kinds import other_temperature
from draftwell.serving.bundle.verdict import Check, GateVerdict, Skipped, Thresholds
from draftwell.serving.runtime.strategies import PLAIN, StrategyChoice, find_strategy, served_choice

LEAST_PROMPTS = 16
"""Below, resampled intervals are too narrow to call a proof wrong."""


def tuned_classes(config: DecodingConfig) -> Iterator[tuple[StrategyChoice, float]]:
    """The choices of a config, each with the temperature that it was tuned at."""
    yield served_choice(config, 0.0), 0.0
    if config.sampled is not None:
        yield served_choice(config, config.sampled.temperature), config.sampled.temperature


def objections(config: DecodingConfig, artifacts: Mapping[str, Artifact]) -> list[str]:
    """For each choice the first artifact it reads that was made for the other class of
    temperatures, in words; none where all fit."""
    found = (
        objection(choice, temperature, artifacts) for choice, temperature in tuned_classes(config)
    )
    return [why for why in found if why is not None]


def objection(
    choice: StrategyChoice, temperature: float, artifacts: Mapping[str, Artifact]
) -> str | None:
    """The same for one choice; None where all that it reads fits."""
    used = [artifacts[kind] for kind in find_strategy(choice.name).reads() if kind in artifacts]
    why = other_temperature(used, temperature)
    return f"{choice} serves requests of temperature {temperature:g}, and {why}" if why else None


def judge_artifacts(config: DecodingConfig, artifacts: Mapping[str, Artifact]) -> GateVerdict:
    """A check for each choice that fails where an artifact that it reads is for the other class of
    temperatures.

    The sampled choice's has a name of its own: where only that fails, the greedy choice is served
    all the same.
    """
    checks = []
    for choice, temperature in tuned_classes(config):
        why = objection(choice, temperature, artifacts)
        name = "sampled temperature" if temperature else "temperature"
        detail = why or "every artifact is for the temperature it serves"
        checks.append(Check(name, int(why is not None), 0, why is None, detail))
    return GateVerdict(tuple(checks))


def sampled_temperature(config: DecodingConfig, champion: DecodingConfig | None) -> float | None:
    """The temperature to judge sampled requests at: that of the candidate's choice for them, else
    of the champion's; None where neither has one."""
    tuned = [one.sampled for one in (config, champion) if one is not None]
    return next((choice.temperature for choice in tuned if choice is not None), None)


def greedy_on_trial(config: DecodingConfig) -> StrategyChoice | None:
    """The greedy choice, where it may serve sampled requests too once it is measured for them:
    nothing was tuned for them, and it is lossless, so that what it writes is right at every
    temperature; None where plain decoding serves them without a measurement."""
    greedy = served_choice(config, 0.0)
    return (
        greedy
        if config.sampled is None
        and greedy.name != PLAIN.name
        and find_strategy(greedy.name).lossless
        else None
    )


def passes_trial(verdict: GateVerdict) -> bool:
    """Whether the verdict on the greedy choice lets it serve sampled requests. How it compares with
    the champion is not asked: it is compared as what serves them, and so is plain decoding in its
    place."""
    own = [check for check in verdict.checks if check.name != "regression"]
    return any(check.name == "speedup" for check in own) and all(check.passed for check in own)


def untuned(
    config: DecodingConfig,
    temperature: float | None,
    serves: StrategyChoice = PLAIN,
    low: float | None = None,
) -> tuple[str, ...]:
    """A note where nothing was tuned for sampled requests.

    Args:
        temperature: that they were measured at; None where they were not.
        serves: what decodes them.
        low: lower end of the greedy choice's speedup over plain decoding there, where that was
            measured.
    """
    if config.sampled is not None:
        return ()
    if temperature is None:
        return (
            f"sampled requests are not judged: nothing was tuned for them, and {serves} decodes "
            "them (`draftwell step choose --set temperature=…`)",
        )
    trial = (
        ""
        if low is None
        else f"; {served_choice(config, 0.0)} is at least {low:.2f} times as fast as plain "
        "decoding there"
    )
    return (
        "nothing was tuned for sampled requests (`draftwell step choose --set temperature=…`): "
        "measured at "
        f"temperature {temperature:g}, {serves} decodes them{trial}",
    )


def judge_sampled(
    verdict: GateVerdict,
    entry: BenchEntry,
    reference: BenchEntry,
    temperature: float,
    thresholds: Thresholds,
) -> GateVerdict:
    """The verdict on what serves sampled requests under names of its own, with how likely the
    target finds what it writes.

    Args:
        verdict: on its bench.
        entry, reference: its entry there, and plain decoding's.
    """
    both = verdict + likelihood(entry, reference, thresholds.max_surprisal_shift)
    notes = tuple(f"at temperature {temperature:g}: {note}" for note in both.notes)
    return replace(both.renamed("sampled {}"), notes=notes)


def likelihood(entry: BenchEntry, reference: BenchEntry, limit: float | None) -> GateVerdict:
    """How likely the target finds a choice's samples, compared with plain decoding's in the same
    run.

    It is judged by its interval over prompts. A lossless choice draws from the target's own
    distribution, by proof: of it only an interval that is wholly beyond the limit is no chance, but
    a fault of what draws; that takes `LEAST_PROMPTS`, since resampling fewer gives intervals that
    are too narrow.
    """
    if limit is None or entry.strategy == reference.strategy:
        return GateVerdict(())
    shift = surprisal_shift(entry, reference)
    if shift is None:
        why = "how likely the target finds its samples was not measured"
        return GateVerdict.of(
            [
                Skipped("likelihood", why)
                if entry.lossless
                else Check("likelihood", 0, limit, False, why)
            ]
        )
    text = (
        f"the target finds its samples {shift.value:+.3f} nats a token less likely than "
        f"plain decoding's [{shift.low:+.3f}, {shift.high:+.3f}]"
    )
    if entry.lossless and shift.prompts < LEAST_PROMPTS:
        why = f"{text}, on {shift.prompts} prompts: below {LEAST_PROMPTS} that decides nothing"
        return GateVerdict.of([Skipped("likelihood", why)])
    check = within("likelihood", shift, limit, f"{text} (both ends within {limit:g})")
    lenient = f"{text} (not wholly beyond {limit:g})"
    return GateVerdict((surely(check, lenient) if entry.lossless else check,))
