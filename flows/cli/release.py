"""Commands that release: gate, promote, rollback, deploy, prune, ui."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftwell.components.gate.settings import DEFAULTS, GateSettings
from draftwell.flows.cli.options import (
    DeviceOption,
    DtypeOption,
    EngineName,
    EngineOption,
    Limit,
    MaxTokens,
    Pair,
    Prompts,
    Threads,
    check_output,
    pick_device,
    progress,
    release_device,
    say,
    set_threads,
    wide_console,
)
from draftwell.flows.failures import disk_full_as_error
from draftwell.serving.errors import DraftwellError

if TYPE_CHECKING:
    from draftwell.components.gate.verdict import GateVerdict

EXIT_FAILED, EXIT_UNDECIDED = 1, 3
"""Exit codes of the gate, with 0 for passed and 2 for an error."""


def add_to(app: typer.Typer) -> None:
    """Register this file's commands."""
    for command in (gate, promote, rollback, deploy, prune, ui):
        app.command()(command)


def gate(
    context: typer.Context,
    pair: Pair = "default",
    device: DeviceOption = None,
    release: Annotated[
        str | None,
        typer.Option(
            "--release",
            help=(
                "Alias or number of the release to judge. Default: the candidate, if the pair "
                "has one."
            ),
        ),
    ] = None,
    baseline: Annotated[
        bool,
        typer.Option(
            "--baseline", help="Judge only this checkout's deterministic counts, as CI does."
        ),
    ] = False,
    record: Annotated[
        bool,
        typer.Option(
            "--record", help="Record this checkout's deterministic counts as the baseline."
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help=(
                "Measure and judge, but keep no verdict and move no alias; the exit code is "
                "that of the verdict."
            ),
        ),
    ] = DEFAULTS.dry_run,
    unmeasured: Annotated[
        str | None,
        typer.Option(
            "--unmeasured",
            help="Reason to pass a release although the champion or the traces cannot be "
            "measured on this machine; "
            "stored with the verdict.",
        ),
    ] = DEFAULTS.unmeasured,
    markdown: Annotated[
        Path | None,
        typer.Option("--markdown", help="Write the verdict as Markdown, for a pull request."),
    ] = None,
    junit: Annotated[
        Path | None, typer.Option("--junit", help="Write the verdict as JUnit XML, for CI.")
    ] = None,
    prompts: Prompts = None,
    limit: Limit = DEFAULTS.limit,
    max_tokens: MaxTokens = DEFAULTS.max_tokens,
    dtype: DtypeOption = None,
    threads: Threads = None,
    engine: EngineOption = EngineName.draftwell,
) -> None:
    """Judge a release, or this checkout against its recorded baseline.

    Exit code: 0 passed, 1 failed, 2 error, 3 not enough evidence: the intervals leave it open, and
    the table estimates how many prompts would decide. A release is promoted after 0 only.

    Where the pair has no release on any device (a fresh clone), only counts (target calls, accepted
    tokens) and outputs are compared with registry/baselines. A pair with releases but no candidate
    for the device is an error; --baseline judges the counts alone.

    With --engine vllm, what `draftwell tune --engine vllm` chose is judged beside vLLM's plain
    decoding, with the same exit codes.

    Example: draftwell gate --pair default
    """
    from draftwell.flows.cli.engine import gate_elsewhere, refuse_options
    from draftwell.registry.pairs import find_pair

    files = [path for path in (markdown, junit) if path is not None]
    for path in files:
        check_output(path)
        path.unlink(missing_ok=True)  # a gate that breaks off leaves no verdict of an earlier one
    elsewhere = refuse_options(
        context, engine, ("dry_run", "markdown", "junit", "prompts", "limit", "max_tokens")
    )
    with errors_are_reported(markdown, junit):
        set_threads(threads)
        name = find_pair(pair).name
        if record:
            record_baseline(pair, name)
            return
        on = "cpu" if baseline else pick_device(device)
        if elsewhere:
            verdicts = gate_elsewhere(
                pair,
                dtype,
                device,
                threads,
                prompts=prompts,
                limit=limit,
                max_tokens=max_tokens,
                keep=not dry_run,
            )
        else:
            wanted = (
                None
                if baseline
                else release_to_judge(name, on, release, expected=device is not None)
            )
            verdicts = baseline_verdicts(pair, name, needed=wanted is None)
            if wanted is not None:
                settings = GateSettings(
                    device=on,
                    limit=limit,
                    max_tokens=max_tokens,
                    dry_run=dry_run,
                    unmeasured=unmeasured,
                )
                verdicts.append(
                    release_verdict(
                        pair,
                        dtype,
                        prompts,
                        wanted,
                        settings,
                        beside=[verdict for _, verdict in verdicts],
                    )
                )
    show(verdicts, markdown, junit)
    if dry_run:
        say("a dry run: no verdict was kept, no alias moved")
    raise typer.Exit(exit_code([verdict for _, verdict in verdicts]))


def exit_code(verdicts: Sequence[GateVerdict]) -> int:
    """0 where all passed, else 1 where any failed, else 3."""
    if all(verdict.passed for verdict in verdicts):
        return 0
    return (
        EXIT_FAILED if any(verdict.result == "failed" for verdict in verdicts) else EXIT_UNDECIDED
    )


@contextmanager
def errors_are_reported(markdown: Path | None, junit: Path | None) -> Iterator[None]:
    """Whatever keeps the gate from a verdict is no failed gate: it has exit code 2, and CI reads of
    it in the same files."""
    try:
        with disk_full_as_error():
            yield
    except Exception as error:
        from draftwell.components.gate.verdict_report import error_junit, error_markdown, write_text

        line = " ".join(str(error).split()) or type(error).__name__
        if markdown is not None:
            write_text(markdown, error_markdown(line))
        if junit is not None:
            write_text(junit, error_junit(line))
        if isinstance(error, DraftwellError) or getattr(error, "filename", None) is not None:
            raise
        traceback.print_exc()  # a fault of ours: Python's own exit code would say 1
        raise typer.Exit(2) from error


def baseline_verdicts(pair: str, name: str, *, needed: bool) -> list[tuple[str, GateVerdict]]:
    """The deterministic part, where a baseline is recorded; one that is `needed` and missing is an
    error."""
    from draftwell.flows.steps.gate_parts.counts import judge_baseline
    from draftwell.registry.gates import load_baseline

    if not needed and load_baseline(name) is None:
        say(f"pair {name} has no recorded baseline: the release alone is judged")
        return []
    with progress("deterministic counts") as bar:
        return [("deterministic counts, float32", judge_baseline(pair, say, bar))]


def release_verdict(
    pair: str,
    dtype: str | None,
    prompts: Path | None,
    wanted: int,
    settings: GateSettings,
    beside: Sequence[GateVerdict] = (),
) -> tuple[str, GateVerdict]:
    """The measured part: a release compared with the champion. Its record says that it failed, too,
    where a verdict `beside` did.

    The first `settings.limit` prompts are taken that the release was not made from; of the shipped
    ones the last, because the first are the first to be learnt from.
    """
    from draftwell.components.prompts.prompt import demo_prompts, read_prompts
    from draftwell.flows.loading import open_pair
    from draftwell.flows.steps.gate import gate_release

    rows = read_prompts(prompts) if prompts else demo_prompts()[::-1]
    opened = open_pair(pair, dtype, device=settings.device or pick_device(None), say=say)
    with progress("gate") as bar:
        step = type(opened)(opened.workspace, opened.pair, bar)
        result = gate_release(step, rows, settings, alias=wanted, beside=beside)
    return f"release {result['release']}", result["verdict"]


def show(
    verdicts: Sequence[tuple[str, GateVerdict]], markdown: Path | None, junit: Path | None
) -> None:
    """Verdicts as tables, and in files where they were asked for."""
    from draftwell.components.gate.verdict_report import (
        verdict_table,
        verdicts_junit,
        verdicts_markdown,
        write_text,
    )

    for title, verdict in verdicts:
        wide_console().print(verdict_table(verdict, title=title))
    if markdown is not None:
        write_text(markdown, verdicts_markdown(verdicts))
    if junit is not None:
        write_text(junit, verdicts_junit(verdicts))


def record_baseline(pair: str, name: str) -> None:
    """Write registry/baselines/<pair>.json."""
    from draftwell.flows.steps.gate_parts.counts import baseline_report
    from draftwell.registry import gates
    from draftwell.serving.files import write_json

    with progress("deterministic counts") as bar:
        report = baseline_report(pair, say, bar)
    path = gates.HERE / "baselines" / f"{name}.json"
    write_json(path, report.model_dump())
    typer.echo(f"recorded {path.name}")


def release_to_judge(pair: str, device: str, release: str | None, *, expected: bool) -> int | None:
    """Number of the release that was named, or else of the candidate; None where the pair has no
    release at all and none is expected.

    Args:
        expected: the device was named, so that judging the counts alone would be a false success.
    Raises:
        DraftwellError: there is no such release, or no candidate for the device where one is
            expected or the pair has releases.
    """
    from draftwell.registry.connection import registry_exists
    from draftwell.registry.releases import aliases_by_device, no_release_hint, resolve_release
    from draftwell.registry.store import Store

    if release is not None:
        return resolve_release(Store(), pair, device, release).version
    known = aliases_by_device(Store(), pair) if registry_exists() else {}
    if (candidate := known.get(device, {}).get("candidate")) is not None:
        return candidate
    if expected or known:
        raise DraftwellError(
            f"no release was judged: release.{pair}.{device} has no "
            f"candidate{no_release_hint(known, device)}, "
            f"`draftwell tune --pair {pair} --device {device}` makes one, or --baseline "
            "judges the counts alone",
            code="no_candidate",
        )
    say(f"pair {pair} has no release: this checkout's counts alone are judged")
    return None


def promote(
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
) -> None:
    """Make a release that passed its gate the champion.

    Example: draftwell promote --pair default --release candidate
    """
    from draftwell.registry.pairs import find_pair
    from draftwell.registry.promotion import promote as run
    from draftwell.registry.store import Store

    name = find_pair(pair).name  # before a registry is made for a mistyped one
    done = run(Store(), name, release_device(device), release, reason=reason)
    typer.echo(
        f"{done.name} is the champion; `draftwell deploy --pair {pair} --device "
        f"{done.device}` builds its bundle"
    )


def rollback(
    reason: Annotated[
        str,
        typer.Option(
            "--reason", help="Why the champion is rolled back; recorded with the release."
        ),
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
) -> None:
    """Make the previous champion the champion again, and point `current` at its bundle.

    Example: draftwell rollback --pair default --reason "answers in French are cut"
    """
    from draftwell.registry.bundles.build import relink
    from draftwell.registry.pairs import find_pair
    from draftwell.registry.promotion import rollback as run
    from draftwell.registry.store import Store

    name, store = find_pair(pair).name, Store()
    bad, good = run(store, name, release_device(device), reason, to)
    typer.echo(
        f"{good.name} is the champion again, version {bad.version} was rolled back: {reason}"
    )
    bundle = relink(store, good, out)
    typer.echo(
        f"{bundle}  (and {bundle.parent / 'current'})"
        if bundle
        else (
            f"its bundle is not in {out}: `draftwell deploy --pair {pair} --device "
            f"{good.device}` builds it"
        )
    )


def deploy(
    context: typer.Context,
    pair: Pair = "default",
    device: DeviceOption = None,
    alias: Annotated[
        str, typer.Option("--alias", help="Alias or number of the release to deploy.")
    ] = "champion",
    out: Annotated[Path, typer.Option("--out", help="Folder of bundles.")] = Path("dist"),
    ungated: Annotated[
        str | None,
        typer.Option(
            "--ungated", help="Deploy without a passed gate, for this reason, which is recorded."
        ),
    ] = None,
    with_weights: Annotated[
        bool, typer.Option("--with-weights", help="Copy the models into the bundle.")
    ] = False,
    dtype: DtypeOption = None,
    engine: EngineOption = EngineName.draftwell,
    temperature: Annotated[
        float,
        typer.Option(
            "--temperature",
            min=0.0,
            help="With --engine vllm: of the requests that it was tuned for.",
        ),
    ] = 0.0,
    options: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help=(
                "With --engine vllm: a setting of what serves, such as image=NAME or "
                "replicas=3; may be repeated."
            ),
        ),
    ] = None,
) -> None:
    """Take the bundle that the gate judged, or build the release's bundle, and point `current` at
    it.

    With --engine vllm, a bundle for vLLM is built of what `draftwell gate --engine vllm` judged, in
    OUT/vllm/PAIR.

    Example: draftwell deploy --pair default --alias champion
    """
    from draftwell.flows.cli.engine import deploy_elsewhere, refuse_options

    if refuse_options(
        context,
        engine,
        ("out", "ungated", "with_weights", "temperature", "options"),
        only_elsewhere=("dtype", "temperature", "options"),
    ):
        built = deploy_elsewhere(
            pair,
            dtype,
            device,
            out=out,
            temperature=temperature,
            ungated=ungated,
            with_weights=with_weights,
            options=options or (),
        )
        typer.echo(f"{built}  (and {built.parent / 'current'})")
        return
    from draftwell.registry.bundles.build import build_bundle
    from draftwell.registry.bundles.judged import deviation
    from draftwell.registry.bundles.signing import hashes_remark, signature_remark
    from draftwell.registry.pairs import fetch, find_pair
    from draftwell.registry.releases import find_release
    from draftwell.registry.store import Store

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
    engine: EngineOption = EngineName.draftwell,
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

    Example: draftwell prune --pair default --keep 3
    """
    from draftwell.registry.bundles.retention import prune as run
    from draftwell.registry.bundles.vllm.build import bundles_of
    from draftwell.registry.pairs import find_pair

    name = find_pair(pair).name
    removed = run(out / name if engine is EngineName.draftwell else bundles_of(out, name), keep)
    typer.echo(
        "\n".join(f"removed {path}" for path in removed)
        or f"nothing to remove: {keep} or fewer are not served"
    )


def ui(
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=1, max=65535, help="Port to listen on.")
    ] = 5000,
) -> None:
    """Start MLflow's UI on this machine's registry.

    Example: draftwell ui --port 5000
    """
    import os
    import subprocess
    import sys

    from draftwell.registry.store import Store

    uri = Store().uri
    if not uri.startswith("sqlite"):
        raise DraftwellError(f"the registry is a server already: open {uri} in a browser")
    say(f"MLflow on http://{host}:{port}  (Ctrl-C ends it)")
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--backend-store-uri",
        uri,
        "--host",
        host,
        "--port",
        str(port),
        "--workers",
        "1",
    ]
    raise typer.Exit(subprocess.run(command, env=environment, check=False).returncode)
