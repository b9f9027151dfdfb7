"""Lineage: from a version back to the traces it was made from."""

from __future__ import annotations

from dataclasses import dataclass

from registry.folders import base_pair
from registry.store import Published, Store


@dataclass(frozen=True)
class Lineage:
    """Where a version comes from; `published` is None for a parent that the registry does not hold."""

    kind: str
    digest: str
    published: Published | None = None
    trace_digest: str | None = None
    git_commit: str | None = None
    parents: tuple[Lineage, ...] = ()


def trace(store: Store, published: Published, pair: str) -> Lineage:
    """The lineage of a version; parents are found by their digest among the versions of their kind."""
    parents, base = [], base_pair(published.kind, pair)
    for kind, digest in published.parents.items():
        same = [version for version in store.versions(kind, base) if version.digest == digest]
        parents.append(trace(store, same[-1], base) if same else Lineage(kind, digest))
    tags = published.tags
    return Lineage(published.kind, published.digest, published, tags.get("trace_digest") or None,
                   tags.get("git_commit") or None, tuple(parents))
