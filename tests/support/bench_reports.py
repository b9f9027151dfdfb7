"""A small report of a bench."""

from __future__ import annotations

from typing import Any

from draftwell.components.bench.schema import SCHEMA

ENTRY: dict[str, Any] = {
    "tokens_per_second": 31.4,
    "speedup": 1.3,
    "speedup_low": 1.2,
    "speedup_high": 1.4,
    "acceptance_rate": 0.5,
    "mat": 1.5,
    "cost_ratio": 1.0,
    "identical_outputs": 15,
    "near_ties": 1,
    "lossless": True,
    "acceptance_by_position": [0.5, 0.25],
    "time_share": {"draft": 0.2, "target": 0.6, "prefill": 0.1, "rest": 0.1},
}
PLAIN: dict[str, Any] = {
    **ENTRY,
    "speedup": 1.0,
    "speedup_low": 1.0,
    "speedup_high": 1.0,
    "acceptance_rate": None,
    "mat": None,
    "cost_ratio": None,
    "identical_outputs": 16,
    "near_ties": 0,
    "acceptance_by_position": [],
}
REPORT: dict[str, Any] = {
    "schema_version": SCHEMA,
    "pair": "tiny",
    "prompts": 16,
    "machine": {"cpu": "CPU", "cores": 2, "threads": 1, "dtype": "bfloat16"},
    "settings": {"max_tokens": 64, "temperature": 0.0, "runs": 3},
    "strategies": {
        "autoregressive": PLAIN,
        "vanilla_sd": ENTRY,
        "csd": {**ENTRY, "lossless": False, "near_ties": 0},
    },
    "peers": {"transformers": {"assisted": {**PLAIN, "tokens_per_second": 9.0}}},
    "peer_notes": ["x"],
}
