"""The steps of a recalibration: from recorded prompts to a deployed champion, apart from the
workspace.

Everything is stored in `recalibrations/<drift>/` of the pair's workspace until it is published:
prompts (fixed when it begins, because a spool grows), traces, artifacts, reports, and what each
finished step returned. A run that was killed resumes there; started again with other settings, it
makes everything but the prompts again. The workspace, its traces and the champion stay as they are
if the gate refuses. `outcome.json` ends a recalibration: one that is deployed, or waits for a
person to promote it, is not done again, one that did not pass begins again when it is started
again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwell.components.gate.settings import GateSettings
from draftwell.flows import context
from draftwell.flows.context import StepContext, now
from draftwell.flows.loading import open_from_settings, prompts_of
from draftwell.flows.orchestration.cached_steps import run_once, traces_of
from draftwell.flows.orchestration.monitor_flow import announced, announcement
from draftwell.flows.progress import announce
from draftwell.flows.settings import BESIDES, PLACES
from draftwell.flows.steps import collect as collect_step
from draftwell.flows.steps import deploy
from draftwell.flows.steps import gate as gate_step
from draftwell.flows.steps import monitor as monitor_step
from draftwell.flows.steps import publish as publish_step
from draftwell.flows.steps import train as train_step
from draftwell.flows.steps import tune as tune_step
from draftwell.flows.steps.champion import champion_number, champion_of
from draftwell.flows.steps.monitor import DriftSettings
from draftwell.flows.steps.reference_traces import RECALIBRATIONS
from draftwell.flows.steps.traffic_prompts import newest_prompts, on_prompts
from draftwell.flows.workspace import Workspace
from draftwell.serving.device import DEVICES
from draftwell.serving.files import file_lock, write_json
from draftwell.serving.recording.trace import TraceSet

if TYPE_CHECKING:
    from draftwell.components.prompts.prompt import Prompt

PROMPTS, BEGUN, OUTCOME, STEPS = "prompts.jsonl", "begun.json", "outcome.json", "steps"
ANSWERED = ("deployed", "waiting")
"""Outcomes that answer a drift; a release that waits does so as challenger, because promotion is
manual. The others, refused and undecided, are tried again."""
MADE_OF = "made_of.json"
"""Among the kept steps: the traces and settings that all of them are of."""


def once(
    step: str,
    settings: DriftSettings,
    folder: str,
    run: Callable[[StepContext, dict[str, list[Prompt]]], Any],
) -> Any:
    """What a step returned in this recalibration; it runs once, with the pair and the prompts of
    each step."""
    return run_once(
        Path(folder) / STEPS / f"{step}.json", step, lambda: run(*open_job(settings, folder))
    )


def begin(settings: DriftSettings) -> dict[str, Any]:
    """Fix the prompts, or find a recalibration that was begun; returns its folder, and what came of
    it where it is over.

    A drift that nothing came of is announced again under another digest, because the spool has
    grown: what was begun for the same champion is resumed, unless it is so old that its prompts
    are.

    Raises:
        DraftwellError: an empty spool, or too few prompts in it.
    """
    space = Workspace(settings.pair, settings.dtype, announce)
    before = announced(space, settings.device)
    drift = settings.drift or (before.digest if before else None)
    home = space.root / RECALIBRATIONS
    if drift is not None and (found := of_drift(home, drift)) is not None:
        return {"folder": str(found), "drift": drift, "outcome": outcome_of(found)}
    spool = (
        settings.spool or (before.spool if before else None) or monitor_step.spool_of(space, None)
    )
    begun = {
        "champion": champion_number(space, settings.device),
        "device": settings.device,
        "spool": str(spool.absolute()),
    }
    if (found := unfinished(home, begun)) is not None:
        announce(f"resuming the recalibration in {found}")
        return {"folder": str(found), "drift": drift, "outcome": None}
    prompts = newest_prompts(settings, spool)
    text = "".join(f"{prompt.id} {prompt.turns} {prompt.messages}\n" for prompt in prompts)
    folder = home / (drift or hashlib.sha256(text.encode()).hexdigest())[:12]
    if not (folder / PROMPTS).is_file():
        from draftwell.components.drift.prompts import write_prompts

        write_json(folder / BEGUN, begun)
        write_prompts(folder / PROMPTS, prompts)
    return {"folder": str(folder), "drift": drift, "outcome": outcome_of(folder)}


def of_drift(home: Path, drift: str) -> Path | None:
    """The recalibration that was begun for a drift, or that answered it."""
    if (home / drift[:12] / PROMPTS).is_file():
        return home / drift[:12]
    answers = [
        file.parent
        for file in home.glob(f"*/{OUTCOME}")
        if (outcome_of(file.parent) or {}).get("drift") == drift
    ]
    return answers[0] if answers else None


def unfinished(home: Path, begun: dict[str, Any]) -> Path | None:
    """The newest recalibration that was begun like this (champion, device, spool) and never ended,
    within two announcements of a drift."""
    oldest = time.time() - 2 * 3600 * monitor_step.load_limits().repeat_after_hours
    found = {}
    for file in home.glob(f"*/{PROMPTS}"):
        folder, at = file.parent, file.stat().st_mtime
        try:
            alike = json.loads((folder / BEGUN).read_text(encoding="utf-8")) == begun
        except (OSError, ValueError):
            continue
        if alike and at > oldest and not (folder / OUTCOME).exists():
            found[folder] = at
    return max(found, key=found.__getitem__) if found else None


def outcome_of(folder: Path) -> dict[str, Any] | None:
    """What came of a recalibration that is deployed or waits to be promoted; None of one that did
    not pass, which may be tried again."""
    try:
        found = json.loads((folder / OUTCOME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return dict(found) if isinstance(found, dict) and found.get("state") in ANSWERED else None


def open_job(settings: DriftSettings, folder: str) -> tuple[StepContext, dict[str, list[Prompt]]]:
    """The pair over a recalibration's folder, and the prompts of each step."""
    place, loaded = Path(folder), open_from_settings(settings)
    return StepContext(loaded.workspace.aside(place), loaded.pair, loaded.bar), prompts_of(
        on_prompts(settings, place / PROMPTS)
    )


def collect_traffic(settings: DriftSettings, folder: str) -> dict[str, str]:
    """Traces of the pair on the new prompts, of each class of temperatures; returns the name of
    their folder → digest.

    Steps of other traces or other settings are forgotten, and what they made too: it names traces
    that no longer exist. What is champion already keeps its traces, whatever the settings say now:
    it is only to be deployed.
    """
    if promoted(settings, folder):
        return {
            name: TraceSet(Path(folder) / name).digest()
            for name in traces_of(settings)
            if (Path(folder) / name).is_dir()
        }
    step, prompts = open_job(settings, folder)
    digests = {
        name: traces.digest()
        for name, traces in collect_step.collect_classes(step, prompts["collect"], settings).items()
    }
    keep_matching_steps(
        folder,
        {
            **digests,
            "settings": settings.model_dump(mode="json", exclude=BESIDES | PLACES | {"drift"}),
        },
    )
    return digests


def promoted(settings: DriftSettings, folder: str) -> bool:
    """Whether the release that was published here is the champion."""
    try:
        kept = json.loads((Path(folder) / STEPS / "publish.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    # an older version kept the number alone
    release = kept.get("result") if isinstance(kept, dict) else kept
    return bool(
        release
        == champion_number(Workspace(settings.pair, settings.dtype, announce), settings.device)
    )


def keep_matching_steps(folder: str, made_of: dict[str, Any]) -> None:
    """Forget what steps returned and made, unless they are of these traces and settings."""
    steps = Path(folder) / STEPS
    try:
        if json.loads((steps / MADE_OF).read_text(encoding="utf-8")) == made_of:
            return
    except (OSError, ValueError):
        pass  # the first run here, or one of an older version
    of_devices = [Path(folder) / device for device in DEVICES]
    # in this order: what is not forgotten yet is forgotten by the next run
    for place in (steps, Path(folder) / "artifacts", *of_devices):
        shutil.rmtree(place, ignore_errors=True)
    write_json(steps / MADE_OF, made_of)


def calibrate_on_traffic(settings: DriftSettings, folder: str) -> dict[str, Any]:
    """Verifier, table, memory and hardware profile; an acceptance head too, where the champion has
    one."""

    def run(step: StepContext, prompts: dict[str, list[Prompt]]) -> dict[str, Any]:
        traces = context.open_trace(step)
        train_step.run_train(step, traces)
        champion = champion_of(step.workspace, settings.device)
        if champion is not None and "acceptance_head" in champion.pins:
            train_step.run_train_head(step, traces)
        return train_step.calibrate_as(settings, step, prompts["calibrate"])

    return dict(once("calibrate", settings, folder, run))


def tune_on_traffic(settings: DriftSettings, folder: str) -> dict[str, Any]:
    """Choose strategy and parameters on the new prompts, compared with the champion; returns the
    choices and why."""
    return dict(
        once(
            "tune",
            settings,
            folder,
            lambda step, prompts: tune_step.tune_as(settings, step, prompts["tune"]),
        )
    )


def publish_candidate(settings: DriftSettings, folder: str, drift: str | None) -> int:
    """Publish what was made and pin it in a release; returns its number."""

    def run(step: StepContext, prompts: dict[str, list[Prompt]]) -> int:
        evidence = {"settings": settings.evidence(step.workspace.spec.name), "drift": drift}
        return publish_step.run_publish(step, evidence, device=settings.device).version

    return int(once("publish", settings, folder, run))


def gate_candidate(settings: DriftSettings, folder: str, release: int) -> dict[str, Any]:
    """Judge the release against the champion on prompts of the new traffic that nothing was chosen
    on; once for the same champion.

    What was promoted already and then killed is not judged again: it would be compared with itself.

    Returns:
        `passed`, `checks`, and `over_champion`: how many times as fast as the champion's config,
            with its interval; None without one.
    """
    champion = champion_number(Workspace(settings.pair, settings.dtype, announce), settings.device)
    file = Path(folder) / STEPS / f"gate-{release}.json"
    if file.is_file() and (
        (kept := json.loads(file.read_text(encoding="utf-8")))["beside"] == champion
        or champion == release
    ):
        return dict(kept["verdict"])
    found = gate_verdict(settings, folder, release)
    write_json(file, {"beside": champion, "verdict": found})
    return found


def gate_verdict(settings: DriftSettings, folder: str, release: int) -> dict[str, Any]:
    """The gate's verdict of today."""
    step, prompts = open_job(settings, folder)
    gate = GateSettings(device=settings.device, limit=None, max_tokens=settings.bench_tokens)
    result = gate_step.gate_release(step, prompts["bench"], gate, alias=release)
    return {
        "passed": result["passed"],
        "checks": result["checks"],
        "over_champion": speedup_over_champion(step, result["report"]),
    }


def speedup_over_champion(step: StepContext, report: dict[str, Any]) -> dict[str, float] | None:
    """Speed of the workspace's choice over the champion's, both measured on the new traffic in one
    run."""
    from draftwell.components.bench.schema import BenchReport
    from draftwell.components.gate.bench_checks import columns
    from draftwell.components.report.intervals import paired_bootstrap_ratio
    from draftwell.serving.artifacts.decoding_config import DecodingConfig

    bench = BenchReport.from_json(report)
    # entries that were measured again are those that count
    entries = bench.in_doubt or bench.strategies
    if "champion" not in entries:
        return None
    chosen = DecodingConfig.load(step.workspace.folder("decoding_config"))
    mine = next(
        entry
        for label, entry in entries.items()
        if label != "champion"
        and (entry.strategy, entry.parameters) == (chosen.strategy, chosen.parameters)
    )
    ratio, low, high = paired_bootstrap_ratio(
        *columns(entries["champion"].per_prompt), *columns(mine.per_prompt)
    )
    return {"ratio": ratio, "low": low, "high": high}


def deploy_release(settings: DriftSettings, release: int) -> str | None:
    """Make a release that passed the champion, and build its bundle; returns the bundle's folder,
    None where a person promotes."""
    space = Workspace(settings.pair, settings.dtype, announce)
    bundle = deploy.promote_and_deploy(
        space, settings.device, release, settings.out, settings.promote
    )
    return None if bundle is None else str(bundle)


def finish(settings: DriftSettings, folder: str, outcome: dict[str, Any]) -> dict[str, Any]:
    """Write down what came of it. A drift whose recalibration is deployed, or waits to be promoted,
    is handled; of any other the steps are not kept."""
    complete = {**outcome, "ended": now()}
    if outcome["state"] not in ANSWERED:
        shutil.rmtree(Path(folder) / STEPS, ignore_errors=True)
    write_json(Path(folder) / OUTCOME, complete)
    space = Workspace(settings.pair, settings.dtype, announce)
    before = announced(space, settings.device)
    if outcome["state"] in ANSWERED and before is not None and before.digest == outcome["drift"]:
        announcement(space, settings.device).unlink(missing_ok=True)
    return complete


def single_recalibration(settings: DriftSettings) -> Any:
    """A context that says whether this process may recalibrate the pair: one at a time on a
    machine."""
    space = Workspace(settings.pair, settings.dtype, announce)
    return file_lock(space.root / RECALIBRATIONS / ".lock", wait=False)
