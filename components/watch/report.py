"""What a look at an engine found: for people, as JSON, and as metrics of Prometheus."""

from __future__ import annotations

import datetime
import hashlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from pydantic import Field

from draftwell.components.engines.port import Message
from draftwell.components.report.tables import markdown, number, rich_table
from draftwell.components.watch.baseline import Baseline
from draftwell.components.watch.probing import plain_seconds, tokens_of_round
from draftwell.components.watch.schema import Alarm, Cause, Probe
from draftwell.components.watch.window import Window, merged

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = ("figure", "now", "in the baseline")
PROBE_COLUMNS = ("prompt", "tokens a round", "ms a token", "without speculation", "times")
LATEST_SECONDS = 900
"""Of the figures that are shown; without traffic so long, the newest window's."""


class Row(Message):
    """A figure now and in the baseline; None where it is not known."""

    name: str
    now: float | None
    then: float | None = None
    form: str = Field(".2f", exclude=True)


class ProbeRow(Message):
    """The newest answers to a fixed prompt."""

    kind: str
    prompt_tokens: int
    tokens_of_round: float | None = None
    acceptance: float | None = Field(None, description="accepted / drafted")
    seconds: float | None = Field(None, description="of a token, with speculation")
    plain_seconds: float | None = Field(None, description="of a token, without")

    @property
    def speedup(self) -> float | None:
        """Tokens a second with speculation over those without."""
        if self.seconds is None or self.plain_seconds is None:
            return None
        return self.plain_seconds / self.seconds


class WatchReport(Message):
    """What a look found."""

    engine: str = Field(description="its address")
    version: str | None = None
    at: float = Field(description="Unix seconds")
    reachable: bool = True
    verdict: Literal["steady", "alarm", "not enough yet"]
    alarms: tuple[Alarm, ...] = Field((), strict=False, description="that stand, the oldest first")
    baseline: str | None = Field(None, description="what it is compared with")
    figures: tuple[Row, ...] = Field((), strict=False)
    probes: tuple[ProbeRow, ...] = Field((), strict=False)
    notes: tuple[str, ...] = Field((), strict=False)

    @property
    def digest(self) -> str:
        """sha256 over the report."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    @property
    def speedup(self) -> float | None:
        """Geometric mean of the probes' speedups; None without answers of both ways."""
        found = [row.speedup for row in self.probes if row.speedup]
        return math.exp(float(np.mean(np.log(found)))) if found else None


def figures(windows: Sequence[Window], baseline: Baseline | None) -> tuple[Row, ...]:
    """Figures of the newest windows of one version and start beside the baseline's."""
    if not windows:
        return ()
    last = windows[-1]
    same = [
        w
        for w in windows
        if (w.version, w.born) == (last.version, last.born) and w.end > last.end - LATEST_SECONDS
    ]
    now, then = merged([w for w in same if not w.beside_probe] or same), baseline
    length, hits, prompt = (then.length, then.hits, then.prompt) if then else (None, None, None)
    usual_at = dict(enumerate(then.accepted_at)) if then else {}
    rows = [
        Row(name="tokens a round", now=now.length, then=math.exp(length.mean) if length else None),
        Row(
            name="accepted / drafted",
            now=now.accepted_share,
            then=then.accepted_share if then else None,
        ),
        *(
            Row(name=f"accepted at position {place}", now=share, then=usual_at.get(place))
            for place, share in enumerate(now.accepted_at)
        ),
        Row(name="drafted tokens for each new one", now=now.drafted_per_token),
        Row(name="wasted tokens for each new one", now=now.wasted_per_token),
        Row(
            name="prompt tokens from the cache",
            now=now.hit_rate,
            then=hits.mean if hits else None,
        ),
        Row(
            name="tokens of a prompt",
            now=now.prompt_length,
            then=2**prompt.mean if prompt else None,
            form=".0f",
        ),
        Row(name="requests at once", now=now.at_once, form=".1f"),
        Row(name="seconds of a token", now=now.seconds_per_token, form=".4f"),
    ]
    if then and then.step_time and now.at_once:
        expected = then.step_time.base + then.step_time.each * now.at_once
        rows.append(Row(name="seconds of a round", now=now.step_seconds, then=expected, form=".4f"))
    return tuple(row for row in rows if row.now is not None)


def probe_rows(probes: Sequence[Probe]) -> tuple[ProbeRow, ...]:
    """The newest answer to each prompt, with and without speculation."""
    found: dict[tuple[str, int], dict[str, float | None]] = {}
    for probe in sorted((p for p in probes if p.answered), key=lambda probe: probe.at):
        row = found.setdefault((probe.kind, probe.prompt_tokens), {})
        if probe.plain:
            row["plain_seconds"] = plain_seconds(probe)
            continue
        row["seconds"] = probe.seconds_per_token
        row["tokens_of_round"] = tokens_of_round(probe)
        row["acceptance"] = probe.acceptance.rate if probe.acceptance else None
    return tuple(
        ProbeRow(kind=kind, prompt_tokens=tokens, **row)
        for (kind, tokens), row in sorted(found.items())
    )


def moment(seconds: float) -> str:
    """A time in UTC.

    >>> moment(0)
    '1970-01-01 00:00:00 UTC'
    """
    return f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%d %H:%M:%S} UTC"


def cause_words(alarm: Alarm) -> str:
    """The cause, and others that are not ruled out."""
    return " or ".join(cause.replace("_", " ") for cause in (alarm.cause, *alarm.or_else))


def alarm_line(alarm: Alarm) -> str:
    """An alarm in a line: cause, since when, the first evidence, and what to do."""
    evidence = "; ".join(line.words for line in alarm.evidence)
    tell = f"; to tell them apart: {alarm.to_tell}" if alarm.to_tell else ""
    return f"{cause_words(alarm)} since {moment(alarm.since)}: {evidence}; {alarm.remedy}{tell}"


def headline(report: WatchReport) -> str:
    """Verdict and causes, in a line."""
    causes = "; ".join(cause_words(alarm) for alarm in report.alarms)
    return f"{report.engine}: {report.verdict}" + (f": {causes}" if causes else "")


def rows_of(report: WatchReport) -> list[tuple[str, ...]]:
    """A row for each figure, as words."""
    return [(r.name, number(r.now, r.form), number(r.then, r.form)) for r in report.figures]


def probe_cells(report: WatchReport) -> list[tuple[str, ...]]:
    """A row for each fixed prompt, as words."""
    return [
        (
            f"{row.kind}, {row.prompt_tokens} tokens",
            number(row.tokens_of_round, ".2f"),
            number(None if row.seconds is None else 1000 * row.seconds, ".1f"),
            number(None if row.plain_seconds is None else 1000 * row.plain_seconds, ".1f"),
            number(row.speedup, ".2f"),
        )
        for row in report.probes
    ]


def remarks(report: WatchReport) -> list[str]:
    """Alarms, and what else is to be said."""
    compared = f"compared with {report.baseline}" if report.baseline else "no baseline yet"
    version = f"version {report.version}, " if report.version else ""
    return [*map(alarm_line, report.alarms), f"{version}{compared}", *report.notes]


def watch_tables(report: WatchReport) -> list[Table]:
    """Figures and probes for a terminal; the verdict is the title."""
    tables = [rich_table(COLUMNS, rows_of(report), "\n".join(remarks(report)), headline(report))]
    if report.probes:
        tables.append(rich_table(PROBE_COLUMNS, probe_cells(report), "newest answers to probes"))
    return tables


def watch_markdown(report: WatchReport) -> str:
    """The report for a page."""
    parts = [f"# {headline(report)}\n", "".join(f"- {line}\n" for line in remarks(report))]
    parts.append(markdown(COLUMNS, rows_of(report)))
    if report.probes:
        parts += ["## Probes\n", markdown(PROBE_COLUMNS, probe_cells(report))]
    return "\n".join(parts)


METRICS = {
    "look_timestamp_seconds": "When the engine was looked at.",
    "reachable": "1 if it answered.",
    "alarm": "1 while an alarm of this cause stands.",
    "speedup": "Speed of probes with speculation over that without.",
    "probe_acceptance": "Accepted / drafted tokens of the newest probe.",
    "probe_seconds_per_token": "Of the newest probe, with speculation or without.",
}
"""Of the file for Prometheus' node exporter; each begins with `draftwell_monitor_`."""


def watch_metrics(report: WatchReport) -> str:
    """The report in Prometheus' text format, for the textfile collector of its node exporter."""
    from prometheus_client import CollectorRegistry, Gauge, generate_latest

    registry, standing = CollectorRegistry(), {alarm.cause for alarm in report.alarms}

    def gauge(name: str, *labels: str) -> Gauge:
        full = f"draftwell_monitor_{name}"
        return Gauge(full, METRICS[name], ("engine", *labels), registry=registry)

    gauge("look_timestamp_seconds").labels(report.engine).set(report.at)
    gauge("reachable").labels(report.engine).set(report.reachable)
    alarm = gauge("alarm", "cause")
    for cause in get_args(Cause):
        alarm.labels(report.engine, cause).set(cause in standing)
    if report.speedup is not None:
        gauge("speedup").labels(report.engine).set(report.speedup)
    acceptance = gauge("probe_acceptance", "kind", "prompt_tokens")
    seconds = gauge("probe_seconds_per_token", "kind", "prompt_tokens", "speculation")
    for row in report.probes:
        of = (report.engine, row.kind, str(row.prompt_tokens))
        if row.acceptance is not None:
            acceptance.labels(*of).set(row.acceptance)
        for way, value in (("on", row.seconds), ("off", row.plain_seconds)):
            if value is not None:
                seconds.labels(*of, way).set(value)
    return generate_latest(registry).decode()
