"""Commands that release: gate, promote, rollback, deploy, prune, ui."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftwell.components.engines.port import CAPABILITIES, LAUNCHED
from draftwell.components.engines.remote.address import is_address
from draftwell.components.gate.settings import DEFAULTS, GateSettings
from draftwell.flows.cli.engine_options import on_other_engine
from draftwell.flows.cli.options import (
    DeviceOption,
    DtypeOption,
    EngineOption,
    Levels,
    Limit,
    MaxTokens,
    Pair,
    PlainOption,
    Prompts,
    Threads,
    check_output,
    release_device,
    say,
    set_threads,
)
from draftwell.flows.cli.shared_options import ADDRESS, LAUNCHER, with_options
from draftwell.registry import promotion
from draftwell.registry.bundles import retention
from draftwell.registry.bundles.build import build_bundle, relink
from draftwell.registry.bundles.judged import deviation
from draftwell.registry.bundles.signing import hashes_remark, signature_remark
from draftwell.registry.bundles.vllm.build import bundles_of
from draftwell.registry.pairs import fetch, find_pair
from draftwell.registry.releases import (
    device_options,
    engine_device,
    find_release,
)
from draftwell.registry.store import Store
from draftwell.serving.errors import DraftwellError

AT = "--temperature T"
"""How `deploy` names the release for sampled requests: by the temperature that it was tuned for."""
Sampled = Annotated[
    bool,
    typer.Option(
        "--sampled", help="With --engine vllm: the release for sampled requests, not greedy ones."
    ),
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
    app.command()(with_options(gate, ADDRESS, LAUNCHER, judged))
    for command in (promote, rollback, deploy, prune, ui):
        app.command()(command)


Release = Annotated[
    str | None,
    typer.Option(
        "--release",
        help=(
            "Alias or number of the release to judge. Default: the candidate, if the pair has one."
        ),
    ),
]
Baseline = Annotated[
    bool,
    typer.Option("--baseline", help="Judge only this checkout's deterministic counts, as CI does."),
]
Record = Annotated[
    bool,
    typer.Option("--record", help="Record this checkout's deterministic counts as the baseline."),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help=(
            "Measure and judge, but keep no verdict and move no alias; the exit code is "
            "that of the verdict."
        ),
    ),
]
Unmeasured = Annotated[
    str | None,
    typer.Option(
        "--unmeasured",
        help="Reason to pass a release although a check that gates.yaml requires cannot run on "
        "this machine; stored with the verdict.",
    ),
]
Markdown = Annotated[
    Path | None,
    typer.Option("--markdown", help="Write the verdict as Markdown, for a pull request."),
]
Junit = Annotated[
    Path | None, typer.Option("--junit", help="Write the verdict as JUnit XML, for CI.")
]

EvidenceFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--evidence",
        help="Judge what a benchmark tool measured with speculation, instead of measuring: a file, "
        "or the folder that the tool wrote; may be repeated. See docs/registry.md.",
    ),
]
PlainEvidence = Annotated[
    list[Path] | None,
    typer.Option(
        "--plain-evidence",
        help="The same of the same engine without speculation; may be repeated.",
    ),
]


def gate(
    context: typer.Context,
    pair: Pair = "default",
    device: DeviceOption = None,
    release: Release = None,
    baseline: Baseline = False,
    record: Record = False,
    dry_run: DryRun = DEFAULTS.dry_run,
    unmeasured: Unmeasured = DEFAULTS.unmeasured,
    markdown: Markdown = None,
    junit: Junit = None,
    prompts: Prompts = None,
    limit: Limit = DEFAULTS.limit,
    max_tokens: MaxTokens = DEFAULTS.max_tokens,
    dtype: DtypeOption = None,
    threads: Threads = None,
    engine: EngineOption = "draftwell",
    sampled: Sampled = False,
    levels: Levels = "1",
) -> None:
    """Judge a release, or this checkout against its recorded baseline. Exit code: 0 passed, 1
    failed, 2 error, 3 not enough evidence: the intervals leave it open, and the table estimates how
    many prompts would decide. A release is promoted after 0 only.

    Where the pair has no release on any device (a fresh clone), only counts (target calls, accepted
    tokens) and outputs are compared with registry/baselines. A pair with releases but no candidate
    for the device is an error; --baseline judges the counts alone.

    With --engine vllm, the candidates for greedy and for sampled requests are judged beside vLLM's
    plain decoding, with the same exit codes. With --engine URL and --launcher so are those of an
    engine that your own command starts; without, the engine is judged as it runs.

    With --evidence, results of others' benchmark tools are judged. The verdict is kept where
    --release names a release of --engine vllm.

    Example: draftwell gate --pair default
    """
    from draftwell.flows.cli import gate_run as run

    for path in filter(None, (markdown, junit)):
        check_output(path)
        path.unlink(missing_ok=True)  # a gate that breaks off leaves no earlier verdict
    on_other = on_other_engine(context)
    with run.errors_are_reported(markdown, junit):
        set_threads(threads)
        if record:
            return run.record_baseline(pair)
        if on_other or context.params["evidence"] or context.params["plain_evidence"]:
            verdicts = judge_on_other(context)
        else:
            on = "cpu" if baseline else run.gated_on(pair, dtype, device)
            settings = GateSettings(device=on, limit=limit, max_tokens=max_tokens, dry_run=dry_run)
            settings = settings.model_copy(update={"unmeasured": unmeasured})
            asked = (find_pair(pair).name, on, release, device is not None)
            judged = None if baseline else run.release_to_judge(*asked)
            verdicts = run.own_verdicts(pair, dtype, prompts, judged, settings)
    run.show(verdicts, markdown, junit)
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


def read_released(text: str) -> str:
    """What --engine says of a release: any engine that releases are made for."""
    names = dict.fromkeys((*CAPABILITIES, *LAUNCHED))
    if text not in names:
        raise typer.BadParameter(f"{text!r} is none of {', '.join(names)}")
    return text


ReleasedEngine = Annotated[
    str,
    typer.Option(
        "--engine",
        parser=read_released,
        metavar="NAME",
        help="The engine that the release is for: draftwell, vllm, and of those that were tuned at "
        "an address also sglang and llama.cpp.",
    ),
]


def promote(
    context: typer.Context,
    pair: Pair = "default",
    device: DeviceOption = None,
    release: Annotated[
        str, typer.Option("--release", help="Alias or number of the release to promote.")
    ] = "candidate",
    reason: Annotated[
        str | None,
        typer.Option(
            "--reason",
            help="Why to promote a release that was rolled back, or that was compared with an "
            "earlier champion; recorded.",
        ),
    ] = None,
    engine: ReleasedEngine = "draftwell",
    sampled: Sampled = False,
) -> None:
    """Make a release that passed its gate the champion.

    Example: draftwell release promote --pair default --release candidate
    """

    name = find_pair(pair).name  # before a registry is made for a mistyped one
    done = promotion.promote(Store(), name, released_on(context), release, reason=reason)
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
        str,
        typer.Option("--reason", help="Why the champion is rolled back; recorded."),
    ],
    pair: Pair = "default",
    device: DeviceOption = None,
    to: Annotated[
        int | None,
        typer.Option(
            "--to",
            min=1,
            help="Number of the release to make champion. Default: the previous champion.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder of bundles.")] = Path("dist"),
    engine: ReleasedEngine = "draftwell",
    sampled: Sampled = False,
) -> None:
    """Make the previous champion the champion again, and point `current` at its bundle; the bundle
    of another engine is built by `deploy`.

    Example: draftwell release rollback --pair default --reason "answers in French are cut"
    """
    name, store = find_pair(pair).name, Store()
    bad, good = promotion.rollback(store, name, released_on(context), reason, to)
    typer.echo(
        f"{good.name} is the champion again, version {bad.version} was rolled back: {reason}"
    )
    if engine not in CAPABILITIES:
        return
    bundle = relink(store, good, out) if engine == "draftwell" else None
    typer.echo(
        f"{bundle}  (and {bundle.parent / 'current'})"
        if bundle
        else (
            f"its bundle is not in {out}: `draftwell deploy --pair {pair} "
            f"{device_options(good.device, AT)}` builds it"
        )
    )


Alias = Annotated[str, typer.Option("--alias", help="Alias or number of the release to deploy.")]
Out = Annotated[Path, typer.Option("--out", help="Folder of bundles.")]
Ungated = Annotated[
    str | None,
    typer.Option(
        "--ungated", help="Deploy without a passed gate, for this reason, which is recorded."
    ),
]
WithWeights = Annotated[
    bool, typer.Option("--with-weights", help="Copy the models into the bundle.")
]
Temperature = Annotated[
    float,
    typer.Option(
        "--temperature",
        min=0.0,
        help="With --engine vllm: of the requests that it was tuned for.",
    ),
]
Swap = Annotated[
    str | None,
    typer.Option(
        "--swap",
        metavar="URL",
        help="With --engine vllm: load the release's head or draft into the vLLM that runs there, "
        "without a restart, and check it there before `current` moves.",
    ),
]
SwapPrompts = Annotated[
    Path | None,
    typer.Option(
        "--swap-prompts", help="With --swap: a file with the prompts that the release was tuned on."
    ),
]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help=(
            "With --engine vllm: a setting of what serves, such as image=NAME or "
            "replicas=3; may be repeated."
        ),
    ),
]


def deploy(
    context: typer.Context,
    pair: Pair = "default",
    device: DeviceOption = None,
    alias: Alias = "champion",
    out: Out = Path("dist"),
    ungated: Ungated = None,
    with_weights: WithWeights = False,
    dtype: DtypeOption = None,
    engine: EngineOption = "draftwell",
    temperature: Temperature = 0.0,
    options: Options = None,
    swap: Swap = None,
    swap_prompts: SwapPrompts = None,
) -> None:
    """Take the bundle that the gate judged, or build the release's bundle, and point `current` at
    it.

    With --engine vllm, a bundle for vLLM is built of its champion, in OUT/vllm/PAIR. --swap also
    loads its head into a server that runs, with DRAFTWELL_SWAP_KEY and DRAFTWELL_ENGINE_KEY.

    Example: draftwell deploy --pair default --alias champion
    """
    if on_other_engine(context):
        from draftwell.flows.cli.engine import deploy_elsewhere

        built = deploy_elsewhere(context)
        typer.echo(f"{built}  (and {built.parent / 'current'})")
        return

    spec, on = find_pair(pair), release_device(device)
    store = Store()
    release = find_release(store, spec.name, on, alias)  # before any model is fetched
    bundle = build_bundle(
        store,
        spec,
        fetch(spec, progress=say),
        alias=alias,
        device=on,
        out=out,
        ungated_reason=ungated,
        with_weights=with_weights,
    )
    if line := None if with_weights or ungated else deviation(bundle, release):
        say(line)
    for remark in filter(None, (signature_remark(bundle), hashes_remark(bundle))):
        say(remark)
    typer.echo(f"{bundle}  (and {bundle.parent / 'current'})")


def prune(
    pair: Pair = "default",
    engine: EngineOption = "draftwell",
    keep: Annotated[
        int,
        typer.Option(
            "--keep", min=1, help="Bundles of each device that stay besides the one that is served."
        ),
    ] = 3,
    out: Annotated[Path, typer.Option("--out", help="Folder of bundles.")] = Path("dist"),
) -> None:
    """Remove a pair's old bundles; what is served and the newest ones stay, and `deploy` builds any
    other again.

    Example: draftwell release prune --pair default --keep 3
    """

    name = find_pair(pair).name
    home = out / name if engine == "draftwell" else bundles_of(out, name)
    removed = retention.prune(home, keep)
    typer.echo(
        "\n".join(f"removed {path}" for path in removed)
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
