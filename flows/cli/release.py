"""Commands that release: gate, promote, rollback, deploy, prune, ui."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import AfterValidator, BeforeValidator, Field

from draftwell.components.engines.port import CAPABILITIES, LAUNCHED
from draftwell.components.engines.remote.address import is_address
from draftwell.components.gate.settings import DEFAULTS, GateSettings
from draftwell.flows.cli.engine_options import on_other_engine, refuse_beside
from draftwell.flows.cli.options import (
    Bundles,
    DeviceOption,
    DtypeOption,
    EngineOption,
    Levels,
    Limit,
    MaxTokens,
    Pair,
    PlainOption,
    Preview,
    Prompts,
    ReleaseDevice,
    Threads,
    read_several,
    release_device,
    say,
    set_threads,
)
from draftwell.flows.cli.settings_option import OtherKeys, add_command
from draftwell.flows.cli.shared_options import ADDRESS, LAUNCHER, with_options
from draftwell.flows.steps.engine.served import OPTIONS
from draftwell.registry import promotion
from draftwell.registry.bundles import retention
from draftwell.registry.bundles.build import build_bundle, check_deployable, relink
from draftwell.registry.bundles.judged import deviation
from draftwell.registry.bundles.signing import hashes_remark, signature_remark
from draftwell.registry.bundles.vllm.build import bundles_of
from draftwell.registry.bundles.vllm.settings import VllmServing
from draftwell.registry.pairs import fetch, find_pair
from draftwell.registry.releases import (
    device_options,
    engine_device,
    find_release,
)
from draftwell.registry.store import Store
from draftwell.serving.errors import DraftwellError

AT = "--set temperature=T"
"""How `deploy` names the release for sampled requests: by the temperature that it was tuned for."""
Sampled = Annotated[
    bool,
    Field(description="With --engine vllm: the release for sampled requests, not greedy ones."),
]


if TYPE_CHECKING:
    from draftwell.serving.bundle.verdict import GateVerdict


def add_to(app: typer.Typer) -> None:
    """Register this file's commands."""
    judged = {
        "plain": (PlainOption, None),
        "evidence": (EvidenceFiles, None),
        "plain_evidence": (PlainEvidence, None),
    }
    add_command(app, with_options(gate, ADDRESS, LAUNCHER, judged), file=True)
    add_command(app, deploy, file=True)
    for command in (promote, rollback, prune, ui):
        add_command(app, command)


Release = Annotated[
    str | None,
    typer.Option(
        "--release",
        metavar="NAME|N",
        help="Default: the candidate, if there is one.",
    ),
]
CountsOnly = Annotated[
    bool,
    Field(description="Judge only this checkout's deterministic counts, as CI does."),
]
RecordCounts = Annotated[
    bool,
    Field(description="Record this checkout's deterministic counts as the baseline."),
]
BESIDE_COUNTS = {
    "record_counts": ("record_counts", "pair", "threads", "engine"),
    "counts_only": ("counts_only", "pair", "threads", "engine", "dry_run", "report"),
}
"""What means something beside each way to count."""
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Keep no verdict, and move no alias.",
    ),
]
Unmeasured = Annotated[
    str | None,
    Field(
        description=(
            "Reason to pass a release although a check that gates.yaml requires cannot run on "
            "this machine; stored with the verdict."
        )
    ),
]
Report = Annotated[
    list[Path] | None,
    typer.Option(
        "--report",
        metavar="FILE",
        help="FILE.json, .md or .xml (JUnit); repeatable.",
    ),
]
EvidenceFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--evidence",
        metavar="PATH",
        help="Judge a benchmark tool's files; repeatable.",
    ),
]
PlainEvidence = Annotated[
    list[Path] | None,
    BeforeValidator(read_several),
    Field(
        description="What was measured of the same engine without speculation: a file or a list."
    ),
]


def gate(
    context: typer.Context,
    pair: Pair = "default",
    device: DeviceOption = None,
    release: Release = None,
    counts_only: CountsOnly = False,
    record_counts: RecordCounts = False,
    dry_run: DryRun = DEFAULTS.dry_run,
    unmeasured: Unmeasured = DEFAULTS.unmeasured,
    report: Report = None,
    prompts: Prompts = None,
    limit: Limit = DEFAULTS.limit,
    max_tokens: MaxTokens = DEFAULTS.max_tokens,
    dtype: DtypeOption = None,
    threads: Threads = None,
    engine: EngineOption = "draftwell",
    sampled: Sampled = False,
    levels: Levels = (1,),
) -> None:
    """Judge a release, or this checkout against its recorded baseline. Exit code: 0 passed, 1
    failed, 2 error, 3 not enough evidence.

    Where the pair has no release (a fresh clone), counts and outputs alone are compared with
    registry/baselines. With --engine vllm or a URL, that engine's candidates are judged; with
    --evidence, what other benchmark tools measured (docs/gates.md).

    Example: draftwell gate --pair default
    """
    from draftwell.flows.cli import gate_run as run

    run.check_reports(report or ())
    on_other = on_other_engine(context)
    with run.errors_are_reported(report or ()):
        for alone, beside in BESIDE_COUNTS.items():
            if context.params[alone]:
                refuse_beside(context, f"--set {alone}=true", beside, "counts_option")
        set_threads(threads)
        if record_counts:
            return run.record_baseline(pair)
        if on_other or context.params["evidence"] or context.params["plain_evidence"]:
            verdicts = judge_on_other(context)
        else:
            on = "cpu" if counts_only else run.gated_on(pair, dtype, device)
            settings = GateSettings(
                limit=limit, max_tokens=max_tokens, dry_run=dry_run, unmeasured=unmeasured
            )
            asked = (find_pair(pair).name, on, release, device is not None)
            judged = None if counts_only else run.release_to_judge(*asked)
            verdicts = run.own_verdicts(pair, dtype, prompts, judged, settings, on)
    run.show(verdicts, report or ())
    if dry_run:
        say("a dry run: no verdict was kept, no alias moved")
    raise typer.Exit(run.exit_code([verdict for _, verdict in verdicts]))


def judge_on_other(context: typer.Context) -> list[tuple[str, GateVerdict]]:
    """Judge another engine: by files of figures, at its address, or by running it."""
    from draftwell.flows.cli import engine as elsewhere, evidence, launched

    if context.params["evidence"] or context.params["plain_evidence"]:
        return evidence.gate_on_evidence(context)
    if is_address(str(context.params["engine"])):
        return launched.gate_remote(context)
    return elsewhere.gate_elsewhere(context)


def read_released(name: str) -> str:
    """An engine that releases are made for."""
    names = dict.fromkeys((*CAPABILITIES, *LAUNCHED))
    if name not in names:
        raise ValueError(f"it is none of {', '.join(names)}")
    return name


ReleasedEngine = Annotated[
    str,
    AfterValidator(read_released),
    Field(
        description="The engine that the release is for: draftwell, vllm, and of those that were "
        "tuned at an address also sglang and llama.cpp."
    ),
]


def promote(
    context: typer.Context,
    pair: Pair = "default",
    device: ReleaseDevice = None,
    release: Annotated[
        str,
        typer.Option(
            "--release", metavar="NAME|N", help="Alias or number of the release to promote."
        ),
    ] = "candidate",
    reason: Annotated[
        str | None,
        Field(
            description=(
                "Why to promote a release that was rolled back, or that was compared with an "
                "earlier champion; recorded."
            )
        ),
    ] = None,
    engine: ReleasedEngine = "draftwell",
    sampled: Sampled = False,
    dry_run: Preview = False,
) -> None:
    """Make a release that passed its gate the champion.

    Example: draftwell release promote --pair default --release candidate
    """

    name = find_pair(pair).name  # before a registry is made for a mistyped one
    done = promotion.promote(
        Store(), name, released_on(context), release, reason=reason, dry_run=dry_run
    )
    if dry_run:
        typer.echo(f"{done.name} may be promoted")
        return
    built = f"`draftwell deploy --pair {pair} {device_options(done.device, AT)}` builds its bundle"
    typer.echo(
        f"{done.name} is the champion; {built}"
        if engine in CAPABILITIES
        else f"{done.name} is the champion"
    )


def released_on(context: typer.Context) -> str:
    """The device of the releases that a command is about, as their names have it."""

    given = context.params
    if given["engine"] in CAPABILITIES:
        on_other_engine(context)
    return engine_device(
        release_device(given["device"]), str(given["engine"]), float(given["sampled"])
    )


def rollback(
    context: typer.Context,
    reason: Annotated[
        str, typer.Option("--reason", help="Why the champion is rolled back; recorded.")
    ],
    pair: Pair = "default",
    device: ReleaseDevice = None,
    release: Annotated[
        str | None,
        typer.Option(
            "--release",
            help="Alias or number of the release to make champion. Default: the previous champion.",
        ),
    ] = None,
    bundles: Bundles = Path("dist"),
    engine: ReleasedEngine = "draftwell",
    sampled: Sampled = False,
    dry_run: Preview = False,
) -> None:
    """Make the previous champion the champion again, and point `current` at its bundle; the bundle
    of another engine is built by `deploy`.

    Example: draftwell release rollback --pair default --reason "answers in French are cut"
    """
    name, store, on = find_pair(pair).name, Store(), released_on(context)
    to = None if release is None else find_release(store, name, on, release).version
    bad, good = promotion.rollback(store, name, on, reason, to, dry_run=dry_run)
    if dry_run:
        typer.echo(f"{good.name} would be the champion again, in place of version {bad.version}")
        return
    typer.echo(
        f"{good.name} is the champion again, version {bad.version} was rolled back: {reason}"
    )
    if engine not in CAPABILITIES:
        return
    bundle = relink(store, good, bundles) if engine == "draftwell" else None
    typer.echo(
        f"{bundle}  (and {bundle.parent / 'current'})"
        if bundle
        else (
            f"its bundle is not in {bundles}: `draftwell deploy --pair {pair} "
            f"{device_options(good.device, AT)}` builds it"
        )
    )


Deployed = Annotated[
    str, typer.Option("--release", help="Alias or number of the release to deploy.")
]
Out = Annotated[Path, typer.Option("--out", help="Folder of bundles.")]
Ungated = Annotated[
    str | None,
    Field(description="Deploy without a passed gate, for this reason, which is recorded."),
]
WithWeights = Annotated[bool, Field(description="Copy the models into the bundle.")]
Temperature = Annotated[
    float,
    Field(ge=0.0, description="With --engine vllm: of the requests that it was tuned for."),
]
Swap = Annotated[
    str | None,
    Field(
        description=(
            "With --engine vllm: load the release's head or draft into the vLLM that runs there, "
            "without a restart, and check it there before `current` moves."
        )
    ),
]
SwapPrompts = Annotated[
    Path | None,
    Field(description="With swap: a file with the prompts that the release was tuned on."),
]
Serving = Annotated[dict[str, str], OtherKeys(OPTIONS, fields=lambda: VllmServing.model_fields)]


def deploy(
    context: typer.Context,
    pair: Pair = "default",
    device: DeviceOption = None,
    release: Deployed = "champion",
    out: Out = Path("dist"),
    ungated: Ungated = None,
    with_weights: WithWeights = False,
    dtype: DtypeOption = None,
    engine: EngineOption = "draftwell",
    temperature: Temperature = 0.0,
    serving: Serving = {},  # noqa: B006 (never changed)
    swap: Swap = None,
    swap_prompts: SwapPrompts = None,
    dry_run: Preview = False,
) -> None:
    """Take the bundle that the gate judged, or build the release's bundle, and point `current` at
    it.

    With --engine vllm a bundle for vLLM is built, in OUT/vllm/PAIR; swap=URL loads its head into a
    server that runs.

    Example: draftwell deploy --pair default --release champion
    """
    if on_other_engine(context):
        from draftwell.flows.cli.engine import deploy_elsewhere

        built = deploy_elsewhere(context)
        typer.echo(
            f"it may be deployed, in {built}"
            if dry_run
            else f"{built}  (and {built.parent / 'current'})"
        )
        return

    spec, on = find_pair(pair), release_device(device)
    store = Store()
    found = find_release(store, spec.name, on, release)  # before any model is fetched
    if dry_run:
        check_deployable(store, found, ungated)
        typer.echo(f"{found.name} may be deployed, in {out / spec.name}")
        return
    bundle = build_bundle(
        store,
        spec,
        fetch(spec, progress=say),
        alias=release,
        device=on,
        out=out,
        ungated_reason=ungated,
        with_weights=with_weights,
    )
    if line := None if with_weights or ungated else deviation(bundle, found):
        say(line)
    for remark in filter(None, (signature_remark(bundle), hashes_remark(bundle))):
        say(remark)
    typer.echo(f"{bundle}  (and {bundle.parent / 'current'})")


def prune(
    pair: Pair = "default",
    engine: ReleasedEngine = "draftwell",
    keep: Annotated[
        int,
        Field(ge=1, description="Bundles of each device that stay besides the one that is served."),
    ] = 3,
    bundles: Bundles = Path("dist"),
    dry_run: Preview = False,
) -> None:
    """Remove a pair's old bundles; what is served and the newest ones stay, and `deploy` builds any
    other again.

    Example: draftwell release prune --pair default --set keep=3
    """

    name = find_pair(pair).name
    if engine not in CAPABILITIES:
        raise DraftwellError(
            f"--set engine={engine}: there are bundles of {' and '.join(CAPABILITIES)} alone",
            code="no_bundles_of_engine",
        )
    home = bundles / name if engine == "draftwell" else bundles_of(bundles, name)
    removed = retention.prune(home, keep, dry_run=dry_run)
    typer.echo(
        "\n".join(f"{'would remove' if dry_run else 'removed'} {path}" for path in removed)
        or f"nothing to remove: {keep} or fewer are not served"
    )


def ui(
    port: Annotated[
        int, typer.Option("--port", min=1, max=65535, help="Port to listen on.")
    ] = 5000,
) -> None:
    """Start MLflow's UI on this machine's registry.

    It asks for no password, so it answers this machine alone; others are served from deploy/.

    Example: draftwell release ui --port 5000
    """
    import os
    import subprocess
    import sys

    uri = Store().uri
    if not uri.startswith("sqlite"):
        raise DraftwellError(f"the registry is a server already: open {uri} in a browser")
    say(f"MLflow on http://127.0.0.1:{port}  (Ctrl-C ends it)")
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--backend-store-uri",
        uri,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--workers",
        "1",
    ]
    raise typer.Exit(subprocess.run(command, env=environment, check=False).returncode)
