"""Prompts of served traffic, for flows that run by themselves.

A recalibration after drift tunes on what is served. If the weekly flows went on with the pipeline's prompts, each would undo the other's
choice, so they take the spool's prompts too, as soon as there are enough of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from flows.failures import will_pass
from flows.loading import open_from_settings
from flows.settings import PipelineSettings, TrafficSettings
from flows.steps.monitor import load_limits, spool_of, watched_temperature
from flows.workspace import Workspace
from serving.errors import DraftwellError

if TYPE_CHECKING:
    from components.prompts.prompt import Prompt

FEWEST = 24
"""Different prompts that a calibration on traffic needs: a third is kept for the gate, and a verifier splits the others."""
PROMPTS = "served_prompts.jsonl"
"""In a workspace: what its traces were collected on, where that was served traffic."""

Settings = TypeVar("Settings", bound=PipelineSettings)


def newest_prompts(settings: TrafficSettings, spool: Path) -> list[Prompt]:
    """The prompts that the monitor looks at, in random order: what the settings use of them is a fair sample of what is watched.

    Those at the temperature of the champion's traces, then; all where there is nothing yet to compare traffic with.
    The newest alone would not do: after a change the monitor still sees older traffic for a while, and would call that the drift.

    Raises:
        DraftwellError: no spool, an empty one, or too few prompts in it.
    """
    from components.drift.prompts import spooled_prompts
    from components.drift.spool import read_spool

    if not spool.is_dir():
        raise DraftwellError(f"there is no spool {spool}: name the folder to which the server writes with --spool")
    step, window = open_from_settings(settings), load_limits().window
    pair = step.pair
    temperature = watched_temperature(step.workspace, settings.device, getattr(settings, "reference", None))
    found = read_spool(spool, pair.fingerprint, window=window, temperature=temperature)
    return spooled_prompts(spool, pair, found.rows, window=window, fewest=FEWEST, shards=found.shards, notes=found.notes)


def take_prompts(settings: TrafficSettings, space: Workspace) -> None:
    """Fix the prompts of a week: the newest of the spool, or none where there is no spool.

    They are fixed where traces are collected, because the spool grows: what is tuned and gated later must be cut from the same ones, or
    the gate would judge on prompts that the choice was made on. A spool with too few, or that cannot be read, leaves those of the last
    time.

    Raises:
        DraftwellError: the registry, which knows at what temperature the champion's traffic is watched, does not answer.
    """
    from components.drift.prompts import write_prompts

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
    """The settings with the prompts that `take_prompts` fixed; as they are where there are none."""
    file = space.root / PROMPTS
    return on_prompts(settings, file) if file.is_file() else settings


def on_prompts(settings: Settings, file: Path) -> Settings:
    """The settings with the prompts of a file, of which a third, at most, is kept for the gate."""
    from components.prompts.prompt import read_prompts

    return settings.model_copy(update={"prompts": file, "bench_prompts": min(settings.bench_prompts, len(read_prompts(file)) // 3)})
