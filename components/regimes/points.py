"""Pairs as points of the plane: the papers', as their tables give them, and ours, as committed
cells have them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from draftwell.components.formulas import token_acceptance
from draftwell.components.regimes.speedups import FLAT, Pair, Placement

Entry = Mapping[str, Any]
"""A contender of a cell, as its JSON has it."""
MEASURED = Path(__file__).resolve().parents[2] / "docs" / "measured"
"""Of a checkout: an installed package has none."""
OURS = "docs/measured/"
ROUNDED_DOWN = 0.25
"""By which a replay's target pass is longer than its whole number of draft passes."""


class Point(NamedTuple):
    """A pair on one set of prompts.

    Args:
        source: table or file that it is from, and what is solved from what.
        placement: which map it belongs on.
        over_sd: method → speed over SD, of counts that were replayed with the strategies' own code.
    """

    name: str
    source: str
    placement: Placement
    pair: Pair
    over_sd: Mapping[str, float] = {}

    @property
    def ours(self) -> bool:
        """Whether it is of a committed cell, else of a paper."""
        return self.source.startswith(OURS)


class SpidePair(NamedTuple):
    """A pair of SPIDE's.

    Args:
        s: draft passes in the time of a target pass, rounded down (Table 18).
        gamma: SD's draft length (Table 17).
        code, maths: mean accepted tokens of SD (Tables 1 and 2).
    """

    name: str
    s: int
    gamma: int
    code: float
    maths: float


SPIDE = (
    SpidePair("Vicuna 68M & 13B", 20, 6, 1.91, 2.08),
    SpidePair("Vicuna 160M & 33B", 11, 5, 2.29, 4.26),
    SpidePair("Pythia 160M & 12B", 6, 5, 3.30, 2.79),
    SpidePair("DeepSeek 1.3B & 33B", 7, 11, 8.25, 6.59),
    SpidePair("TinyLlama 1.1B & CodeLlama 34B", 6, 8, 5.65, 7.04),
    SpidePair("Qwen3 1.7B & 32B", 4, 5, 3.65, 3.09),
)
CSD = (("MATH500", 0.636, 1.89), ("HumanEval", 0.597, 1.90))
"""Llama-3 1B & 70B: data, share of SD's drafted tokens that is kept (Table 3), SD's speed over
plain decoding (Table 1), both at γ 6 (section 5.1)."""
DUO_GAMMA, DUO_KEPT = 24, 0.435
"""DuoDecoding: draft passes in a target pass (section 4.4.1), and how often the draft's first
choice is kept (Table 4, which names neither data nor model)."""
LEFT_OUT = {
    "SPRINTER": "it gives no times of passes and no draft length of its SD",
    "PyramidSD": "the ten speeds of its SD (Table 2) fit c .03 as well as c .37",
}
"""Paper → why it has no point."""


def published_points() -> Iterator[Point]:
    """The papers' pairs."""
    for row in SPIDE:
        for data, table, mat in (("HumanEval", 1, row.code), ("GSM8K", 2, row.maths)):
            yield Point(
                row.name,
                f"SPIDE, {data}: c at most 1 / s of Table 18, α from SD's MAT of Table {table} at "
                "γ of Table 17",
                Placement.OWN,
                Pair(1 / row.s, token_acceptance(mat, row.gamma)),
            )
    yield Point(
        "DuoDecoding's 68M & 7B",
        "DuoDecoding: c = 1 / γ of section 4.4.1, α of Table 4",
        Placement.OWN,
        Pair(1 / DUO_GAMMA, DUO_KEPT),
    )
    for data, kept, speed in CSD:
        yield Point(
            "Llama-3 1B & 70B",
            f"CSD, {data}: α from SD's acceptance in Table 3, c from its speed in Table 1, γ 6",
            Placement.IN_TURN,
            Pair(((6 * kept + 1) / speed - 1) / 6, token_acceptance(6 * kept, 6)),
        )


def our_points(folder: Path = MEASURED) -> Iterator[Point]:
    """The pairs of our committed cells: measured ones, whose models share a machine, and replayed
    ones, whose costs are those of a paper's pair."""
    for file in sorted(folder.glob("**/*.json")):
        cell = json.loads(file.read_text(encoding="utf-8"))
        # of runs on emulated devices, and of counted ones, the costs are assumed
        if "report" not in cell or cell["cell"].get("counted"):
            continue
        entries = drafted(cell["report"]["strategies"].values())
        alpha = acceptance_of(entries)
        if alpha is None:
            continue
        name = str(cell["cell"]["pair"])
        source = OURS + file.relative_to(folder).as_posix()
        if costs := cell.get("costs"):
            times = {int(size): seconds for size, seconds in costs["t_verify"].items()}
            curve = {size: seconds / times[1] for size, seconds in times.items()}
            pair = Pair(costs["t_draft"] / times[1], alpha, curve)
            yield Point(name, source, Placement.IN_TURN, pair)
        elif replay := cell["cell"].get("replay"):
            pair = Pair(1 / (replay + ROUNDED_DOWN), alpha, FLAT)
            yield Point(name, source, Placement.OWN, pair, replayed_gains(entries))


def drafted(entries: Iterable[Entry]) -> list[Entry]:
    """Those that draft with the draft model, not with a qualifier, SPIDE only with its overlap."""
    return [
        entry
        for entry in entries
        if entry["parameters"].get("drafter") != "qualifier"
        and str(entry["parameters"].get("parallel", True)).lower() == "true"
    ]


def acceptance_of(entries: Iterable[Entry]) -> float | None:
    """Share of the judged tokens that the fastest SD keeps; None without one."""
    found = [
        one for one in entries if one["strategy"] == "vanilla_sd" and one.get("acceptance_rate")
    ]
    if not found:
        return None
    return float(max(found, key=lambda one: one["decode_tokens_per_second"])["acceptance_rate"])


def replayed_gains(entries: Iterable[Entry]) -> dict[str, float]:
    """SPIDE's and PEARL's speed over SD's, each at its fastest setting; of what was replayed."""
    best: dict[str, float] = {}
    for entry in entries:
        speed = entry["decode_tokens_per_second"]
        best[entry["strategy"]] = max(best.get(entry["strategy"], 0.0), speed)
    names = {"spide": "SPIDE", "pearl": "PEARL"}
    return {shown: best[name] / best["vanilla_sd"] for name, shown in names.items() if name in best}
