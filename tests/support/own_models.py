"""Two models in folders, traffic and the outcome of a tuning, for the tests of `draftwell tune`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftwell.flows.steps.outcome_card import Asked
from draftwell.flows.steps.own_pair import pair_of_models
from tests.support.peers.releases import WORDS

ASKED = Asked("it fits", 60.0, 10.0, "chats.json", confirming=16, in_time=True)


def pair_of(models: Path, draft: str | None = "small", target: str = "Big Model") -> Any:
    said: list[str] = []
    spec = pair_of_models(
        str(models / target), None if draft is None else str(models / draft), "cpu", said.append
    )
    return spec, said


def sharegpt(file: Path, count: int) -> Path:
    """Conversations as ShareGPT has them."""
    asked = [f"the {one} in the {two}" for one in WORDS for two in WORDS if one != two][:count]
    rows = [
        {"id": f"c{i}", "conversations": [{"from": "human", "value": text}]}
        for i, text in enumerate(asked)
    ]
    file.write_text(json.dumps(rows))
    return file


def outcome(**changes: Any) -> dict[str, Any]:
    """What the flow returns before it deploys."""
    rows = [
        {"prompt_id": f"p{i}", "category": "code" if i % 2 else "maths", "seconds": 1.0}
        for i in range(16)
    ]
    both = {
        "lossless": True,
        "exact": True,
        "per_prompt": rows,
    }
    kind = {
        "category": "code", "prompts": 8, "speedup": 1.6, "speedup_low": 1.5, "speedup_high": 1.7,
        "acceptance_length": None, "acceptance_low": None, "acceptance_high": None,
    }  # fmt: skip
    report = {
        "schema_version": 3,
        "pair": "tiny",
        "machine": {"cpu": "x", "cores": 2, "threads": 2, "dtype": "float32"},
        "settings": {"max_tokens": 40, "temperature": 0.0, "runs": 2},
        "prompts": 16,
        "strategies": {
            "autoregressive": {"strategy": "autoregressive", **both},
            "hybrid": {
                "strategy": "hybrid",
                "parameters": {"max_draft": 8},
                "speedup": 1.3,
                "speedup_low": 1.2,
                "speedup_high": 1.42,
                "tokens_per_second": 50.0,
                "categories": [{**kind, "category": "maths", "speedup": 1.1}, kind],
                **both,
            },
        },
    }
    load = {
        "label": "4", "at_once": 4, "groups": 4, "prompts": 16, "ratio": 1.1, "low": 1.0,
        "high": 1.2, "tokens_per_second": 90.0, "plain_tokens_per_second": 82.0,
    }  # fmt: skip
    found = {
        "strategy": "hybrid",
        "parameters": {"max_draft": 8},
        "reason": "1.9 x plain decoding",
        "sampled": None,
        "report": report,
        "checks": [],
        "passed": True,
        "verdict": "passed",
        "champion": None,
        "release": 7,
        "bundle": None,
        "loads": [load],
        "peak_bytes": 5,
    }
    return {**found, **changes}
