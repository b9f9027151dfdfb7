"""Replay: what a strategy would have done on traced prompts, exactly, and how long it would have taken.

The strategy's own generator runs over trace models, so there is no second implementation of anything. At temperature 0
in float32 a lossless strategy makes the same target calls, draft calls and accepted tokens as in a real run, prompt by
prompt (in order, one at a time, state carried). Time is predicted from a hardware profile.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

from serving.runtime.artifacts.hardware_profile import HardwareProfile
from serving.runtime.engine import Engine
from serving.runtime.models.trace_model import TracedText, TraceModel
from serving.runtime.session import Session
from serving.runtime.stats import Stats
from serving.runtime.strategies import Kit, Strategy, StrategyConfig, build_strategy
from serving.runtime.trace import TraceError, TraceSet
from serving.runtime.types import DraftwellError, Forward, Model, Overlap, Role, Sampling, Step

COLUMNS = ("prompt_id", "turn", "kind", "position", "prompt_tokens", "token", "rollout_tokens", "rollout_confidence", "rollout_entropy")


@dataclass(frozen=True)
class PromptReplay:
    """One text as replayed: its counters, and the seconds it would take."""

    name: str
    stats: Stats
    seconds: float


@dataclass(frozen=True)
class ReplayResult:
    """A strategy replayed over a trace.

    Args:
        stats: counters over all texts.
        predicted_seconds_per_token: of the whole, prefill included.
        exact: False where a draft ran behind the end of a rollout (only with `extend`).
    """

    stats: Stats
    predicted_seconds_per_token: float
    per_prompt: list[PromptReplay]
    exact: bool


@dataclass(frozen=True)
class Texts:
    """The texts of a trace that can be replayed, read once for many replays."""

    texts: list[TracedText]
    max_tokens: int
    stop_token_ids: frozenset[int]
    rollout: int


def read_texts(trace: TraceSet, limit: int | None = None) -> Texts:
    """The target's own greedy texts of a trace.

    Raises:
        TraceError: the trace holds none, or is not fit to be read.
    """
    header = trace.header
    if header.temperature > 0:
        raise TraceError(f"{trace.folder} was sampled at temperature {header.temperature}: replay needs one collected at 0")
    columns = {name: column.to_pylist() for name, column in zip(COLUMNS, trace.read(COLUMNS).columns, strict=True)}
    starts = [i for i, position in enumerate(columns["position"]) if position == 0]
    texts = [_text(columns, slice(start, end)) for start, end in zip(starts, [*starts[1:], len(columns["position"])], strict=True)
             if columns["kind"][start] == "target"]
    if not texts:
        raise TraceError(f"{trace.folder} holds no text written by the target: collect with the prefix kind target")
    return Texts(texts[:limit], header.max_tokens, frozenset(header.stop_token_ids), header.rollout)


def _text(columns: Mapping[str, list[Any]], rows: slice) -> TracedText:
    prompt = columns["prompt_tokens"][rows.start]
    turn = columns["turn"][rows.start]
    return TracedText(columns["prompt_id"][rows.start] + (f", turn {turn + 1}" if turn else ""), prompt + columns["token"][rows],
                      len(prompt), columns["rollout_tokens"][rows], columns["rollout_confidence"][rows],
                      columns["rollout_entropy"][rows])


def replay(trace: TraceSet | Texts, strategy_name: str, parameters: Mapping[str, Any], kit: Kit, profile: HardwareProfile, *,
           max_tokens: int | None = None, overlap: bool = True, extend: bool = False) -> ReplayResult:
    """Run a strategy over a trace.

    Args:
        kit: artifacts of the strategy; replay works on copies, so that it changes no state.
        profile: of the device that time is predicted for.
        max_tokens: emit at most this many, at most the trace's own number; None takes that.
        overlap: forwards that a strategy overlaps take as long as the slower side; False adds them up.
        extend: go on where a rollout ends (see `TraceModel`) instead of raising `RolloutExhausted`.
    Raises:
        DraftwellError: a lossy strategy, a longer text than traced, parameters that are out of bounds.
        RolloutExhausted: the parameters let a draft run on behind its first wrong token for more than K tokens.
    """
    texts = trace if isinstance(trace, Texts) else read_texts(trace)
    budget = texts.max_tokens if max_tokens is None else max_tokens
    if budget > texts.max_tokens:
        raise DraftwellError(f"the trace holds texts of {texts.max_tokens} tokens, not {budget}: lower max_tokens or collect longer ones")
    strategy = build_strategy(strategy_name, dict(parameters), kit.private())
    if not strategy.lossless:
        raise DraftwellError(f"strategy {strategy_name} is lossy, so a trace does not tell what it writes: measure it instead")
    sampling = Sampling(max_tokens=budget, stop_token_ids=texts.stop_token_ids)
    results, exact = [], True
    for text in texts.texts:
        clock = Clock(profile.when(strategy.overlaps), overlap)
        models: dict[Role, Model] = {role: TraceModel(text, role, extend=extend) for role in strategy.roles}
        job = Engine(models).generate(text.prompt, sampling, Clocked(strategy, clock))
        if job.output != text.output[:budget]:
            raise RuntimeError(f"{strategy_name} is called lossless, but its replay of {text.name} left the target's text")
        exact = exact and not any(isinstance(model, TraceModel) and model.extended for model in models.values())
        stats = job.session.stats
        results.append(PromptReplay(text.name, stats, clock.seconds + stats.target_calls * profile.t_rest))
    total = Stats.total(result.stats for result in results)
    return ReplayResult(total, sum(result.seconds for result in results) / total.emitted, results, exact)


class Clock:
    """Seconds of forwards, from a profile."""

    def __init__(self, profile: HardwareProfile, overlap: bool):
        self.profile, self.overlap, self.seconds = profile, overlap, 0.0

    def count(self, command: Forward) -> None:
        """Add a forward. One of the draft over k tokens costs as many times one over 1 as it does for the target."""
        tokens = len(command.tokens)
        if command.model == "target":
            self.seconds += self.verify_seconds(tokens)
        else:
            self.seconds += self.profile.t_draft * self.verify_seconds(tokens) / self.verify_seconds(1)

    def verify_seconds(self, tokens: int) -> float:
        """Seconds of a target forward; beyond the measured sizes (a prompt's) never less than at the largest of them."""
        largest = max(self.profile.t_verify)
        return max(self.profile.verify_seconds(tokens), self.profile.verify_seconds(min(tokens, largest)))

    def watch(self, steps: Generator[Any, Any, Any]) -> Step[Any]:
        """The same generator, with its forwards counted."""
        reply = None
        while True:
            try:
                command = steps.send(reply)
            except StopIteration as stop:
                return stop.value
            if isinstance(command, Overlap):
                clocks = [Clock(self.profile, self.overlap) for _ in command.sides]
                reply = yield Overlap(*(clock.watch(side) for clock, side in zip(clocks, command.sides, strict=True)))
                seconds = [clock.seconds for clock in clocks]
                self.seconds += max(seconds) if self.overlap else sum(seconds)
            else:
                self.count(command)
                reply = yield command


class Clocked(Strategy):
    """A strategy under a clock."""

    name = "clocked"
    lossless = True
    paper = "-"
    Config = StrategyConfig

    def __init__(self, strategy: Strategy, clock: Clock):
        super().__init__(strategy.config, strategy.kit)
        self.strategy, self.clock = strategy, clock

    def run(self, session: Session) -> Step[None]:
        yield from self.clock.watch(self.strategy.run(session))

    def choose_models(self, models: Mapping[Role, Model]) -> dict[Role, Model]:
        return self.strategy.choose_models(models)
