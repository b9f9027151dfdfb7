"""What `draftwell bench --engine` says of an engine, made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftwell.components.bench.engines.figures import Figure
from draftwell.components.engines.port import Acceptance

ENGINE: dict[str, Any] = {
    "engine": "vllm",
    "version": "0.32.0",
    "device_class": "cpu-x",
    "machine": "a CPU",
    "dtype": "bfloat16",
    "fingerprint": "f" * 64,
    "models": {"head": "pair-head-0123456789ab"},
    "prompts_file": "demo",
    "max_tokens": 64,
    "temperature": 0.0,
}


def figure(label: str, rounds: int, *accepted_at: int) -> dict[str, Any]:
    return Figure(
        label=label,
        at_once=1,
        groups=8,
        prompts=8,
        ratio=1.5,
        low=1.4,
        high=1.6,
        tokens_per_second=30.0,
        plain_tokens_per_second=20.0,
        acceptance=Acceptance(
            rounds=rounds, accepted=sum(accepted_at), accepted_at=tuple(accepted_at)
        ),
    ).model_dump(mode="json")


def written(folder: Path, document: Any, name: str = "bench.json") -> Path:
    """A file with a document, as text or to be written as JSON."""
    file = folder / name
    file.write_text(document if isinstance(document, str) else json.dumps(document))
    return file
