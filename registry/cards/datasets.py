"""Traces as inputs of runs: MLflow's page of a run names what an artifact was made from, and lists
runs by dataset."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput

LONGEST_DIGEST = 36
"""Characters of a dataset's digest in MLflow's databases; the whole one is a tag of the input."""
USES = {
    "verifier": "training",
    "acceptance_head": "training",
    "medusa_heads": "training",
    "datastore": "training",
    "acceptance_table": "calibration",
    "correction_memory": "calibration",
    "decoding_config": "tuning",
}
"""kind → what its traces were used for."""


def trace_input(kind: str, provenance: Mapping[str, Any]) -> DatasetInput | None:
    """The trace set that an artifact was made from, as MLflow takes it; None for what was made from
    none.

    The source is `code`, MLflow's word for a dataset that a program made: a trace set has no
    address, only a digest over its rows.
    """
    from mlflow.entities import Dataset, DatasetInput, InputTag

    digest = provenance.get("trace_digest")
    if not digest:
        return None
    source = {"tags": {"trace_digest": digest, "fingerprint": provenance["fingerprint"]}}
    dataset = Dataset(
        name=f"traces.{provenance['pair']}",
        digest=digest[:LONGEST_DIGEST],
        source_type="code",
        source=json.dumps(source),
    )
    tags = {"mlflow.data.context": USES.get(kind, "source"), "trace_digest": digest}
    return DatasetInput(dataset, [InputTag(key, value) for key, value in tags.items()])
