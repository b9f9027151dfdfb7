"""What `draftwell demo --engine vllm` ends with: a table and a few lines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from draftwell.components.bench.engines.figures import Figure, figure_table
from draftwell.flows.steps.verdict import sentence, unmet

if TYPE_CHECKING:
    from rich.table import Table

    from draftwell.flows.settings import PipelineSettings


def engine_table(result: Mapping[str, Any]) -> Table:
    """The settings that were measured on all prompts of the tuning, and what the gate measured of
    the choice, each beside plain decoding."""
    measured = result["measured"]
    rows = [("tuning", figure) for figure in (*measured["confirmed"], *measured["scheduled"])]
    rows += [("gate", figure) for figure in result["figures"]]
    figures = [
        Figure.model_validate_json(json.dumps({**figure, "label": f"{figure['label']}, {name}"}))
        for name, figure in rows
    ]
    return figure_table(
        figures,
        f"{result['pair']} in {result['dtype']} on {result['device_class']}, {result['engine']} "
        f"{result['version']}, {result['threads']} threads; each setting beside plain decoding",
    )


def engine_lines(result: Mapping[str, Any], settings: PipelineSettings) -> Iterator[str]:
    """What was chosen and why, its regret, the verdict, where it is, and how it was served."""
    yield f"chosen: {result['reason']}"
    if grid := result.get("grid"):
        yield regret_line(grid)
        yield from (
            f"left out of the grid: {name}, {why}" for name, why in grid["left_out"].items()
        )
    against = "; ".join(f"{check['name']}, {check['detail']}" for check in unmet(result))
    yield sentence(result) + (f": {against}" if against else "")
    yield f"{result['seconds'] / 60:.1f} of {settings.minutes:g} minutes"
    if result["bundle"] is None:
        yield "nothing was deployed; what was deployed before stays"
        return
    served, drift = result["served"], result["since_tuning"]
    yield (
        f"served: {served['requests']} requests, {served['tokens_per_second']:.1f} tokens/s with "
        f"{served['clients']} at once, ready after {served['start_seconds']:.0f} s"
    )
    yield f"drafts since the tuning: {drift['verdict']}, {drift['why']}"
    yield (
        f"the bundle decodes up to {served['clients']} requests at once, further ones "
        "wait: other numbers with levels, such as "
        "--set levels=1,8, and minutes enough to measure them"
    )
    yield f"bundle {result['bundle']}. Next: `make serve ENGINE={result['engine']}`"


def regret_line(grid: Mapping[str, Any]) -> str:
    """How far the choice is behind the best of a grid that was measured again."""
    regret = grid["regret"]
    if regret is None:
        return "regret: unknown, because the choice could not be measured again"
    low, mid, high = (100 * regret[name] for name in ("low", "regret", "high"))
    return (
        f"regret {mid:.1f} % ({low:.1f} to {high:.1f}): the choice beside {regret['best']}, the "
        f"best of the others of {len(grid['figures'])} settings, on all prompts of the tuning"
    )
