"""The claim of a folder: which collection it belongs to, how far that is, and who is writing to
it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import file_lock, write_atomically
from draftwell.serving.recording.trace import TraceSet

PLAN, LOCK = "plan.json", ".lock"


class ForeignTrace(DraftwellError):
    """The folder holds a trace of other prompts, another pair or other settings."""

    code = "foreign_trace"


class Plan(BaseModel):
    """What binds a folder to a collection: `plan.json`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    inputs: str = Field(description="digest of prompts, pair and settings")
    prompts: int = Field(ge=1)
    shard_prompts: int = Field(ge=1, description="prompts of a shard")
    batch: int = Field(ge=1, description="texts written at once")
    room: int = Field(ge=1, description="tokens that a prompt may have")
    prompt_hashes: dict[str, str] = Field(
        description="prompt id → hash (components/prompts/overlap.py)"
    )

    @property
    def shards(self) -> int:
        return -(-self.prompts // self.shard_prompts)


@contextmanager
def exclusive_folder(
    folder: Path, what: str = "collection", fix: str = "choose another folder"
) -> Iterator[None]:
    """Lock a folder, so that no other process writes to it.

    Args:
        what, fix: of the error: who else is writing, and what to do about it.
    Raises:
        DraftwellError: another process holds the folder.
    """
    with file_lock(folder / LOCK, wait=False) as held:
        if not held:
            raise DraftwellError(
                f"another {what} is writing to {folder}: wait for it, or {fix}",
                code="folder_in_use",
            )
        yield


def read_plan(folder: Path) -> Plan | None:
    """The plan of a folder, None where it has none that can be read."""
    try:
        return Plan.model_validate_json((folder / PLAN).read_text())
    except (OSError, ValidationError):
        return None


def prompt_hashes(traces: TraceSet) -> dict[str, str] | None:
    """Prompt id → hash of the prompts of a trace; None where a server recorded it."""
    plan = read_plan(traces.folder)
    return None if plan is None else plan.prompt_hashes


def is_complete(folder: Path) -> bool:
    """Whether the collection that claimed a folder has written all its shards; True where no plan
    says how many."""
    plan = read_plan(folder)
    return plan is None or len(list(folder.glob("shard-*.parquet"))) >= plan.shards


def claim(traces: TraceSet, plan: Plan) -> None:
    """Bind a folder to a collection, unless it is bound to it already.

    Raises:
        ForeignTrace: the folder holds another collection, or shards without a plan.
    """
    folder = traces.folder
    if (folder / PLAN).is_file():
        if read_plan(folder) != plan:
            raise ForeignTrace(
                f"{folder} holds a trace of other inputs (prompts, pair, settings or texts at "
                "once): choose another folder or delete this one"
            )
    elif traces.shards:
        raise ForeignTrace(
            f"{folder} holds shards but no {PLAN}: choose another folder or delete this one"
        )
    remove_unfinished(folder)
    if not (folder / PLAN).is_file():
        write_atomically(folder / PLAN, (plan.model_dump_json(indent=2) + "\n").encode())


def check_complete(traces: TraceSet, plan: Plan) -> None:
    """Remove what workers that died left unfinished, and refuse a trace that lacks shards.

    Raises:
        DraftwellError: shards are missing.
    """
    remove_unfinished(traces.folder)
    missing = [index for index in range(plan.shards) if not traces.shard(index).is_file()]
    if missing:
        raise DraftwellError(
            f"{len(missing)} of {plan.shards} shards in {traces.folder} were not written: "
            "run the same "
            "`draftwell step collect` again, it resumes with those",
            code="missing_shards",
        )


def forget(folder: Path) -> None:
    """Remove the trace of a folder, and nothing else that may be there."""
    remove_unfinished(folder)
    for path in (*folder.glob("shard-*.parquet"), folder / PLAN, folder / TraceSet.SIDECAR):
        path.unlink(missing_ok=True)


def remove_unfinished(folder: Path) -> None:
    """Remove the unfinished files of a run that was killed."""
    for path in (*folder.glob(".shard-*"), *folder.glob(f".{PLAN}.*")):
        path.unlink(missing_ok=True)
