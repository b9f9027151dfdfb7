"""How much is drafted under load, so that many requests at once are not slower than with plain
decoding.

Every running request has a limit on the length of its drafts (`Session.draft_limit`). How long
drafts are on average is found out by trying (draft_length.py), for each kind of load: the
strategies, the number of requests, how many of them are limited and the length of their texts.
Predicted costs (costs.py), the acceptance of recent drafts and the prompt tokens per generated
token say only where to begin. The tokens of a round are then given to the requests whose drafts are
likely to be kept (draft_budget.py). Within the limit strategies decide as before.

A limit changes which random numbers an answer uses, and which tokens a lossy strategy keeps. So
requests whose answer must not depend on other traffic have none (`repeats`): they draft as much as
their config says. Sampled ones with a seed come here with an exact strategy that drafts only if
they named it; others are sent to plain decoding (http/service.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import log2

from draftwell.serving.artifacts.forward_costs import seconds_at
from draftwell.serving.runtime.commands import Role
from draftwell.serving.runtime.engine.engine import Engine
from draftwell.serving.runtime.requests import Sampling
from draftwell.serving.runtime.session.session import UNLIMITED, Session
from draftwell.serving.runtime.strategies import Strategy
from draftwell.serving.runtime.strategies.lossless.autoregressive import Autoregressive
from draftwell.serving.server.scheduling.costs import LONGEST, BatchCosts
from draftwell.serving.server.scheduling.draft_budget import Drafting, give_out
from draftwell.serving.server.scheduling.draft_length import DraftLength, best_of
from draftwell.serving.server.scheduling.recent_traffic import Acceptance, Prompts, UsualLoad

Running = Sequence[tuple[Session, Strategy]]
Load = tuple[frozenset[str], int, int, int, int]
"""A kind of load: names of the strategies that are limited, their longest draft, number of requests
and tokens of a text, both in steps, and the share of limited requests in quarters: drafts of one
beside seven others change the time of a round less than those of eight."""

PROBE_EVERY = 32
"""While no request may draft, every recorded request whose text this cannot change drafts one token
every this many steps: its draft then reads the tokens that it has missed
(serving/recording/recorder.py). One prediction that may not be used does so, to notice when
predictions improve."""
LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, LONGEST)
"""Draft lengths that are compared, as far as the strategies draft as much; their longest draft is
one too."""
REQUEST_KEPT = 0.97
"""Weight of a request's own earlier tokens after each round: one that drafts nothing for long is
given a try again."""
MOST_KINDS = 256
"""Kinds of load that are remembered; that which was not met for longest is forgotten."""


@dataclass
class LoadControl:
    """Sets the draft limit of every running request, on the scheduler's thread, after each round
    and whenever requests come or go.

    A single request has no limit, nor has one that `repeats`.

    Args:
        costs: of the models that serve.
        measured: find lengths out by trying; False: keep to what the costs predict.
    """

    costs: BatchCosts
    measured: bool = True
    acceptance: dict[str, Acceptance] = field(default_factory=dict)
    predictions: Acceptance = field(default_factory=Acceptance)
    """Of clients' predictions, whatever the strategy: they have a limit of their own."""
    prompts: Prompts = field(default_factory=Prompts)
    """Of requests that use a draft model."""
    lengths: dict[Load, DraftLength] = field(default_factory=dict)
    current: DraftLength | None = None
    """Of the load that there is; None: nobody's drafts are limited."""
    last: dict[str, int] = field(default_factory=dict)
    """Strategy → the longest of its last limits; for `describe`."""
    given: int = 0
    """Draft tokens that the last round gave out to all limited requests together."""
    switches: int = 0
    """How often another length was put in force, by what was measured."""
    _steps: int = 0
    _now: float = 0.0
    """Seconds, by the clock that rounds are timed with."""
    _own: dict[Session, Acceptance] = field(default_factory=dict)
    _seen: dict[Session, tuple[int, int, int, int, bool]] = field(default_factory=dict)
    _usual: UsualLoad = field(default_factory=UsualLoad)
    _load: Load | None = None
    _used: dict[Load, float] = field(default_factory=dict)
    """Kind of load → when it was there last."""
    _limited: set[Session] = field(default_factory=set)
    _whole: bool = True
    """Whether the length in force has been the same since the last round ended."""
    _renewed: BatchCosts | None = None
    """Costs that the scheduler's thread has not taken up yet."""

    def renew(self, costs: BatchCosts) -> None:
        """Other models or settings serve from now on: their costs, and nothing of what the earlier
        ones' drafts taught. From any thread: the scheduler's takes it up when it limits drafts
        next."""
        self._renewed = costs

    def _take_up(self) -> None:
        costs, self._renewed = self._renewed, None
        if costs is not None:
            self.costs, self.acceptance, self.lengths, self.current = costs, {}, {}, None
            self._load, self._used = None, {}

    def limit(self, strategy: Strategy, running: int, sampling: Sampling | None = None) -> int:
        """Longest draft of a request that comes, `running` of them being there with it; UNLIMITED
        or less.

        Args:
            sampling: the request's; None: the answer may depend on the limit.
        """
        self._take_up()
        if running == 1 or not limits(strategy, sampling):
            return UNLIMITED
        wanted = (
            self.current.length
            if self.current
            else best_of(self._predicted([strategy], running, None))
        )
        limit = min(wanted, longest_of(strategy))
        self.last[strategy.name] = limit
        return limit

    def predicted_limit(self, strategy: Strategy, running: int, sampling: Sampling) -> int:
        """Longest draft of a request's prediction while `running` requests run: it costs its
        verification only."""
        if running == 1 or not sampling.prediction or repeats(strategy, sampling):
            return UNLIMITED
        return best_prediction(self.costs, running, round(self.predictions.rate, 2))

    def apply(self, engine: Engine, running: Running) -> None:
        """Learn from the round that has ended, if one has, and limit the drafts that begin next."""
        self._take_up()
        self._learn(running)
        self._steps, self._now = self._steps + 1, engine.meter.clock()
        limited = [
            (session, strategy)
            for session, strategy in running
            if len(running) > 1 and limits(strategy, session.sampling)
        ]
        ended, sessions = engine.meter.take(), {session for session, _ in limited}
        if ended and self.current:
            before = self.current.switches
            self.current.observe(
                ended.tokens,
                ended.seconds + self._reading(limited) * ended.tokens,
                clean=ended.clean and self._whole,
            )
            self.switches += self.current.switches - before
        if ended:
            self._whole = True
            self._usual.learn(len(running), context_of(running))
        if ended or sessions != self._limited or len(running) == 1:
            for session, strategy in running:
                session.draft_limit = UNLIMITED
                session.predicted_limit = self.predicted_limit(
                    strategy, len(running), session.sampling
                )
                if session not in sessions and strategy.name != Autoregressive.name:
                    self.last[strategy.name] = session.draft_limit
            self._limit_drafts(limited, running)
        self._limited = sessions
        engine.patience = patience_of(running)
        # cores are divided only for models that run at the same time
        engine.split = (
            None
            if any(strategy.overlaps and session.draft_limit > 0 for session, strategy in running)
            else False
        )
        if self._steps % PROBE_EVERY == 0:
            self._probe(running)

    def describe(self) -> dict[str, object]:
        """For `/health`: the source of the costs, the limits of the last round (null: none), and
        what is known of draft lengths under the load that there is."""
        limits = {
            name: None if limit == UNLIMITED else limit for name, limit in dict(self.last).items()
        }
        speeds = {
            str(length): round(speed, 1) for length, speed in self.tokens_per_second().items()
        }
        return {
            "costs": (self._renewed or self.costs).source,
            "draft_limits": limits,
            "draft_length": self.draft_length,
            "tokens_per_second": speeds,
            "control_share": round(self.control_share, 4),
        }

    @property
    def draft_length(self) -> int | None:
        """Draft tokens in force for each request, on average; None: drafts are as long as their
        strategies make them."""
        # it may change meanwhile: this is asked from other threads
        current = None if self._renewed else self.current
        return current.in_force if current else None

    def tokens_per_second(self) -> dict[int, float]:
        """Draft length → tokens per second of all requests together, under the load that there is;
        empty where nothing is limited."""
        current = None if self._renewed else self.current
        return current.tokens_per_second() if current else {}

    @property
    def control_share(self) -> float:
        """Share of the rounds so far, where drafts were limited, that compared another length."""
        kinds = list(self.lengths.values())
        tried = sum(kind.rounds_in_trials for kind in kinds)
        return tried / max(1, tried + sum(kind.rounds_in_force for kind in kinds))

    def _limit_drafts(self, limited: Running, running: Running) -> None:
        """Give out the draft tokens of a round."""
        if not limited:
            self.current, self._load, self.given = None, None, 0
            return
        count, context = self._usual.beside(len(running), context_of(running))
        strategies = [strategy for _, strategy in limited]
        before = self.current and (self.current, self.current.length)
        self.current = self._known(strategies, count, context, len(strategies) / len(running))
        length = self.current.length
        if before != (self.current, length):
            self._whole = False
        rates = [
            self.acceptance.setdefault(strategy.name, Acceptance()).rate for strategy in strategies
        ]
        shares = [0] * len(limited)
        if length:
            wishes = [
                self._drafting(session, strategy, rate, length, len(running))
                for (session, strategy), rate in zip(limited, rates, strict=True)
            ]
            shares = give_out(length * len(limited), wishes)
        self.given = sum(shares)
        for name in {strategy.name for strategy in strategies}:
            self.last[name] = max(
                share
                for share, strategy in zip(shares, strategies, strict=True)
                if strategy.name == name
            )
        for (session, _), share in zip(limited, shares, strict=True):
            session.draft_limit = share
            self._own[session].fade(REQUEST_KEPT)

    def _known(
        self, strategies: Sequence[Strategy], running: int, context: float, limited: float
    ) -> DraftLength:
        """What is known of draft lengths under a load.

        Args:
            limited: share of the requests that are.
        """
        names, longest = (
            frozenset(strategy.name for strategy in strategies),
            max(map(longest_of, strategies)),
        )
        share = round(4 * limited)
        load: Load = (
            names,
            longest,
            round(2 * log2(running)),
            round(log2(max(context, 64)) / 2),
            share,
        )
        predicted, before = self._predicted(strategies, running, context), self.current
        previous, self._load = self._load, load
        away, self._used[load] = self._now - self._used.get(load, self._now), self._now
        if (known := self.lengths.pop(load, None)) is not None:
            # the last one: that which was not met for longest is forgotten first
            self.lengths[load] = known
            after_long = known.outdated(away)
            if load != previous or after_long:
                known.come_back(after_long=after_long)
            known.expect(predicted)
            return known
        if len(self.lengths) >= MOST_KINDS:
            oldest = next(iter(self.lengths))
            del self.lengths[oldest], self._used[oldest]
        begin = (
            before.in_force
            if before and before.compared and previous and previous[:2] == load[:2]
            else None
        )
        self.lengths[load] = DraftLength(predicted, begin, measured=self.measured)
        return self.lengths[load]

    def _predicted(
        self, strategies: Sequence[Strategy], running: int, context: float | None
    ) -> dict[int, float]:
        """Draft length → tokens per second of all requests, by predicted costs."""
        longest = max(map(longest_of, strategies))
        lengths = sorted({length for length in LENGTHS if length <= longest} | {longest})
        times = [self._seconds_per_token(strategy, running, context) for strategy in strategies]
        return {
            length: running * len(times) / sum(seconds[length] for seconds in times)
            for length in lengths
        }

    def _seconds_per_token(
        self, strategy: Strategy, running: int, context: float | None
    ) -> Sequence[float]:
        alpha = round(self.acceptance.setdefault(strategy.name, Acceptance()).rate, 2)
        return seconds_per_token(
            self.costs,
            running,
            alpha,
            "draft" in strategy.roles,
            bool(strategy.overlaps),
            strategy.draft_share,
            round(self.prompts.rate, 1),
            context and 2.0 ** round(log2(max(context, 1))),
        )

    def _reading(self, limited: Running) -> float:
        """Seconds for each token in which drafts read prompts: rounds in which that happens are not
        compared, so it is added to all."""
        if not limited or self.current is None or self.current.length == 0:
            return 0.0
        with_draft = sum("draft" in strategy.roles for _, strategy in limited)
        return with_draft / len(limited) * self.prompts.rate * self.costs.seconds_to_read

    def _drafting(
        self, session: Session, strategy: Strategy, rate: float, length: int, running: int
    ) -> Drafting:
        """What is known of a request's next draft, of which `length` tokens are the average."""
        role: Role = "draft" if "draft" in strategy.roles else "target"
        part = 1.0 if role == "draft" else strategy.draft_share
        row, step = draft_prices(self.costs, running, length, role, part)
        row += part * self.costs.reading(role, len(session.text.ids))
        return Drafting(
            self._own[session].rate_beside(rate),
            max(row, 1e-6),
            step,
            strategy.name,
            min(longest_of(strategy), 2 * length),
        )

    def _probe(self, running: Running) -> None:
        unused = next((session for session, _ in running if session.predicted_limit == 0), None)
        if unused is not None:
            unused.predicted_limit = 1
        for session, strategy in running:
            if (
                session.draft_limit == 0
                and session.recorded
                and "draft" in session.lanes
                and indifferent(strategy, session.sampling)
            ):
                session.draft_limit = 1  # recording changes no answer

    def _learn(self, running: Running) -> None:
        seen, own = {}, {session: self._own.get(session) or Acceptance() for session, _ in running}
        for session, strategy in running:
            # the acceptance of a prediction, or of what a grammar forces, says nothing of the
            # strategy's
            stats = session.stats
            predicted, fitted = stats.predicted_judged, stats.predicted_accepted
            judged = stats.judged - predicted - stats.forced_judged
            accepted = stats.accepted - fitted - stats.forced_accepted
            before, kept, predicted_before, fitted_before, _ = self._seen.get(
                session, (0, 0, 0, 0, False)
            )
            if judged > before:
                for learnt in (
                    self.acceptance.setdefault(strategy.name, Acceptance()),
                    own[session],
                ):
                    learnt.learn(judged - before, accepted - kept)
            if predicted > predicted_before:
                self.predictions.learn(predicted - predicted_before, fitted - fitted_before)
            seen[session] = judged, accepted, predicted, fitted, "draft" in strategy.roles
        for session, (*_, drafts) in self._seen.items():
            # at the end of a request, when all of its tokens are known
            if drafts and session not in seen:
                self.prompts.learn(
                    session.text.prompt_length, len(session.text.ids) - session.text.prompt_length
                )
        self._seen, self._own = seen, own


def context_of(running: Running) -> float:
    """Tokens of a text, on average; 0 where nobody runs."""
    return sum(len(session.text.ids) for session, _ in running) / max(1, len(running))


def patience_of(running: Running) -> int | None:
    """Draft passes that a pass of the target waits for: as many as the longest draft that has a
    limit needs, and one for what the draft model has missed. None where nobody would wait for one
    who has no limit: all draft as long as they like, or nobody does."""
    free = [
        session.draft_limit == UNLIMITED and strategy.name != Autoregressive.name
        for session, strategy in running
    ]
    if all(free) or not any(free):
        return None
    longest = max(
        (
            session.draft_limit
            for session, strategy in running
            if strategy.name != Autoregressive.name and session.draft_limit != UNLIMITED
        ),
        default=0,
    )
    return longest + 1 if longest else 0


def indifferent(strategy: Strategy, sampling: Sampling) -> bool:
    """Whether a request's text is the same whatever the limit: greedy text of an exact strategy."""
    return sampling.greedy and strategy.lossless


def repeats(strategy: Strategy, sampling: Sampling) -> bool:
    """Whether a request has no limit, because its answer must be the same whatever else runs and a
    limit could change it."""
    if indifferent(strategy, sampling):
        return False
    # a random seed repeats nothing
    return sampling.repeatable or (strategy.resources.deterministic and not strategy.lossless)


def limits(strategy: Strategy, sampling: Sampling | None) -> bool:
    """Whether a request among others has a limit that changes; without its sampling: whether its
    strategy drafts at all."""
    return strategy.name != Autoregressive.name and (
        sampling is None or not repeats(strategy, sampling)
    )


def longest_of(strategy: Strategy) -> int:
    """Tokens of a strategy's longest draft beside other requests, as far as lengths are
    compared."""
    return 0 if strategy.drafts_alone else min(strategy.longest_draft or LONGEST, LONGEST)


@lru_cache(4096)
def draft_prices(
    costs: BatchCosts, running: int, length: int, role: Role, part: float
) -> tuple[float, float]:
    """Seconds of one more draft token in passes that run anyway, and of a pass that drafts.

    Args:
        length: tokens that `running` requests draft on average.
        role: the model that drafts, of which a step takes `part` of a pass.
    """
    row = costs.seconds_per_row(running, length) + costs.per_token
    step = part * seconds_at(costs.draft if role == "draft" else costs.target, 1)
    # else every request pays for passes of its own
    return (row, step) if costs.batched else (row + step, 0.0)


@lru_cache(4096)
def best_prediction(costs: BatchCosts, running: int, alpha: float) -> int:
    """`BatchCosts.best_gamma` of drafts that no model makes, cached, because every round asks for
    it."""
    return costs.best_gamma(running, alpha, drafts=False)


@lru_cache(4096)
def seconds_per_token(
    costs: BatchCosts,
    running: int,
    alpha: float,
    drafts: bool,
    overlaps: bool,
    share: float,
    prompt: float,
    context: float | None,
) -> tuple[float, ...]:
    """`BatchCosts.seconds_per_token` of drafts of 0 to `LONGEST` tokens, cached, because every
    round asks for it."""
    return tuple(
        max(
            1e-9,
            costs.seconds_per_token(
                running,
                length,
                alpha,
                drafts=drafts,
                overlaps=overlaps,
                share=share,
                prompt=prompt,
                context=context,
            ),
        )
        for length in range(LONGEST + 1)
    )
