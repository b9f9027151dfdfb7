"""Announcing alarms of an engine once, and what answers them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from draftwell.components.engines.remote.address import ReachSettings
from draftwell.components.watch.report import WatchReport, alarm_line
from draftwell.components.watch.schema import Alarm, Cause
from draftwell.flows.settings import PipelineSettings, pair_anywhere
from draftwell.flows.steps.remote.watch import Watch, open_watch
from draftwell.registry.pairs import find_pair
from draftwell.serving.files import write_json

FIXED_BY_TUNING: tuple[Cause, ...] = ("drift_of_traffic", "context_length", "load_crossover")
"""Causes that another choice, tuned on what is served now, can fix; others need a person."""


class WatchSettings(ReachSettings):
    """What the flow `monitor` looks at where `engine` is an address; its key is read from the
    worker's environment or a file alone."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: str = Field(pattern="^https?://", description="address of the engine")
    limits: Path | None = Field(None, description="YAML file of limits")
    probes_per_hour: int = Field(0, ge=0, le=3600, description="requests of our own; 0: none")
    metrics_file: Path | None = Field(
        None, description="what was found as metrics, for the textfile collector"
    )
    answer: PipelineSettings | None = Field(
        None,
        description="what the flow `draftwell` runs with where tuning on recorded traffic can fix "
        "an alarm: its pair, engine and prompts; the gate decides. None leaves it to a person",
    )

    def open(self) -> Watch:
        """What is watched."""
        return open_watch(
            self.address(self.engine),
            None if self.plain is None else self.address(self.plain),
            limits=self.limits,
            probes_per_hour=self.probes_per_hour,
        )


def announce_each(
    watch: Watch, report: WatchReport, send: Callable[[Alarm], bool]
) -> tuple[list[Alarm], list[str]]:
    """Announce each alarm that stands and was not announced since it began.

    Args:
        send: says whether it could be sent; only then it is remembered. Killed in between, it is
            sent twice, never lost.
    Returns:
        what was announced now, and causes that have ended.
    """
    file = watch.folder / "announced.json"
    known = read_announced(file)
    standing = {alarm.cause for alarm in report.alarms}
    ended = [cause for cause in known if cause not in standing]
    known = {cause: since for cause, since in known.items() if cause in standing}
    sent = []
    for alarm in report.alarms:
        if alarm.cause not in known and send(alarm):
            known[alarm.cause] = alarm.since
            sent.append(alarm)
            write_json(file, known)
    if ended:
        write_json(file, known)
    return sent, ended


def read_announced(file: Path) -> dict[str, float]:
    """Cause → beginning of the alarms that were announced and stand."""
    try:
        return {str(k): float(v) for k, v in json.loads(file.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def payload_of(settings: WatchSettings, report: WatchReport, alarm: Alarm) -> dict[str, Any]:
    """What an alarm's event says; with `settings` for the flow that answers it, where there is an
    answer."""
    said: dict[str, Any] = {
        "engine": report.engine,
        "version": report.version,
        "digest": report.digest,
        "cause": alarm.cause,
        "or_else": list(alarm.or_else),
        "since": alarm.since,
        "reasons": [line.words for line in alarm.evidence],
        "remedy": alarm.remedy,
        "switch_off_above": alarm.switch_off_above,
        "line": alarm_line(alarm),
    }
    answer = answer_of_alarm(settings, report, alarm)
    return said if answer is None else {**said, "settings": answer}


def answer_of_alarm(
    settings: WatchSettings, report: WatchReport, alarm: Alarm
) -> dict[str, Any] | None:
    """Settings of the run of the flow `draftwell` that answers an alarm; None where a person has
    to. Paths are whole, because a worker may start elsewhere."""
    wanted = settings.answer
    if wanted is None or not {alarm.cause, *alarm.or_else} & {*FIXED_BY_TUNING}:
        return None
    given = wanted.model_dump(mode="json", exclude_unset=True)
    for name in ("prompts", "spool", "out"):
        if (path := getattr(wanted, name)) is not None:
            given[name] = str(path.absolute())
    levels = levels_for(alarm, wanted)
    return {
        **given,
        **({"levels": levels} if levels else {}),
        "engine": wanted.engine,
        "source": wanted.source,
        "pair": pair_anywhere(wanted.pair),
        "device": wanted.device,
    }


def levels_for(alarm: Alarm, wanted: PipelineSettings) -> list[int] | None:
    """Requests at once at which a tuning looks for the draft lengths by load that a load crossover
    asks for: the border that was found, and twice that; None where that is not what is asked."""
    if alarm.cause != "load_crossover" or not wanted.restarts or not alarm.switch_off_above:
        return None
    return sorted({1, alarm.switch_off_above, 2 * alarm.switch_off_above})


def resource_of(settings: WatchSettings, payload: dict[str, Any]) -> dict[str, str]:
    """What an event is about: the pair, on its device, where a run of the pair answers it, as drift
    of its own traffic is; else the engine."""
    url = settings.address(settings.engine).url
    wanted = settings.answer
    if wanted is None or "settings" not in payload:
        return {"prefect.resource.id": f"draftwell.engine.{url}", "prefect.resource.name": url}
    name = find_pair(wanted.pair).name
    return {
        "prefect.resource.id": f"draftwell.pair.{name}",
        "prefect.resource.name": name,
        "draftwell.device": wanted.device,
    }
