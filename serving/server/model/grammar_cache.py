"""Compiled grammars, kept for those who asked for them.

Whether a grammar is there shows in the time that a request takes. So nobody finds those of others,
and when there is no more room, who has the most gives way: nobody loses any while it has less than
its share, whatever the others ask for.
"""

from __future__ import annotations

import threading

from draftwell.serving.runtime.grammar.guidance import GuidanceGrammar

GRAMMARS_KEPT = 64
Owner = tuple[str, str]
"""A tenant, and the `cache_salt` of its request."""


class GrammarCache:
    """Grammars by owner and definition; any thread may use it, and none waits for long.

    Args:
        capacity: grammars of all tenants together.
    """

    def __init__(self, capacity: int = GRAMMARS_KEPT):
        self.capacity = capacity
        self._lock = threading.Lock()
        # by salt and definition, the one asked for last at the end
        self._tenants: dict[str, dict[tuple[str, str], GuidanceGrammar]] = {}

    def get(self, owner: Owner, definition: str) -> GuidanceGrammar | None:
        """A grammar that is kept for this owner, else None."""
        tenant, salt = owner
        with self._lock:
            own = self._tenants.get(tenant, {})
            found = own.pop((salt, definition), None)
            if found is not None:
                own[salt, definition] = found
            return found

    def put(self, owner: Owner, definition: str, grammar: GuidanceGrammar) -> None:
        """Keep a grammar; beyond the capacity the tenant with the most loses the one that it has
        not asked for for longest."""
        tenant, salt = owner
        with self._lock:
            self._tenants.setdefault(tenant, {})[salt, definition] = grammar
            if sum(map(len, self._tenants.values())) > self.capacity:
                most = max(self._tenants, key=lambda one: len(self._tenants[one]))
                del self._tenants[most][next(iter(self._tenants[most]))]
