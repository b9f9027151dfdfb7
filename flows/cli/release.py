"""Commands that release: gate, promote, deploy, ui."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.options import DtypeOption, Limit, MaxTokens, Pair, Prompts, Threads, progress, say, set_threads, wide_console
from serving.runtime.types import DraftwellError

Device = Annotated[str, typer.Option("--device", help="cpu or cuda.")]


def add_to(app: typer.Typer) -> None:
    """Register this file's commands."""
    for command in (gate, promote, deploy, ui):
        app.command()(command)


def gate(pair: Pair = "default", device: Device = "cpu",
         release: Annotated[str | None, typer.Option(
             "--release", help="Alias or number of the release to judge; the candidate, if there is one, if left out.")] = None,
         baseline: Annotated[bool, typer.Option("--baseline", help="Judge only this checkout's deterministic counts, as CI does.")] = False,
         record: Annotated[bool, typer.Option("--record", help="Record this checkout's deterministic counts as the baseline.")] = False,
         prompts: Prompts = None, limit: Limit = 16, max_tokens: MaxTokens = 64, dtype: DtypeOption = None,
         threads: Threads = None) -> None:
    """Judge a release, or this checkout against its recorded baseline; exit code 1 if the gate fails, 2 on an error.

    Without a release (a fresh clone) the deterministic part alone is judged.

    Example: draftwell gate --pair default
    """
    from components.reports import verdict_table
    from flows.gating import judge_baseline
    from registry.gates import load_baseline
    from registry.pairs import find_pair

    set_threads(threads)
    name = find_pair(pair).name
    if record:
        record_baseline(pair, name)
        return
    wanted = None if baseline else release_to_judge(name, device, release)
    verdicts = []
    if wanted is None or load_baseline(name) is not None:
        with progress("deterministic counts") as bar:
            verdicts.append(("deterministic counts, float32", judge_baseline(pair, say, bar)))
    else:
        say(f"pair {name} has no recorded baseline: the release alone is judged")
    if wanted is not None:
        from components.prompts import demo_prompts, read_prompts
        from flows.context import open_station
        from flows.gating import gate_release

        rows = read_prompts(prompts, limit) if prompts else demo_prompts(limit)
        opened = open_station(pair, dtype, device=device, say=say)
        with progress("gate") as bar:
            station = type(opened)(opened.workspace, opened.pair, bar)
            result = gate_release(station, rows, alias=wanted, device=device, max_tokens=max_tokens)
        verdicts.append((f"release {result['release']}", result["verdict"]))
    for title, verdict in verdicts:
        wide_console().print(verdict_table(verdict, title=title))
    if not all(verdict.passed for _, verdict in verdicts):
        raise typer.Exit(1)


def record_baseline(pair: str, name: str) -> None:
    """Write registry/baselines/<pair>.json."""
    import json

    from flows.gating import baseline_report
    from registry import gates
    from serving.runtime.artifacts.base import write_atomically

    with progress("deterministic counts") as bar:
        report = baseline_report(pair, say, bar)
    path = gates.HERE / "baselines" / f"{name}.json"
    write_atomically(path, (json.dumps(report, indent=2) + "\n").encode())
    typer.echo(f"recorded {path.name}")


def release_to_judge(pair: str, device: str, release: str | None) -> int | None:
    """Number of the release that was named, which must exist, or else of the candidate; None where there is none."""
    from registry.store import Store

    store = Store()
    if release is not None:
        return store.resolve("release", f"{pair}.{device}", release).version
    return store.get_aliases("release", f"{pair}.{device}").get("candidate")


def promote(pair: Pair = "default", device: Device = "cpu",
            release: Annotated[str, typer.Option("--release", help="Alias or number of the release.")] = "candidate") -> None:
    """Make a release that passed its gate the champion.

    Example: draftwell promote --pair default --release candidate
    """
    from registry.pairs import find_pair
    from registry.releases import promote as run
    from registry.store import Store

    name = find_pair(pair).name
    done = run(Store(), name, device, release)
    typer.echo(f"{done.name} is the champion; `draftwell deploy --pair {pair}` builds its bundle")


def deploy(pair: Pair = "default", device: Device = "cpu",
           alias: Annotated[str, typer.Option("--alias", help="Alias or number of the release.")] = "champion",
           out: Annotated[Path, typer.Option("--out", help="Folder of bundles.")] = Path("dist"),
           ungated: Annotated[str | None, typer.Option(
               "--ungated", help="Deploy without a passed gate, for this reason; it is recorded.")] = None,
           with_weights: Annotated[bool, typer.Option("--with-weights", help="Copy the models into the bundle.")] = False) -> None:
    """Build the bundle of a release and let `current` lead to it.

    Example: draftwell deploy --pair default --alias champion
    """
    from registry.bundles import build_bundle
    from registry.pairs import fetch, find_pair
    from registry.store import Store

    spec = find_pair(pair)
    store = Store()
    store.resolve("release", f"{spec.name}.{device}", alias)  # before any model is fetched
    bundle = build_bundle(store, spec, fetch(spec, progress=say), alias=alias, device=device, out=out, ungated_reason=ungated,
                          with_weights=with_weights)
    typer.echo(f"{bundle}  (and {bundle.parent / 'current'})")


def ui(host: Annotated[str, typer.Option("--host")] = "127.0.0.1",
       port: Annotated[int, typer.Option("--port", min=1, max=65535)] = 5000) -> None:
    """Open MLflow's UI on this machine's registry.

    Example: draftwell ui --port 5000
    """
    import os
    import subprocess
    import sys

    from registry.store import Store

    uri = Store().uri
    if not uri.startswith("sqlite"):
        raise DraftwellError(f"the registry is a server already: open {uri} in a browser")
    say(f"MLflow on http://{host}:{port}  (Ctrl-C ends it)")
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri, "--host", host, "--port", str(port), "--workers", "1"]
    raise typer.Exit(subprocess.run(command, env=environment, check=False).returncode)
