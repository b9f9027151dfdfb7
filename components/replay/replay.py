"""Replay: what a strategy would have done on traced prompts, exactly, and how long it would have
taken.

The strategy's own generator runs over trace models, so nothing is implemented twice. At temperature
0 in float32 a lossless strategy makes the same target calls, draft calls and accepted tokens as in
a real run, round by round (prompts in order, one at a time, with state carried over). Time is
predicted from a hardware profile. Sampled texts are replayed on average
(`draftwell.components.replay.sampled`).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

from draftwell.components.replay.costs import ReplayCosts, costs_of
from draftwell.components.replay.texts import Texts, read_texts
from draftwell.components.replay.trace_model import TraceModel
from draftwell.components.replay.traced_text import NotInTrace
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.errors import DraftwellError
from draftwell.serving.recording.trace import TraceSet
from draftwell.serving.runtime.commands import Overlap, Role
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.session.stats import Stats
from draftwell.serving.runtime.strategies import (
    Strategy,
    StrategyResources,
    build_strategy,
    find_strategy,
)


@dataclass(frozen=True)
class PromptReplay:
    """One replayed text: its counters, and its predicted seconds."""

    name: str
    stats: Stats
    seconds: float


@dataclass(frozen=True)
class ReplayResult:
    """A strategy replayed over a trace.

    Args:
        stats: counters over all texts.
        predicted_seconds_per_token: over all texts, including prefill.
        exact: False where a draft ran past the end of a rollout (only with `extend`).
    """

    stats: Stats
    predicted_seconds_per_token: float
    per_prompt: list[PromptReplay]
    exact: bool


def replay_strategy(
    trace: TraceSet | Texts,
    strategy_name: str,
    parameters: Mapping[str, Any],
    resources: StrategyResources,
    profile: HardwareProfile,
    *,
    max_tokens: int | None = None,
    extend: bool = False,
) -> ReplayResult:
    """Run a strategy over a trace.

    Args:
        resources: artifacts of the strategy; replay works on copies, so that it changes no state.
        profile: of the device that time is predicted for.
        max_tokens: emit at most this many, at most the trace's own number; None: that number.
        extend: continue after the end of a rollout (see `TraceModel`) instead of raising
            `RolloutExhausted`.
    Raises:
        DraftwellError: a lossy strategy (`cannot_replay_lossy`), longer texts than traced
            (`texts_too_short`), or parameters that are out of bounds.
        RolloutExhausted: the parameters let a draft continue after its first wrong token for more
            than K tokens.
    """
    texts = trace if isinstance(trace, Texts) else read_texts(trace)
    budget = texts.max_tokens if max_tokens is None else max_tokens
    if budget > texts.max_tokens:
        raise DraftwellError(
            f"the trace holds texts of {texts.max_tokens} tokens, not {budget}: lower max_tokens "
            "or collect longer ones",
            code="texts_too_short",
        )
    strategy = _replayable(strategy_name, parameters, resources, texts)
    sampling = Sampling(max_tokens=budget, stop_token_ids=texts.stop_token_ids)
    longest = max(len(text.ids) for text in texts.texts)
    costs = costs_of(profile, strategy.overlaps, longest)
    chains = profile.details is not None and profile.details.chains and texts.temperature == 0
    results, exact = [], True
    for text in texts.texts:
        models = {
            role: TraceModel(text, role, extend=extend, chains=chains and role == "draft")
            for role in strategy.roles
        }
        session = Session(text.prompt, sampling, models)
        _, seconds, _ = play(strategy.run(session), models, costs)
        stats, output = session.stats, session.text.output
        if output != text.output[:budget]:
            raise RuntimeError(
                f"{strategy_name} is declared lossless, but its replay of {text.name} "
                "differs from the target's text"
            )
        stats.emitted = len(output)
        exact = exact and not any(model.extended for model in models.values())
        results.append(PromptReplay(text.name, stats, seconds + stats.target_calls * costs.round))
    total = Stats.total(result.stats for result in results)
    seconds = sum(result.seconds for result in results)
    return ReplayResult(total, seconds / total.emitted, results, exact)


def _replayable(
    name: str, parameters: Mapping[str, Any], resources: StrategyResources, texts: Texts
) -> Strategy:
    """The strategy with artifacts of its own, where a trace has all that it asks for.

    Raises:
        DraftwellError: it is lossy (`cannot_replay_lossy`), or asks for what no trace has.
    """
    settings = dict(parameters)
    if texts.temperature > 0:
        for field, value in find_strategy(name).sampled_defaults:
            if settings.get(field) is None:
                settings[field] = value
    # a replay's own requests are greedy
    strategy = build_strategy(name, settings, resources.at(texts.temperature).private())
    if not strategy.lossless:
        raise DraftwellError(
            f"strategy {name} is lossy, so it writes other texts than the trace: measure it "
            "instead",
            code="cannot_replay_lossy",
        )
    for field, value in strategy.not_in_traces:
        if getattr(strategy.config, field) == value:
            raise NotInTrace(
                f"{name} with {field}={value} needs more than a trace for a replay: measure instead"
            )
    return strategy


def play(
    steps: Generator[Any, Any, Any], models: Mapping[Role, TraceModel], costs: ReplayCosts
) -> tuple[Any, float, float]:
    """Drive a strategy's generator, or a side of an overlap, to its end.

    Nothing waits, nothing is batched and no clock is read, so no engine is needed. The sides of an
    overlap are played one after the other: they share counters only.

    Returns:
        the generator's value, and its predicted seconds: alone, and while the other model runs too.
    """
    reply: Any = None
    alone = busy = 0.0
    while True:
        try:
            command = steps.send(reply)
        except StopIteration as stop:
            return stop.value, alone, busy
        if isinstance(command, Overlap):
            played = [play(side, models, costs) for side in command.sides]
            seconds = costs.together([(one, other) for _, one, other in played])
            alone, busy = alone + seconds, busy + seconds
            reply = tuple(value for value, _, _ in played)
            continue
        model = models[command.model]
        rest = costs.figure * model.take_figures() + (
            costs.token * command.steps if command.model == "draft" else 0.0
        )
        alone += costs.alone.seconds(command, model.length) + rest
        busy += costs.busy.seconds(command, model.length) + rest
        reply = model.answer(command)
