"""What a bench measured beside what a `speculation_profile.json` lets expect."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from draftwell.components.export.profile import SpeculationProfile
from draftwell.components.report.tables import number, rich_table

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = ("contender", "acceptance length", "expected", "kept by position", "expected by position")


class Kept(NamedTuple):
    """What a contender counted.

    Args:
        rounds: in which the target verified a draft.
        accepted_at: rounds that kept the token at each position and all before it.
    """

    label: str
    rounds: int
    accepted_at: Sequence[int]


def expected_rows(profile: SpeculationProfile, contenders: Iterable[Kept]) -> list[list[str]]:
    """A row for each contender that drafted, in `COLUMNS`; over the positions that both have, so
    that a shorter draft than the profile's is compared with the beginning of it.

    Raises:
        DraftwellError: as `SpeculationProfile.expected`.
    """
    wanted = profile.expected
    rows = []
    for label, rounds, accepted_at in contenders:
        shares = [count / rounds for count in accepted_at] if rounds else []
        known = list(zip(shares, wanted, strict=False))
        if known:
            both = [[one for one, _ in known], [other for _, other in known]]
            lengths = [number(1 + sum(side), ".2f") for side in both]
            positions = [" ".join(number(share, ".2f") for share in side) for side in both]
            rows.append([label, *lengths, *positions])
    return rows


def expected_table(profile: SpeculationProfile, contenders: Iterable[Kept]) -> Table:
    """`expected_rows`, with what the profile was measured with."""
    given = profile.measurement_conditions or {}
    named = ("engine", "engine_version", "machine", "dtype", "dataset", "temperature")
    said = ", ".join(f"{name} {given[name]}" for name in named if given.get(name) is not None)
    note = f"expected of {profile.method or 'a method that it does not name'}; measured with " + (
        said or "what it does not say"
    )
    return rich_table(COLUMNS, expected_rows(profile, contenders), note)
