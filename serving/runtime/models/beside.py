"""What an artifact becomes beside a target, such as the model of a head: made once for all
strategies, dropped with the artifact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from draftwell.serving.artifacts.base import Artifact

T = TypeVar("T")


def kept_beside(target: Any, artifact: Artifact, make: Callable[[], T]) -> T:
    """What `make` returned when it was first asked for this artifact, or for another one read from
    the same data.

    It lives as long as any of these artifacts, and must not refer to them.
    """
    known: WeakKeyDictionary[Artifact, T] = target.__dict__.setdefault(
        "kept_beside", WeakKeyDictionary()
    )
    if artifact not in known:
        same = [
            made
            for other, made in list(known.items())
            if artifact.digest and other.digest == artifact.digest
        ]
        known[artifact] = same[0] if same else make()
    return known[artifact]
