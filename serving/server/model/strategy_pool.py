"""The strategies that a server decodes with, and what they learn from its requests.

Tables, memories and adaptive thresholds are *online state*: every verification may change them. Three modes set whose requests share it:

- `shared`: one state for all clients. It learns most and is fastest, but a client with unusual traffic changes it for all.
- `tenant`: one for each client, so that none can poison another's; the least recently used are dropped when there are too many.
- `off`: a copy for every request; nothing is learnt, and an answer never depends on an earlier one.

Every state starts as a copy of the bundle's artifacts, which are never written to. A state has bounded size (see `AcceptanceTable`,
`CorrectionMemory` and `adaptive`) and is changed only by the scheduler's thread; any thread may copy it at any time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from serving.artifacts.acceptance_table import AcceptanceTable
from serving.artifacts.base import Artifact
from serving.artifacts.correction_memory import CorrectionMemory
from serving.artifacts.decoding_config import DecodingConfig
from serving.errors import DraftwellError
from serving.runtime.pair import LoadedPair
from serving.runtime.strategies import STRATEGIES, Strategy, StrategyResources, build_strategy, find_strategy
from serving.server.settings import StateSharing

PLAIN = "autoregressive"
"""The strategy without speculation, which every server offers."""
MOST_TENANTS = 32
"""Most states of tenants; each takes at most about 13 MB, with a full correction memory."""
EVERYBODY = ""
"""Name of the shared state; in mode `tenant` the state of requests without a key."""


@dataclass(frozen=True)
class Learnt:
    """A copy of a state as plain data: what differs from the bundle.

    Args:
        table: the acceptance table's (total, accepted) by bin; None if no strategy used one.
        memory: counts of the correction memory, in its order.
        strategies: name → what `Strategy.learnt` returned, if not empty.
    """

    table: tuple[list[int], list[int]] | None = None
    memory: dict[tuple[int, int], int] | None = None
    strategies: dict[str, dict[str, float]] = field(default_factory=dict)


class UnknownStrategy(DraftwellError):
    """A client named a strategy that this server does not offer."""

    code = "unknown_strategy"


class State:
    """Strategies and artifacts of one group of requests; both are created when first needed.

    Args:
        bundle: kind → artifact; those that requests write to are copied.
        learnt: where to start instead of the bundle's counts.
    """

    def __init__(self, bundle: Mapping[str, Artifact], special_tokens: frozenset[int], *, deterministic: bool = False,
                 learnt: Learnt | None = None):
        self._bundle, self._special_tokens, self._deterministic = bundle, special_tokens, deterministic
        self._resumed = learnt or Learnt()
        self._artifacts: dict[str, Artifact] = {}
        self._strategies: dict[str, Strategy] = {}

    def strategy(self, name: str, parameters: Mapping[str, Any]) -> Strategy:
        """The strategy of a name; its parameters are those of the first call."""
        if name not in self._strategies:
            kinds = [kind for kind in find_strategy(name).artifacts if kind in self._bundle]
            resources = StrategyResources({kind: self._artifact(kind) for kind in kinds}, self._special_tokens, self._deterministic)
            built = build_strategy(name, dict(parameters), resources)
            if name in self._resumed.strategies:
                built.resume(self._resumed.strategies[name])
            self._strategies[name] = built
        return self._strategies[name]

    def learnt(self) -> Learnt:
        """A copy of what was learnt, from any thread; each part is consistent in itself."""
        table, memory = (self._artifacts.get(kind) for kind in (AcceptanceTable.kind, CorrectionMemory.kind))
        counts = table.copy() if isinstance(table, AcceptanceTable) else None
        known = {name: found for name, strategy in self._strategies.copy().items() if (found := strategy.learnt())}
        return Learnt((counts.total, counts.accepted) if counts else self._resumed.table,
                      memory.copy().counts if isinstance(memory, CorrectionMemory) else self._resumed.memory,
                      {**self._resumed.strategies, **known})

    def _artifact(self, kind: str) -> Artifact:
        if kind not in self._artifacts:
            self._artifacts[kind] = self._own(self._bundle[kind])
        return self._artifacts[kind]

    def _own(self, artifact: Artifact) -> Artifact:
        """A copy if requests write to the artifact, else the bundle's own."""
        if isinstance(artifact, AcceptanceTable):
            table = self._resumed.table
            return AcceptanceTable(*table, artifact.provenance) if table else artifact.copy()
        if isinstance(artifact, CorrectionMemory):
            memory = self._resumed.memory
            return artifact.copy() if memory is None else CorrectionMemory(memory, artifact.provenance, artifact.max_pairs)
        return artifact


class StrategyPool:
    """The strategies of a bundle, by name and tenant.

    Args:
        pair: what they decode with.
        artifacts: kind → artifact of the bundle; never written to.
        config: the tuned strategy.
        special_tokens: ids of special tokens; None: the pair's.
        mode: whose requests share what is learnt.
        offered: strategies that requests may choose besides the tuned one and plain decoding; None: all that models and artifacts
            allow.
        most_tenants: states kept in mode `tenant`; beyond that the least recently used is dropped.
    """

    def __init__(self, pair: LoadedPair, artifacts: Mapping[str, Artifact], config: DecodingConfig,
                 special_tokens: frozenset[int] | None = None, mode: StateSharing = "shared", *,
                 offered: Collection[str] | None = None, most_tenants: int = MOST_TENANTS):
        self.mode, self.tuned, self.most_tenants = mode, config.strategy, most_tenants
        self._offered = offered
        self._parameters: dict[str, dict[str, Any]] = {config.strategy: config.parameters}
        self._bundle = dict(artifacts)
        self._special_tokens = pair.special_tokens if special_tokens is None else special_tokens
        self._states: OrderedDict[str, State] = OrderedDict()
        self._lock = threading.Lock()  # requests and snapshots use the pool from different threads
        self._names = tuple(name for name in sorted(STRATEGIES, key=self._rank) if self._fits(name, pair))
        self.get()  # finds an invalid config

    def names(self) -> tuple[str, ...]:
        """Names for `get`: the tuned strategy, plain decoding, then the others that are offered and possible."""
        return self._names

    def get(self, name: str | None = None, tenant: str | None = None) -> Strategy:
        """A strategy with the state of a request's tenant; the same object for the same name and state.

        Args:
            name: None: the tuned one. It has its tuned parameters, all others their defaults.
            tenant: name derived from the client's key, None without a key; used in mode `tenant` only.
        Raises:
            UnknownStrategy: it is not offered; the message lists those that are.
        """
        name = name or self.tuned
        if name not in self._names:
            raise UnknownStrategy(f"this server has no strategy {name!r}: choose one of {', '.join(self._names)}")
        with self._lock:
            return self._state(tenant).strategy(name, self._parameters.get(name, {}))

    def learnt(self) -> dict[str, Learnt]:
        """Tenant → a copy of its state, the least recently used first; `EVERYBODY` if all share one. Any thread may call it."""
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
        for name in {self.tuned, *(name for name in learnt.strategies if name in self._names)}:
            state.strategy(name, self._parameters.get(name, {}))
        with self._lock:
            self._keep(tenant, state)

    def _state(self, tenant: str | None) -> State:
        key = (tenant or EVERYBODY) if self.mode == "tenant" else EVERYBODY
        if key not in self._states:
            self._keep(key, State(self._bundle, self._special_tokens, deterministic=self.mode == "off"))
        self._states.move_to_end(key)
        return self._states[key]

    def _keep(self, tenant: str, state: State) -> None:
        self._states[tenant] = state
        self._states.move_to_end(tenant)
        while len(self._states) > max(1, self.most_tenants):
            self._states.popitem(last=False)  # running requests keep theirs until they end

    def _rank(self, name: str) -> tuple[bool, bool]:
        return name != self.tuned, name != PLAIN

    def _fits(self, name: str, pair: LoadedPair) -> bool:
        """Whether a strategy is available: the tuned one always, so that missing parts raise an error; others if they are offered and
        nothing is missing."""
        if name in (self.tuned, PLAIN):
            return True
        if self._offered is not None and name not in self._offered:
            return False
        if not set(find_strategy(name).artifacts) <= set(self._bundle):
            return False
        try:
            build_strategy(name, {}, StrategyResources(self._bundle, self._special_tokens)).choose_models(pair.models)
        except DraftwellError:  # a model is missing, or a setting has no default
            return False
        return True
