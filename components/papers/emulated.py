"""Runs on emulated devices that the project keeps, as the summary shows them.

`components/emulation` makes them; that is a layer above, so their files are read as data.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from draftwell.components.papers.committed import FOLDER
from draftwell.components.papers.estimates import Estimate


@dataclass(frozen=True)
class EmulatedRun:
    """One comparison of a run.

    Args:
        cost: a draft pass over a target pass.
        acceptance: of the strategy's draft tokens.
        ours: how many times as fast it is as the other.
        predicted: the same by the formulas.
    """

    cost: float
    acceptance: float
    ours: Estimate
    predicted: float
    prompts: int
    max_tokens: int


def kept_runs(strategy: str, other: str) -> list[EmulatedRun]:
    """The runs that compared two strategies, the cheapest draft first; of several settings of the
    first the fastest. Void runs are left out, and so are those whose draft has no curve."""
    files = sorted((FOLDER / "emulated").glob("*.json"))
    contents = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    found = []
    for content in contents:
        if content["void"] is not None or content["curve"]["draft"] is None:
            continue
        named = {label: row["strategy"] for label, row in content["rows"].items()}
        ratios = [
            ratio
            for ratio in content["ratios"]
            if (named[ratio["contender"]], named[ratio["over"]]) == (strategy, other)
        ]
        if ratios:
            found.append(run_of(content, max(ratios, key=lambda one: float(one["ratio"]))))
    return sorted(found, key=lambda run: run.cost)


def run_of(content: dict[str, Any], ratio: dict[str, Any]) -> EmulatedRun:
    """One ratio of a file."""
    curve = content["curve"]
    return EmulatedRun(
        cost=curve["draft"]["1"] / curve["target"]["1"],
        acceptance=content["rows"][ratio["contender"]]["acceptance"],
        ours=Estimate(ratio["ratio"], ratio["low"], ratio["high"]),
        predicted=ratio["predicted"],
        prompts=len(content["prompt_ids"]),
        max_tokens=content["max_tokens"],
    )
