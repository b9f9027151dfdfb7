"""Data that is registered again: one version, which is described as it was made the last time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from draftwell.registry.published import Published, insert_or_change

if TYPE_CHECKING:
    from mlflow import MlflowClient

RENEWED = ("trace_digest", "git_commit", "device_class", "parents", "strategy")
"""Tags that may differ although the data is the same."""
NOTE = "mlflow.note.content"
"""Tag of a run that holds the description as this project wrote it, without what the gate or a
person added to the version's."""


def renew(
    client: MlflowClient,
    known: Published,
    tags: Mapping[str, str],
    words: str,
    metrics: Mapping[str, float],
) -> Published:
    """Bring tags, description and metrics of a version up to date where they differ; returns the
    version with its tags.

    What was added to the description stays, such as the gate's verdict; one that a person has
    rewritten stays as a whole. Parameters of a run never change in MLflow: those of the first time
    stay.

    Args:
        words: the description that a new version would get.
    """
    from mlflow.entities import Metric

    changed = {
        key: tags[key] for key in RENEWED if key in tags and tags[key] != known.tags.get(key, "")
    }
    for key, value in changed.items():
        insert_or_change(
            partial(client.set_model_version_tag, known.name, str(known.version), key, value)
        )
    shown = client.get_model_version(known.name, str(known.version)).description or ""
    if changed or not shown.startswith(words):
        run = client.get_run(known.run_id)
        before = run.data.tags.get(NOTE, "")
        if before and before != words and shown.startswith(before.rstrip()):
            client.update_model_version(
                known.name, str(known.version), words + shown[len(before.rstrip()) :]
            )
            client.set_tag(known.run_id, NOTE, words)
        now = int(time.time() * 1000)
        newer = [
            Metric(key, float(value), now, 0)
            for key, value in metrics.items()
            if run.data.metrics.get(key) != float(value)
        ]
        if newer:
            client.log_batch(known.run_id, newer)
    return replace(known, tags={**known.tags, **changed})
