"""Lineage: from a version back to the traces it was made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from draftwell.registry.folders import base_pair
from draftwell.registry.store import Published, Store
from draftwell.registry.strict import validate
from draftwell.serving.artifacts.base import Provenance, digest_of, read_manifest


@dataclass(frozen=True)
class Lineage:
    """Where an artifact comes from.

    Args:
        published: the version that holds it; None where the registry holds none.
        folder: where it lies, if it was found on this machine and not in the registry.
        parents: what it was made from; of an artifact that is in neither place nothing more is
            known.
    """

    kind: str
    digest: str
    published: Published | None = None
    trace_digest: str | None = None
    git_commit: str | None = None
    parents: tuple[Lineage, ...] = ()
    folder: Path | None = None


def lineage_of(
    store: Store, published: Published, pair: str, folders: Mapping[str, Path] | None = None
) -> Lineage:
    """The lineage of a version; parents are found by their digest.

    Args:
        pair: that the version is registered for, of a release with its device (`<pair>.<device>`).
        folders: digest → folder of artifacts that are not registered.
    """
    base, tags = base_pair(published.kind, pair), published.tags
    parents = tuple(
        find(store, kind, digest, base, folders, published.fingerprint)
        for kind, digest in published.parents.items()
    )
    return Lineage(
        published.kind,
        published.digest,
        published,
        tags.get("trace_digest") or None,
        tags.get("git_commit") or None,
        parents,
    )


def find(
    store: Store,
    kind: str,
    digest: str,
    pair: str,
    folders: Mapping[str, Path] | None = None,
    fingerprint: str = "",
) -> Lineage:
    """The lineage of an artifact that is known by its digest: in the registry, else in one of the
    folders, else it ends here.

    Args:
        fingerprint: of the pair; decides between versions with the same data that were published
            for several.
    """
    same = [version for version in store.versions(kind, pair) if version.digest == digest]
    same = [version for version in same if version.fingerprint == fingerprint] or same
    if same:
        return lineage_of(store, same[-1], pair, folders)
    if folders and digest in folders:
        return trace_folder(store, folders[digest], pair, folders)
    return Lineage(kind, digest)


def trace_folder(
    store: Store, folder: Path, pair: str, folders: Mapping[str, Path] | None = None
) -> Lineage:
    """The lineage of an artifact folder that need not be registered."""
    manifest = read_manifest(folder)
    made = validate(Provenance, manifest["provenance"], str(folder))
    parents = tuple(
        find(store, kind, digest, pair, folders, made.fingerprint)
        for kind, digest in made.parents.items()
    )
    return Lineage(
        manifest["kind"],
        digest_of(folder),
        None,
        made.trace_digest,
        made.git_commit,
        parents,
        folder,
    )
