"""What a run shows in Prefect: tables, pictures, and links to the runs in MLflow."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwell.registry.access import hidden

if TYPE_CHECKING:
    from draftwell.registry.store import Published, Store

LOCAL_UI = "http://127.0.0.1:5000"
"""Where `make ui` shows MLflow."""


def key_for(*words: str) -> str:
    """An artifact's key: small letters, digits and dashes are all that Prefect takes.

    >>> key_for("tuning", "Qwen2.5_7b", "roc.png")
    'tuning-qwen2-5-7b-roc-png'
    """
    return re.sub(r"[^a-z0-9]+", "-", "-".join(words).lower()).strip("-")


def table(step: str, pair: str, rows: Sequence[Mapping[str, Any]], words: str) -> None:
    """A table of a step, one mapping from column to value for each row."""
    from prefect.artifacts import create_table_artifact

    create_table_artifact(
        [{column: readable(value) for column, value in row.items()} for row in rows],
        key_for(step, pair),
        words,
    )


def readable(value: Any) -> Any:
    """A value as a table shows it: floats with four digits, anything nested as text."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    return value if value is None or isinstance(value, str | int) else str(value)


def pictures(step: str, pair: str, files: Iterable[Path]) -> None:
    """The PNG files among some, each as a picture that needs no server."""
    for file in files:
        if file.suffix == ".png":
            picture(key_for(step, pair, file.stem), file, f"{pair}: {file.stem}")


def picture(key: str, file: Path, words: str) -> None:
    """A PNG file as a picture."""
    from prefect.artifacts import create_image_artifact

    create_image_artifact(
        f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}", key, words
    )


def links(step: str, pair: str, store: Store, published: Iterable[Published]) -> None:
    """A link to MLflow's run of every published version."""
    from prefect.artifacts import create_link_artifact

    for version in published:
        name = f"{version.name} version {version.version}"
        create_link_artifact(
            run_address(store, version),
            f"{name} in MLflow",
            key_for(step, pair, version.kind),
            f"{name}, digest {version.digest[:12]}",
        )


def run_address(store: Store, version: Published) -> str:
    """The page of a version's run in MLflow."""
    experiment = store.client.get_run(version.run_id).info.experiment_id
    return f"{ui_address(store.uri)}/#/experiments/{experiment}/runs/{version.run_id}"


def ui_address(uri: str) -> str:
    """Where people open MLflow: `$DRAFTWELL_MLFLOW_UI`, else the tracking server without its
    password, else that of `make ui`."""
    if named := os.environ.get("DRAFTWELL_MLFLOW_UI"):
        return named.rstrip("/")
    if uri.startswith(("http://", "https://")):
        return hidden(uri).rstrip("/")
    return LOCAL_UI
