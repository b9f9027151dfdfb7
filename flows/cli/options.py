"""Options that several commands share, and how they print."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import AfterValidator, BeforeValidator, Field

from draftwell.components.engines.port import CAPABILITIES
from draftwell.components.engines.remote.address import is_address
from draftwell.components.engines.vllm_methods import METHODS
from draftwell.components.prompts.sources import LeftOut, load_prompts, readable_by
from draftwell.flows.cli import AT_THE_END
from draftwell.flows.progress import shown
from draftwell.serving.device import (
    checked_device,
    cuda_available,
    default_device,
    known_device,
    set_threads as fix_threads,
)
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import write_atomically
from draftwell.serving.settings import read_threads

if TYPE_CHECKING:
    from rich.console import Console

    from draftwell.components.prompts.prompt import Prompt
    from draftwell.serving.runtime.pair import LoadedPair

MOST_THREADS = 4096
"""Above that, a number of threads is a slip."""
MOST_AT_ONCE = 512
"""Requests, as many as connections are opened to an engine."""
EXIT_FAILED, EXIT_UNDECIDED = 1, 3
"""Exit codes of the gate, with 0 for passed and 2 for an error."""


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    bfloat16_int8 = "bfloat16-int8"
    bfloat16_int4 = "bfloat16-int4"
    float32_int8 = "float32-int8"
    float32_int4 = "float32-int4"


class Runner(StrEnum):
    threads = "threads"
    ray = "ray"


Pair = Annotated[
    str,
    typer.Option(
        "--pair",
        metavar="NAME|FILE",
        help="A pair: its name, or its YAML file.",
    ),
]
DtypeOption = Annotated[
    Dtype | None,
    Field(
        description=(
            "Number format of weights and cache; -int8 and -int4 round the target's weights. "
            "Default: the pair's own."
        )
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="cpu|cuda",
        help="Default: $DRAFTWELL_DEVICE, or the best.",
    ),
]
DraftDevice = Annotated[
    str | None,
    Field(
        description=(
            "Where the torch draft computes: cpu runs it alongside a target on CUDA. Default: "
            "the target's device."
        )
    ),
]


def read_thread_count(value: Any) -> int | None:
    """What `threads` says; None: auto."""
    threads = read_threads(value)
    if threads is not None and (not isinstance(threads, int) or not 1 <= threads <= MOST_THREADS):
        raise ValueError(f"it is neither auto nor a number from 1 to {MOST_THREADS}")
    return threads


def read_names(value: Any) -> Any:
    """Names that are written with commas, or a list."""
    if not isinstance(value, str | list):
        return value
    words = ",".join([value] if isinstance(value, str) else map(str, value)).split(",")
    return tuple(word.strip() for word in words if word.strip())


def read_counts(value: Any) -> Any:
    """Numbers from 1 that are written with commas; a list as it is."""
    parts = value if isinstance(value, list | tuple) else str(value).split(",")
    words = [str(part).strip() for part in parts]
    if not words or not all(word.isdecimal() and 0 < int(word) <= MOST_AT_ONCE for word in words):
        raise ValueError(f"write numbers from 1 to {MOST_AT_ONCE}, with commas, such as 1,8,32")
    return tuple(dict.fromkeys(map(int, words)))


def read_several(value: Any) -> Any:
    """One value as a list of one; a list as it is."""
    return value if value is None or isinstance(value, list | tuple) else (value,)


Threads = Annotated[
    int | None,
    BeforeValidator(read_thread_count),
    Field(
        description=(
            "CPU threads: a number, or auto: one for each usable core (where texts are only "
            "written, fewer while others use the cores). "
            "Default: auto."
        )
    ),
]
RunnerOption = Annotated[
    Runner,
    Field(
        description=(
            "Where workers run: threads of this process, or a Ray cluster (that of "
            "$RAY_ADDRESS, else one on this machine)."
        )
    ),
]
Workers = Annotated[
    int,
    Field(
        ge=1,
        description=(
            "Jobs at the same time; threads are shared among them. Timings are always taken "
            "one at a time."
        ),
    ),
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help="Default: the shipped demo prompts.",
    ),
]
Limit = Annotated[int | None, Field(ge=1, le=10**9, description="Use the first N prompts.")]
MaxTokens = Annotated[int, Field(ge=1, description="Tokens to emit per prompt at most.")]
Temperature = Annotated[float, Field(ge=0.0, description="0 is greedy.")]
Seed = Annotated[int, Field(ge=0, description="Seed of all random streams.")]
PadTarget = Annotated[
    float | None,
    Field(
        ge=1.0,
        le=1e15,
        description=(
            "Pad the target with zeros to this many parameters: the same outputs at the cost "
            "of a larger model."
        ),
    ),
]


def read_engine(text: str) -> str:
    """What --engine says: a name, or the address of a server."""
    if text in CAPABILITIES or is_address(text):
        return text
    names = ", ".join(CAPABILITIES)
    raise typer.BadParameter(
        f"{text!r} is neither one of {names} nor the address of a server, http://HOST:PORT"
    )


EngineOption = Annotated[
    str,
    typer.Option(
        "--engine",
        parser=read_engine,
        metavar=f"{'|'.join(CAPABILITIES)}|URL",
        help="What decodes (docs/engines.md).",
    ),
]
PlainOption = Annotated[
    str | None,
    Field(
        description=(
            "With --engine URL: where the same model is served without speculation. Default: the "
            "same server, if its requests can switch speculation off."
        )
    ),
]
Fresh = Annotated[
    bool,
    Field(description="With --engine vllm: begin again instead of with what is there."),
]


Methods = Annotated[
    tuple[str, ...] | None,
    BeforeValidator(read_names),
    Field(
        description=(
            f"With --engine vllm: ways to speculate to choose among, with commas, out of "
            f"{', '.join(METHODS[1:])}. Default: all that are possible."
        )
    ),
]


Levels = Annotated[
    tuple[int, ...],
    BeforeValidator(read_counts),
    Field(
        description=(
            "With --engine vllm: requests at once, from 1; several, such as 1,4,16, give draft "
            "lengths by load. The highest that was measured is what the bundle serves at once."
        )
    ),
]
Minutes = Annotated[
    float,
    Field(
        ge=1.0,
        description=(
            "With --engine vllm: time for the whole loop; the tuning measures what there is time "
            "for."
        ),
    ),
]
Artifacts = Annotated[
    Path | None,
    Field(description="Folder of artifact folders, used before those of the workspace."),
]


ReleaseDevice = Annotated[
    str | None,
    Field(
        description="The device that the release is for, cpu or cuda. Default: "
        "$DRAFTWELL_DEVICE, else cuda where there is such a device."
    ),
]


def leads_somewhere(path: Path) -> Path:
    """A folder's path, unless it is a link that leads to itself."""
    try:
        path.resolve()
    except (RuntimeError, OSError) as error:
        raise ValueError("it is a link that leads to itself") from error
    return path


Bundles = Annotated[Path, AfterValidator(leads_somewhere), Field(description="Folder of bundles.")]
Preview = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]


def prompts_from(source: str | Path, limit: int | None = None, **options: Any) -> list[Prompt]:
    """Prompts of a source, as `load_prompts` reads them."""
    left = LeftOut()
    found = load_prompts(source, limit=limit, left_out=left, **options)
    say_at_the_end(left)
    return found


def readable(
    pair: LoadedPair, rows: list[Prompt], source: object, max_tokens: int | None = None
) -> list[Prompt]:
    """The prompts that a pair can read, and answer in so many tokens; the shipped ones, which have
    no source, as they are."""
    if source is None:
        return rows
    left, longest = LeftOut(), None
    if max_tokens is not None:
        longest = min(model.max_context for model in pair.models.values()) - max_tokens
    found = readable_by(pair, rows, left, longest)
    say_at_the_end(left)
    return found


def say_at_the_end(left: LeftOut) -> None:
    """Say what was left out, when the command ends."""
    if left:
        AT_THE_END.append(str(left))


def say(line: str) -> None:
    """One line of progress, on stderr or in the view that is open."""
    if (view := shown()) is not None:
        view.line(line)
    else:
        typer.secho(line, err=True, dim=True)


def wide_console() -> Console:
    """A console on stdout that does not cut the cells of our tables, in a narrow window or a pipe
    either."""
    from rich.console import Console

    return Console(width=max(120, Console().width))


def pick_device(device: str | None) -> str:
    """The device to run on; one that is picked where there is a choice is named, and asking for
    CUDA where there is none is an error."""

    if device is not None:
        return checked_device(device)
    picked = default_device()
    if cuda_available():
        say(f"device: {picked}, picked by default (--device or $DRAFTWELL_DEVICE names another)")
    return picked


def release_device(device: str | None) -> str:
    """The device of the releases to work on, which this machine need not have: the same default as
    for running."""

    return pick_device(None) if device is None else known_device(device)


def pick_draft_device(draft_device: str | None, device: str) -> str | None:
    """The torch device of the draft; None takes the target's `device`."""
    if draft_device not in (None, "cpu", "cuda"):
        raise DraftwellError(f"unknown draft device {draft_device!r}: choose cpu or cuda")
    if draft_device == "cuda" and device == "cpu":
        raise DraftwellError(
            "draft_device cuda: the target computes on the CPU: use --device cuda too, "
            "or leave draft_device out"
        )
    return draft_device


def set_threads(threads: int | None) -> None:
    """Fix the number of CPU threads before the first forward pass; None takes one for each usable
    core."""

    fix_threads(threads)


@contextmanager
def progress(title: str) -> Iterator[Callable[..., None]]:
    """A progress bar on stderr, or that of the view that is open; the callback takes (done, total)
    and, optionally, a short text."""
    if (view := shown()) is not None:
        yield view.advance
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task(title, total=None)
        yield lambda done, total, words="": bars.update(
            bar, completed=done, total=total, description=f"{title} {words}"
        )


def check_output(path: Path) -> None:
    """Refuse, before any work, a file that could not be written: a missing folder of the user's own
    choice is not created silently."""
    if path.is_dir():
        raise DraftwellError(f"{path} is a folder: name a file in it", code="output_is_folder")
    if not path.parent.is_dir() and path.parent != Path(".draftwell"):
        raise DraftwellError(
            f"the folder {path.parent} does not exist: create it first, or name another file",
            code="no_output_folder",
        )


def check_folder(path: Path) -> None:
    """Refuse, before any work, a folder that could not be created; one level is created."""
    if path.is_file() or not path.absolute().parent.is_dir():
        raise DraftwellError(
            f"{path} is not a folder and cannot be created: name another folder",
            code="no_output_folder",
        )


def check_artifacts(folder: Path | None) -> None:
    """Refuse, before models are loaded, a folder of artifacts that is not there."""
    if folder is not None and not folder.is_dir():
        raise DraftwellError(f"no artifacts folder {folder}: check artifacts=")


def write_json(path: Path, value: object) -> None:
    """Write a JSON file atomically."""
    import json

    check_output(path)
    write_atomically(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())
