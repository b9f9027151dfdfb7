"""Monitoring: compares served traffic with the traces that the release that serves it was
calibrated on, or, where its strategy is lossy, with what that wrote on the same prompts
(`reference_traces`).

No model is loaded. The release's artifacts come from the registry. What serves is what `current`
leads to, which may be another release than the champion of the alias; "champion" below means what
serves.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import Field

from draftwell import registry
from draftwell.components.collect.plan import prompt_hashes
from draftwell.components.collect.repeated_prompts import first_of_the_same
from draftwell.components.drift.drift import Subject, WatchedArtifacts, compare_traffic
from draftwell.components.drift.history import drift_over_time, remember
from draftwell.components.drift.prompts import untouched_prompts
from draftwell.components.drift.report import drift_json, drift_markdown, drift_plots
from draftwell.components.drift.schema import DriftLimits, DriftReport
from draftwell.components.drift.spool import RecentTraffic, read_spool
from draftwell.components.drift.traffic import (
    COLUMNS,
    HIDDEN,
    Traffic,
    prompts_of_the_other_sort,
    read_traffic,
    shared_kinds,
)
from draftwell.components.train.examples import LEAST_PROMPTS
from draftwell.flows.failures import will_pass
from draftwell.flows.settings import PipelineSettings
from draftwell.flows.steps.reference_traces import Served, find_reference, keep_reference, served
from draftwell.flows.workspace import Workspace
from draftwell.registry.promotion import champion_since
from draftwell.registry.store import Store
from draftwell.registry.strict import read_yaml
from draftwell.serving.artifacts.kinds import KINDS, WATCHED
from draftwell.serving.artifacts.pair_files import draftwell_home
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import write_atomically
from draftwell.serving.recording.trace_schema import LOSSY
from draftwell.serving.runtime.strategies import find_strategy, served_choice

HEADS = ("eagle3_head", "medusa_heads")
"""Kinds that draft by themselves and take long to train."""


COLLECTED = 24
"""Prompts of an answer to drift that traces are collected on: later traffic is compared with them,
too."""


class DriftSettings(PipelineSettings):
    """What monitoring works on; those of the pipeline say how much a recalibration may do."""

    reference: Path | None = Field(
        None,
        description="traces to compare with; None finds those that the champion was calibrated on",
    )
    collect_prompts: int = Field(
        COLLECTED,
        ge=1,
        description="prompts to collect traces on: also what later traffic is compared with",
    )


HISTORY, OVER_TIME = "drift_history.json", "drift_over_time.png"
"""Files of a report's folder."""
OTHER_REFERENCE = "{} was not calibrated on this reference"


def load_limits(path: Path | None = None) -> DriftLimits:
    """What counts as drift, from the project's `registry/drift.yaml` or another file.

    >>> load_limits().false_alarm_rate
    0.001
    """
    return read_yaml(path or Path(registry.__file__).parent / "drift.yaml", DriftLimits)


def spool_of(space: Workspace, named: Path | None) -> Path:
    """Where served traffic is."""
    return named if named is not None else draftwell_home() / "spool" / space.spec.name


def check(
    space: Workspace,
    *,
    spool: Path,
    device: str = "cpu",
    reference: Path | None = None,
    out: Path = Path("dist"),
    limits: DriftLimits | None = None,
    now: datetime | None = None,
) -> tuple[DriftReport, Served]:
    """Compare the newest traffic with the calibration traces of the release that `current` names.

    Args:
        spool: folder of traces that a server writes.
        reference: folder of traces; None finds the champion's own
            (`reference_traces.find_reference`).
        out: folder of bundles, for what `current` serves.
        limits: None takes those of the registry; `now`: None takes the clock.
    Raises:
        DraftwellError: nothing calibrated, its traces are not here, an empty spool, or one of
            another pair.
    """
    limits, now = limits or load_limits(), now or datetime.now(UTC)
    champion = served(space, device, out)
    traces = find_reference(space, champion, reference)
    header, digest = traces.header, traces.digest()
    verifier: Any = champion.artifacts.get("verifier")
    hidden = verifier is not None and bool({"before", "after"} & set(verifier.features))
    found = read_served(spool, champion, limits, header.temperature, hidden)
    rows = traces.read([*COLUMNS, *(HIDDEN if hidden else ())])
    feedback, kinds, doubts = comparable(champion, rows, found.rows, reference)
    longest = max((one.max_tokens for one in found.headers), default=header.max_tokens)
    max_tokens = min(header.max_tokens, longest)
    then, today = (
        read_traffic(table, kinds=kinds, temperature=header.temperature, max_tokens=max_tokens)
        for table in (rows, feedback)
    )
    few = [] if doubts else too_few(today, found.others, header.temperature, limits)
    doubts += out_of_date(champion, found.newest, limits, now) + few
    remarks, more = left_out(champion, feedback, kinds, len(today.names))
    # a lossy strategy's reference is on those traces' prompts
    origin = champion.trace_digest if reference is None else digest
    notes = [*found.notes, *cut(today, max_tokens), *remarks]
    notes += [OTHER_REFERENCE.format(champion.name)] if origin != champion.trace_digest else []
    digests = (digest, found.digest)
    report = compare_traffic(
        then,
        today,
        limits,
        Subject(space.spec.name, champion.fingerprint, kinds, digests, champion.name),
        watched(champion, untouched(verifier, origin, rows, prompt_hashes(traces))),
        notes=notes,
        doubts=[*doubts, *more],
    )
    if digest == champion.trace_digest:
        keep_reference(space, traces, digest)
    if report.drifted:
        said = (*report.notes, *heads_left(champion, space.name))
        report = report.model_copy(update={"notes": said})
    return report, champion


def read_served(
    spool: Path, champion: Served, limits: DriftLimits, temperature: float, hidden: bool
) -> RecentTraffic:
    """The newest of what was served at a temperature; of a lossy champion nothing from before its
    promotion, because that may be another strategy's."""
    since = promoted(champion) if champion.lossy is not None else None
    return read_spool(
        spool,
        champion.fingerprint,
        window=limits.window,
        hidden=hidden,
        temperature=temperature,
        since=since,
    )


def too_few(today: Traffic, others: int, temperature: float, limits: DriftLimits) -> list[str]:
    """A doubt where few prompts can be compared and `others` cannot."""
    if not others or len(today.names) >= limits.min_prompts:
        return []
    return [
        f"the feedback has {len(today.names)} different prompts at the reference's temperature "
        f"{temperature:g} ({limits.min_prompts} are needed) and {others} at others, which cannot "
        "be compared: wait for more, or calibrate on traces collected at the temperature that is "
        "served"
    ]


def cut(traffic: Traffic, max_tokens: int) -> list[str]:
    """A note on positions that were left out; none where there are none."""
    left = f"{traffic.others} positions of the feedback left out: after the first {max_tokens} "
    return [f"{left}tokens of a text"] if traffic.others else []


def watched(champion: Served, untouched: Sequence[str]) -> WatchedArtifacts:
    """The champion's artifacts that traffic is compared with."""
    roles: dict[str, Any] = {
        str(KINDS[name].drift_role): champion.artifacts.get(name) for name in WATCHED
    }
    return WatchedArtifacts(**roles, untouched=untouched)


def heads_left(champion: Served, pair: str) -> list[str]:
    """A line for each head that the champion drafts from: no flow trains it again, and traffic that
    has changed may fit it less."""
    config: Any = champion.artifacts.get("decoding_config")
    if config is None:
        return []
    read = {
        kind
        for temperature in (0.0, 1.0)
        for kind in find_strategy(served_choice(config, temperature).name).reads()
    }
    return [
        f"{champion.name} drafts with {kind}, which a recalibration does not train: where "
        "fewer of its drafts are kept now, run "
        f"`draftwell step train --kind {kind} --pair {pair}`, then `draftwell step choose`"
        for kind in HEADS
        if kind in read and kind in champion.artifacts
    ]


def comparable(
    champion: Served, reference: pa.Table, feedback: pa.Table, named: Path | None
) -> tuple[pa.Table, tuple[str, ...], list[str]]:
    """The feedback that can be compared, the kinds of texts that are, and why there is none: texts
    of a lossy champion's own strategy are compared with such texts only, unless a person names a
    reference."""
    if named is not None or champion.lossy is None:
        return feedback, shared_kinds(reference, feedback), []
    if LOSSY in reference.column("kind").unique().to_pylist():
        return feedback, (LOSSY,), []
    return (
        feedback.slice(0, 0),
        ("target",),
        [
            f"there is no reference yet of what {champion.lossy.strategy}, which is lossy, "
            f"serves as {champion.name}: publishing it again "
            "collects it (the next weekly release, or a recalibration)"
        ],
    )


def left_out(
    champion: Served, feedback: pa.Table, kinds: tuple[str, ...], compared: int
) -> tuple[list[str], list[str]]:
    """What is left out of the feedback because a strategy of the other sort, lossy or lossless,
    wrote it: notes and, where that is most of it, doubts."""
    count, by = (
        prompts_of_the_other_sort(feedback, kinds),
        f"a {'lossless' if LOSSY in kinds else 'lossy'} strategy",
    )
    if not count:
        return [], []
    own = champion.lossy is None or LOSSY in kinds
    fix = (
        f"wait for more of what {champion.name} serves"
        if own
        else "leave reference out, or name one of such texts"
    )
    why = (
        f"{count} of the newest prompts were answered by {by}: its texts differ from those of "
        f"the reference; {fix}"
    )
    return [f"{count} prompts of the feedback left out: answered by {by}"], [
        why
    ] if count > compared else []


def out_of_date(
    champion: Served, newest: datetime | None, limits: DriftLimits, now: datetime
) -> list[str]:
    """Why the newest traffic says nothing about what is served now: a spool that no longer grows
    looks steady for ever."""
    if newest is None:
        return []
    since = promoted(champion)
    if since is not None and newest < since:
        found = f"before {champion.name} became champion"
    elif now - newest > timedelta(hours=limits.stale_after_hours):
        found = f"more than {limits.stale_after_hours:g} hours ago"
    else:
        return []
    return [
        f"the newest traffic to compare was recorded on {newest:%Y-%m-%d at %H:%M} UTC, "
        f"{found}: wait for more, and see that the "
        "server records it (--feedback-dir)"
    ]


def promoted(champion: Served) -> datetime | None:
    """When the champion was promoted, by the registry's clock; None where there is none, or one
    that was named by hand and never deployed."""
    return champion_since(Store(), champion.release) if champion.release else None


def watched_temperature(
    space: Workspace, device: str, reference: Path | None, out: Path = Path("dist")
) -> float | None:
    """The temperature of the traffic that `check` looks at; None where there is nothing to compare
    it with.

    Raises:
        DraftwellError: the registry does not answer.
    """
    try:
        return find_reference(space, served(space, device, out), reference).header.temperature
    except DraftwellError as error:
        if will_pass(error):
            raise
        return None


def untouched(
    verifier: Any, digest: str | None, rows: pa.Table, hashes: Mapping[str, str] | None = None
) -> list[str]:
    """Prompts of the reference that the verifier has not learnt from: its test prompts; of other
    traces than it was made of those whose hashes it does not record; none where it was tested on
    another trace and learnt from all of this one.

    Args:
        digest: of the traces whose prompts these are.
        hashes: prompt id → hash; None where the reference does not record its prompts, or the
            verifier none: then all count as new to it.
    """
    alike = first_of_the_same(rows)
    different = sorted({alike.get(name, name) for name in rows.column("prompt_id").to_pylist()})
    if verifier is None or len(different) < LEAST_PROMPTS:
        return different
    if verifier.provenance.trace_digest != digest:
        learnt = set(verifier.provenance.training_prompts or ())
        return [name for name in different if (hashes or {}).get(name) not in learnt]
    made = verifier.provenance.parameters
    return (
        [] if made.get("test_trace") else untouched_prompts(different, int(made.get("seed") or 0))
    )


def write_report(report: DriftReport, folder: Path, now: datetime | None = None) -> list[Path]:
    """`drift.json`, `drift.md` and the plots in a folder; returns all of them. What the checks of
    one folder found over time is in `drift_history.json` there.

    Args:
        now: None takes the clock.
    """
    data, text = folder / "drift.json", folder / "drift.md"
    write_atomically(
        data, (json.dumps(drift_json(report), indent=2, allow_nan=False) + "\n").encode()
    )
    write_atomically(text, drift_markdown(report).encode())
    history = remember(report, folder / HISTORY, now or datetime.now(UTC))
    over_time = drift_over_time(history.looks, report.pair, folder / OVER_TIME)
    return [data, text, *drift_plots(report, folder), *([over_time] if over_time else [])]


def note_in_registry(champion: Served, report: DriftReport, pictures: Iterable[Path] = ()) -> None:
    """Keep the report and its pictures with the champion's run in MLflow, and name it in a tag of
    that version."""
    if champion.release is None:
        return
    store = Store()
    name = f"drift/{report.digest[:12]}"
    store.log_text(champion.release.published, report.model_dump_json(indent=2), f"{name}.json")
    store.log_text(champion.release.published, drift_markdown(report), f"{name}.md")
    store.log_files(champion.release.published, pictures, name)
    store.set_tag(champion.release.published, "drift", report.digest[:12])
