"""The answer to drift of what another engine serves: the loop on recorded prompts, then a restart.

Counts that our plug-in has recorded say whether there is drift; they hold no text, so the prompts
are requests that somebody recorded before the engine, such as a gateway. The loop keeps what it has
finished. Beside it one file (`recalibration.json`) says what was begun on which prompts, so that a
run that was killed resumes: prompts are fixed when it begins, because their folder grows, and a
restart that is due is made up for.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from draftwell.components.drift.acceptance import read_lines
from draftwell.components.drift.prompts import recorded_prompts, refuse_missing, write_prompts
from draftwell.components.drift.schema import NOT_ENOUGH
from draftwell.flows.steps.engine.monitor import check_engine
from draftwell.flows.steps.engine.served import served_settings
from draftwell.flows.steps.monitor import load_limits, spool_of
from draftwell.flows.steps.verdict import sentence
from draftwell.registry.bundles.vllm.build import bundles_of
from draftwell.registry.bundles.vllm.render import MANIFEST
from draftwell.registry.webhooks_out import send_event
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import file_lock, write_json

if TYPE_CHECKING:
    from draftwell.components.drift.schema import DriftLimits, DriftReport
    from draftwell.flows.settings import PipelineSettings
    from draftwell.flows.steps.engine.space import EngineSpace

STATE, PROMPTS = "recalibration.json", "recalibration-prompts.jsonl"
RESUMED = timedelta(hours=24)
"""Age of a recalibration that was begun and not finished, up to which it is resumed: later its
prompts are old."""
DEPLOYED, BUSY, ANSWERED = "deployed", "busy", "answered"


class Begun(BaseModel):
    """The last recalibration."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    state: Literal["begun", "deployed", "waiting", "refused", "undecided"]
    at: datetime = Field(description="when its prompts were fixed, or it ended")
    served: str = Field(description="folder of the bundle that was served when it began")
    made: str | None = Field(None, description="folder of the bundle that it made")
    failed: datetime | None = Field(None, description="when a run of it ended with an error")


@dataclass(frozen=True)
class Recalibration:
    """A check, and what follows from it.

    Args:
        space: the pair on the engine.
        loop: the flow on settings that answer a drift: its outcome.
    """

    space: EngineSpace
    settings: PipelineSettings
    limits: DriftLimits
    say: Callable[[str], None]
    loop: Callable[[PipelineSettings], dict[str, Any]]

    @property
    def spool(self) -> Path:
        """Folder of counts."""
        return spool_of(self.space.workspace, self.settings.spool)

    @property
    def pair(self) -> str:
        """Its name."""
        return self.space.workspace.spec.name

    @property
    def pause(self) -> timedelta:
        """Between two recalibrations of the same bundle."""
        return timedelta(hours=self.limits.repeat_after_hours)

    def served(self) -> Path:
        """The bundle that `current` leads to."""
        return (bundles_of(self.settings.out, self.pair) / "current").resolve()

    def run(self) -> dict[str, Any]:
        """Check, and recalibrate where there is drift; see `recalibrate`."""
        last = self.last()
        made = str(self.served())
        due = last is not None and last.state == "begun" and last.made == made
        if last is not None and due and last.served != made:
            self.say(f"{made} was deployed by an earlier run, which did not restart what serves")
            return self.deployed(last)
        if self.settings.prompts is not None:  # a restart that is due needs no prompts
            refuse_missing(self.settings.prompts)
        found = self.check()
        why = "nothing was counted yet" if found is None else "; ".join((found.why, *found.notes))
        if found is not None and found.drifted:
            self.say(f"{found.verdict}: {why}")
            return self.answer(why, last)
        if not served_settings(self.settings.out, self.pair)["speculative"]:
            return self.answer_plain(last)
        return {"state": NOT_ENOUGH if found is None else found.verdict, "why": why}

    def check(self) -> DriftReport | None:
        """What the counts say; None where there are none in the folder that nobody named."""
        try:
            return check_engine(
                self.space, spool=self.spool, out=self.settings.out, limits=self.limits
            )
        except DraftwellError as error:
            if error.code != "spool_empty" or self.settings.spool is not None:
                raise
            return None

    def answer_plain(self, last: Begun | None) -> dict[str, Any]:
        """Tune again where plain decoding has been served for a while: newer prompts are reason
        enough, because no count can be one."""
        plain = "plain decoding is served"
        deployed = (self.served() / MANIFEST).stat().st_mtime
        since = [datetime.fromtimestamp(deployed, UTC)]
        if last is not None and last.failed is not None:  # once more at once would fail again
            since.append(last.failed)
        again = max(since) + self.pause
        if datetime.now(UTC) < again and not self.settings.fresh:
            why = f"{plain}, of which no drafts are counted: tuned again on newer prompts "
            return {"state": NOT_ENOUGH, "why": why + later(again)}
        try:
            return self.answer(f"{plain}, and other prompts may be worth drafts", last)
        except DraftwellError as error:
            if error.code not in ("no_prompts", "too_few_prompts"):
                raise
            why = f"{plain}, and there is nothing to tune it on: {error}"
            return {"state": NOT_ENOUGH, "why": why}

    def answer(self, reason: str, last: Begun | None) -> dict[str, Any]:
        """The loop on recorded prompts, unless that was done already."""
        if not self.settings.fresh and last is not None and (why := self.waits(last)):
            return {"state": ANSWERED, "why": why, "drift": reason}
        self.refuse_several_gpus()
        job = self.begin(last)
        self.note(job)
        about = {"pair": self.pair, "device": self.settings.device, "reasons": [reason]}
        send_event("traffic.drifted", {**about, "champion": named(str(self.served()))})
        prompts = self.space.folder / PROMPTS
        settings = {"source": "drift", "prompts": prompts, "drift": reason}
        try:
            outcome = self.loop(self.settings.model_copy(update=settings))
        except DraftwellError:
            if (now := self.last()) is not None:
                self.note(now.model_copy(update={"failed": datetime.now(UTC)}))
            raise
        if outcome["state"] == DEPLOYED:
            done = self.deployed(job.model_copy(update={"made": outcome["bundle"]}))
        else:
            self.note(job.model_copy(update={"state": outcome["state"], "at": datetime.now(UTC)}))
            why = f"{sentence(outcome)}; what is served stays"
            done = {"state": outcome["state"], "why": why}
        return {**done, "drift": reason, "report": outcome}

    def refuse_several_gpus(self) -> None:
        """What is tuned keeps the served bundle's `gpus`, and would be refused in the end."""
        gpus = served_settings(self.settings.out, self.pair).get("gpus", 1)
        if gpus != 1:
            raise DraftwellError(
                f"{named(str(self.served()))} serves on {gpus} GPUs, and vLLM is measured on one: "
                "what is tuned could not be deployed. Tune with `draftwell step choose --engine "
                "vllm`, "
                f"then `draftwell deploy --engine vllm --set gpus={gpus} --set ungated=REASON`",
                code="bad_setting",
            )

    def begin(self, last: Begun | None) -> Begun:
        """The recalibration that was begun for what is served, or a new one with the prompts of
        today."""
        file, served, settings = self.space.folder / PROMPTS, str(self.served()), self.settings
        now = datetime.now(UTC)
        if (
            last is not None
            and (last.state, last.served) == ("begun", served)
            and now - last.at < RESUMED
            and file.is_file()
            and not settings.fresh
        ):
            self.say("resuming the recalibration that was begun")
            return last.model_copy(update={"made": None})
        place, fewest = settings.prompts or self.spool, needed_prompts(settings)
        write_prompts(file, recorded_prompts(place, window=self.limits.window, fewest=fewest))
        return Begun(state="begun", at=now, served=served)

    def waits(self, last: Begun) -> str | None:
        """Why a drift is left for now at what came of the last recalibration; None where it is
        not."""
        served, again = str(self.served()), last.at + self.pause
        if last.served == served and last.made not in (None, served):
            return (
                f"{named(last.made)} was taken back by hand, and {named(served)} is served "
                "again: --set fresh=true tunes again"
            )
        if datetime.now(UTC) >= again or last.state == "begun":
            return None
        if last.state == DEPLOYED and last.made == served:
            return (
                f"{named(served)} was deployed as the answer to a drift; tried again {later(again)}"
            )
        if last.state != DEPLOYED and last.served == served:
            why = f"the gate did not pass what was tuned last ({last.state})"
            if last.state == "waiting":
                why = "what was tuned last waits until a person promotes it"
            return f"{why}; tried again {later(again)}"
        return None

    def deployed(self, job: Begun) -> dict[str, Any]:
        """Restart what serves; afterwards the bundle that was made is what the next check compares
        with.

        Raises:
            DraftwellError: what the restart raises, or it found nothing while the bundle before is
                served somewhere (`nothing_restarted`).
        """
        self.note(job)
        if job.made != job.served and not self.restart() and self.still_counted(job):
            raise DraftwellError(
                f"{named(job.made)} is ready, but nothing was restarted, and counts of "
                f"{named(job.served)} are less than {self.limits.stale_after_hours:g} "
                "hours old: restart its servers, or name what does, as in "
                '--set restart="systemctl restart my-vllm", or restart=true where none is '
                "running any more",
                code="nothing_restarted",
            )
        self.note(job.model_copy(update={"state": DEPLOYED, "at": datetime.now(UTC)}))
        return {"state": DEPLOYED, "why": f"{job.made} is deployed", "bundle": job.made}

    def restart(self) -> bool:
        """Run the user's command, because systemd, compose, Kubernetes or Ray runs the servers;
        whether there was one.

        Raises:
            DraftwellError: it failed (`restart_failed`).
        """
        command = self.settings.restart
        if command is None:
            return False
        self.say(f"restarting: {command}")
        done = subprocess.run(["/bin/sh", "-c", command], stdin=subprocess.DEVNULL, check=False)
        if done.returncode:
            raise DraftwellError(
                f"the command that restarts the servers ended with exit code {done.returncode}: "
                f"{command}",
                code="restart_failed",
            )
        return True

    def still_counted(self, job: Begun) -> bool:
        """Whether the bundle before was served a short while ago, as far as the counts know, and
        the one that was made not since."""
        least = time.time() - 3600 * self.limits.stale_after_hours
        try:
            # the oldest first
            newest = {line.bundle: line.begun for line in read_lines(self.spool)}
        except DraftwellError:  # no counts at all
            return False
        before, since = (
            newest.get(f"{self.pair}/{named(bundle)}", 0.0) for bundle in (job.served, job.made)
        )
        return before >= max(least, since)

    def last(self) -> Begun | None:
        """The last recalibration; None where there is none, or nothing that can be read."""
        try:
            return Begun.model_validate_json((self.space.folder / STATE).read_bytes())
        except (OSError, ValidationError):
            return None

    def note(self, job: Begun) -> None:
        """Keep what a recalibration has come to."""
        write_json(self.space.folder / STATE, job.model_dump(mode="json"))


def recalibrate(
    space: EngineSpace,
    settings: PipelineSettings,
    say: Callable[[str], None],
    loop: Callable[[PipelineSettings], dict[str, Any]],
    limits: DriftLimits | None = None,
) -> dict[str, Any]:
    """Check what is served for drift, and answer it.

    Args:
        settings: `spool` and `prompts` that were named have to be there.
        limits: None takes those of the registry.
    Returns:
        plain JSON: `state` (steady, not enough yet; deployed; refused or undecided by the gate,
        then what is served stays; answered: there is nothing to do about the drift yet; busy:
        another run is at it), `why`, and where there was a loop its `report`.
    Raises:
        DraftwellError: more prompts are asked for than are looked at, the command of a restart is
            empty, or several GPUs serve (`bad_setting`); what the check, the loop and the restart
            raise, or nothing was restarted (`nothing_restarted`): the next run resumes.
    """
    limits = limits or load_limits()
    if needed_prompts(settings) > limits.window:
        raise DraftwellError(
            f"collect_prompts, tune_prompts and bench_prompts add up to {needed_prompts(settings)},"
            f" and only the newest {limits.window} prompts are looked at: ask for fewer, or for a "
            "larger window in the limits of drift",
            code="bad_setting",
        )
    if settings.restart is not None and not settings.restart.strip():
        raise DraftwellError(
            "restart= names no command: name one, or leave restart out",
            code="bad_setting",
        )
    with file_lock(space.folder / ".recalibration", wait=False) as free:
        if not free:
            return {"state": BUSY, "why": "another recalibration of this pair is running"}
        return Recalibration(space, settings, limits, say, loop).run()


def note_made(space: EngineSpace, bundle: Path) -> None:
    """Note the bundle that the recalibration that was begun, if any, is about to activate: a run
    that is killed before it restarts what serves is then made up for."""
    file = space.folder / STATE
    try:
        job = Begun.model_validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return
    if job.state == "begun":
        made = job.model_copy(update={"made": str(bundle.resolve())})
        write_json(file, made.model_dump(mode="json"))


def needed_prompts(settings: PipelineSettings) -> int:
    """Prompts of all steps together."""
    return settings.collect_prompts + settings.tune_prompts + settings.bench_prompts


def named(bundle: str | None) -> str:
    """Name of a bundle's folder.

    >>> named("/srv/dist/vllm/tiny/2-cpu")
    '2-cpu'
    """
    return Path(bundle or "").name


def later(again: datetime) -> str:
    """When something is done again."""
    return f"after {again:%Y-%m-%d %H:%M} UTC, or with --set fresh=true"


def said_of(outcome: dict[str, Any]) -> str:
    """An outcome in one line.

    >>> said_of({"state": "steady", "why": "0.71 of drafts keep their first token"})
    'steady: 0.71 of drafts keep their first token'
    """
    return f"{outcome['state']}: {outcome['why']}"
