"""Commands that learn from traces: train, calibrate. A command's function has one parameter for
each flag."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field

from draftwell.components.calibrate.settings import MemorySettings
from draftwell.components.train.settings import LabelKind, VerifierSettings
from draftwell.flows import context
from draftwell.flows.cli.learn.shared import (
    Column,
    Publish,
    Redact,
    Source,
    Split,
    Traces,
    load,
    load_more,
    open_with_progress,
    publish_kinds,
)
from draftwell.flows.cli.options import (
    DeviceOption,
    DtypeOption,
    Limit,
    Pair,
    Threads,
    readable,
    say,
    set_threads,
)
from draftwell.flows.cli.settings_option import add_command, named as on_line, spelled
from draftwell.flows.context import pictures_of
from draftwell.flows.workspace import Workspace
from draftwell.registry.store import Store
from draftwell.serving.artifacts.kinds import made_by
from draftwell.serving.errors import DraftwellError

DEFAULTS, MEMORY = VerifierSettings(), MemorySettings()

if TYPE_CHECKING:
    from draftwell.components.train.datastore import DatastoreReport
    from draftwell.components.train.medusa import MedusaReport
    from draftwell.components.train.reports import HeadReport, VerifierReport
    from draftwell.serving.recording.trace import TraceSet


def add_to(app: typer.Typer) -> None:
    """Register this file's commands."""
    for command in (train, calibrate):
        add_command(app, command)


class Trained(StrEnum):
    """Kinds of artifact that are trained."""

    VERIFIER = "verifier"
    ACCEPTANCE_HEAD = "acceptance_head"
    DATASTORE = "datastore"
    EAGLE3_HEAD = "eagle3_head"
    MEDUSA_HEADS = "medusa_heads"


OF_DRAFTS = ("traces", "prompts", "temperature")
WITHOUT_DRAFT = (
    "only for pairs with a draft model: without one the hardware profile alone is made, remove this"
)
OF_TRACES = {"traces", "test", "seed", "device"}
OPTIONS = {
    Trained.VERIFIER: OF_TRACES | {"label", "ratio", "eta_fp", "features"},
    Trained.ACCEPTANCE_HEAD: OF_TRACES,
    Trained.MEDUSA_HEADS: OF_TRACES,
    Trained.DATASTORE: {"traces", "device"},
    Trained.EAGLE3_HEAD: {
        *("prompts", "redact", "limit", "minutes", "tokens", "work", "seed", "published"),
    },
}
"""What each kind takes of the options that not all do."""


Kind = Annotated[
    Trained,
    typer.Option(
        "--kind",
        help="What to make (docs/learning.md).",
    ),
]
Test = Annotated[
    Path | None,
    Field(
        description=(
            "Trace folder of other prompts to test on; default: a fifth of the prompts is held out."
        )
    ),
]
Label = Annotated[
    LabelKind | None,
    Field(
        description=(
            "Verifier: what it predicts of a draft token: ratio (q/p at most "
            "lambda, SPRINTER's), argmax (the target's choice; traces at "
            "temperature 0) or soft (min(1, p/q)); default: "
            f"{DEFAULTS.label.value}."
        )
    ),
]
Ratio = Annotated[
    float | None,
    Field(
        ge=0.001,
        description=(
            "Verifier: lambda, the largest q/p of an acceptable token; "
            f"default: {DEFAULTS.ratio:g}."
        ),
    ),
]
EtaFp = Annotated[
    float | None,
    Field(
        ge=0.0,
        le=1.0,
        description=(
            "Verifier: false-positive rate that sets its threshold: share of "
            "the tokens to be rejected (q/p > 1, or by the label) that it "
            f"may accept; default: {DEFAULTS.eta_fp:g}."
        ),
    ),
]
Features = Annotated[
    str | None,
    Field(
        description=(
            "Verifier: comma-separated names out of before, after and "
            "scalars; default: the best set by cross-validation."
        )
    ),
]
Prompts = Annotated[
    str | None,
    typer.Option(
        "--prompts",
        metavar="FILE|HUB",
        help="Of eagle3_head. Default: the target invents them.",
    ),
]
Minutes = Annotated[
    float | None,
    typer.Option(
        "--minutes",
        metavar="N",
        min=0.01,
        help="Of eagle3_head: training time. Default: 60.",
    ),
]
Tokens = Annotated[
    int | None,
    Field(ge=1, description="Head of eagle3: train on this many tokens instead of for --minutes."),
]
Work = Annotated[
    Path | None,
    Field(
        description=(
            "Head of eagle3: folder of unfinished work, which a second run resumes "
            "(default: in the pair's workspace)."
        )
    ),
]
Published = Annotated[
    Path | None,
    Field(
        description=(
            "Head of eagle3: take the one in this folder instead of training one: of EAGLE, "
            "SpecForge, SGLang or speculators, with config.json and safetensors, for the pair's "
            "target."
        )
    ),
]
Seed = Annotated[int | None, Field(ge=0, description="Seed of all random streams (default: 0).")]


def train(
    invoked: typer.Context,
    pair: Pair = "default",
    traces: Traces = None,
    publish: Publish = True,
    kind: Kind = Trained.VERIFIER,
    test: Test = None,
    label: Label = None,
    ratio: Ratio = None,
    eta_fp: EtaFp = None,
    features: Features = None,
    prompts: Prompts = None,
    redact: Redact = False,
    limit: Limit = None,
    minutes: Minutes = None,
    tokens: Tokens = None,
    work: Work = None,
    published: Published = None,
    seed: Seed = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    threads: Threads = None,
) -> None:
    """Train a verifier (sprinter), an acceptance head (specdec_pp) or Medusa's heads on traces,
    keep texts in a datastore (rest, suffix), or train an EAGLE-3 head on prompts, an hour or more.

    Example: draftwell step train --pair default
    """
    refuse_other_kinds(invoked, kind)
    if kind is Trained.EAGLE3_HEAD:
        set_threads(threads)
        budget = named(minutes=minutes, tokens=tokens, work=work, seed=seed)
        if published:
            training = ("prompts", "redact", "limit", "minutes", "tokens", "work", "seed")
            why = "not with published=, which trains nothing: remove this"
            refuse(invoked, training, why, "option_of_training")
            return import_eagle3(published, pair, dtype, publish)
        rows = load(prompts, limit, redact=redact) if prompts else None
        budget |= named(prompts=rows, invented=None if prompts else limit)
        return train_eagle3(pair, dtype, publish, budget)
    from draftwell.components.train.datastore import DatastoreReport

    names = None if features is None else tuple(name.strip() for name in features.split(","))
    settings = named(label=label, ratio=ratio, eta_fp=eta_fp, features=names)
    verifier = VerifierSettings(**settings)
    with open_with_progress("train", pair, dtype, device, threads) as opened:
        found = context.open_trace(opened, traces)
        untouched = context.open_trace(opened, test) if test else None
        report = train_on_traces(kind, opened, found, untouched, verifier, seed or 0)
    if publish:
        publish_kinds(opened, kind.value)
    if isinstance(report, DatastoreReport):
        typer.echo(report.line())
        return
    if report.left_out:
        say(
            f"{len(report.left_out)} prompts of {test} are in the training trace too and "
            "were not tested on"
        )
    show_report(report, opened.workspace.reports)


def refuse_other_kinds(context: typer.Context, kind: Trained) -> None:
    """Refuse options and settings of other kinds; every kind may be asked to use the CPU."""
    others = sorted(set().union(*OPTIONS.values()) - OPTIONS[kind])
    if context.params["device"] == "cpu":
        others = [name for name in others if name != "device"]
    refuse(
        context,
        others,
        f"not for --kind {kind.value}: remove this, or choose another --kind",
        "option_of_another_kind",
    )


def train_on_traces(
    kind: Trained,
    opened: context.StepContext,
    found: TraceSet,
    untouched: TraceSet | None,
    verifier: VerifierSettings,
    seed: int,
) -> VerifierReport | HeadReport | MedusaReport | DatastoreReport:
    """Make one kind of the traces that were found; `untouched`: those to test on."""
    from draftwell.flows.steps import train as train_step

    if kind is Trained.DATASTORE:
        return train_step.run_train_datastore(opened, found)
    if kind is Trained.VERIFIER:
        return train_step.run_train(opened, found, verifier, test=untouched, seed=seed)
    if kind is Trained.ACCEPTANCE_HEAD:
        return train_step.run_train_head(opened, found, test=untouched, seed=seed)
    return train_step.run_train_medusa(opened, found, test=untouched, seed=seed)


def refuse(context: typer.Context, names: Sequence[str], why: str, code: str) -> None:
    """Refuse options and settings that were named, in one line."""
    if given := [spelled(context, name) for name in names if on_line(context, name)]:
        raise DraftwellError(f"{', '.join(given)}: {why}", code=code)


def named(**options: Any) -> dict[str, Any]:
    """Those that were given."""
    return {name: value for name, value in options.items() if value is not None}


def train_eagle3(pair: str, dtype: str | None, publish: bool, request: dict[str, Any]) -> None:
    """`train --kind eagle3_head`.

    Args:
        request: fields of `HeadRequest`.
    """
    from draftwell.flows.steps.eagle3 import HeadRequest, run_train_eagle3

    space = Workspace(pair, dtype, say)
    head, report = run_train_eagle3(space, HeadRequest(**request), say=say)
    if publish:
        made = Store().publish(
            space.folder(head.kind),
            pair=space.spec.name,
            metrics=report["curves"],
            plots=pictures_of(space, head.kind),
        )
        say(f"registered {made.name} version {made.version}")
    shares = ", ".join(f"{share:.3f}" for share in report["acceptance"])
    # tuning reads traces, which a draft is collected with
    then = "; then draftwell step choose" if space.spec.draft else ""
    typer.echo(
        f"acceptance on held-out texts, by depth: {shares}; "
        f"{report['accepted_length']:.2f} tokens of a draft are kept\n"
        f"next: draftwell step calibrate --pair {pair}, which measures the head's step{then}"
    )


def import_eagle3(folder: Path, pair: str, dtype: str | None, publish: bool) -> None:
    """`train --kind eagle3_head --set published=…`."""
    from draftwell.flows.steps.eagle3 import run_import_eagle3

    space = Workspace(pair, dtype, say)
    head = run_import_eagle3(space, folder)
    if publish:
        made = Store().publish(space.folder(head.kind), pair=space.spec.name)
        say(f"registered {made.name} version {made.version}")
    typer.echo(
        f"a head of {len(head.head_tokens)} tokens that reads what enters the layers "
        f"{', '.join(map(str, head.layers))} of the target\n"
        f"next: draftwell step calibrate --pair {pair}, which measures the head's step"
    )


def show_report(report: VerifierReport | HeadReport | MedusaReport, folder: Path) -> None:
    """Print the metrics, with their intervals."""
    from draftwell.components.train.medusa import MedusaReport
    from draftwell.components.train.reports import VerifierReport

    if isinstance(report, MedusaReport):
        right = ", ".join(
            f"{100 * one:.1f} % ({100 * three:.1f} %)"
            for one, three in zip(report.top1, report.top3, strict=True)
        )
        typer.echo(
            f"heads right on {report.rows['test']} unseen places, with their likeliest "
            f"token (three likeliest): {right}; they "
            f"propose {report.tokens} tokens; report: {folder / 'medusa_heads.json'}"
        )
        return
    intervals = report.metrics.intervals or {}
    typer.echo(
        "  ".join(
            f"{name} {format_metric(value)}"
            + (" [{:.3f}, {:.3f}]".format(*intervals[name]) if name in intervals else "")
            for name, value in report.to_json().items()
            if isinstance(value, int | float)
        )
    )
    if isinstance(report, VerifierReport):
        typer.echo(f"features {'+'.join(report.features)}; report: {folder / 'verifier.md'}")


def format_metric(value: float) -> str:
    """A metric for the terminal."""
    return f"{value:.3f}" if isinstance(value, float) else str(value)


Temperature = Annotated[
    float,
    Field(
        ge=0.0,
        le=2.0,
        description=(
            "Above 0: add counts for sampled requests to the acceptance table, from traces "
            "of this temperature, and make "
            "nothing else. 0: all, from greedy texts."
        ),
    ),
]
MaxTokens = Annotated[int, Field(ge=1, description="Correction memory: tokens of each prompt.")]
Batch = Annotated[
    int,
    Field(
        ge=1,
        description="Correction memory: prompts decoded at once. More are faster and take more "
        "memory.",
    ),
]
SmallestCount = Annotated[
    int,
    Field(ge=1, description="Correction memory: leave out pairs that were seen less often."),
]


def calibrate(
    invoked: typer.Context,
    pair: Pair = "default",
    traces: Traces = None,
    prompts: Source = None,
    limit: Limit = 24,
    split: Split = "train",
    column: Column = None,
    redact: Redact = False,
    temperature: Temperature = 0.0,
    max_tokens: MaxTokens = MEMORY.max_tokens,
    batch: Batch = MEMORY.batch,
    smallest_count: SmallestCount = MEMORY.smallest_count,
    publish: Publish = True,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    threads: Threads = None,
) -> None:
    """Make the acceptance table, the correction memory and the hardware profile of a pair.

    Prompts that the traces were collected on are left out. The memory is counted while the prompts
    are decoded: CSD's paper takes 2,000 or more. A run that was stopped resumes where it was. Of a
    pair without a draft model the hardware profile alone is made, for hybrid.

    Example: draftwell step calibrate --pair default --prompts traffic.jsonl --set limit=2000
    --set batch=32
    """
    from draftwell.flows.steps import train as train_step

    asked = ("calibrate", pair, dtype, device, threads)
    if Workspace(pair, dtype).spec.draft is None:
        refuse(invoked, OF_DRAFTS, WITHOUT_DRAFT, "calibrate_without_draft")
        with open_with_progress(*asked, any_strategy=True) as opened:
            return profile_alone(opened, publish)
    if temperature > 0:
        calibrate_sampled(pair, traces, temperature, publish, dtype, device, threads)
        return
    used = context.training_prompts(Workspace(pair, dtype), traces)
    rows = load_more(prompts, limit, used, split=split, column=column, redact=redact)
    memory = MemorySettings(max_tokens=max_tokens, batch=batch, smallest_count=smallest_count)
    with open_with_progress(*asked, any_strategy=True, slots=batch) as opened:
        if "draft" not in opened.pair.models:  # left out: its vocabulary is another one
            refuse(invoked, OF_DRAFTS, WITHOUT_DRAFT, "calibrate_without_draft")
            return profile_alone(opened, publish)
        rows = readable(opened.pair, rows, prompts, max_tokens)
        report = train_step.run_calibrate(
            opened, context.open_trace(opened, traces), rows, memory, limit=limit
        )
    if publish:
        publish_kinds(opened, *made_by("draftwell step calibrate"))
    typer.echo(
        f"table: {report['accepted']} of {report['judged']} judged tokens accepted, prior "
        f"weight {report['prior_weight']}  "
        f"memory: {report['memory_pairs']} pairs  draft forward pass "
        f"{report['t_draft_ms']:.1f} ms  "
        f"target forward pass {report['t_verify_ms']['1']:.1f} ms"
    )


def profile_alone(opened: context.StepContext, publish: bool) -> None:
    """Make the hardware profile of a pair without a draft model."""
    from draftwell.flows.steps import train as train_step

    found = train_step.run_profile(opened)
    if publish:
        publish_kinds(opened, "hardware_profile")
    head = f"head step {found['t_head_ms']:.1f} ms  " if "t_head_ms" in found else ""
    typer.echo(
        f"no draft model: the hardware profile alone  {head}target forward pass "
        f"{found['t_verify_ms']['1']:.1f} ms"
    )


def calibrate_sampled(
    pair: str,
    traces: Path | None,
    temperature: float,
    publish: bool,
    dtype: str | None,
    device: str | None,
    threads: int | None,
) -> None:
    """`calibrate` with a temperature: count sampled texts into the acceptance table."""
    from draftwell.flows.steps import train as train_step

    with open_with_progress("calibrate", pair, dtype, device, threads) as opened:
        report = train_step.run_calibrate_sampled(
            opened, context.open_trace(opened, traces, temperature), temperature
        )
    if publish:
        publish_kinds(opened, "acceptance_table")
    typer.echo(
        f"table, at temperature {report['temperature']:g}: "
        f"{100 * report['acceptance_rate']:.1f} % of {report['judged']:.0f} judged "
        f"tokens accepted in expectation, prior weight {report['prior_weight']:.0f}"
    )
