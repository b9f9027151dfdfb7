"""`draftwell step distil`: a draft for a target that has no small sibling. The command has one
parameter for each flag."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BeforeValidator, Field

from draftwell.flows.cli.learn.shared import (
    Column,
    Publish,
    Redact,
    Split,
    load,
)
from draftwell.flows.cli.options import (
    DeviceOption,
    DtypeOption,
    Limit,
    MaxTokens,
    Threads,
    check_folder,
    pick_device,
    say,
    set_threads,
)
from draftwell.flows.cli.settings_option import add_command
from draftwell.registry.store import Store


def add_to(app: typer.Typer) -> None:
    """Register this file's command."""
    add_command(app, distil)


class Loss(StrEnum):
    """The loss that training minimises."""

    KL = "kl"
    TV = "tv"


Target = Annotated[
    str,
    typer.Option(
        "--target",
        metavar="DIR|HUB|PAIR",
        help="Hub id, model folder, or a pair's name.",
    ),
]
Prompts = Annotated[
    str | None,
    typer.Option("--prompts", metavar="FILE|HUB", help="Default: the target invents them."),
]


def read_layers(value: Any) -> Any:
    """Numbers of layers that are written with commas; a list as it is."""
    if value is None or isinstance(value, list | tuple):
        return value
    words = [part.strip() for part in str(value).split(",")]
    if not all(word.isdecimal() for word in words):
        raise ValueError("write numbers with commas between them, such as 0,1,28,29")
    return tuple(map(int, words))


Layers = Annotated[
    tuple[int, ...] | None,
    BeforeValidator(read_layers),
    Field(
        description="Layers of the target to keep, such as 0,1,28,29. Default: the first two and "
        "the last two."
    ),
]
HeadTokens = Annotated[int, Field(ge=2, description="Tokens that the draft can propose.")]
LossOption = Annotated[
    Loss,
    Field(
        description=(
            "KL divergence (kl) or total variation (tv), which is one minus the chance of "
            "acceptance."
        )
    ),
]
Minutes = Annotated[
    float,
    typer.Option(
        "--minutes",
        metavar="N",
        min=0.01,
        help="Training time.",
    ),
]
Tokens = Annotated[
    int | None,
    Field(ge=1, description="Train on this many tokens instead of for --minutes."),
]
Invent = Annotated[
    int,
    Field(ge=8, description="Number of instructions that the target invents without --prompts."),
]
Name = Annotated[
    str | None,
    Field(description="Name of the new pair (default: the target's with -distilled)."),
]
Work = Annotated[
    Path | None,
    Field(
        description=(
            "Folder of unfinished work, which a second run resumes (default: in "
            "$DRAFTWELL_HOME/distill)."
        )
    ),
]
Out = Annotated[
    Path | None,
    Field(description="Folder of the draft (default: in the pair's workspace)."),
]


def distil(
    target: Target,
    prompts: Prompts = None,
    limit: Limit = None,
    split: Split = "train",
    column: Column = None,
    redact: Redact = False,
    layers: Layers = None,
    head_tokens: HeadTokens = 8192,
    loss: LossOption = Loss.KL,
    minutes: Minutes = 60,
    tokens: Tokens = None,
    max_tokens: MaxTokens = 128,
    invent: Invent = 2000,
    name: Name = None,
    work: Work = None,
    out: Out = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    threads: Threads = None,
    publish: Publish = True,
) -> None:
    """Make a draft of a few of a target's own layers, trained on what the target writes, and a pair
    of both. A run that was stopped resumes where it was.

    Example: draftwell step distil --target HuggingFaceTB/SmolLM2-360M-Instruct --minutes 60
    """
    for folder in filter(None, (work, out)):
        check_folder(folder)
    rows = load(prompts, limit, split=split, column=column, redact=redact) if prompts else None
    from draftwell.flows.steps import distil as distil_step

    set_threads(threads)
    wanted = distil_step.DistilRequest(
        target,
        layers=layers,
        prompts=rows,
        invented=invent,
        head_tokens=head_tokens,
        loss=loss.value,
        minutes=minutes,
        tokens=tokens,
        max_tokens=max_tokens,
        name=name,
        dtype=dtype.value if dtype else "bfloat16",
        device=pick_device(device),
        work=work,
        out=out,
        threads=threads,
    )
    made = distil_step.run_distil(wanted, say=say)
    reports = distil_step.keep_report(made)
    if publish:
        kept_as = Store().publish(made.folder, pair=made.pair.name)
        say(f"registered {kept_as.name} version {kept_as.version}")
    if found := made.report.get("agreement"):
        after = f"{found['positions']} tokens that the target wrote after untouched prompts"
        typer.echo(f"agreement {found['agreement']:.3f} on {after}")
    typer.echo(f"{made.folder}  {reports}\nnext: draftwell step collect --pair {made.pair.name}")
