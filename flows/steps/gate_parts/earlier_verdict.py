"""The gate's verdict of an earlier run, where it still answers the question."""

from __future__ import annotations

from typing import Any

from draftwell.flows.workspace import Workspace
from draftwell.registry.promotion import CHAMPION_SINCE, withdrawal
from draftwell.registry.releases import find_release, gate_record, objection
from draftwell.registry.store import Store


def earlier_verdict(
    space: Workspace, device: str, number: int, champion: int | None
) -> dict[str, Any] | None:
    """The gate's verdict about a release beside the champion of today; None where the gate has to
    run. `withdrawn`: why there will be none.

    The champion itself is not judged again. A refused candidate that nothing has changed is not
    measured until it passes by luck; one that could not be measured at that moment is. One that is
    no longer champion stays as it is: a person rolled it back, or another release was better.
    """
    if number == champion:
        return {"passed": True, "checks": []}
    pair = space.spec.name
    release = find_release(Store(), pair, device, number)
    record = gate_record(release)
    checks = [vars(check) for check in record.checks] if record else []
    why = withdrawal(release)
    if why is None and release.published.tags.get(CHAMPION_SINCE):
        why = (
            f"it was champion before; `draftwell promote --pair {pair} --device {device} "
            f"--release {number}` to promote it again"
        )
    if why is not None:
        return {
            "passed": False,
            "checks": checks,
            "withdrawn": f"neither judged nor promoted, {why}",
        }
    if record is None or record.baseline_version != champion:
        return None
    if record.undecided or (record.passed and objection(release, record)):
        return None
    space.say(f"release {number} was judged beside this champion already, on {record.created}")
    return {"passed": record.passed, "checks": checks}
