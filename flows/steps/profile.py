"""The hardware profile that commands run with: the one that is there, where it was measured on a
machine like this one, else one that is measured now."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from draftwell.components.calibrate.hardware_profile import fits_here, measure_profile
from draftwell.components.report.machine import draft_device_of
from draftwell.components.report.provenance import provenance
from draftwell.flows.workspace import Workspace
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.runtime.machine_class import machine_class
from draftwell.serving.runtime.pair import LoadedPair
from draftwell.serving.runtime.strategies import find_strategy


def find_or_measure_profile(
    space: Workspace, pair: LoadedPair, names: Iterable[str], folder: Path | None = None
) -> HardwareProfile | None:
    """The profile for strategies, None where none of them reads one; a person reads when it is
    measured.

    A measured one is kept in the workspace. Those of a padded target, and of a draft on another
    device than the target's, take other times than any profile on disk has: they are always
    measured, and never kept.

    Args:
        names: of the strategies.
        folder: as in `Workspace.resources`.
    """
    kinds = {kind for name in names for kind in find_strategy(name).reads()}
    if HardwareProfile.kind not in kinds:
        return None
    # all of them, so that one of other models is refused before anything is measured
    found = {kind: space.found(pair, kind, folder) for kind in sorted(kinds)}
    known, head = found[HardwareProfile.kind], cast("Any", found.get("eagle3_head"))
    if isinstance(known, HardwareProfile) and fits_here(known, pair, head):
        return known
    special = {"padded_to": pair.padded_to, "draft_device": draft_device_of(pair)}
    unlike = {name: value for name, value in special.items() if value is not None}
    here = machine_class(pair)
    words = [
        *(["with the padded target"] if "padded_to" in unlike else []),
        *([f"with the draft on {unlike['draft_device']}"] if "draft_device" in unlike else []),
    ]
    space.say(
        f"measuring a hardware profile for {here} " + (", ".join(words) or "(once, about 10 s)")
    )
    made = measure_profile(
        pair, provenance(pair, device_class=here, parameters=unlike or None), head=head
    )
    if not unlike:
        space.save(made)
    return made
