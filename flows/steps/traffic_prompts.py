"""Prompts of served traffic, for scheduled flows.

A recalibration after drift tunes on what is served. If the weekly flows kept using the pipeline's
prompts, each would undo the other's choice. So they too take prompts from the spool (the folder of
recorded requests), as soon as there are enough of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from draftwell.flows.failures import will_pass
from draftwell.flows.loading import open_from_settings
from draftwell.flows.settings import PipelineSettings, TrafficSettings
from draftwell.flows.steps.monitor import load_limits, spool_of, watched_temperature
from draftwell.flows.workspace import Workspace
from draftwell.serving.errors import DraftwellError

if TYPE_CHECKING:
    from draftwell.components.prompts.prompt import Prompt

FEWEST = 40
"""Different prompts that a calibration on traffic needs: eight each to calibrate and to tune,
twelve each for the gate and for the traces, which later traffic is compared with."""
PROMPTS = "served_prompts.jsonl"
"""In a workspace: the prompts of its traces, where those were served traffic."""

Settings = TypeVar("Settings", bound=PipelineSettings)


def newest_prompts(settings: TrafficSettings, spool: Path) -> list[Prompt]:
    """The prompts that the monitor reads, in random order, so that any number of them is a fair
    sample of what is monitored.

    Only those at the temperature of the champion's traces; all where there is no champion to
    compare traffic with yet. The newest alone would not do: after a change the monitor still sees
    older traffic for a while, and would report it as drift.

    Raises:
        DraftwellError: no spool, an empty one, or too few prompts in it.
    """
    from draftwell.components.drift.prompts import spooled_prompts
    from draftwell.components.drift.spool import read_spool

    if not spool.is_dir():
        raise DraftwellError(
            (
                f"there is no spool {spool}: name the folder of recorded requests that the "
                "server writes with --spool"
            ),
            code="no_spool",
        )
    step, window = open_from_settings(settings), load_limits().window
    pair = step.pair
    temperature = watched_temperature(
        step.workspace, settings.device, getattr(settings, "reference", None), settings.out
    )
    found = read_spool(spool, pair.fingerprint, window=window, temperature=temperature)
    return spooled_prompts(
        spool,
        pair,
        found.rows,
        window=window,
        fewest=FEWEST,
        shards=found.shards,
        notes=found.notes,
    )


def take_prompts(settings: TrafficSettings, space: Workspace) -> None:
    """Fix the prompts of a week: the newest of the spool, or none where there is no spool.

    They are fixed when traces are collected, because the spool grows: later steps must use the same
    prompts, or the gate would judge on prompts that the choice was made on. If the spool has too
    few or cannot be read, the prompts of the last time stay.

    Raises:
        DraftwellError: the registry, which records the temperature of the champion's traces, does
            not answer.
    """
    from draftwell.components.drift.prompts import write_prompts

    file, spool = space.root / PROMPTS, spool_of(space, settings.spool)
    if not spool.is_dir():
        file.unlink(missing_ok=True)
        return
    try:
        prompts = newest_prompts(settings, spool)
    except DraftwellError as error:
        if will_pass(error):
            raise
        space.say(f"no new prompts of served traffic: {error}")
        return
    space.say(f"on {len(prompts)} prompts of served traffic, from {spool}")
    write_prompts(file, prompts)


def on_taken(settings: TrafficSettings, space: Workspace) -> TrafficSettings:
    """The settings with the prompts that `take_prompts` fixed; unchanged where there are none."""
    file = space.root / PROMPTS
    return on_prompts(settings, file) if file.is_file() else settings


def on_prompts(settings: Settings, file: Path) -> Settings:
    """The settings with the prompts of a file."""
    return settings.model_copy(update={"prompts": file})
