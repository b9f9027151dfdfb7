"""The answer to drift of what another engine serves: tuned again on recorded prompts, gated,
deployed after a trial, and restarted.

Counts that our plug-in has recorded say whether there is drift; they hold no text, so the prompts
are requests that somebody recorded before the engine, such as a gateway. All steps are those of
`EngineLoop`, which keeps what it has finished. Beside them one file (`recalibration.json`) says
what was begun on which prompts, so that a run that was killed resumes: prompts are fixed when it
begins, because their folder grows, and a restart that is due is made up for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from draftwell.components.drift.acceptance import read_lines
from draftwell.components.drift.prompts import recorded_prompts, refuse_missing, write_prompts
from draftwell.components.drift.schema import NOT_ENOUGH
from draftwell.components.gate.verdict import FAILED, PASSED, UNDECIDED, Thresholds
from draftwell.components.prompts.overlap import hashes_of
from draftwell.components.prompts.prompt import read_prompts
from draftwell.flows.steps.engine.loop import EngineLoop
from draftwell.flows.steps.engine.monitor import check_engine, served_settings
from draftwell.flows.steps.engine.restart import restart_hook
from draftwell.flows.steps.engine.served import Deployment, served_deployment
from draftwell.flows.steps.engine.settings import EngineDriftSettings, LoopSettings
from draftwell.flows.steps.monitor import load_limits, spool_of
from draftwell.flows.steps.verdict import result_of, sentence
from draftwell.registry.bundles.vllm.build import activate_vllm_bundle, bundles_of
from draftwell.registry.bundles.vllm.render import MANIFEST
from draftwell.registry.gates import load_gates
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import file_lock, json_digest, write_json

if TYPE_CHECKING:
    from draftwell.components.drift.schema import DriftLimits, DriftReport
    from draftwell.components.prompts.prompt import Prompt
    from draftwell.flows.steps.engine.space import EngineSpace

STATE, PROMPTS = "recalibration.json", "recalibration-prompts.jsonl"
RESUMED = timedelta(hours=24)
"""Age of a recalibration that was begun and not finished, up to which it is resumed: later its
prompts are old."""
DEPLOYED, REFUSED, UNDECIDED_STATE, BUSY, ANSWERED = (
    "deployed",
    "refused",
    "undecided",
    "busy",
    "answered",
)
STATES = {PASSED: DEPLOYED, FAILED: REFUSED, UNDECIDED: UNDECIDED_STATE}


class Begun(BaseModel):
    """The last recalibration."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    state: Literal["begun", "deploying", "deployed", "refused", "undecided"]
    at: datetime = Field(description="when its prompts were fixed, or it ended")
    served: str = Field(description="folder of the bundle that was served when it began")
    place: str = Field(description="where its prompts come from")
    prompts: str = Field(description="digest of its prompts")
    made: str | None = Field(None, description="folder of the bundle that it made")
    active: bool = Field(False, description="whether `current` has led to that bundle")
    failed: datetime | None = Field(None, description="when an error ended its loop")


@dataclass(frozen=True)
class EngineRecalibration:
    """A check, and what follows from it.

    Args:
        space: the pair on the engine.
        place: file or folder of recorded requests.
        spool: folder of counts.
        restart: restarts what serves, after `current` has moved, and says whether there was
            anything; called again where it failed or was stopped.
        spool_named: a person named the folder of counts, so that one without any is a mistake.
        place_named: a person named the place of the requests, so that it has to be there also while
            nothing has drifted.
        clock: seconds, ascending.
        deployment: what a person decided about the bundle that is served, which stays.
    """

    space: EngineSpace
    wanted: LoopSettings
    thresholds: Thresholds
    limits: DriftLimits
    say: Callable[[str], None]
    place: Path
    spool: Path
    restart: Callable[[], bool]
    spool_named: bool = False
    place_named: bool = False
    clock: Callable[[], float] = time.monotonic
    deployment: Deployment = field(default_factory=Deployment)

    def run(self) -> dict[str, Any]:
        """Check, and recalibrate where there is drift.

        Returns:
            plain JSON: `state` (steady, not enough yet; deployed; refused or undecided by the gate,
                then what is served stays; answered:
            there is nothing to do about the drift yet; busy: another run is at it), `why`, and
            where there was a loop its `report`.
        Raises:
            DraftwellError: what the check, the loop and the restart raise, or nothing was restarted
                (`nothing_restarted`); the next run resumes. Or a place of requests that was named
                is not there (`no_prompts`).
        """

        with file_lock(self.space.folder / ".recalibration", wait=False) as free:
            if not free:
                return {"state": BUSY, "why": "another recalibration of this pair is running"}
            last = self.last()
            if last is not None and last.state == "deploying" and last.made == str(self.current()):
                self.say(
                    f"{last.made} was deployed by an earlier run, which did not restart what serves"
                )
                return self.deployed(last)
            if self.place_named:  # a restart that is due needs no prompts
                refuse_missing(self.place)
            found = self.check()
            why = (
                "nothing was counted yet" if found is None else "; ".join((found.why, *found.notes))
            )
            if found is not None and found.drifted:
                self.say(f"{found.verdict}: {why}")
                return self.answer(why, last)
            if self.plain():
                return self.answer_plain(last)
            return {"state": NOT_ENOUGH if found is None else found.verdict, "why": why}

    def current(self) -> Path:
        """The bundle that `current` leads to."""
        return (bundles_of(self.wanted.out, self.space.workspace.spec.name) / "current").resolve()

    def plain(self) -> bool:
        """Whether plain decoding is served, of which no drafts are counted."""
        return not served_settings(self.wanted.out, self.space.workspace.spec.name)["speculative"]

    def check(self) -> DriftReport | None:
        """What the counts say; None where there are none in the folder that nobody named."""
        try:
            return check_engine(
                self.space, spool=self.spool, out=self.wanted.out, limits=self.limits
            )
        except DraftwellError as error:
            if error.code != "spool_empty" or self.spool_named:
                raise
            return None

    def answer_plain(self, last: Begun | None) -> dict[str, Any]:
        """Tune again where plain decoding has been served for a while: newer prompts are reason
        enough, because no count can be one."""
        manifest = self.current() / MANIFEST
        again = datetime.fromtimestamp(manifest.stat().st_mtime, UTC) + self.pause
        if datetime.now(UTC) < again and not self.wanted.fresh:
            return {
                "state": NOT_ENOUGH,
                "why": "plain decoding is served, of which no drafts are counted: tuned again on "
                "newer prompts "
                f"after {again:%Y-%m-%d %H:%M} UTC, or with --fresh",
            }
        if (
            last is not None
            and last.failed is not None
            and last.served == str(self.current())
            and not self.wanted.fresh
        ):
            again = last.failed + self.pause
            if datetime.now(UTC) < again:
                return {
                    "state": ANSWERED,
                    "why": "plain decoding is served, and an error ended its last recalibration: "
                    "tried again after "
                    f"{again:%Y-%m-%d %H:%M} UTC, or with --fresh",
                }
        try:
            return self.answer(
                "plain decoding is served, and other prompts may be worth drafts", last
            )
        except DraftwellError as error:
            if error.code not in ("no_prompts", "too_few_prompts"):
                raise
            return {
                "state": NOT_ENOUGH,
                "why": f"plain decoding is served, and there is nothing to tune it on: {error}",
            }

    @property
    def pause(self) -> timedelta:
        """Between two recalibrations of the same bundle."""
        return timedelta(hours=self.limits.repeat_after_hours)

    def answer(self, reason: str, last: Begun | None) -> dict[str, Any]:
        """Tune again, unless that was done already."""
        former = None if self.wanted.fresh else last
        if former is not None and (why := self.waits(former)):
            return {"state": ANSWERED, "why": why, "drift": reason}
        job, prompts = self.begin(last)
        if former is not None and self.same_prompts(job, former):
            return {
                "state": ANSWERED,
                "drift": reason,
                "why": f"{self.place} has no other prompts than those that were tuned on already: "
                "record newer ones, or name --fresh",
            }
        self.note(job)
        try:
            report = self.loop(job, prompts).run()
        except DraftwellError:
            self.note((self.last() or job).model_copy(update={"failed": datetime.now(UTC)}))
            raise
        record = report["record"]
        state = STATES[result_of(record)]
        if state == DEPLOYED:
            made = self.last()
            assert made is not None
            return {**self.deployed(made), "drift": reason, "report": report}
        self.note(job.model_copy(update={"state": state, "at": datetime.now(UTC)}))
        return {
            "state": state,
            "why": f"{sentence(record)}; what is served stays",
            "drift": reason,
            "report": report,
        }

    def begin(self, last: Begun | None) -> tuple[Begun, list[Prompt]]:
        """The recalibration that was begun for what is served, or a new one with the prompts of
        today."""

        file, served, wanted = self.space.folder / PROMPTS, str(self.current()), self.wanted
        if (
            last is not None
            and last.state in ("begun", "deploying")
            and (last.served, last.place) == (served, str(self.place))
            and datetime.now(UTC) - last.at < RESUMED
            and file.is_file()
            and not wanted.fresh
        ):
            self.say("resuming the recalibration that was begun")
            return last.model_copy(update={"state": "begun", "failed": None}), read_prompts(file)
        prompts = recorded_prompts(
            self.place,
            window=self.limits.window,
            fewest=wanted.needed,
        )
        write_prompts(file, prompts)
        return Begun(
            state="begun",
            at=datetime.now(UTC),
            served=served,
            place=str(self.place),
            prompts=json_digest(sorted(hashes_of(prompts))),
        ), prompts

    def waits(self, last: Begun) -> str | None:
        """Why a drift is left for now at what came of the last recalibration, whatever was recorded
        since; None where it is not."""
        served, again = str(self.current()), last.at + self.pause
        if (
            (last.state == DEPLOYED or last.active)
            and last.made != served
            and last.served == served
        ):
            return (
                f"{named(last.made)} was taken back by hand, and {named(served)} is served "
                "again: --fresh tunes again"
            )
        later = f"tried again after {again:%Y-%m-%d %H:%M} UTC, or with --fresh"
        if datetime.now(UTC) >= again:
            return None
        if last.state == DEPLOYED and last.made == served:
            return f"{named(served)} was deployed as the answer to a drift; {later}"
        if last.state in (REFUSED, UNDECIDED_STATE) and last.served == served:
            return f"the gate did not pass what was tuned last ({last.state}); {later}"
        return None

    @staticmethod
    def same_prompts(job: Begun, last: Begun) -> bool:
        """Whether the last recalibration came to its end with the same prompts, and what is served
        came of it."""
        if last.state not in (DEPLOYED, REFUSED) or last.prompts != job.prompts:
            return False
        return job.served == (last.made if last.state == DEPLOYED else last.served)

    def loop(self, job: Begun, prompts: list[Prompt]) -> EngineLoop:
        """The loop on the prompts; before `current` moves it is noted that a restart is due."""

        def activate(bundle: Path) -> None:
            due = job.model_copy(
                update={
                    "state": "deploying",
                    "at": datetime.now(UTC),
                    "made": str(bundle.resolve()),
                }
            )
            self.note(due)
            activate_vllm_bundle(bundle)
            # from now on a person who moves `current` back has decided so
            self.note(due.model_copy(update={"active": True}))

        return EngineLoop(
            self.space,
            prompts,
            self.wanted,
            self.thresholds,
            self.limits,
            self.say,
            self.clock,
            activate=activate,
            deployment=self.deployment,
        )

    def deployed(self, job: Begun) -> dict[str, Any]:
        """Restart what serves; afterwards the bundle that was made is what the next check compares
        with.

        Raises:
            DraftwellError: what the restart raises, or it found nothing while the bundle before is
                served somewhere (`nothing_restarted`).
        """
        if job.made != job.served and not self.restart() and self.still_counted(job):
            raise DraftwellError(
                f"{named(job.made)} is ready, but nothing was restarted, and counts of "
                f"{named(job.served)} are less than {self.limits.stale_after_hours:g} "
                "hours old: restart its servers, or name what does, as in "
                '--restart "systemctl restart my-vllm", or --restart true where none is '
                "running any more",
                code="nothing_restarted",
            )
        self.note(job.model_copy(update={"state": DEPLOYED, "at": datetime.now(UTC)}))
        return {"state": DEPLOYED, "why": f"{job.made} is deployed", "bundle": job.made}

    def still_counted(self, job: Begun) -> bool:
        """Whether the bundle before was served a short while ago, as far as the counts know, and
        the one that was made not since."""

        pair, least = (
            self.space.workspace.spec.name,
            time.time() - 3600 * self.limits.stale_after_hours,
        )
        try:
            # the oldest first
            newest = {line.bundle: line.begun for line in read_lines(self.spool)}
        except DraftwellError:  # no counts at all
            return False
        before, since = (
            newest.get(f"{pair}/{named(bundle)}", 0.0) for bundle in (job.served, job.made)
        )
        return before >= max(least, since)

    def last(self) -> Begun | None:
        """The last recalibration; None where there is none, or nothing that can be read."""
        try:
            return Begun.model_validate_json(
                (self.space.folder / STATE).read_text(encoding="utf-8")
            )
        except (OSError, ValidationError):
            return None

    def note(self, job: Begun) -> None:
        """Keep what a recalibration has come to."""
        write_json(self.space.folder / STATE, job.model_dump(mode="json"))


def recalibrate_engine(
    space: EngineSpace,
    settings: EngineDriftSettings,
    say: Callable[[str], None],
    limits: DriftLimits | None = None,
) -> dict[str, Any]:
    """Check what is served for drift, and answer it; see `EngineRecalibration.run`.

    Args:
        limits: None takes those of the registry.
    """

    limits = limits or load_limits(None)
    refuse_mistakes(settings, limits)
    pair, spool = space.workspace.spec.name, spool_of(space.workspace, settings.spool)
    deployment = served_deployment(settings.out, pair)
    settings.tuning(deployment.temperature)  # a mistake in methods or levels is refused now, too
    if settings.threads is None and deployment.threads is not None:
        space = replace(space, threads=min(deployment.threads, space.threads))
    return EngineRecalibration(
        space,
        settings,
        Thresholds.of(load_gates().model_dump()),
        limits,
        say,
        place=(settings.prompts or spool).absolute(),
        spool=spool,
        restart=restart_hook(settings.restart, say),
        spool_named=settings.spool is not None,
        place_named=settings.prompts is not None,
        deployment=deployment,
    ).run()


def refuse_mistakes(settings: EngineDriftSettings, limits: DriftLimits) -> None:
    """Refuse now what would be noticed only when traffic has drifted.

    Raises:
        DraftwellError: more prompts are asked for than are looked at, or the command of a restart
            is empty (`bad_setting`).
    """
    if settings.needed > limits.window:
        raise DraftwellError(
            f"collect_prompts, tune_prompts and bench_prompts add up to {settings.needed}, and "
            f"only the newest {limits.window} prompts are looked at: ask for fewer, or for a "
            "larger window in the limits of drift",
            code="bad_setting",
        )
    if settings.restart is not None and not settings.restart.strip():
        raise DraftwellError(
            "the command of --restart is empty: name one, or leave --restart out",
            code="bad_setting",
        )


def named(bundle: str | None) -> str:
    """Name of a bundle's folder.

    >>> named("/srv/dist/vllm/tiny/2-cpu")
    '2-cpu'
    """
    return Path(bundle or "").name


def said_of(outcome: dict[str, Any]) -> str:
    """An outcome in one line.

    >>> said_of({"state": "steady", "why": "0.71 of drafts keep their first token"})
    'steady: 0.71 of drafts keep their first token'
    """
    return f"{outcome['state']}: {outcome['why']}"
