"""The answer to drift of what another engine serves: tuned again on recorded prompts, gated, deployed after a trial, and restarted.

Counts that our plug-in has recorded say whether there is drift; they hold no text, so the prompts are requests that somebody recorded
before the engine, such as a gateway. All steps are those of `EngineLoop`, which keeps what it has finished. Beside them one file
(`recalibration.json`) says what was begun on which prompts, so that a run that was killed resumes: prompts are fixed when it begins,
because their folder grows, and a restart that is due is made up for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from components.drift.schema import NOT_ENOUGH
from components.gate.verdict import FAILED, PASSED, UNDECIDED
from flows.steps.engine_loop import EngineLoop, LoopSettings
from flows.steps.monitor_engine import check_engine
from flows.steps.verdict import result_of, sentence
from registry.bundles.vllm.build import activate_vllm_bundle, bundles_of
from serving.errors import DraftwellError
from serving.files import file_lock, json_digest, write_json

if TYPE_CHECKING:
    from components.drift.acceptance import AcceptanceReport
    from components.drift.schema import DriftLimits
    from components.gate.verdict import Thresholds
    from components.prompts.prompt import Prompt
    from flows.steps.engine import EngineSpace

STATE, PROMPTS = "recalibration.json", "recalibration-prompts.jsonl"
RESUMED = timedelta(hours=24)
"""Age of a recalibration that was begun and not finished, up to which it is resumed: later its prompts are old."""
DEPLOYED, REFUSED, UNDECIDED_STATE, BUSY, ANSWERED = "deployed", "refused", "undecided", "busy", "answered"
STATES = {PASSED: DEPLOYED, FAILED: REFUSED, UNDECIDED: UNDECIDED_STATE}


class EngineDriftSettings(BaseModel):
    """What the check and the recalibration of another engine work on; defaults of the loop are those of `draftwell demo --engine vllm`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pair: str = Field("default", description="name, alias or YAML file of a pair")
    dtype: str | None = Field(None, pattern="^(float32|bfloat16)$", description="None takes the pair's own")
    device: str | None = Field(None, pattern="^(cpu|cuda)$", description="None takes the device that the installed engine is built for")
    threads: int | None = Field(None, ge=1, description="compute threads of the engine; None takes all cores")
    spool: Path | None = Field(None, description="folder of counts; None takes $DRAFTWELL_HOME/spool/<pair>")
    prompts: Path | None = Field(None, description="file or folder of recorded requests (JSONL); None takes those in the spool's folder")
    restart: str | None = Field(None, description="command of a shell that restarts the servers; None follows what this user serves on "
                                "this machine by processes of the new bundle, one after the other")
    out: Path = Field(Path("dist"), description="folder of bundles")
    minutes: float = Field(45.0, gt=0, description="for the whole recalibration")
    methods: tuple[str, ...] | None = Field(None, description="ways to speculate to choose among; None: all that are possible")
    levels: tuple[int, ...] = Field((1, 8), description="requests at once that are measured, ascending from 1")
    collect_prompts: int = Field(24, ge=1, description="prompts that texts are collected for")
    tune_prompts: int = Field(12, ge=2, description="prompts of the tuning")
    bench_prompts: int = Field(16, ge=2, description="prompts of the gate")
    max_tokens: int = Field(64, ge=1, description="of an answer")
    serve_seconds: float = Field(90.0, gt=0, description="of the trial of the new bundle's server")
    fresh: bool = Field(False, description="tune and judge again, also on prompts of an earlier recalibration")

    def loop(self) -> LoopSettings:
        """Settings of the loop."""
        return LoopSettings(minutes=self.minutes, collected=self.collect_prompts, tuned=self.tune_prompts, judged=self.bench_prompts,
                            max_tokens=self.max_tokens, methods=self.methods, levels=self.levels, serve_seconds=self.serve_seconds,
                            out=self.out, fresh=self.fresh)


class Begun(BaseModel):
    """The last recalibration."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    state: Literal["begun", "deploying", "deployed", "refused", "undecided"]
    at: datetime = Field(description="when its prompts were fixed, or it ended")
    served: str = Field(description="folder of the bundle that was served when it began")
    place: str = Field(description="where its prompts come from")
    prompts: str = Field(description="digest of its prompts")
    made: str | None = Field(None, description="folder of the bundle that it made")


@dataclass(frozen=True)
class EngineRecalibration:
    """A check, and what follows from it.

    Args:
        space: the pair on the engine.
        place: file or folder of recorded requests.
        spool: folder of counts.
        restart: restarts what serves, after `current` has moved; called again where it failed or was stopped.
        clock: seconds, ascending.
    """

    space: EngineSpace
    wanted: LoopSettings
    thresholds: Thresholds
    limits: DriftLimits
    say: Callable[[str], None]
    place: Path
    spool: Path
    restart: Callable[[], None]
    clock: Callable[[], float] = time.monotonic

    def run(self) -> dict[str, Any]:
        """Check, and recalibrate where there is drift.

        Returns:
            plain JSON: `state` (steady, not enough yet; deployed; refused or undecided by the gate, then what is served stays; answered:
            these prompts were tuned on already; busy: another run is at it), `why`, and where there was a loop its `report`.
        Raises:
            DraftwellError: what the check, the loop and the restart raise; the next run resumes.
        """
        with file_lock(self.space.folder / ".recalibration", wait=False) as free:
            if not free:
                return {"state": BUSY, "why": "another recalibration of this pair is running"}
            last = self.last()
            if last is not None and last.state == "deploying" and last.made == str(self.current()):
                self.say(f"{last.made} was deployed by an earlier run, which did not restart what serves")
                return self.deployed(last)
            found = self.check()
            if found is None or not found.drifted:
                return {"state": NOT_ENOUGH, "why": "nothing was counted yet"} if found is None else {
                    "state": found.verdict, "why": found.why}
            self.say(f"{found.verdict}: {found.why}")
            return self.answer(found, last)

    def current(self) -> Path:
        """The bundle that `current` leads to."""
        return (bundles_of(self.wanted.out, self.space.workspace.spec.name) / "current").resolve()

    def check(self) -> AcceptanceReport | None:
        """What the counts say; None where there are none."""
        try:
            return check_engine(self.space, spool=self.spool, out=self.wanted.out, limits=self.limits)
        except DraftwellError as error:
            if error.code != "spool_empty":
                raise
            return None

    def answer(self, found: AcceptanceReport, last: Begun | None) -> dict[str, Any]:
        """Tune again, unless that was done already."""
        job, prompts = self.begin(last)
        if last is not None and not self.wanted.fresh and (why := self.answered(job, last)):
            return {"state": ANSWERED, "why": why, "drift": found.why}
        self.note(job)
        report = self.loop(job, prompts).run()
        record = report["record"]
        state = STATES[result_of(record)]
        if state == DEPLOYED:
            made = self.last()
            assert made is not None
            return {**self.deployed(made), "drift": found.why, "report": report}
        self.note(job.model_copy(update={"state": state, "at": datetime.now(UTC)}))
        return {"state": state, "why": f"{sentence(record)}; what is served stays", "drift": found.why, "report": report}

    def begin(self, last: Begun | None) -> tuple[Begun, list[Prompt]]:
        """The recalibration that was begun for what is served, or a new one with the prompts of today."""
        from components.drift.prompts import recorded_prompts, write_prompts
        from components.prompts.overlap import hashes_of
        from components.prompts.prompt import read_prompts

        file, served, wanted = self.space.folder / PROMPTS, str(self.current()), self.wanted
        if (last is not None and last.state in ("begun", "deploying") and (last.served, last.place) == (served, str(self.place))
                and datetime.now(UTC) - last.at < RESUMED and file.is_file() and not wanted.fresh):
            self.say("resuming the recalibration that was begun")
            return last.model_copy(update={"state": "begun"}), read_prompts(file)
        prompts = recorded_prompts(self.place, window=self.limits.window, fewest=wanted.collected + wanted.tuned + wanted.judged)
        write_prompts(file, prompts)
        return Begun(state="begun", at=datetime.now(UTC), served=served, place=str(self.place),
                     prompts=json_digest(sorted(hashes_of(prompts)))), prompts

    def answered(self, job: Begun, last: Begun) -> str | None:
        """Why a drift is left at what came of the last recalibration; None where there is something to do."""
        if last.state in (REFUSED, UNDECIDED_STATE) and last.served == job.served:
            again = last.at + timedelta(hours=self.limits.repeat_after_hours)
            if datetime.now(UTC) < again:
                return (f"the gate did not pass what was tuned last ({last.state}); tried again after {again:%Y-%m-%d %H:%M} UTC, or with "
                        "--fresh")
        same = last.prompts == job.prompts and job.served == (last.made if last.state == DEPLOYED else last.served)
        if same and last.state in (DEPLOYED, REFUSED):
            return f"{self.place} has no other prompts than those that were tuned on already: record newer ones, or name --fresh"
        return None

    def loop(self, job: Begun, prompts: list[Prompt]) -> EngineLoop:
        """The loop on the prompts; before `current` moves it is noted that a restart is due."""
        def activate(bundle: Path) -> None:
            self.note(job.model_copy(update={"state": "deploying", "at": datetime.now(UTC), "made": str(bundle.resolve())}))
            activate_vllm_bundle(bundle)

        return EngineLoop(self.space, prompts, self.wanted, self.thresholds, self.limits, self.say, self.clock, activate=activate)

    def deployed(self, job: Begun) -> dict[str, Any]:
        """Restart what serves; afterwards the bundle that was made is what the next check compares with."""
        self.restart()
        self.note(job.model_copy(update={"state": DEPLOYED, "at": datetime.now(UTC)}))
        return {"state": DEPLOYED, "why": f"{job.made} is deployed", "bundle": job.made}

    def last(self) -> Begun | None:
        """The last recalibration; None where there is none, or nothing that can be read."""
        try:
            return Begun.model_validate_json((self.space.folder / STATE).read_text(encoding="utf-8"))
        except (OSError, ValidationError):
            return None

    def note(self, job: Begun) -> None:
        """Keep what a recalibration has come to."""
        write_json(self.space.folder / STATE, job.model_dump(mode="json"))


def recalibrate_engine(space: EngineSpace, settings: EngineDriftSettings, say: Callable[[str], None],
                       limits: DriftLimits | None = None) -> dict[str, Any]:
    """Check what is served for drift, and answer it; see `EngineRecalibration.run`.

    Args:
        limits: None takes those of the registry.
    """
    from components.gate.verdict import Thresholds
    from flows.steps.engine_replicas import restart_hook
    from flows.steps.monitor import load_limits, spool_of
    from registry.gates import load_gates

    spool = spool_of(space.workspace, settings.spool)
    wanted = settings.loop()
    wanted.tuning()  # a mistake in methods or levels is refused now, and not when traffic has drifted
    return EngineRecalibration(
        space, wanted, Thresholds.of(load_gates().model_dump()), limits or load_limits(None), say,
        place=(settings.prompts or spool).absolute(), spool=spool,
        restart=restart_hook(settings.restart, settings.out, space.workspace.spec.name, say)).run()


def said_of(outcome: dict[str, Any]) -> str:
    """An outcome in one line.

    >>> said_of({"state": "steady", "why": "0.71 of drafts keep their first token"})
    'steady: 0.71 of drafts keep their first token'
    """
    return f"{outcome['state']}: {outcome['why']}"


