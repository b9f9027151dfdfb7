"""The strategies that a server decodes with, and what they learn from its requests.

Tables, memories and adaptive thresholds are *online state*: every verification may change them.
Three modes set whose requests share it:

- `shared`: one state for all clients. It learns most and is fastest, but a client with unusual
  traffic changes it for all.
- `tenant`: one for each client, so that none can poison another's; the least recently used are
  dropped when there are too many.
- `off`: a copy for every request; nothing is learnt, and an answer never depends on an earlier one.

Every state starts as a copy of the bundle's artifacts, which are never written to. A state has
bounded size (see `AcceptanceTable`, `CorrectionMemory` and `adaptive`) and is changed only by the
scheduler's thread; any thread may copy it at any time.
"""

from __future__ import annotations

import operator
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import AfterValidator, Field

from draftwell.serving.artifacts.acceptance_table import MIDPOINTS, AcceptanceTable
from draftwell.serving.artifacts.base import Artifact
from draftwell.serving.artifacts.correction_memory import (
    MAX_PAIRS,
    MOST_SEEN,
    CorrectionMemory,
)
from draftwell.serving.artifacts.decoding_config import DecodingConfig
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import (
    STRATEGIES,
    Strategy,
    StrategyChoice,
    StrategyResources,
    build_strategy,
    find_strategy,
    served_choice,
)
from draftwell.serving.server.settings import StateSharing
from draftwell.serving.temperature import class_of

PLAIN = "autoregressive"
"""The strategy without speculation, which every server offers."""
MOST_TENANTS = 32
"""Most states of tenants; each takes at most about 13 MB, with a full correction memory."""
SAMPLED = "sampled:"
"""Before the name of the strategy that was tuned for sampled requests, where it keeps what it
learns apart from the greedy one."""
EVERYBODY = ""
"""Name of the shared state; in mode `tenant` the state of requests without a key."""


Count = Annotated[int, Field(ge=0)]
Bins = Annotated[list[Count], Field(min_length=len(MIDPOINTS), max_length=len(MIDPOINTS))]


def no_more_than_all(bins: tuple[list[int], list[int]]) -> tuple[list[int], list[int]]:
    """Refuse acceptance rates above 1."""
    if any(accepted > total for total, accepted in zip(*bins, strict=True)):
        raise ValueError("more tokens accepted than verified")
    return bins


Rejections = list[tuple[Count, Count, Annotated[int, Field(ge=1, le=MOST_SEEN)]]]


def each_pair_once(memory: Rejections) -> Rejections:
    """Refuse a memory that counts a pair twice."""
    if len({(drafted, right) for drafted, right, _ in memory}) != len(memory):
        raise ValueError("the memory names a pair twice")
    return memory


Table = Annotated[tuple[Bins, Bins], AfterValidator(no_more_than_all)]


@dataclass(frozen=True)
class Learnt:
    """A copy of a state as plain data: what differs from the bundle. pydantic checks one that is
    read from a file.

    Args:
        table: the acceptance table's (total, accepted) by bin; None if no strategy used one.
        sampled_table: the same of its counts for sampled requests; None where it has none.
        memory: draft token, correction and count of the correction memory, in its order.
        strategies: name, or `SAMPLED` key → what `Strategy.learnt` returned, if not empty.
    """

    table: Table | None = None
    memory: (
        Annotated[Rejections, Field(max_length=MAX_PAIRS), AfterValidator(each_pair_once)] | None
    ) = None
    strategies: dict[str, dict[str, float]] = field(default_factory=dict)
    sampled_table: Table | None = None


class UnknownStrategy(DraftwellError):
    """A client named a strategy that this server does not offer."""

    code = "unknown_strategy"

    def __init__(self, name: str | None, offered: Collection[str]):
        super().__init__(
            f"this server has no strategy {name!r}: choose one of {', '.join(offered)}"
        )


class State:
    """Strategies and artifacts of one group of requests; both are created when first needed.

    Args:
        bundle: kind → artifact; those that requests write to are copied.
        learnt: where to start instead of the bundle's counts.
    """

    def __init__(
        self,
        bundle: Mapping[str, Artifact],
        special_tokens: frozenset[int],
        *,
        deterministic: bool = False,
        learnt: Learnt | None = None,
    ):
        self._bundle, self._special_tokens, self._deterministic = (
            bundle,
            special_tokens,
            deterministic,
        )
        self._resumed = learnt or Learnt()
        self._artifacts: dict[str, Artifact] = {}
        self._strategies: dict[str, Strategy] = {}

    def strategy(self, choice: StrategyChoice, key: str | None = None) -> Strategy:
        """The strategy of a choice.

        Args:
            key: what it is kept under; None: its name. Its parameters are those of the first call.
        """
        key = key or choice.name
        if key not in self._strategies:
            kinds = [kind for kind in find_strategy(choice.name).reads() if kind in self._bundle]
            resources = StrategyResources(
                {kind: self._artifact(kind) for kind in kinds},
                self._special_tokens,
                self._deterministic,
            )
            built = build_strategy(choice.name, dict(choice.parameters), resources)
            if choice.draft_length_by_batch:
                built.draft_length_by_batch = choice.draft_length_by_batch
            if key in self._resumed.strategies:
                built.resume(self._resumed.strategies[key])
            self._strategies[key] = built
        return self._strategies[key]

    def learnt(self) -> Learnt:
        """A copy of what was learnt, from any thread; each part is consistent in itself."""
        table, memory = (
            self._artifacts.get(kind) for kind in (AcceptanceTable.kind, CorrectionMemory.kind)
        )
        counts = table.copy() if isinstance(table, AcceptanceTable) else None
        known = {
            name: found
            for name, strategy in self._strategies.copy().items()
            if (found := strategy.learnt())
        }
        sampled = counts.sampled if counts else None
        pairs = self._resumed.memory
        if isinstance(memory, CorrectionMemory):
            pairs = [(*pair, count) for pair, count in memory.copy().counts.items()]
        return Learnt(
            (counts.total, counts.accepted) if counts else self._resumed.table,
            pairs,
            {**self._resumed.strategies, **known},
            (sampled.total, sampled.accepted) if sampled else self._resumed.sampled_table,
        )

    def _artifact(self, kind: str) -> Artifact:
        if kind not in self._artifacts:
            self._artifacts[kind] = self._own(self._bundle[kind])
        return self._artifacts[kind]

    def _own(self, artifact: Artifact) -> Artifact:
        """A copy if requests write to the artifact, else the bundle's own."""
        if isinstance(artifact, AcceptanceTable):
            table, resumed = artifact.copy(), self._resumed
            if table.sampled is not None and resumed.sampled_table is not None:
                table.sampled = table.sampled.with_counts(*resumed.sampled_table)
            return table.with_counts(*resumed.table, table.sampled) if resumed.table else table
        if isinstance(artifact, CorrectionMemory):
            if self._resumed.memory is None:
                return artifact.copy()
            counts = {(drafted, right): count for drafted, right, count in self._resumed.memory}
            return CorrectionMemory(counts, artifact.provenance, artifact.max_pairs)
        return artifact


class StrategyPool:
    """The strategies of a bundle, by name and tenant.

    Args:
        pair: what they decode with.
        artifacts: kind → artifact of the bundle; never written to.
        config: the tuned strategies, for greedy requests and for sampled ones.
        special_tokens: ids of special tokens; None: the pair's.
        mode: whose requests share what is learnt.
        offered: strategies that requests may choose besides the tuned one and plain decoding; None:
            all that models and artifacts allow.
        most_tenants: states kept in mode `tenant`; beyond that the least recently used is dropped.
    """

    def __init__(
        self,
        pair: LoadedPair,
        artifacts: Mapping[str, Artifact],
        config: DecodingConfig,
        special_tokens: frozenset[int] | None = None,
        mode: StateSharing = "shared",
        *,
        offered: Collection[str] | None = None,
        most_tenants: int = MOST_TENANTS,
    ):
        self.mode, self.most_tenants = mode, most_tenants
        self._tuned, self._sampled = served_choice(config, 0), served_choice(config, 1)
        tables = (choice.draft_length_by_batch for choice in (self._tuned, self._sampled))
        # a choice that both classes share has one state
        shared = self._tuned == self._sampled and operator.eq(*tables)
        self._own_sampled = None if shared else self._sampled
        self._offered = offered
        self._bundle = dict(artifacts)
        self._special_tokens = pair.special_tokens if special_tokens is None else special_tokens
        self._states: OrderedDict[str, State] = OrderedDict()
        self._lock = threading.Lock()  # requests and snapshots use the pool from different threads
        self._names = tuple(
            name for name in sorted(STRATEGIES, key=self._rank) if self._fits(name, pair)
        )
        for temperature in (0.0, 1.0):  # finds an invalid config
            self.get(temperature=temperature)

    def names(self) -> tuple[str, ...]:
        """Names for `get`: the tuned strategies, that for greedy requests first, plain decoding,
        then the others that are offered."""
        return self._names

    def get(
        self, name: str | None = None, tenant: str | None = None, temperature: float = 0.0
    ) -> Strategy:
        """A strategy with the state of a request's tenant; the same object for the same name, class
        of temperature and state.

        Args:
            name: None: the one that was tuned for the temperature. Tuned ones have their tuned
                parameters, all others their defaults.
            tenant: name derived from the client's key, None without a key; used in mode `tenant`
                only.
            temperature: of the request.
        Raises:
            UnknownStrategy: it is not offered; the message lists those that are.
        """
        choice, key = self._choice(name, temperature)
        if choice.name not in self._names:
            raise UnknownStrategy(name, self._names)
        with self._lock:
            return self._state(tenant).strategy(choice, key)

    def _choice(self, name: str | None, temperature: float) -> tuple[StrategyChoice, str]:
        """What a request gets, and the key of its state: the choice tuned for its class, then the
        other class's, then defaults."""
        tuned, other = self._tuned, self._sampled
        if class_of(temperature) == "sampled":
            tuned, other = other, tuned
        choice = next((choice for choice in (tuned, other) if name in (None, choice.name)), None)
        if choice is None:
            assert name is not None
            return StrategyChoice(name), name
        return choice, f"{SAMPLED}{choice.name}" if choice is self._own_sampled else choice.name

    def learnt(self) -> dict[str, Learnt]:
        """Tenant → a copy of its state, the least recently used first; `EVERYBODY` if all share
        one. Any thread may call it."""
        if self.mode == "off":
            return {}
        with self._lock:
            states = list(self._states.items())
        return {tenant: state.learnt() for tenant, state in states}

    def resume(self, tenant: str, learnt: Learnt) -> None:
        """Let a tenant's state start from what was learnt before, if the mode keeps such a state.

        Raises:
            ValueError, DraftwellError: it does not fit the bundle's strategies.
        """
        if self.mode == "off" or (self.mode == "shared" and tenant != EVERYBODY):
            return
        state = State(self._bundle, self._special_tokens, learnt=learnt)
        for key in {self._tuned.name, *learnt.strategies}:
            name = key.removeprefix(SAMPLED)
            if name in self._names:
                state.strategy(*self._choice(name, 1.0 if key.startswith(SAMPLED) else 0.0))
        with self._lock:
            self._keep(tenant, state)

    def _state(self, tenant: str | None) -> State:
        key = (tenant or EVERYBODY) if self.mode == "tenant" else EVERYBODY
        if key not in self._states:
            self._keep(
                key, State(self._bundle, self._special_tokens, deterministic=self.mode == "off")
            )
        self._states.move_to_end(key)
        return self._states[key]

    def _keep(self, tenant: str, state: State) -> None:
        self._states[tenant] = state
        self._states.move_to_end(tenant)
        while len(self._states) > max(1, self.most_tenants):
            self._states.popitem(last=False)  # running requests keep theirs until they end

    def _rank(self, name: str) -> tuple[bool, bool, bool]:
        return name != self._tuned.name, name != self._sampled.name, name != PLAIN

    def _fits(self, name: str, pair: LoadedPair) -> bool:
        """Whether a strategy is available: the tuned ones always, so that missing parts raise an
        error; others if they are offered and nothing is missing."""
        if name in (self._tuned.name, self._sampled.name, PLAIN):
            return True
        if self._offered is not None and name not in self._offered:
            return False
        if not set(find_strategy(name).artifacts) <= set(self._bundle):
            return False
        try:
            build_strategy(
                name, {}, StrategyResources(self._bundle, self._special_tokens)
            ).choose_models(pair.models)
        except DraftwellError:  # a model is missing, or a setting has no default
            return False
        return True
