"""What the formulas predict of a measured cell: Leviathan's speed-up of every SD, and SPIDE's gain over SD.

The formulas know nothing of the prompt: measured speeds next to them are of decoding alone, from the first token on.
"""

from __future__ import annotations

from components.bench.schema import BenchEntry
from components.papers import formulas
from components.papers.cell_file import CellFile, Costs
from components.papers.cells import PLAIN


def prediction_rows(file: CellFile) -> list[list[str]]:
    """Rows of text: engine, acceptance, γ, c, Leviathan's formula, with measured passes, measured, share reached.

    All speeds are over plain decoding with all cores, also those of engines whose models have a share of them each.
    The share is of the prediction with measured passes. SPIDE's rows predict its speed over SD's prediction, from SD's acceptance.
    """
    costs = file.costs
    if costs is None:
        return []
    entries, plain = file.report.strategies, file.measured().entry(PLAIN)
    rows = [row for label, entry in entries.items() if entry.strategy == "vanilla_sd" and (row := sd_row(label, entry, plain, costs))]
    return rows + spide_rows(file, costs)


def times(entry: BenchEntry, costs: Costs) -> tuple[float, dict[int, float]]:
    """Draft and target passes as this entry ran them."""
    return costs.alone if entry.split_cores and costs.alone is not None else (costs.t_draft, costs.t_verify)


def decoding_speed(entry: BenchEntry, base: BenchEntry) -> float | None:
    """How many times as fast one entry decodes as another, the prompt's reading left out on both sides; None where nothing was decoded."""
    mine, other = entry.decode_tokens_per_second, base.decode_tokens_per_second
    return mine / other if mine and other else None


def sd_row(label: str, entry: BenchEntry, plain: BenchEntry, costs: Costs) -> list[str] | None:
    """One vanilla SD."""
    alpha, gamma = entry.acceptance_rate, int(entry.parameters.get("num_speculative_tokens", 5))
    measured = decoding_speed(entry, plain)
    if alpha is None or measured is None:
        return None
    draft, verify = times(entry, costs)
    share = costs.t_verify[1] / verify[1]  # the formula is over the same target pass, which on a share of the cores is slower than plain's
    ideal = formulas.leviathan_speedup(alpha, gamma, draft / verify[1]) * share
    predicted = formulas.sd_speedup(alpha, gamma, costs.t_verify[1], draft, verify, costs.t_rest)
    return row_of(label, alpha, str(gamma), draft / verify[1], ideal, predicted, measured)


def spide_rows(file: CellFile, costs: Costs) -> list[list[str]]:
    """Every SPIDE that overlaps, over the fastest SD of its cell."""
    found = file.measured()
    if "SD" not in found.labels or costs.busy is None or costs.alone is None:
        return []
    base = found.entry("SD")
    alpha, gamma = base.acceptance_rate, int(base.parameters.get("num_speculative_tokens", 5))
    if alpha is None:
        return []
    rows = []
    for label, entry in file.report.strategies.items():
        if entry.strategy != "spide" or str(entry.parameters.get("parallel", True)).lower() == "false" or "tau" not in entry.parameters:
            continue
        predicted = formulas.spide_pace(alpha, float(entry.parameters["tau"]), costs.alone, costs.busy, costs.t_rest)
        predicted /= formulas.sd_pace(alpha, gamma, costs.alone, costs.t_rest)
        if (measured := decoding_speed(entry, base)) is not None:
            rows.append(row_of(f"{label}, over SD", alpha, "–", costs.busy[0] / costs.busy[1][1], None, predicted, measured))
    return rows


def row_of(label: str, alpha: float, gamma: str, c: float, ideal: float | None, predicted: float, measured: float) -> list[str]:
    """A row of text."""
    return [label, f"{alpha:.2f}", gamma, f"{c:.3f}", "–" if ideal is None else f"{ideal:.2f}", f"{predicted:.2f}", f"{measured:.2f}",
            f"{measured / predicted:.0%}"]
