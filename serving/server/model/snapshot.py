"""A snapshot of online state, and the file that holds it.

The first line of the file is the sha256 of the second, which holds counts and numbers, and names
the bundle that they were learnt over.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from draftwell.serving.artifacts.acceptance_table import EDGES
from draftwell.serving.artifacts.correction_memory import MAX_PAIRS, MOST_SEEN
from draftwell.serving.bundle.bundle import Manifest
from draftwell.serving.server.model.strategy_pool import EVERYBODY, Learnt

SCHEMA = 1
LARGEST = 16 << 20
"""Bytes of the largest file that can be a snapshot: a full memory takes less than 2 MB."""

Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class SnapshotOrigin:
    """The bundle that state was learnt over.

    Args:
        version: of the release.
        digest: of the bundle's manifest.
        fingerprint: of the pair.
    """

    pair: str
    version: int
    digest: str
    fingerprint: str

    @classmethod
    def of(cls, manifest: Manifest) -> SnapshotOrigin:
        """The origin that a bundle's manifest names."""
        return cls(manifest.pair, manifest.release_version, manifest.digest, manifest.fingerprint)


class Bins(BaseModel):
    """Counts of an acceptance table."""

    model_config = ConfigDict(extra="forbid", strict=True)

    total: list[Count] = Field(min_length=len(EDGES) + 1, max_length=len(EDGES) + 1)
    accepted: list[Count] = Field(min_length=len(EDGES) + 1, max_length=len(EDGES) + 1)

    @model_validator(mode="after")
    def no_more_than_all(self) -> Bins:
        """Refuse acceptance rates above 1."""
        if any(accepted > total for accepted, total in zip(self.accepted, self.total, strict=True)):
            raise ValueError("more tokens accepted than verified")
        return self


class Snapshot(BaseModel):
    """The second line of a file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    schema_version: int
    origin: SnapshotOrigin
    tenant: str
    table: Bins | None
    memory: list[Count] | None = Field(
        max_length=3 * MAX_PAIRS, description="draft token, correction, count; one after the other"
    )
    strategies: dict[str, dict[str, float]]
    sampled_table: Bins | None = None

    @model_validator(mode="after")
    def in_threes(self) -> Snapshot:
        """A memory's numbers come in threes, each pair once, its count at least 1."""
        numbers = self.memory or []
        pairs = set(zip(numbers[::3], numbers[1::3], strict=False))
        if (
            len(numbers) % 3
            or len(pairs) != len(numbers) // 3
            or any(not 1 <= count <= MOST_SEEN for count in numbers[2::3])
        ):
            raise ValueError("the memory is not a list of different pairs with their counts")
        return self

    @classmethod
    def of(cls, origin: SnapshotOrigin, tenant: str, learnt: Learnt) -> Snapshot:
        """A snapshot of a state."""
        table, sampled = (
            None if counts is None else Bins.model_construct(total=counts[0], accepted=counts[1])
            for counts in (learnt.table, learnt.sampled_table)
        )
        memory = (
            None
            if learnt.memory is None
            else [x for pair, count in learnt.memory.items() for x in (*pair, count)]
        )
        fields: dict[str, Any] = {
            "origin": origin,
            "tenant": tenant,
            "table": table,
            "sampled_table": sampled,
            "memory": memory,
            "strategies": learnt.strategies,
        }
        return cls.model_construct(schema_version=SCHEMA, **fields)

    def learnt(self) -> Learnt:
        """The state of this snapshot."""
        numbers = self.memory
        memory = (
            None
            if numbers is None
            else dict(
                zip(zip(numbers[::3], numbers[1::3], strict=True), numbers[2::3], strict=True)
            )
        )
        table, sampled = (
            (bins.total, bins.accepted) if bins else None
            for bins in (self.table, self.sampled_table)
        )
        return Learnt(table, memory, self.strategies, sampled)


def read_snapshot(path: Path) -> Snapshot:
    """A snapshot, checked.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged, or of another schema.
    """
    if path.stat().st_size > LARGEST:
        raise ValueError("too large")
    head, _, rest = path.read_bytes().partition(b"\n")
    body = rest.removesuffix(b"\n")
    try:
        stated = json.loads(head)["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError("it has no sha256") from error
    if stated != hashlib.sha256(body).hexdigest():
        raise ValueError("sha256 differs")
    if (version := json.loads(body).get("schema_version")) != SCHEMA:
        raise ValueError(f"schema {version}, this server reads {SCHEMA}")
    try:
        snapshot = Snapshot.model_validate_json(body)
    except ValidationError as error:
        raise ValueError(error.errors()[0]["msg"]) from error
    if name_of(snapshot.tenant) != path.name:
        raise ValueError("it belongs to another tenant")
    return snapshot


def name_of(tenant: str) -> str:
    """The file of a tenant's state.

    >>> name_of("")
    'everybody.json'
    """
    return (
        "everybody.json"
        if tenant == EVERYBODY
        else f"tenant-{hashlib.sha256(tenant.encode()).hexdigest()[:32]}.json"
    )


def first_line(error: Exception) -> str:
    """The first line of an error's text, without the path that an OSError ends with."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).splitlines() or [type(error).__name__])[0]
