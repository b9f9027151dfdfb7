"""What a run shows in Prefect: tables, pictures, and a link to the release's run in MLflow."""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect.artifacts import (
    create_image_artifact,
    create_link_artifact,
    create_markdown_artifact,
    create_table_artifact,
)

from draftwell.components.tune.evidence import TuningEvidence
from draftwell.components.tune.report.tables import measured
from draftwell.flows.context import pictures_of
from draftwell.flows.workspace import Workspace
from draftwell.registry.access import hidden
from draftwell.registry.store import Published, Store

LOCAL_UI = "http://127.0.0.1:5000"
"""Where `make ui` shows MLflow."""


def key_for(*words: str) -> str:
    """An artifact's key: small letters, digits and dashes are all that Prefect takes.

    >>> key_for("tuning", "Qwen2.5_7b", "roc.png")
    'tuning-qwen2-5-7b-roc-png'
    """
    return re.sub(r"[^a-z0-9]+", "-", "-".join(words).lower()).strip("-")


def text(step: str, pair: str, words: str) -> None:
    """A text of a step, as Markdown."""
    create_markdown_artifact(words, key_for(step, pair))


def table(step: str, space: Workspace, rows: Sequence[Mapping[str, Any]], words: str) -> None:
    """A table of a step, one mapping from column to value for each row."""
    cells = [{column: readable(value) for column, value in row.items()} for row in rows]
    create_table_artifact(cells, key_for(step, space.spec.name), words)


def readable(value: Any) -> Any:
    """A value as a table shows it: floats with four digits, anything nested as text."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    return value if value is None or isinstance(value, str | int) else str(value)


def figures(step: str, space: Workspace, report: Mapping[str, Any]) -> None:
    """The numbers and texts of a report, without its curves, as a table."""
    rows = [
        {"figure": name, "value": value}
        for name, value in report.items()
        if isinstance(value, int | float | str)
    ]
    table(step, space, rows, "")


def pictures(space: Workspace, kinds: Iterable[str]) -> None:
    """The plots of artifacts in the workspace."""
    for kind in kinds:
        for file in pictures_of(space, kind):
            picture(kind, space, file)


def picture(step: str, space: Workspace, file: Path) -> None:
    """A PNG file as a picture that needs no server; others are left out."""
    if file.suffix != ".png":
        return
    data, pair = base64.b64encode(file.read_bytes()).decode(), space.spec.name
    key = key_for(step, pair, file.stem)
    create_image_artifact(f"data:image/png;base64,{data}", key, f"{pair}: {file.stem}")


def measured_rows(space: Workspace) -> list[dict[str, Any]]:
    """What the tuning measured, as rows of its report's table."""
    file = space.device_reports / "tuning.json"
    evidence = TuningEvidence.read(json.loads(file.read_text(encoding="utf-8")), str(file))
    return [{**row} for row in measured(evidence)]


def link(space: Workspace, version: Published) -> str:
    """A link to a published version's run in MLflow; returns its address."""
    store = Store()
    experiment = store.client.get_run(version.run_id).info.experiment_id
    address = f"{ui_address(store.uri)}/#/experiments/{experiment}/runs/{version.run_id}"
    create_link_artifact(
        address,
        f"{version.name} version {version.version} in MLflow",
        key_for("mlflow", space.spec.name, version.kind),
        f"digest {version.digest[:12]}",
    )
    return address


def ui_address(uri: str) -> str:
    """Where people open MLflow: `$DRAFTWELL_MLFLOW_UI`, else the tracking server without its
    password, else that of `make ui`."""
    if named := os.environ.get("DRAFTWELL_MLFLOW_UI"):
        return named.rstrip("/")
    return hidden(uri).rstrip("/") if uri.startswith(("http://", "https://")) else LOCAL_UI
