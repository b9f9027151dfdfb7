"""Prompts of served traffic, for scheduled flows.

A recalibration after drift tunes on what is served. If the weekly flow kept using the pipeline's
prompts, each would undo the other's choice. So it too takes prompts from the spool (the folder of
recorded requests), as soon as there are enough of them.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from draftwell.components.drift.prompts import spooled_prompts, write_prompts
from draftwell.components.drift.spool import read_spool
from draftwell.components.prompts.prompt import Prompt
from draftwell.components.prompts.redact import redacted
from draftwell.flows.failures import will_pass
from draftwell.flows.loading import open_from_settings, workspace_of
from draftwell.flows.settings import PipelineSettings
from draftwell.flows.steps.announcement import announced
from draftwell.flows.steps.monitor import load_limits, spool_of, watched_temperature
from draftwell.flows.steps.reference_traces import RECALIBRATIONS
from draftwell.flows.workspace import Workspace
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import json_digest

FEWEST = 40
"""Different prompts that a calibration on traffic needs: eight each to calibrate and to tune,
twelve each for the gate and for the traces, which later traffic is compared with."""
PROMPTS, DRIFT_PROMPTS = "served_prompts.jsonl", "prompts.jsonl"
"""In a workspace: the prompts of its traces, where those were served traffic; and in the folder of
a drift."""


def newest_prompts(settings: PipelineSettings, spool: Path) -> list[Prompt]:
    """The prompts that the monitor reads, in random order, so that any number of them is a fair
    sample of what is monitored.

    Only those at the temperature of the champion's traces; all where there is no champion to
    compare traffic with yet. The newest alone would not do: after a change the monitor still sees
    older traffic for a while, and would report it as drift.

    Raises:
        DraftwellError: no spool, an empty one, or too few prompts in it.
    """
    if not spool.is_dir():
        raise DraftwellError(
            (
                f"there is no spool {spool}: name the folder of recorded requests that the "
                "server writes with --set spool=…"
            ),
            code="no_spool",
        )
    step, window = open_from_settings(settings), load_limits().window
    pair = step.pair
    temperature = watched_temperature(step.workspace, settings.device, None, settings.out)
    found = read_spool(spool, pair.fingerprint, window=window, temperature=temperature)
    prompts = spooled_prompts(
        spool,
        pair,
        found.rows,
        window=window,
        fewest=FEWEST,
        shards=found.shards,
        notes=found.notes,
    )
    if not settings.redact:
        return prompts
    texts = [redacted(p) for p in prompts if not p.tokens]
    if len(texts) < FEWEST:
        raise DraftwellError(
            f"{len(prompts) - len(texts)} of {len(prompts)} prompts in {spool} are token ids, in "
            f"which nothing can be masked (redact), and {FEWEST} others are needed: wait for more "
            "traffic, or let clients send texts",
            code="too_few_prompts",
        )
    return texts


def settle_prompts(settings: PipelineSettings) -> PipelineSettings:
    """The settings with the prompts of this run, which are fixed now because the spool grows: later
    steps must use the same ones, or the gate would judge on prompts that the choice was made on.

    Raises:
        DraftwellError: the registry, which records the temperature of the champion's traces, does
            not answer; or an answer to drift finds too few served prompts.
    """
    if settings.source == "prompts":
        return settings
    own = settings.model_copy(update={"source": "prompts"})
    space = workspace_of(own)
    if settings.source == "drift":
        drift, file = drifted_prompts(own, space)
        return settings.model_copy(update={"prompts": file, "drift": drift})
    take_prompts(own, space)
    file = space.root / PROMPTS
    return settings.model_copy(update={"prompts": file}) if file.is_file() else settings


def take_prompts(settings: PipelineSettings, space: Workspace) -> None:
    """Put the newest of the spool into the workspace, or none where there is no spool. If it has
    too few or cannot be read, the prompts of the last time stay."""
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


def drifted_prompts(settings: PipelineSettings, space: Workspace) -> tuple[str | None, Path]:
    """The drift that is answered, and the file of its prompts; those that an earlier run began with
    stay."""
    before = announced(space, settings.device)
    drift = settings.drift or (before.digest if before else None)
    home = space.root / RECALIBRATIONS
    if drift and (file := home / drift[:12] / DRIFT_PROMPTS).is_file():
        return drift, file
    spool = settings.spool or (before.spool if before else spool_of(space, None))
    prompts = newest_prompts(settings, spool)
    name = drift or json_digest([asdict(prompt) for prompt in prompts])
    if not (file := home / name[:12] / DRIFT_PROMPTS).is_file():
        write_prompts(file, prompts)
    return drift, file
