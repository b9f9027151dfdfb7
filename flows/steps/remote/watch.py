"""A look at an engine at an address: read its counters, send what probes there is a budget for,
keep both, and judge them against the baseline."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from draftwell.components.engines.port import EngineSettings
from draftwell.components.engines.remote.address import EngineAddress
from draftwell.components.engines.remote.client import EngineClient
from draftwell.components.engines.remote.counters import Counters
from draftwell.components.engines.remote.discover import find_dialect
from draftwell.components.engines.remote.remote import RemoteEngine
from draftwell.components.watch.baseline import Baseline, quiet_windows
from draftwell.components.watch.evidence import FEWEST
from draftwell.components.watch.judge import judge
from draftwell.components.watch.probes import (
    NEW_TOKENS,
    ProbeBudget,
    ProbePrompt,
    least_recent,
    probe_prompts,
)
from draftwell.components.watch.report import WatchReport, figures, probe_rows
from draftwell.components.watch.schema import Alarm, Probe, WatchLimits
from draftwell.components.watch.store import Series, Store
from draftwell.components.watch.window import Window, windows_of
from draftwell.flows.steps.remote.space import folder_name
from draftwell.registry.strict import read_yaml
from draftwell.serving.artifacts.pair_files import draftwell_home
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import file_lock, write_text
from draftwell.serving.runtime.requests import Sampling

PROBE_SECONDS = 60.0
"""For the answer to a probe: meanwhile nobody looks."""
UNTOLD = (
    "probes say nothing of drafts: start vLLM with --per-request-spec-decode-metrics; else only an "
    "engine that decodes nothing besides tells how one fared"
)
NEW = "new"
"""What the setting `baseline` says for another one from now on."""


def watch_folder(address: EngineAddress) -> Path:
    """Where what is known of an engine is kept: whichever pair it serves."""
    return draftwell_home() / "engines" / folder_name(address)


@dataclass
class Watch:
    """An engine that is watched.

    Args:
        engine: what is watched.
        plain: the same engine without speculation, for shadow requests; None: none is known.
        folder: where samples, probes, baseline and budget are kept.
        limits: what counts as an alarm.
        probes_per_hour: requests of our own that may be sent; 0 sends none.
        clock: says the time, Unix seconds.
    """

    engine: RemoteEngine
    plain: RemoteEngine | None
    folder: Path
    limits: WatchLimits
    probes_per_hour: int = 0
    clock: Callable[[], float] = time.time
    started: bool = False

    @cached_property
    def store(self) -> Store:
        """Samples and probes on disk."""
        return Store(self.folder / "series.ndjson")

    @cached_property
    def series(self) -> Series:
        """Samples and probes, also those that were added since it was read."""
        return self.store.read()

    def add(self, *entries: Counters | Probe) -> None:
        """Keep samples and probes."""
        samples, probes = self.series
        self.store.add(*entries)
        if len(samples) + len(probes) + len(entries) > 2 * self.store.largest:
            del self.series  # it was cut on disk
            return
        samples += [entry for entry in entries if isinstance(entry, Counters)]
        probes += [entry for entry in entries if isinstance(entry, Probe)]

    @cached_property
    def prompts(self) -> list[ProbePrompt]:
        """Fixed prompts in the engine's tokens."""
        dialect, client = self.engine.dialect, self.engine.client
        return probe_prompts(lambda text: dialect.tokens_of(client, text) or [])

    @property
    def baseline_file(self) -> Path:
        """What it is compared with, once that is known."""
        return self.folder / "baseline.json"

    @property
    def since_file(self) -> Path:
        """From when on samples count: the first one, or the first since a new baseline was asked
        for."""
        return self.folder / "since.json"

    @cached_property
    def begun(self) -> float:
        """When it was first looked, Unix seconds."""
        return self.clock()

    def close(self) -> None:
        """Close the connections to the engine; it is watched on at the next look."""
        self.engine.stop()
        self.started = False

    @property
    def since(self) -> float:
        """From when on samples count, and silence."""
        if self.since_file.exists():
            return float(json.loads(self.since_file.read_text(encoding="utf-8")))
        return self.begun


def open_watch(
    address: EngineAddress,
    plain: EngineAddress | None,
    *,
    limits: Path | None = None,
    baseline: str | None = None,
    probes_per_hour: int = 0,
) -> Watch:
    """What an address is watched with; the engine need not answer.

    Args:
        limits: YAML file of `WatchLimits`.
        baseline: a file of an earlier baseline, or `new`; None: the one that is there, else the
            first quiet windows.
    Raises:
        DraftwellError: a file that does not hold what it should.
    """
    watch = Watch(
        RemoteEngine("speculation", address, connect=patient_client),
        None if plain is None else RemoteEngine("plain", plain, connect=patient_client),
        watch_folder(address),
        WatchLimits() if limits is None else read_yaml(limits, WatchLimits),
        probes_per_hour,
    )
    watch.folder.mkdir(parents=True, exist_ok=True)
    if baseline == NEW or not watch.since_file.exists():
        watch.baseline_file.unlink(missing_ok=True)
        watch.since_file.unlink(missing_ok=True)
    if baseline is not None and baseline != NEW:
        write_text(watch.baseline_file, read_baseline(Path(baseline)).model_dump_json(indent=2))
    return watch


def patient_client(address: EngineAddress) -> EngineClient:
    """What asks a watched engine."""
    return EngineClient(address, answer_seconds=PROBE_SECONDS)


def read_baseline(file: Path) -> Baseline:
    """A baseline that was kept of an engine (`baseline.json`).

    Raises:
        DraftwellError: the file holds none (`bad_baseline`).
    """
    try:
        return Baseline.model_validate_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DraftwellError(
            f"{file} holds no baseline: name a baseline.json of another engine, or make one with "
            "--set baseline=new",
            code="bad_baseline",
        ) from error


def look(watch: Watch, *, patient: bool = False) -> WatchReport:
    """Look once.

    Args:
        patient: an engine that does not answer is a report, too, before it is an alarm.
    Raises:
        DraftwellError: it does not say how it fares, whatever the reason, and has not been silent
            for long enough to be an alarm; another process looks just now (`watched_twice`).
    """
    away, counters, notes = None, None, []
    with file_lock(watch.folder / ".lock", wait=False) as free:
        if not free:
            raise DraftwellError(
                f"another process watches {watch.engine.address.url}: end one of them, or set "
                "another DRAFTWELL_HOME",
                code="watched_twice",
            )
        try:
            counters = counters_of(watch)
        except DraftwellError as error:
            away = error
        if counters is not None:
            if not watch.since_file.exists():
                write_text(watch.since_file, json.dumps(counters.at))
            watch.add(counters)
            notes += ask_probes(watch, counters)
        report = judged(watch, counters, notes if away is None else [str(away)])
    if away is not None and not report.alarms and not patient:
        raise away
    return report


def counters_of(watch: Watch) -> Counters:
    """What the engine's metrics say, after finding out what it is: it may be another one since the
    last look."""
    engine = watch.engine
    if not watch.started:
        engine.start(EngineSettings())
        watch.started = True
    engine.client.model_name = None
    counters = find_dialect(engine.client).counters(engine.client)
    if counters.new_tokens is None and counters.rounds is None:
        raise DraftwellError(
            f"{engine.address.url} has no metrics that say how drafts fare: switch them on "
            "(llama.cpp's server: --metrics, SGLang: --enable-metrics)",
            code="engine_without_metrics",
        )
    return counters.model_copy(update={"at": watch.clock()})


def judged(watch: Watch, counters: Counters | None, notes: Sequence[str]) -> WatchReport:
    """The report of all that is kept."""
    # probes may have taken a while
    now, since = counters.at if counters else watch.clock(), watch.since
    samples = [sample for sample in watch.series.samples if sample.at >= since]
    probes = [probe for probe in watch.series.probes if probe.at >= since]
    windows = windows_of(samples, probes)
    baseline = baseline_of(watch, windows)
    if baseline is not None:  # one of another day says nothing of the time since then
        baseline = baseline.model_copy(update={"end": max(baseline.end, since)})
    heard = samples[-1].at if samples else since
    # without a baseline nothing but silence can be judged
    seen = windows if baseline else ()
    alarms = judge(baseline, seen, probes, watch.limits, now=now, heard=heard)
    report = WatchReport(
        engine=watch.engine.address.url,
        version=counters.version if counters else windows[-1].version if windows else None,
        at=now,
        reachable=counters is not None,
        verdict="alarm" if alarms else "steady" if baseline else "not enough yet",
        alarms=tuple(alarms),
        baseline=None if baseline is None else baseline.source,
        figures=figures(windows, baseline),
        probes=probe_rows(probes),
        notes=(*notes, *speed_notes(baseline, windows)),
    )
    return with_progress(report, windows, watch.limits) if baseline is None else report


def with_progress(
    report: WatchReport, windows: Sequence[Window], limits: WatchLimits
) -> WatchReport:
    """The report with a note on how far the baseline is."""
    traffic = len(quiet_windows(windows, limits))
    note = f"{traffic} of {limits.baseline_windows} quiet looks with traffic for a baseline"
    return report.model_copy(update={"notes": (*report.notes, note)})


def speed_notes(baseline: Baseline | None, windows: Sequence[Window]) -> list[str]:
    """That speed is not judged, where plain probes leave nothing to judge it by."""
    beside = [window.beside_probe for window in windows if window.step_seconds]
    if baseline is None or not any(beside):
        return []
    if baseline.step_time is None:
        anew = ", then --set baseline=new"
    elif beside[-FEWEST:].count(True) == FEWEST:
        anew = ""
    else:
        return []
    return [
        "speed is not judged, because too few looks lie apart from plain probes: set fewer "
        f"probes_per_hour, or plain=…{anew}"
    ]


def baseline_of(watch: Watch, windows: Sequence[Window]) -> Baseline | None:
    """The baseline that is kept, else one of the first quiet windows, which is kept then. Where
    those have too few tokens to judge drafts by, or too few lie apart from plain probes to judge
    speed by, more of them are waited for."""
    if watch.baseline_file.exists():
        return read_baseline(watch.baseline_file)
    drafts = any(window.length for window in windows)
    quiet = quiet_windows(windows, watch.limits)
    traffic = len(quiet)
    timed = sum(bool(w.at_once and w.step_seconds) and not w.beside_probe for w in quiet)
    # where fewer than a tenth are, or they are merged with others, it would take too long
    speed = timed > traffic / 10 and traffic < 10 * FEWEST
    for count in (watch.limits.baseline_windows, max(watch.limits.baseline_windows, traffic)):
        limits = watch.limits.model_copy(update={"baseline_windows": count})
        found = Baseline.of(windows, limits)
        if found is None or (drafts and found.length is None):
            continue
        if found.step_time is not None or not speed:
            write_text(watch.baseline_file, found.model_dump_json(indent=2))
            return found
    return None


def ask_probes(watch: Watch, counters: Counters) -> list[str]:
    """Send the probes that are due and keep their answers; returns notes on those that were not
    sent."""
    if not watch.probes_per_hour:
        return []
    plain = plain_engine(watch)
    now, requests = watch.clock(), 1 if plain is None else 2
    budget = ProbeBudget(watch.folder / "probes_spent.json", watch.probes_per_hour)
    if watch.probes_per_hour < requests:
        return [
            "no probes: each is also decoded without speculation, so name a budget of 2 or more"
        ]
    due = budget.due(now, requests)
    if due and counters.waiting:
        return [f"no probes while {counters.waiting} requests wait"]
    if not due:
        return []
    asked = {probe.name: probe.at for probe in watch.series.probes}
    try:
        left = least_recent(watch.prompts, asked)
        for _ in range(due):
            if not probe_one(watch, plain, budget, left):
                break
    except DraftwellError as error:
        return [f"no answer to a probe: {error}"]
    if not watch.prompts:
        del watch.prompts
        return ["no probes: the engine does not say the tokens of a text"]
    newest = [probe for probe in watch.series.probes if probe.at >= now and not probe.plain]
    if newest and not any(probe.acceptance for probe in newest):
        return [UNTOLD]
    return []


def plain_engine(watch: Watch) -> RemoteEngine | None:
    """What decodes without speculation: the address that was named, else the engine itself where a
    request can ask for it."""
    if watch.plain is not None:
        return watch.plain
    if watch.engine.dialect.switches_off:
        return RemoteEngine("plain", watch.engine.address, speculate=False, connect=patient_client)
    return None


def probe_one(
    watch: Watch, plain: RemoteEngine | None, budget: ProbeBudget, prompts: Iterator[ProbePrompt]
) -> bool:
    """Ask the next prompt that the engine has room for, with and without speculation; returns
    whether one was left."""
    for prompt in prompts:
        try:
            ask(watch, watch.engine, prompt, budget, plain=False)
            if plain is not None:
                plain.start(EngineSettings())
                ask(watch, plain, prompt, budget, plain=True)
        except DraftwellError as error:
            if error.code == "context_too_long":
                budget.take_back()
                continue
            raise
        finally:
            if plain is not None:
                plain.stop()
        return True
    return False


def ask(
    watch: Watch, engine: RemoteEngine, prompt: ProbePrompt, budget: ProbeBudget, *, plain: bool
) -> None:
    """Send a fixed prompt, and keep its answer, or that none came."""
    elsewhere = plain and watch.plain is not None
    budget.spend(watch.clock(), len(prompt.ids) + NEW_TOKENS)
    running = engine.dialect.counters(engine.client).running
    try:
        decoded = engine.decode([prompt.ids], Sampling(max_tokens=NEW_TOKENS))
    except DraftwellError as error:
        if error.code != "context_too_long":
            watch.add(prompt.unanswered(watch.clock(), plain=plain, elsewhere=elsewhere))
        raise
    answer = decoded.answers[0]
    # one that came at once, through a proxy that does not stream, is timed as a whole
    after = answer.seconds - answer.first_token_seconds
    drafted = answer.acceptance.drafted or answer.acceptance.rounds
    probe = Probe(
        at=watch.clock(),
        name=prompt.name,
        kind=prompt.kind,
        prompt_tokens=len(prompt.ids),
        new_tokens=max(1, len(answer.tokens) - 1),
        seconds=after if after > 0 else answer.seconds,
        plain=plain,
        elsewhere=elsewhere,
        acceptance=answer.acceptance if drafted and not plain else None,
        at_once=None if running is None else float(running) + 1,
    )
    watch.add(probe)


def new_alarms(report: WatchReport, before: Sequence[Alarm]) -> tuple[list[Alarm], list[Alarm]]:
    """Alarms that a report has and an earlier one did not, and those that have ended since, by
    cause."""
    was, now = {a.cause for a in before}, {a.cause for a in report.alarms}
    begun = [alarm for alarm in report.alarms if alarm.cause not in was]
    return begun, [replace_until(alarm, report.at) for alarm in before if alarm.cause not in now]


def replace_until(alarm: Alarm, at: float) -> Alarm:
    """The alarm, ended."""
    return alarm.model_copy(update={"until": at})
