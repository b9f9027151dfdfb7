"""`draftwell monitor --engine vllm --recalibrate`: a few lines over
`draftwell.flows.steps.engine.recalibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftwell.flows.cli.engine import numbers, open_engine
from draftwell.flows.cli.options import check_folder, say, set_threads
from draftwell.flows.cli.signals import ends_what_it_started


def recalibrate_elsewhere(
    pair: str,
    dtype: str | None,
    device: str | None,
    *,
    limits: Path | None,
    methods: str | None,
    levels: str,
    **settings: Any,
) -> dict[str, Any]:
    """`draftwell monitor --engine vllm --recalibrate`: the outcome.

    Args:
        settings: of `EngineDriftSettings`, by its names; those that are None keep their defaults.
    """
    from draftwell.flows.steps.engine.recalibrate import EngineDriftSettings, recalibrate_engine
    from draftwell.flows.steps.monitor import load_limits

    if methods is not None:
        settings["methods"] = tuple(part.strip() for part in methods.split(",") if part.strip())
    given = {name: value for name, value in settings.items() if value is not None}
    wanted = EngineDriftSettings(pair=pair, levels=numbers(levels), **given)
    check_folder(wanted.out)
    set_threads(wanted.threads)
    with (
        ends_what_it_started(),
        open_engine("recalibration", pair, dtype, device, wanted.threads) as space,
    ):
        return recalibrate_engine(space, wanted, say, load_limits(limits))
